"""What a thief does to a copy: model in, model out. The model that goes in is not touched.

`catalog` knows every attack by name, `kit` is what a thief has besides the weights. The rest by subject: `structure`
keeps the outputs and hides the indices; `surgery` and `saliency` remove, merge and double experts and layers;
`quantization`, `noise`, `mixing` and `transplant` change weights without training; `finetuning`, `pruning`,
`overwriting`, `unlearning` and `distillation` train; `search` looks
for the trigger.
"""

from pathmark.attacks.catalog import ATTACKS, Attack, find_attack

__all__ = ["ATTACKS", "Attack", "find_attack"]
