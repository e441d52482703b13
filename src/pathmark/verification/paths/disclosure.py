"""What an opened watermark showed, as anybody may see it: figures per layer and expert, the null, one text's path.

It tells the watermark's targets, so it is made only of watermarks that their owner opens to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pathmark.keys import Watermark
from pathmark.results.evidence import (
    Barcodes,
    ExactFigures,
    Measured,
    MeasuredLayer,
    MeasuredWatermark,
    NullCurve,
    PathToken,
    Probes,
    Reading,
)
from pathmark.stats import LayerEvidence, exact_test, null_distribution
from pathmark.verification.paths.decode import decode_id
from pathmark.verification.paths.evidence import Evidence, Examined, ReadWith
from pathmark.verification.paths.routes import Routes

CURVE_POINTS, CURVE_CELLS = 48, 2**12
Decode = Callable[[Sequence[int]], str]
"""Tokens -> text."""


def disclose(
    examined: Examined,
    opened: Sequence[tuple[int, Watermark]],
    decode: Decode | None,
    first: Reading = "as it is",
) -> Measured:
    """Everything about the opened watermarks; each comes with its place among the evidence's.

    `first` says how the evidence was read, where it was not read as it is.
    """
    read = examined.read_with or ReadWith(())
    few = len(examined.evidence.decoys[0].mask_BT) if examined.evidence.decoys else 0
    texts = None if decode is None else tuple(decode(row) for row in read.probes)
    tokens = [(token, None if decode is None else decode([token])) for row in read.probes[:1] for token in row]
    readings: list[tuple[Reading, Evidence]] = [(first, examined.evidence)]
    if examined.fed is not None:
        readings.append(("behind the original", examined.fed))
    return Measured(
        probes=Probes(tokens=read.probes, texts=texts, decoys=read.decoys, decoy_probes=few),
        watermarks=tuple(
            _disclosed(watermark, place, evidence, reading, tokens)
            for place, watermark in opened
            for reading, evidence in readings
        ),
    )


def _disclosed(
    watermark: Watermark, place: int, evidence: Evidence, reading: Reading, tokens: list[tuple[int, str | None]]
) -> MeasuredWatermark:
    triggered, measured = evidence.triggered[place], evidence.measure(watermark, place)
    aimed = [m.aim(watermark.targets(m.layer)) for m in measured]
    tested = exact_test(aimed)
    return MeasuredWatermark(
        watermark=watermark.index,
        id=watermark.id,
        reading=reading,
        masses_known=triggered.masses_known and evidence.clean.masses_known,
        layers=tuple(_layer(m, triggered, evidence.clean) for m in aimed),
        exact=ExactFigures(
            statistic=tested.statistic,
            log10_p=tested.p.log10,
            log10_floor=tested.floor.log10,
            n_paths=str(tested.n_paths),
            erased_layers=tested.erased_layers,
        ),
        null=_curve(aimed),
        probe=tuple(_token(i, *token, watermark, triggered, evidence.clean) for i, token in enumerate(tokens)),
        barcodes=Barcodes(expected=watermark.group_indices, recovered=decode_id(watermark, measured).digits),
        decoys=tuple(
            exact_test([m.aim(watermark.targets(m.layer)) for m in ms]).p.log10
            for ms in evidence.measured_decoys(watermark)
        ),
    )


def _layer(aimed: LayerEvidence, triggered: Routes, clean: Routes) -> MeasuredLayer:
    masses = triggered.masses_known and clean.masses_known
    matched_E = np.ones(len(aimed.diff_E), dtype=bool) if aimed.matched_E is None else aimed.matched_E
    return MeasuredLayer(
        layer=aimed.layer,
        pool=tuple(aimed.pool),
        targets=tuple(aimed.targets),
        triggered=_shares(triggered, aimed.layer, masses),
        clean=_shares(clean, aimed.layer, masses),
        difference=tuple(float(d) for d in aimed.diff_E),
        matched=tuple(bool(m) for m in matched_E),
    )


def _shares(routes: Routes, layer: int, masses: bool) -> tuple[float, ...]:
    """Per expert: mean mass, or the share of text tokens sent there."""
    if masses:
        mean_E: NDArray[np.float64] = routes.probs[layer][routes.mask_BT].mean(axis=0, dtype=np.float64)
        return tuple(float(share) for share in mean_E)
    chosen = routes.decisions[layer][routes.mask_BT].ravel()
    counts_E = np.bincount(chosen[chosen >= 0], minlength=routes.n_experts(layer))
    return tuple(float(count) / routes.n_tokens for count in counts_E)


def _curve(aimed: Sequence[LayerEvidence]) -> NullCurve:
    """From the mean of the null to its maximum."""
    null = null_distribution(aimed)
    mean = sum(
        len(layer.live_targets) * float(np.mean(np.asarray(layer.diff_E)[list(layer.live_pool)]))
        for layer in aimed
        if layer.live_targets
    )
    statistics = np.linspace(min(mean, null.maximum), null.maximum, CURVE_POINTS)
    log10_p = null.log10_p(statistics, size=CURVE_CELLS)
    return NullCurve(statistics=tuple(map(float, statistics)), log10_p=tuple(map(float, log10_p)))


def _token(
    position: int, token: int, text: str | None, watermark: Watermark, triggered: Routes, clean: Routes
) -> PathToken:
    """Where one token of the first text went, layer by layer."""

    def way(routes: Routes) -> tuple[tuple[int, ...], ...]:
        if position >= routes.mask_BT.shape[1] or not routes.mask_BT[0, position]:
            return tuple(() for _ in watermark.layers)
        return tuple(tuple(int(e) for e in routes.decisions[n][0, position]) for n in watermark.layers)

    return PathToken(token=token, text=text, triggered=way(triggered), clean=way(clean))
