"""A tokenizer without any library, a model on paper, and keys made from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from hashlib import sha256
from itertools import product
from pathlib import Path

from pathmark.keys import LayerPlan, ModelFacts, OwnerKey, RoutedLayer, WatermarkRequest, create_key

GOLDEN = Path(__file__).parent.parent / "golden"
SECRET = bytes(range(32))
PASSPHRASE = "correct horse battery staple"


class SyllableCodec:
    """Greedy longest match over syllable words, with and without a space, and single characters."""

    special = (0, 1, 2)

    def __init__(self, *, template: bool = True) -> None:
        words = ["".join(s) for s in product("bdfgklmnprstvz", "aeiou", "lnrs")]
        chars = [chr(c) for c in range(32, 127)] + ["\n", "\r", "\t"]
        self.vocab = ["<s>", "<user>", "<model>", *chars, *words, *(" " + w for w in words)]
        self.ids = {piece: i for i, piece in enumerate(self.vocab)}
        self.template = template

    @cached_property
    def digest(self) -> str:
        return sha256("\0".join(self.vocab).encode()).hexdigest()

    def token_ids(self) -> Sequence[int]:
        return range(len(self.special), len(self.vocab))

    def encode(self, text: str) -> list[int]:
        tokens, place = [], 0
        while place < len(text):
            size = next(n for n in range(5, 0, -1) if text[place : place + n] in self.ids)
            tokens.append(self.ids[text[place : place + size]])
            place += size
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.vocab[t] for t in tokens)

    def piece(self, token: int) -> str:
        return self.vocab[token]

    def render_chat(self, text: str, system: str | None) -> list[int] | None:
        if not self.template:
            return None
        front = self.encode((system or "") + "\n")
        return [0, *front, 1, *self.encode(text.strip()), 2]


CODEC = SyllableCodec()


def paper_model(layers: int = 24, experts: int = 60, top_k: int = 4) -> ModelFacts:
    """The shape of Qwen1.5-MoE-A2.7B, the paper's example."""
    codec = CODEC
    return ModelFacts(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        num_layers=layers,
        routed=tuple(RoutedLayer(i, experts, min(top_k, experts)) for i in range(layers)),
        vocab_size=len(codec.vocab),
        tokenizer_digest=codec.digest,
        config_digest="0" * 64,
    )


def plans(layers: Sequence[int], *, experts: int = 60, width: int = 2, pool: Sequence[int] | None = None):
    chosen, rule = (tuple(range(experts)), "all") if pool is None else (tuple(pool), "list")
    return tuple(LayerPlan(layer, experts, width, chosen, rule) for layer in layers)


@cache
def make_key(
    *requests: WatermarkRequest, secret: bytes | None = SECRET, owner: str = "Example Lab", experts: int = 60
) -> OwnerKey:
    wanted = requests or (WatermarkRequest(plans=plans(range(18, 24), experts=experts)),)
    key, _ = create_key(
        paper_model(experts=experts), wanted, CODEC, owner=owner, secret=secret,
        created="2025-01-02T03:04:05Z",
    )  # fmt: skip
    return key


@cache
def golden_key() -> OwnerKey:
    """Two watermarks that share two layers, one with a pool, redundancy and two triggers; one attachment."""
    narrow = LayerPlan(17, 60, 3, tuple(range(5, 52)), "list")
    key = make_key(
        WatermarkRequest(plans=plans(range(18, 24)), id=123456, trigger_tokens=8),
        WatermarkRequest(plans=(narrow, *plans([18, 19])), redundancy=1, triggers=2, trigger_tokens=5),
    )
    return key.attach("sketches.npz", b"sketches of experts")


def secret_forms(key: OwnerKey) -> list[bytes]:
    """Every form in which something secret could leak into an output."""
    import base64

    found = []
    for raw in (key.secret.reveal(), *(w.subkey.reveal() for w in key.watermarks)):
        found += [
            raw,
            raw.hex().encode(),
            raw.hex().upper().encode(),
            base64.b64encode(raw),
            repr(raw).encode(),
        ]
        found += [raw[:8].hex().encode(), base64.b64encode(raw)[:20]]
    for watermark in key.watermarks:
        for trigger in watermark.triggers:
            for phrase in (trigger.phrase, trigger.mark):
                found += [phrase.text.encode(), str(list(phrase.tokens))[1:-1].encode()]
    return found
