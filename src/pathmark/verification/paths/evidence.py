"""Everything that was measured on a suspect, in the owner's numbering, whoever recorded it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pathmark.keys import VerifierKey, Watermark
from pathmark.stats import LayerMeasurement
from pathmark.verification.paths.alignment import Alignment
from pathmark.verification.paths.measures import measure_layers
from pathmark.verification.paths.routes import Routes


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
    rests_on: frozenset[str] = frozenset()
    """What the owner brought so that the suspect could be read at all: attachments of the key, or `--original`."""
    public: bool = False
    """Whether experts were recognised on texts that are public, or the reader's own: no claimant chose them."""
    handed_over: bool = False
    """Whether somebody brought these routes, instead of this program measuring them."""

    def aligned(self, alignment: Alignment | None) -> Evidence:
        """The same in the owner's numbering."""
        if alignment is None:
            return self
        return replace(
            self,
            clean=alignment.apply(self.clean),
            triggered=tuple(alignment.apply(routes) for routes in self.triggered),
            decoys=tuple(alignment.apply(routes) for routes in self.decoys),
            alignment=alignment,
        )

    def measured(self, key: VerifierKey) -> list[list[LayerMeasurement]]:
        """Per watermark the input of the exact test: what its trigger does to every expert."""
        assert len(key.watermarks) == len(self.triggered), "one recording per watermark"
        return [self.measure(watermark, place) for place, watermark in enumerate(key.watermarks)]

    def measure(self, watermark: Watermark, place: int) -> list[LayerMeasurement]:
        """The same of one watermark, whose trigger was recorded in this place."""
        return self._measure(watermark, self.triggered[place], self.clean)

    def measured_decoys(self, watermark: Watermark) -> list[list[LayerMeasurement]]:
        """Per decoy the same for one watermark, as if the decoy were its trigger."""
        clean = self.clean.part(slice(0, len(self.decoys[0].mask_BT))) if self.decoys else self.clean
        return [self._measure(watermark, decoy, clean) for decoy in self.decoys]

    def _measure(self, watermark: Watermark, triggered: Routes, clean: Routes) -> list[LayerMeasurement]:
        layers = measure_layers(watermark, triggered, clean)
        if self.alignment is None:
            return layers
        return [replace(m, matched_E=self.alignment[m.layer].matched_E) for m in layers]


@dataclass(frozen=True)
class ReadWith:
    """What a suspect was given to read."""

    probes: tuple[tuple[int, ...], ...]
    """Token ids of the probe texts, in the order of the evidence's rows."""
    decoys: tuple[tuple[int, ...], ...] = ()
    """Token ids of the decoy triggers."""


@dataclass(frozen=True, eq=False)
class Examined:
    """Evidence, and how it was had."""

    evidence: Evidence
    access: Literal["weights", "streamed weights", "routes"]
    notes: tuple[str, ...] = ()
    """What could not be done, and why; part of the verdict."""
    mute: str | None = None
    """Why clean text shows no working language model, if it shows none: then no mark found means nothing."""
    fed: Evidence | None = None
    """The same behind the original's lower layers, where it was asked for."""
    read_with: ReadWith | None = None
    """The texts and controls that it was had with; None where whoever recorded it did not say."""
