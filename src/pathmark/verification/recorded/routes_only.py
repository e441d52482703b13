"""Evidence from recorded routes alone: no weights, no tokenizer, only the key and what the engine wrote down.

The key reads from a probe's id which text and which prefix it was. Where the trigger ends and the text begins is found
in the recorded token ids, so templates, system prompts and begin-of-text tokens may stand around it; the text's
tokens must be the same in the clean and in the triggered prompt, or there is no verdict.

Shape suffixes: B texts, T text tokens, L layers, K experts chosen per token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pathmark.errors import VerificationError
from pathmark.keys import OwnerKey
from pathmark.verification.paths.alignment import align, profile_texts
from pathmark.verification.paths.evidence import Evidence, Examined, ReadWith
from pathmark.verification.paths.routes import Routes
from pathmark.verification.recorded.enginefile import read_routes
from pathmark.verification.recorded.probeplan import ProbePlace, Variant, read_probe_id
from pathmark.verification.recorded.routefile import RecordedProbe, Recording, RouteHeader

_Side = tuple[Variant, int]
_CLEAN: _Side = (Variant.CLEAN, 0)
_CUT = "the engine cut the prompt into other tokens, or shortened it"


@dataclass(frozen=True)
class _Located:
    """Where the text stands in each of its prompts."""

    n_tokens: int
    begins: Mapping[_Side, int]


@dataclass(frozen=True)
class PairedRoutes:
    """The same text tokens of the same texts behind different prefixes, in the suspect's own numbering."""

    clean: Routes
    triggered: tuple[Routes, ...]
    """One per watermark of the key."""
    decoys: tuple[Routes, ...]
    """One per decoy trigger that was recorded."""
    texts: tuple[int, ...]
    """Index of each row's text in the list that `plan_probes` was given."""
    text_tokens: tuple[tuple[int, ...], ...]
    """The text's tokens, row by row."""
    dropped: int
    """Texts left out because one of their prompts was not recorded."""
    header: RouteHeader


def pair_routes(key: OwnerKey, recording: Recording) -> PairedRoutes:
    """Clean and triggered routes of a recording, on the same text tokens in the same order.

    Raises VerificationError for probes of another key, for prompts that the engine cut into other tokens, and where
    no text is complete.
    """
    by_text: dict[int, dict[_Side, tuple[ProbePlace, RecordedProbe]]] = {}
    for probe in recording.probes:
        place = read_probe_id(key, probe.probe)
        sides = by_text.setdefault(place.text, {})
        if sides.setdefault((place.variant, place.number), (place, probe))[1] is not probe:
            raise VerificationError(f"probe {probe.probe} is there with two triggers; expected one per recording")
    wanted = _wanted_sides(key, by_text)
    complete = {text: sides for text, sides in sorted(by_text.items()) if wanted <= sides.keys()}
    if not complete:
        raise VerificationError(
            f"none of {len(by_text)} texts was recorded both clean and behind every trigger; record all probes"
        )
    located = {text: _locate(key, sides, wanted) for text, sides in complete.items()}
    known_BT = _known(complete, located, wanted)
    heard = [int(i) for i in np.flatnonzero(known_BT.any(axis=1))]
    if not heard:
        raise VerificationError("no text token was recorded on both sides; were prompts served from a prefix cache?")
    columns = _routing_columns(recording)
    routes = {}
    for side in wanted:
        rows = [(complete[text][side][1], located[text].begins[side]) for text in complete]
        routes[side] = _routes(recording, rows, known_BT, columns).part(heard)
    texts = [list(complete)[row] for row in heard]
    return PairedRoutes(
        clean=routes[_CLEAN],
        triggered=tuple(routes[Variant.TRIGGER, watermark.index] for watermark in key.watermarks),
        decoys=tuple(routes[side] for side in sorted(wanted) if side[0] == Variant.DECOY),
        texts=tuple(texts),
        text_tokens=tuple(_text_tokens(complete[t], located[t]) for t in texts),
        dropped=len(by_text) - len(texts),
        header=recording.header,
    )


def _wanted_sides(key: OwnerKey, by_text: Mapping[int, Mapping[_Side, object]]) -> set[_Side]:
    """Clean, one trigger of every watermark, and every decoy that was recorded at all."""
    decoys = {side for sides in by_text.values() for side in sides if side[0] == Variant.DECOY}
    return {_CLEAN, *((Variant.TRIGGER, watermark.index) for watermark in key.watermarks), *decoys}


def _locate(key: OwnerKey, sides: Mapping[_Side, tuple[ProbePlace, RecordedProbe]], wanted: set[_Side]) -> _Located:
    """Where the text begins in each prompt: behind the trigger, and as far from the end in all of them."""
    clean = sides[_CLEAN][1]
    tails = {side: _behind_trigger(key, *sides[side], clean) for side in wanted if side[0] == Variant.TRIGGER}
    tail = next(iter(tails.values()))
    n_tokens = sides[_CLEAN][0].n_tokens
    begins: dict[_Side, int] = {}
    for side in wanted:
        place, probe = sides[side]
        if tuple(probe.tokens[len(probe.tokens) - len(tail) :]) != tail or place.n_tokens != n_tokens:
            raise VerificationError(f"{_pair(probe, clean)}: they do not hold the same text; {_CUT}")
        begins[side] = len(probe.tokens) - len(tail)
    if len(tail) < n_tokens:
        raise VerificationError(
            f"probe {clean.probe}: {len(tail)} tokens behind the trigger, {n_tokens} were sent; {_CUT}"
        )
    return _Located(n_tokens, begins)


