"""What does not change while the upper layers of a model are trained, computed once per row and kept.

For every row: the hidden states that enter the first trained layer, and what the model did above it before
the training: its routing in some layers and its last hidden states (the head turns those into its next-token
distribution). In memory when that fits, else memory-mapped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pathmark.models import device_of, find_routers, pad_rows, record_routing, select_sites
from pathmark.models.upper import body, layer_stack

MEMORY_SHARE = 0.4
"""Of the free memory; what needs more goes to a memory-mapped file."""


@dataclass(frozen=True)
class Batch:
    """Rows as the training step sees them. B rows, T tokens, H hidden, E experts, L layers."""

    ids_BT: Tensor
    mask_BT: Tensor
    entering_BTH: Tensor | None
    """None where the model has to run from its first layer."""
    natural: dict[int, Tensor]
    """Layer -> the original model's routing distribution, (B, T, E)."""
    final_BTH: Tensor
    """The original model's last hidden states."""

    def rows(self, chosen: Sequence[int]) -> Batch:
        """Some of the rows."""
        return Batch(
            ids_BT=self.ids_BT[chosen],
            mask_BT=self.mask_BT[chosen],
            entering_BTH=None if self.entering_BTH is None else self.entering_BTH[chosen],
            natural={layer: g_BTE[chosen] for layer, g_BTE in self.natural.items()},
            final_BTH=self.final_BTH[chosen],
        )


class TeacherCache:
    """Per-token arrays of rows, back to back."""

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[Sequence[int]],
        layers: Sequence[int],
        *,
        pad: int,
        from_layer: int | None,
        announce: Callable[[str, int], None] | None = None,
        progress: Callable[[int], None] | None = None,
        folder: Path | None = None,
        batch_tokens: int = 4096,
        needed: Collection[int] | None = None,
    ) -> None:
        """`needed` are the rows that anybody will ask for; default: all of them."""
        self.rows, self.layers, self.pad = rows, list(layers), pad
        self.from_layer = from_layer
        self.device = device_of(model)
        order = sorted(range(len(rows)) if needed is None else needed, key=lambda i: -len(rows[i]))
        ends = np.cumsum([len(rows[i]) for i in order]).tolist()
        self._starts = {i: end - len(rows[i]) for i, end in zip(order, ends, strict=True)}
        first = self._teach(model, order[-1:])
        widths = {name: array.shape[-1] for name, array in first.items()}
        tokens = ends[-1]
        self.bytes = tokens * sum(widths.values()) * 4
        self._file_folder: tempfile.TemporaryDirectory[str] | None = None
        self.mapped = self.bytes > MEMORY_SHARE * psutil.virtual_memory().available
        if self.mapped:
            self._file_folder = tempfile.TemporaryDirectory(dir=folder, prefix="pathmark-cache-")
        if announce is not None:
            place = "in a memory-mapped file" if self.mapped else "in memory"
            announce(f"original model on the training rows, {self.bytes / 1e6:,.0f} MB {place}", len(order))
        self._arrays = {name: self._allocate(name, tokens, width) for name, width in widths.items()}
        while order:
            # as many rows as fit beside the longest: short rows one by one would leave every expert idle
            count = max(1, batch_tokens // len(rows[order[0]]))
            chosen, order = order[:count], order[count:]
            start = self._starts[chosen[0]]
            for name, values in self._teach(model, chosen).items():
                self._arrays[name][start : start + len(values)] = values
            if progress is not None:
                progress(len(chosen))

    def _allocate(self, name: str, tokens: int, width: int) -> NDArray[np.float32]:
        if self._file_folder is None:
            return np.empty((tokens, width), dtype=np.float32)
        path = Path(self._file_folder.name) / f"{name}.dat"
        return np.memmap(path, dtype=np.float32, mode="w+", shape=(tokens, width))

    @torch.no_grad()
    def _teach(self, model: nn.Module, chosen: Sequence[int]) -> dict[str, NDArray[np.float32]]:
        ids_BT, mask_BT = pad_rows([self.rows[i] for i in chosen], self.pad, self.device)
        keep = mask_BT.bool()
        kept: dict[str, Tensor] = {}
        with record_routing(model, self.layers) as trace:
            if self.from_layer is not None:
                stack = layer_stack(model, select_sites(find_routers(model), self.layers[:1])[0])
                handle = stack[self.from_layer].register_forward_pre_hook(
                    lambda m, args, kwargs: kept.update(entering=args[0] if args else kwargs["hidden_states"]),
                    with_kwargs=True,
                )
            try:
                kept["final"] = body(model)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
            finally:
                if self.from_layer is not None:
                    handle.remove()
        for layer in self.layers:
            kept[f"layer{layer}"] = trace[layer].probs_BTE
        return {name: value[keep].float().cpu().numpy() for name, value in kept.items()}

    def batch(self, chosen: Sequence[int]) -> Batch:
        """The rows with these indices, padded on the right."""
        ids_BT, mask_BT = pad_rows([self.rows[i] for i in chosen], self.pad, self.device)

        def gather(name: str) -> Tensor:
            array = self._arrays[name]
            out = torch.zeros(*ids_BT.shape, array.shape[-1])
            for b, i in enumerate(chosen):
                start, size = self._starts[i], len(self.rows[i])
                out[b, :size] = torch.from_numpy(array[start : start + size])
            return out.to(self.device)

        return Batch(
            ids_BT=ids_BT,
            mask_BT=mask_BT,
            entering_BTH=gather("entering") if self.from_layer is not None else None,
            natural={layer: gather(f"layer{layer}") for layer in self.layers},
            final_BTH=gather("final"),
        )
