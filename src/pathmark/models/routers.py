"""Find the router of every MoE layer, and compute its logits in one place.

Shape suffixes: B batch, T tokens, N valid tokens, E experts, K experts chosen per token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.errors import ModelError
from pathmark.models.families import (
    NOT_FEED_FORWARD,
    NOT_PER_EXPERT,
    Scoring,
    log_distribution,
    scoring_of,
)


@dataclass(frozen=True, eq=False)
class RouterSite:
    """One router: where it is, what it decides, and its weight.

    `layer` counts decoder layers from zero, dense ones included, as the model's own module names do.
    """

    layer: int
    name: str
    router: nn.Module
    projection: nn.Module
    """The module whose `weight` has a row per expert: the router itself or a Linear inside it."""
    experts: nn.Module | None
    """The sibling that receives the decision; None where the block computes experts inline."""
    n_experts: int
    top_k: int
    scoring: Scoring
    group_limited: bool
    choice_bias: bool
    """A correction bias is added to the scores before the choice, so the decision may differ from TopK(g)."""

    @property
    def weight_name(self) -> str:
        """Full parameter name of the router weight in the model."""
        inner = next((n for n, m in self.router.named_modules() if m is self.projection), "")
        return ".".join(part for part in (self.name, inner, "weight") if part)

    @property
    def weight(self) -> Tensor:
        """(experts, hidden) weight; a row may be appended for choices that are not routed experts."""
        weight = self.projection.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def row_names(self) -> set[str]:
        """Full names of the router's parameters that have a row per expert: its weight, and perhaps a bias."""
        prefix = self.weight_name.removesuffix("weight")
        rows = len(self.weight)
        return {
            f"{prefix}{name}" for name, p in self.projection.named_parameters(recurse=False) if p.shape[:1] == (rows,)
        }

    @property
    def kind(self) -> str:
        """Scoring function with what else takes part in the decision, for people."""
        extras = ["group-limited"] * self.group_limited + ["with bias"] * self.choice_bias
        return ", ".join([self.scoring.value, *extras])

    @property
    def hands_on_decision(self) -> bool:
        """Whether the experts module is told the chosen experts; else the decision is TopK of the logits.

        llama4 hands its experts scaled copies of the tokens, jetmoe sorts tokens inside the block.
        """
        return self.experts is not None and not self.is_a("Llama4Router")

    def is_a(self, class_name: str) -> bool:
        """Class test that holds during a forward with LoRA, when torch renames it to Parametrized..."""
        return type(self.router).__name__.endswith(class_name)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., E) router logits from the input of the projection, in float32.

        Computed here and not read from the router's output, whose first element has been logits in one
        release of transformers and probabilities in another.
        """
        # gpt-oss adds its bias to the logits; Linear gates of the other families have none that they use.
        bias = getattr(self.projection, "bias", None) if self.projection is self.router else None
        bias = bias.float() if isinstance(bias, Tensor) else None
        logits = F.linear(hidden.float(), self.weight.float(), bias)[..., : self.n_experts]
        cap = getattr(self.router, "router_logit_softcapping", 0.0) or 0.0
        return torch.tanh(logits / cap) * cap if cap > 0 else logits

    def distribution(self, logits: Tensor) -> Tensor:
        """The routing distribution g over experts (the paper's g_l); see `families.log_distribution`."""
        return log_distribution(logits, self.scoring).exp()


def find_routers(model: nn.Module) -> list[RouterSite]:
    """Every feed-forward router of a causal LM, in the order of its layers.

    Raises ModelError for a dense model and for routers that no row of weights per expert describes.
    """
    classes = {cls for cls in _recorded_classes(model) if cls.__name__ not in NOT_FEED_FORWARD}
    sites = []
    for name, module in model.named_modules():
        if type(module) not in classes:
            continue
        reason = NOT_PER_EXPERT.get(type(module).__name__)
        if reason:
            raise ModelError(f"{_class_name(model)} cannot be marked: {reason}")
        if _layer_of(name) is None or _inside_attention(name):
            continue
        sites.append(_site(model, name, module))
    if not sites:
        raise ModelError(
            f"{_class_name(model)} has no MoE router; expected a Mixture-of-Experts causal LM such as "
            "mixtral, qwen2_moe, qwen3_moe, olmoe or deepseek_v3 (see docs/models.md)"
        )
    return sorted(sites, key=lambda site: site.layer)


def select_sites(sites: Sequence[RouterSite], layers: Iterable[int]) -> list[RouterSite]:
    """The sites of the chosen layers, each once, in that order; layers without a router are an error."""
    by_layer = {site.layer: site for site in sites}
    wanted = list(dict.fromkeys(layers))
    missing = sorted(layer for layer in wanted if layer not in by_layer)
    if missing:
        raise ModelError(
            f"layers {_span(missing)} have no router; this model routes in layers {_span(sorted(by_layer))}. "
            "Choose among those"
        )
    return [by_layer[layer] for layer in wanted]


def count_layers(model: nn.Module, sites: Sequence[RouterSite]) -> int:
    """Decoder layers of the stack that holds the routers, dense ones included."""
    parts = sites[0].name.split(".")
    position = next(i for i, part in enumerate(parts) if part.isdigit())
    stack = model.get_submodule(".".join(parts[:position]))
    return len(list(stack.children()))


def _recorded_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Classes that transformers records as `router_logits`, of this model and of models inside it."""
    classes: set[type[nn.Module]] = set()
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        recorders = (module.can_record_outputs or {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            classes.add(getattr(recorder, "target_class", None) or recorder)
    return classes


def _site(model: nn.Module, name: str, router: nn.Module) -> RouterSite:
    parent = _block(model, name)
    projection = _projection(router)
    # inkling appends rows for shared experts, which every token visits: they are not part of the choice
    shared_rows = hasattr(router, "n_total_experts")
    rows = int(projection.weight.shape[0])  # type: ignore[index]
    n_experts = int(router.num_experts) if shared_rows else rows  # type: ignore[arg-type]
    layer = _layer_of(name)
    assert layer is not None
    return RouterSite(
        layer=layer,
        name=name,
        router=router,
        projection=projection,
        experts=getattr(parent, "experts", None),
        n_experts=n_experts,
        top_k=_top_k(router, parent),
        scoring=scoring_of(router),
        group_limited=_group_limited(router),
        choice_bias=_has_choice_bias(router, parent),
    )


def _block(model: nn.Module, name: str) -> nn.Module:
    """The MoE block around a router; adapters of peft stand between the two as `base_layer`."""
    parts = name.split(".")[:-1]
    while hasattr(model.get_submodule(".".join(parts)), "base_layer"):
        parts.pop()
    return model.get_submodule(".".join(parts))


def _projection(router: nn.Module) -> nn.Module:
    if isinstance(getattr(router, "weight", None), Tensor):
        return router
    if any(hasattr(m, "base_layer") for m in router.modules()):
        raise ModelError(
            f"a peft adapter sits inside {type(router).__name__}; expected LoRA on the router's weight "
            "(target_parameters) or a merged model. Try merge_and_unload()"
        )
    linears = [m for m in router.modules() if isinstance(m, nn.Linear)]
    if not linears:
        raise ModelError(f"{type(router).__name__} has no weight with a row per expert; got none that is Linear")
    return linears[-1]  # zaya's router is a small MLP that ends in it; elsewhere there is only one


def _top_k(router: nn.Module, parent: nn.Module) -> int:
    owners = ((router, "top_k"), (parent, "top_k"), (getattr(router, "config", None), "top_k_experts"))
    for owner, name in owners:
        value = getattr(owner, name, None)
        if isinstance(value, int):
            return value
    raise ModelError(f"{type(router).__name__} does not say how many experts it chooses; expected a top_k attribute")


def _group_limited(router: nn.Module) -> bool:
    groups, kept = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
    return groups > kept and getattr(router, "topk_method", "group_limited_greedy") == "group_limited_greedy"


def _has_choice_bias(router: nn.Module, parent: nn.Module) -> bool:
    names = ("e_score_correction_bias", "balancing_biases", "moe_statics")
    if any(hasattr(router, name) for name in names):
        return True
    if not getattr(router, "use_expert_bias", True):
        return False
    return any(hasattr(parent, name) for name in ("e_score_correction_bias", "expert_bias"))


def _layer_of(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _inside_attention(name: str) -> bool:
    return any("attn" in part or "attention" in part for part in name.split("."))


def _class_name(model: nn.Module) -> str:
    return type(model).__name__


def _span(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as `1-3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