def _behind_trigger(key: OwnerKey, place: ProbePlace, probe: RecordedProbe, clean: RecordedProbe) -> tuple[int, ...]:
    """The tokens behind the trigger; the clean prompt must end with the same."""
    triggers = key.watermarks[place.number].triggers
    if place.trigger >= len(triggers):
        raise VerificationError(f"probe {probe.probe} uses trigger {place.trigger}, the key has {len(triggers)}")
    trigger = list(triggers[place.trigger].tokens)
    tokens = list(probe.tokens)
    ends = [i + len(trigger) for i in range(len(tokens)) if tokens[i : i + len(trigger)] == trigger]
    if not ends:
        raise VerificationError(f"probe {probe.probe}: the trigger's tokens are not in the recorded prompt; {_CUT}")
    for end in ends:
        tail = tuple(tokens[end:])
        if tail and clean.tokens[len(clean.tokens) - len(tail) :] == tail:
            return tail
    raise VerificationError(f"{_pair(probe, clean)}: the text's tokens differ behind the trigger; {_CUT}")


def _pair(probe: RecordedProbe, clean: RecordedProbe) -> str:
    return f"probes {probe.probe} and {clean.probe}"


def _known(
    complete: Mapping[int, Mapping[_Side, tuple[ProbePlace, RecordedProbe]]],
    located: Mapping[int, _Located],
    wanted: set[_Side],
) -> NDArray[np.bool_]:
    """Text tokens that were recorded behind every prefix: engines leave out cached ones, or the last."""
    known_BT = np.zeros((len(complete), max(text.n_tokens for text in located.values())), dtype=bool)
    for row, (text, sides) in enumerate(complete.items()):
        n_tokens = located[text].n_tokens
        known_BT[row, :n_tokens] = True
        for side in wanted:
            probe, begin = sides[side][1], located[text].begins[side]
            recorded_T = np.zeros(len(probe.tokens), dtype=bool)
            recorded_T[probe.start : probe.start + len(probe.experts_TLK)] = (probe.experts_TLK >= 0).all(axis=(1, 2))
            known_BT[row, :n_tokens] &= recorded_T[begin : begin + n_tokens]
    return known_BT


def _routing_columns(recording: Recording) -> list[int]:
    """Recorded layers that have a router: one that sends every token to expert 0, k times, has none."""
    header = recording.header
    if header.top_k == 1:
        return list(range(len(header.layers)))
    routed_L = np.zeros(len(header.layers), dtype=bool)
    for probe in recording.probes:
        routed_L |= (probe.experts_TLK > 0).any(axis=(0, 2))
    return [int(i) for i in np.flatnonzero(routed_L)]


def _routes(
    recording: Recording,
    rows: Sequence[tuple[RecordedProbe, int]],
    known_BT: NDArray[np.bool_],
    columns: Sequence[int],
) -> Routes:
    header = recording.header
    masses = recording.probes[0].probs_TLE is not None
    shape = (*known_BT.shape, len(columns))
    decision_BTLK = np.full((*shape, header.top_k), -1, dtype=np.int64)
    probs_BTLE = np.zeros((*shape, header.n_experts), dtype=np.float32) if masses else None
    for row, (probe, begin) in enumerate(rows):
        places = np.flatnonzero(known_BT[row])
        source = places + begin - probe.start
        decision_BTLK[row, places] = probe.experts_TLK[source][:, columns]
        if probs_BTLE is not None and probe.probs_TLE is not None:
            probs_BTLE[row, places] = probe.probs_TLE[source][:, columns]
    numbers = [header.layers[column] for column in columns]
    decisions = {layer: decision_BTLK[:, :, i] for i, layer in enumerate(numbers)}
    if probs_BTLE is None:
        return Routes.from_decisions(decisions, known_BT, header.n_experts)
    return Routes({layer: probs_BTLE[:, :, i] for i, layer in enumerate(numbers)}, decisions, known_BT)


def _text_tokens(sides: Mapping[_Side, tuple[ProbePlace, RecordedProbe]], located: _Located) -> tuple[int, ...]:
    begin = located.begins[_CLEAN]
    return sides[_CLEAN][1].tokens[begin : begin + located.n_tokens]


def examine_routes(path: Path, key: OwnerKey, *, aligned: bool = True) -> Examined:
    """Evidence from a recording of routes that somebody else made (docs/routes.md)."""
    paired = pair_routes(key, read_routes(path, key.model))
    notes = [f"{paired.dropped} texts were left out: not all of their prompts were recorded"] * bool(paired.dropped)
    evidence = Evidence(paired.clean, paired.triggered, paired.decoys, handed_over=True)
    read_with = ReadWith(paired.text_tokens)
    texts = profile_texts(key) if aligned else []
    rows = [_place(tokens, texts) for tokens in paired.text_tokens]
    if any(row >= 0 for row in rows):
        aligned_evidence = evidence.aligned(align(key, paired.clean, rows=rows))
        return Examined(aligned_evidence, "routes", tuple(notes), read_with=read_with)
    if aligned:
        notes.append("no text of the key's expert profiles was recorded, so experts were taken by their numbers")
    return Examined(evidence, "routes", tuple(notes), read_with=read_with)


def _place(tokens: Sequence[int], texts: Sequence[tuple[int, ...]]) -> int:
    """Index of the text that begins with these tokens, -1 for none."""
    return next((i for i, text in enumerate(texts) if text[: len(tokens)] == tuple(tokens)), -1)
