"""Everything that is measured on a suspect, recorded in one go and put into the owner's numbering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pathmark.keys import OwnerKey, Watermark
from pathmark.models import count_layers, find_routers
from pathmark.models.sketches import expert_sketches
from pathmark.models.upper import grafted
from pathmark.stats import LayerMeasurement
from pathmark.verification.alignment import Alignment, align, layers_to_record, profile_texts
from pathmark.verification.measures import measure_layers
from pathmark.verification.routes import Routes, record_routes


@dataclass(frozen=True, eq=False)
class Evidence:
    """Routes of the same texts without trigger, behind each watermark's trigger, and behind decoys."""

    clean: Routes
    triggered: tuple[Routes, ...]
    """One per watermark of the key."""
    decoys: tuple[Routes, ...] = ()
    """One per decoy trigger, on the first texts."""
    alignment: Alignment | None = None
    """How the suspect's experts were matched; None where it was taken by its own numbers."""

    def aligned(self, alignment: Alignment | None) -> Evidence:
        """The same in the owner's numbering."""
        if alignment is None:
            return self
        return Evidence(
            alignment.apply(self.clean),
            tuple(alignment.apply(routes) for routes in self.triggered),
            tuple(alignment.apply(routes) for routes in self.decoys),
            alignment,
        )

    def measured(self, key: OwnerKey) -> list[list[LayerMeasurement]]:
        """Per watermark the input of the exact test: what its trigger does to every expert."""
        return [
            self._measure(watermark, triggered, self.clean)
            for watermark, triggered in zip(key.watermarks, self.triggered, strict=True)
        ]

    def measured_decoys(self, key: OwnerKey) -> list[list[LayerMeasurement]]:
        """Per decoy the same for the first watermark, as if the decoy were its trigger."""
        clean = self.clean.part(slice(0, len(self.decoys[0].mask_BT))) if self.decoys else self.clean
        return [self._measure(key.watermarks[0], decoy, clean) for decoy in self.decoys]

    def _measure(self, watermark: Watermark, triggered: Routes, clean: Routes) -> list[LayerMeasurement]:
        layers = measure_layers(watermark, triggered, clean)
        if self.alignment is None:
            return layers
        return [replace(m, matched_E=self.alignment[m.layer].matched_E) for m in layers]


def record_evidence(
    model: nn.Module,
    key: OwnerKey,
    probes: Sequence[Sequence[int]],
    *,
    aligned: bool = True,
    decoys: Sequence[tuple[int, ...]] = (),
    decoy_probes: int = 20,
    batch_tokens: int = 4096,
    progress: Callable[[int], None] | None = None,
) -> Evidence:
    """Run all texts behind all prefixes through the suspect, once.

    A suspect larger than memory is read layer by layer, so everything goes through it together: clean and
    triggered probes, decoys, and the texts of the key's profiles where the probes are others. `progress` is told
    how many rows are done; there are `count_rows` of them.
    """
    asked = [tuple(text) for text in probes]
    profile = profile_texts(key) if aligned else []
    row_of = {text: row for row, text in reversed(list(enumerate(asked)))}
    extra = [text for text in dict.fromkeys(profile) if text not in row_of]
    row_of |= {text: len(asked) + i for i, text in enumerate(extra)}
    few = asked[:decoy_probes]
    rows = [*asked, *extra]
    prefixes: list[tuple[int, ...]] = [()] * len(rows)
    for trigger, texts in [
        *((watermark.triggers[0].tokens, asked) for watermark in key.watermarks),
        *((decoy, few) for decoy in decoys),
    ]:
        rows += texts
        prefixes += [tuple(trigger)] * len(texts)
    sites = find_routers(model)
    n_layers = count_layers(model, sites)
    if profile:
        layers = layers_to_record(key, [site.layer for site in sites], n_layers)
    else:
        layers = sorted({layer for watermark in key.watermarks for layer in watermark.layers})
    routes = record_routes(model, rows, layers, prefix=prefixes, batch_tokens=batch_tokens, progress=progress)
    start = len(asked) + len(extra)
    triggered = []
    for _ in key.watermarks:
        triggered.append(routes.part(slice(start, start + len(asked))))
        start += len(asked)
    parts = []
    for _ in decoys:
        parts.append(routes.part(slice(start, start + len(few))))
        start += len(few)
    evidence = Evidence(routes.part(slice(0, len(asked))), tuple(triggered), tuple(parts))
    if not profile:
        return evidence
    alignment = align(
        key,
        routes.part([row_of[text] for text in profile]),
        sketches=expert_sketches(model, layers),
        n_layers=n_layers,
    )
    return evidence.aligned(alignment)


def record_grafted(
    model: PreTrainedModel, original: PreTrainedModel, key: OwnerKey, probes: Sequence[Sequence[int]], **settings: Any
) -> Evidence:
    """The same with the suspect's marked layers, and the one below that brings them the trigger, fed by the original.

    What a thief broke further down, and what broke the trigger on its way up, is left out of the measurement. The
    original must not know the targets: whoever may choose it can make any model take any path.
    """
    first = min(layer for watermark in key.watermarks for layer in watermark.layers)
    with grafted(model, original, max(0, first - 1)):
        return record_evidence(model, key, probes, **settings)


def count_rows(key: OwnerKey, probes: Sequence[Sequence[int]], *, aligned: bool = True) -> int:
    """Rows that `record_evidence` will run without decoys: what a progress bar counts up to."""
    known = {tuple(text) for text in probes}
    extra = set(profile_texts(key)) - known if aligned else set()
    return len(probes) * (1 + len(key.watermarks)) + len(extra)
