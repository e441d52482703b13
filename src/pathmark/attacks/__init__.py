"""What a thief does to a copy: model in, model out. The model that goes in is not touched.

`structure` keeps the outputs and hides the indices; `surgery` removes, merges and doubles experts and layers.
"""

from pathmark.attacks.structure import (
    PermuteExperts,
    PermuteNeurons,
    RescaleNeurons,
    RotateResidual,
    ShiftRouters,
    expert_order,
    permute_experts,
    permute_neurons,
    rescale_neurons,
    rotate_residual,
    shift_routers,
)
from pathmark.attacks.surgery import (
    DuplicateExperts,
    MergeExperts,
    RemoveExperts,
    drop_layers,
    duplicate_experts,
    merge_experts,
    remove_experts,
    similar_pairs,
)

__all__ = [
    "DuplicateExperts",
    "MergeExperts",
    "PermuteExperts",
    "PermuteNeurons",
    "RemoveExperts",
    "RescaleNeurons",
    "RotateResidual",
    "ShiftRouters",
    "drop_layers",
    "duplicate_experts",
    "expert_order",
    "merge_experts",
    "permute_experts",
    "permute_neurons",
    "remove_experts",
    "rescale_neurons",
    "rotate_residual",
    "shift_routers",
    "similar_pairs",
]
