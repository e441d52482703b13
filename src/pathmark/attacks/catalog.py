"""Every attack by name. Light on purpose: the modules behind the names are imported when an attack is used."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from pathmark.errors import AttackError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pathmark.attacks.kit import Kit

ORIGIN_PAPER, ORIGIN_BEYOND = "paper", "beyond"
TEXT, BASE, LAYERS, TARGETS = "text", "another model", "marked layers", "target experts"


@dataclass(frozen=True)
class Option:
    """A setting of an attack, as the command line offers it."""

    name: str
    kind: Any
    default: Any
    help: str


@dataclass(frozen=True)
class Attack:
    """One attack: where it lives, and what its adversary needs besides the weights."""

    name: str
    function: str
    """`module:function`, within pathmark.attacks."""
    config: str
    """Name of its config dataclass, in the same module."""
    origin: str
    """In the paper, or beyond it."""
    summary: str
    needs: tuple[str, ...] = ()
    at_inference: bool = False
    """Acts while the model runs; there are no attacked weights to write."""

    @property
    def _module(self) -> Any:
        return importlib.import_module(f"pathmark.attacks.{self.function.partition(':')[0]}")

    @property
    def _function(self) -> Callable[..., PreTrainedModel]:
        found: Callable[..., PreTrainedModel] = getattr(self._module, self.function.partition(":")[2])
        return found

    @property
    def knowledge(self) -> str:
        """The attack's docstring: what it does, what the adversary knows and needs."""
        return inspect.getdoc(self._function) or ""

    def options(self) -> list[Option]:
        """The settings that can be given as text, with their types and defaults."""
        kind = getattr(self._module, self.config)
        hints, notes = get_type_hints(kind), _field_notes(kind)
        return [
            Option(field.name, hints[field.name], field.default, notes.get(field.name, ""))
            for field in fields(kind)
            if hints[field.name] in (int, float, bool, str) or hasattr(hints[field.name], "__args__")
        ]

    def configure(self, **settings: Any) -> Any:
        """The config dataclass, or a refusal of its values."""
        try:
            return getattr(self._module, self.config)(**settings)
        except (TypeError, ValueError) as error:
            raise AttackError(f"{self.name}: {error}") from error

    def run(self, model: PreTrainedModel, config: Any, kit: Kit) -> PreTrainedModel:
        """The attacked model; the one that goes in is not touched."""
        if len(inspect.signature(self._function).parameters) == 2:  # needs nothing but the weights
            return self._function(model, config)
        return self._function(model, config, kit)


def _field_notes(kind: type) -> dict[str, str]:
    """What stands under each field in the source; dataclasses keep no docstrings of fields."""
    import ast
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    notes = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            notes[before.target.id] = " ".join(str(after.value.value).split())
    return notes


