"""Every attack by name, with what its adversary needs besides the weights."""

from __future__ import annotations

from typing import Any

from pathmark.attacks.attack import Attack, Need, only_model
from pathmark.attacks.distillation import DistillRouters, distill_routers
from pathmark.attacks.finetuning import FineTune, fine_tune
from pathmark.attacks.mixing import Average, DareTies, LowRank, average, dare_ties, low_rank
from pathmark.attacks.noise import RouterNoise, WeightNoise, router_noise, weight_noise
from pathmark.attacks.overwriting import Overwrite, overwrite
from pathmark.attacks.pruning import FinePrune, fine_prune
from pathmark.attacks.purging import InjectUnlearn, SearchUnlearn, inject_and_unlearn, search_and_unlearn
from pathmark.attacks.quantization import AutoRound, Gptq, RoundToNearest, auto_round, gptq, round_to_nearest
from pathmark.attacks.saliency import (
    MergeSimilar,
    Reap,
    RemoveLeastUsed,
    mask_least_used,
    merge_similar,
    reap_prune,
    remove_least_used,
)
from pathmark.attacks.structure import (
    PermuteExperts,
    PermuteNeurons,
    RescaleNeurons,
    RotateResidual,
    ShiftRouters,
    permute_experts,
    permute_neurons,
    rescale_neurons,
    rotate_residual,
    shift_routers,
)
from pathmark.attacks.surgery import (
    ChangeTopK,
    DropLayers,
    DuplicateExperts,
    change_top_k,
    drop_chosen_layers,
    duplicate_experts,
)
from pathmark.attacks.transplant import Transplant, transplant
from pathmark.attacks.unlearning import Unlearn, unlearn
from pathmark.attacks.vocabulary import ExtendVocabulary, PermuteVocabulary, extend_vocabulary, permute_vocabulary
from pathmark.errors import AttackError, instead

TEXT: Need = "text"
ORIGINAL: Need = "another model"
LAYERS: Need = "marked layers"
TARGETS: Need = "target experts"

_ALL: tuple[Attack[Any], ...] = (
    Attack("rtn", RoundToNearest, only_model(round_to_nearest), "paper",
           "Round weights to 8, 4, 3 or 2 bits, group by group."),
    Attack("gptq", Gptq, only_model(gptq), "paper",
           "Real GPTQ of experts, attention and, if asked, routers.", (TEXT,)),
    Attack("auto-round", AutoRound, only_model(auto_round), "paper",
           "Quantize with learnt rounding.", (TEXT,)),
    Attack("fine-tune", FineTune, only_model(fine_tune), "paper",
           "Train on clean text: routers, LoRA or all weights.", (TEXT,)),
    Attack("fine-prune", FinePrune, only_model(fine_prune), "paper",
           "Zero the least active neurons of every feed-forward part, then repair if asked.", (TEXT,)),
    Attack("router-noise", RouterNoise, only_model(router_noise), "paper",
           "Add Gaussian noise to router logits while the model runs.", (), at_inference=True),
    Attack("overwrite", Overwrite, overwrite, "paper",
           "Embed another key into the same layers.", (TEXT, LAYERS)),
    Attack("remove-experts", RemoveLeastUsed, only_model(remove_least_used), "paper",
           "Remove the least used experts of every layer.", (TEXT,)),
    Attack("mask-experts", RemoveLeastUsed, only_model(mask_least_used), "paper",
           "Never choose the least used experts, of the marked layers if they are known.", (TEXT, LAYERS),
           at_inference=True),
    Attack("unlearn", Unlearn, only_model(unlearn), "paper",
           "Push random triggers away from the known targets.", (TEXT, LAYERS, TARGETS)),
    Attack("search-unlearn", SearchUnlearn, only_model(search_and_unlearn), "beyond",
           "Search for firing prefixes, train them away, and again.", (TEXT,)),
    Attack("inject-unlearn", InjectUnlearn, only_model(inject_and_unlearn), "beyond",
           "Put marks of the thief's own in, then train them away.", (TEXT, LAYERS)),
    Attack("permute-experts", PermuteExperts, only_model(permute_experts), "beyond",
           "Renumber the experts of every layer."),
    Attack("shift-routers", ShiftRouters, only_model(shift_routers), "beyond",
           "Add one vector to all router rows of a layer."),
    Attack("permute-neurons", PermuteNeurons, only_model(permute_neurons), "beyond",
           "Renumber the neurons inside every expert."),
    Attack("rescale-neurons", RescaleNeurons, only_model(rescale_neurons), "beyond",
           "Multiply up rows and divide down columns."),
    Attack("permute-vocabulary", PermuteVocabulary, permute_vocabulary, "beyond",
           "Renumber all tokens, in embedding, head and tokenizer."),
    Attack("extend-vocabulary", ExtendVocabulary, only_model(extend_vocabulary), "beyond",
           "Add tokens that nobody uses."),
    Attack("rotate", RotateResidual, only_model(rotate_residual), "beyond",
           "Express the residual stream in a random basis."),
    Attack("reap", Reap, only_model(reap_prune), "beyond",
           "Remove the experts that write least, weighted by their gate.", (TEXT,)),
    Attack("merge-experts", MergeSimilar, only_model(merge_similar), "beyond",
           "Average pairs of experts with similar router rows.", (TEXT,)),
    Attack("duplicate-experts", DuplicateExperts, only_model(duplicate_experts), "beyond",
           "Add copies of experts."),
    Attack("top-k", ChangeTopK, only_model(change_top_k), "beyond",
           "Let the routers choose another number of experts."),
    Attack("drop-layers", DropLayers, only_model(drop_chosen_layers), "beyond",
           "Remove whole layers.", (TEXT,)),
    Attack("transplant", Transplant, only_model(transplant), "beyond",
           "Put routers and experts into another model.", (ORIGINAL,)),
    Attack("distill-routers", DistillRouters, only_model(distill_routers), "beyond",
           "Train only routers, redrawn first if asked, towards the stolen model's replies.", (TEXT,)),
    Attack("average", Average, only_model(average), "beyond",
           "Average with the original or a sibling.", (ORIGINAL,)),
    Attack("dare-ties", DareTies, only_model(dare_ties), "beyond",
           "Thin out the change against the original, as model merging does.", (ORIGINAL,)),
    Attack("low-rank", LowRank, only_model(low_rank), "beyond",
           "Keep only the strongest directions of the change against the original.", (ORIGINAL,)),
    Attack("weight-noise", WeightNoise, only_model(weight_noise), "beyond",
           "Add Gaussian noise to all weight matrices."),
)  # fmt: skip

ATTACKS = {attack.name: attack for attack in _ALL}
"""Name -> attack, the paper's first."""


def find_attack(name: str) -> Attack[Any]:
    """An attack by name, or a refusal that says which is meant."""
    if name not in ATTACKS:
        raise AttackError(f"there is no attack {name!r}; {instead(name, list(ATTACKS))}")
    return ATTACKS[name]
