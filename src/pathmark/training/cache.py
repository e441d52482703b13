"""What does not change while the upper layers of a model are trained, computed once per row and kept.

For every row: the hidden states that enter the first trained layer, and what the model did above it before
the training: its routing in some layers and its last hidden states (the head turns those into its next-token
distribution). In memory when that fits, else memory-mapped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pathmark.models import device_of, find_routers, pad_rows, record_routing, select_sites
from pathmark.models.upper import body, can_run_from, hidden_at_layer, layer_stack, without_layers_below
from pathmark.progress import Progress, Silent

MEMORY_SHARE = 0.4
"""Of the free memory; what needs more goes to a memory-mapped file."""
BATCH_TOKENS = 4096
"""Tokens at a time while the rows are run through the model."""


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
    """Per-token arrays of rows, back to back, and the model above them."""

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[Sequence[int]],
        layers: Sequence[int],
        *,
        lowest: int,
        pad: int,
        progress: Progress | None = None,
        needed: Collection[int] | None = None,
    ) -> None:
        """Routing is kept of `layers`; nothing below `lowest` will change. `needed` are the rows that anybody will ask
        for; default: all of them."""
        say = progress or Silent()
        self.model, self.rows, self.layers, self.pad = model, rows, list(layers), pad
        self.device = device_of(model)
        self._entering_type = torch.float32
        self._stack = layer_stack(model, select_sites(find_routers(model), self.layers[:1])[0])
        ids_BT, mask_BT = pad_rows(rows[:4], pad, self.device)
        self.from_layer = lowest if can_run_from(model, self._stack, lowest, ids_BT, mask_BT) else None
        """The first layer that is run; None where the model has to run from its first layer."""
        order = sorted(range(len(rows)) if needed is None else needed, key=lambda i: -len(rows[i]))
        ends = np.cumsum([len(rows[i]) for i in order]).tolist()
        self._starts = {i: end - len(rows[i]) for i, end in zip(order, ends, strict=True)}
        first = self._teach(order[-1:])
        widths = {name: array.shape[-1] for name, array in first.items()}
        tokens = ends[-1]
        size = tokens * sum(widths.values()) * 4
        self._file_folder: tempfile.TemporaryDirectory[str] | None = None
        if size > MEMORY_SHARE * psutil.virtual_memory().available:
            self._file_folder = tempfile.TemporaryDirectory(prefix="pathmark-cache-")
        place = "in memory" if self._file_folder is None else "in a memory-mapped file"
        say.stage(f"the model before training, on its rows, {size / 1e6:,.0f} MB {place}", len(order))
        self._arrays = {name: self._allocate(name, tokens, width) for name, width in widths.items()}
        while order:
            # as many rows as fit beside the longest: short rows one by one would leave every expert idle
            count = max(1, BATCH_TOKENS // len(rows[order[0]]))
            chosen, order = order[:count], order[count:]
            start = self._starts[chosen[0]]
            for name, values in self._teach(chosen).items():
                self._arrays[name][start : start + len(values)] = values
            say.advance(len(chosen))

    @property
    def bytes_per_token(self) -> int:
        """What is kept of one token."""
        return sum(array.shape[-1] * array.itemsize for array in self._arrays.values())

    def _allocate(self, name: str, tokens: int, width: int) -> NDArray[np.float32]:
        if self._file_folder is None:
            return np.empty((tokens, width), dtype=np.float32)
        path = Path(self._file_folder.name) / f"{name}.dat"
        return np.memmap(path, dtype=np.float32, mode="w+", shape=(tokens, width))

    @torch.no_grad()
    def _teach(self, chosen: Sequence[int]) -> dict[str, NDArray[np.float32]]:
        ids_BT, mask_BT = pad_rows([self.rows[i] for i in chosen], self.pad, self.device)
        keep = mask_BT.bool()
        kept: dict[str, Tensor] = {}
        with record_routing(self.model, self.layers) as trace:
            if self.from_layer is not None:
                handle = self._stack[self.from_layer].register_forward_pre_hook(
                    lambda m, args, kwargs: kept.update(entering=args[0] if args else kwargs["hidden_states"]),
                    with_kwargs=True,
                )
            try:
                kept["final"] = self._whole(ids_BT, mask_BT)
            finally:
                if self.from_layer is not None:
                    handle.remove()
        if self.from_layer is not None:
            self._entering_type = kept["entering"].dtype
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

    def forward(self, batch: Batch) -> Tensor:
        """(B, T, H) last hidden states of the model as it is now."""
        if batch.entering_BTH is None:
            return self._whole(batch.ids_BT, batch.mask_BT)
        assert self.from_layer is not None
        with without_layers_below(self._stack, self.from_layer):
            entering_BTH = batch.entering_BTH.to(self._entering_type)
            output = body(self.model)(inputs_embeds=entering_BTH, attention_mask=batch.mask_BT, use_cache=False)
        final_BTH: Tensor = output.last_hidden_state
        return final_BTH.to(self.device)

    def entering(self, ids_BT: Tensor) -> Tensor:
        """(B, T, H) hidden states that enter the lowest layer that is run, of rows that need no padding."""
        assert self.from_layer is not None
        ids_BT = ids_BT.to(self.device)
        return hidden_at_layer(self.model, self._stack, self.from_layer, ids_BT, torch.ones_like(ids_BT)).float()

    def _whole(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        output = body(self.model)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
        final_BTH: Tensor = output.last_hidden_state
        return final_BTH.to(self.device)