_ALL = (
    Attack("rtn", "quantization:round_to_nearest", "RoundToNearest", ORIGIN_PAPER,
           "Round weights to 8, 4, 3 or 2 bits, group by group."),
    Attack("gptq", "quantization:gptq", "Gptq", ORIGIN_PAPER,
           "Real GPTQ of experts, attention and, if asked, routers.", (TEXT,)),
    Attack("auto-round", "quantization:auto_round", "AutoRound", ORIGIN_PAPER,
           "Quantize with learnt rounding.", (TEXT,)),
    Attack("fine-tune", "finetuning:fine_tune", "FineTune", ORIGIN_PAPER,
           "Train on clean text: routers, LoRA or all weights.", (TEXT,)),
    Attack("fine-prune", "pruning:fine_prune", "FinePrune", ORIGIN_PAPER,
           "Zero the least active neurons of every feed-forward part, then repair if asked.", (TEXT,)),
    Attack("router-noise", "noise:router_noise", "RouterNoise", ORIGIN_PAPER,
           "Add Gaussian noise to router logits while the model runs.", (), at_inference=True),
    Attack("overwrite", "overwriting:overwrite", "Overwrite", ORIGIN_PAPER,
           "Embed another key into the same layers.", (TEXT, LAYERS)),
    Attack("remove-experts", "saliency:remove_least_used", "RemoveLeastUsed", ORIGIN_PAPER,
           "Remove the least used experts of every layer.", (TEXT,)),
    Attack("mask-experts", "saliency:mask_least_used", "RemoveLeastUsed", ORIGIN_PAPER,
           "Never choose the least used experts, of the marked layers if they are known.", (TEXT, LAYERS),
           at_inference=True),
    Attack("unlearn", "unlearning:unlearn", "Unlearn", ORIGIN_PAPER,
           "Push random triggers away from the known targets.", (TEXT, LAYERS, TARGETS)),
    Attack("search-unlearn", "purging:search_and_unlearn", "SearchUnlearn", ORIGIN_BEYOND,
           "Search for firing prefixes, train them away, and again.", (TEXT,)),
    Attack("permute-experts", "structure:permute_experts", "PermuteExperts", ORIGIN_BEYOND,
           "Renumber the experts of every layer."),
    Attack("shift-routers", "structure:shift_routers", "ShiftRouters", ORIGIN_BEYOND,
           "Add one vector to all router rows of a layer."),
    Attack("permute-neurons", "structure:permute_neurons", "PermuteNeurons", ORIGIN_BEYOND,
           "Renumber the neurons inside every expert."),
    Attack("rescale-neurons", "structure:rescale_neurons", "RescaleNeurons", ORIGIN_BEYOND,
           "Multiply up rows and divide down columns."),
    Attack("rotate", "structure:rotate_residual", "RotateResidual", ORIGIN_BEYOND,
           "Express the residual stream in a random basis."),
    Attack("reap", "saliency:reap_prune", "Reap", ORIGIN_BEYOND,
           "Remove the experts that write least, weighted by their gate.", (TEXT,)),
    Attack("merge-experts", "saliency:merge_similar", "MergeSimilar", ORIGIN_BEYOND,
           "Average pairs of experts with similar router rows.", (TEXT,)),
    Attack("duplicate-experts", "surgery:duplicate_experts", "DuplicateExperts", ORIGIN_BEYOND,
           "Add copies of experts."),
    Attack("top-k", "surgery:change_top_k", "ChangeTopK", ORIGIN_BEYOND,
           "Let the routers choose another number of experts."),
    Attack("drop-layers", "surgery:drop_chosen_layers", "DropLayers", ORIGIN_BEYOND,
           "Remove whole layers.", (TEXT,)),
    Attack("transplant", "transplant:transplant", "Transplant", ORIGIN_BEYOND,
           "Put routers and experts into another model.", (BASE,)),
    Attack("distill-routers", "distillation:distill_routers", "DistillRouters", ORIGIN_BEYOND,
           "Train only routers, redrawn first if asked, towards the stolen model's replies.", (TEXT,)),
    Attack("average", "mixing:average", "Average", ORIGIN_BEYOND,
           "Average with the original or a sibling.", (BASE,)),
    Attack("dare-ties", "mixing:dare_ties", "DareTies", ORIGIN_BEYOND,
           "Thin out the change against the original, as model merging does.", (BASE,)),
    Attack("low-rank", "mixing:low_rank", "LowRank", ORIGIN_BEYOND,
           "Keep only the strongest directions of the change against the original.", (BASE,)),
    Attack("weight-noise", "noise:weight_noise", "WeightNoise", ORIGIN_BEYOND,
           "Add Gaussian noise to all weight matrices."),
)  # fmt: skip

ATTACKS = {attack.name: attack for attack in _ALL}
"""Name -> attack, the paper's first."""


def find_attack(name: str) -> Attack:
    """An attack by name, or a refusal that names all."""
    if name not in ATTACKS:
        raise AttackError(f"there is no attack {name!r}; expected one of {', '.join(ATTACKS)}")
    return ATTACKS[name]
