"""The layers that an attack trains, run again and again on rows whose way up to them was computed once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from pathmark.models import device_of, find_routers, pad_rows, select_sites
from pathmark.models.upper import body, can_run_from, layer_stack, without_layers_below
from pathmark.progress import Progress
from pathmark.training import Batch, TeacherCache


class Replay:
    """Token rows with the stolen model's hidden states below the trained layers and at its end."""

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Sequence[int]],
        lowest: int,
        *,
        pad: int,
        progress: Progress,
    ) -> None:
        self.model = model
        self.stack = layer_stack(model, select_sites(find_routers(model), [lowest])[0])
        ids_BT, mask_BT = pad_rows(rows[:4], pad, device_of(model))
        self.from_layer = lowest if can_run_from(model, self.stack, lowest, ids_BT, mask_BT) else None
        self.cache = TeacherCache(
            model,
            rows,
            [lowest],
            pad=pad,
            from_layer=self.from_layer,
            announce=lambda _, total: progress.stage("stolen model on the texts", total),
            progress=progress.advance,
        )

    def batch(self, chosen: Sequence[int]) -> Batch:
        """The rows with these indices, and what the stolen model did on them before training."""
        return self.cache.batch(chosen)

    def forward(self, batch: Batch) -> Tensor:
        """(B, T, H) last hidden states of the model as it is now."""
        if self.from_layer is None:
            output = body(self.model)(input_ids=batch.ids_BT, attention_mask=batch.mask_BT, use_cache=False)
        else:
            with without_layers_below(self.stack, self.from_layer):
                output = body(self.model)(
                    inputs_embeds=batch.entering_BTH, attention_mask=batch.mask_BT, use_cache=False
                )
        final_BTH: Tensor = output.last_hidden_state
        return final_BTH
