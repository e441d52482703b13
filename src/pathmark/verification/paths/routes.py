"""Recorded routing of the text tokens of probe texts, with masses or with decisions alone.

Shape suffixes: B probes, T text tokens, E experts, K experts chosen per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pathmark.errors import VerificationError


@dataclass(frozen=True)
class Routes:
    """Recorded routing of the text tokens of some probes, per layer.

    A serving engine tells which experts it chose and not how much mass each had: such routes have decisions
    and no probs, and whoever needs masses asks `masses_known` first.
    """

    probs: dict[int, NDArray[np.float32]]
    """Layer -> probs_BTE, the routing distribution g; zero where the mask is False. Empty: masses are not known."""
    decisions: dict[int, NDArray[np.int64]]
    """Layer -> decision_BTK, the model's own choice; -1 where the mask is False or the expert has no number here."""
    mask_BT: NDArray[np.bool_]
    experts: Mapping[int, int] = field(default_factory=dict)
    """Layer -> number of experts; needed only where masses are not known."""

    def __post_init__(self) -> None:
        known = self.probs.keys() if self.probs else self.experts.keys()
        if not self.decisions.keys() <= known:
            lacking = sorted(self.decisions.keys() - known)
            raise VerificationError(f"expected masses or a number of experts for every layer, none for {lacking}")

    @classmethod
    def from_decisions(
        cls,
        decisions: Mapping[int, NDArray[np.integer]],
        mask_BT: NDArray[np.bool_],
        n_experts: int | Mapping[int, int],
    ) -> Routes:
        """Routes of which only the chosen experts are known; n_experts is one for all layers, or one per layer."""
        experts = dict.fromkeys(decisions, n_experts) if isinstance(n_experts, int) else dict(n_experts)
        clean: dict[int, NDArray[np.int64]] = {}
        for layer, decision_BTK in decisions.items():
            if decision_BTK.ndim != 3 or decision_BTK.shape[:2] != mask_BT.shape:
                raise VerificationError(
                    f"layer {layer}: expected decisions of shape {mask_BT.shape} x top-k, got {decision_BTK.shape}"
                )
            if layer not in experts:
                raise VerificationError(f"layer {layer}: its number of experts is not given")
            if decision_BTK.size and decision_BTK.max() >= experts[layer]:
                raise VerificationError(
                    f"layer {layer}: expert {decision_BTK.max()} of {experts[layer]}; were physical instead of "
                    "logical expert numbers recorded?"
                )
            clean[layer] = np.where(mask_BT[:, :, None], decision_BTK, -1).astype(np.int64)
        return cls({}, clean, mask_BT, {layer: experts[layer] for layer in clean})

    @property
    def n_tokens(self) -> int:
        """Text tokens recorded."""
        return int(self.mask_BT.sum())

    @property
    def masses_known(self) -> bool:
        """Whether the routing distribution is known, or only the decisions."""
        return bool(self.probs)

    @property
    def layers(self) -> tuple[int, ...]:
        """Recorded layers, rising."""
        return tuple(sorted(self.decisions))

    def n_experts(self, layer: int) -> int:
        """Experts of one layer."""
        return int(self.probs[layer].shape[-1]) if self.masses_known else self.experts[layer]

    def require(self, layers: Iterable[int]) -> None:
        """Refuse layers that were not recorded."""
        missing = sorted(set(layers) - self.decisions.keys())
        if missing:
            raise VerificationError(
                f"layers {', '.join(map(str, missing))} were not recorded; got {', '.join(map(str, self.layers))}"
            )

    def part(self, rows: slice | Sequence[int]) -> Routes:
        """The same for some of the probes."""
        chosen = rows if isinstance(rows, slice) else list(rows)
        return Routes(
            {layer: probs_BTE[chosen] for layer, probs_BTE in self.probs.items()},
            {layer: decision_BTK[chosen] for layer, decision_BTK in self.decisions.items()},
            self.mask_BT[chosen],
            dict(self.experts),
        )
