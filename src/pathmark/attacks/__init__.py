"""What a thief does to a copy: model in, model out. The model that goes in is not touched.

`attack` says what an attack is, `catalog` knows all by name, `kit` is what a thief has besides the weights. The rest by
subject: `structure`
keeps the outputs and hides the indices; `surgery` and `saliency` remove, merge and double experts and layers;
`quantization`, `noise`, `mixing` and `transplant` change weights without training; `finetuning`, `pruning`,
`overwriting`, `unlearning` and `distillation` train; `search` looks
for the trigger.
"""

from pathmark.attacks.attack import Attack, Attacked
from pathmark.attacks.catalog import ATTACKS, find_attack
from pathmark.attacks.kit import Kit

__all__ = ["ATTACKS", "Attack", "Attacked", "Kit", "find_attack"]
