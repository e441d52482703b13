"""Do a key's triggers and marks follow from its secret? Asked with the tokenizer that the key names.

A key file and a claim say how many candidates there were, and a p-value for replies rests on that number. Whoever makes
one up can claim any number, and any trigger; drawing everything again shows it.
"""

from __future__ import annotations

from pathmark.errors import CapacityError
from pathmark.keys.phrase import Phrase
from pathmark.keys.trigger import TextCodec, draw_mark, draw_trigger, find_candidates
from pathmark.keys.verifier import VerifierKey


def underivable(key: VerifierKey, codec: TextCodec) -> list[str]:
    """Drawn triggers and marks that this tokenizer does not draw again; empty for an honest key."""
    phrases = [phrase for w in key.watermarks for t in w.triggers for phrase in (t.phrase, t.mark)]
    if not any(phrase.derived for phrase in phrases):
        return []
    candidates = find_candidates(codec)
    wrong: list[str] = []
    used: list[tuple[int, ...]] = []

    def drawn(kind: str, length: int, subkey: bytes, place: dict[str, int]) -> Phrase | None:
        """What the secret gives in this place."""
        try:
            if kind == "trigger":
                return draw_trigger(codec, candidates, subkey, **place, length=length, taken=used)
            return draw_mark(codec, candidates, subkey, **place, taken=used)
        except CapacityError:
            return None

    for watermark in key.watermarks:
        subkey = watermark.subkey.reveal()
        for number, trigger in enumerate(watermark.triggers):
            place = {"watermark": watermark.index, "number": number}
            for kind, phrase in (("trigger", trigger.phrase), ("mark", trigger.mark)):
                if phrase.derived and phrase != drawn(kind, len(phrase.tokens), subkey, place):
                    wrong.append(f"{kind} {number} of watermark {watermark.index}")
                used.append(phrase.tokens)
    return wrong
