"""Run only the upper part of a model, from cached hidden states or on another model's lower part.

While a mark goes in, nothing changes below the layer under the first watermarked one, so what comes out there is
computed once per text. To run the rest, the lower layers are swapped for modules that hand the hidden state on, and
the model's own forward does everything else (masks, rotary embeddings, norms), whatever the architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from pathmark.errors import ModelError
from pathmark.models.routers import RouterSite, find_routers

SAME = 0.5
"""Two embeddings that are this much apart or less, relative to their size, are one. Strangers' are 1.4 apart."""


class _PassThrough(nn.Module):
    """Stands in for a decoder layer: returns what it was given, answers questions as the layer would."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # not registered as a submodule: its parameters must not show up, move or train
        object.__setattr__(self, "_layer", layer)

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)


def layer_stack(model: nn.Module, site: RouterSite) -> nn.ModuleList:
    """The list of decoder layers that holds a router."""
    parts = site.name.split(".")
    position = next(i for i, part in enumerate(parts) if part.isdigit())
    stack = model.get_submodule(".".join(parts[:position]))
    assert isinstance(stack, nn.ModuleList)
    return stack


def body(model: nn.Module) -> nn.Module:
    """The model without its language-modelling head; unwraps a peft model."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    base = getattr(inner, "base_model", None)
    if base is not None and base is inner:  # llama4 calls itself its base model
        base = next((m for m in inner.children() if isinstance(m, PreTrainedModel)), None)
    if not isinstance(base, nn.Module) or base is inner:
        raise ModelError(f"{type(inner).__name__} has no body apart from its head; expected a causal LM")
    return base


@contextmanager
def swapped_layers(stack: nn.ModuleList, instead: Mapping[int, nn.Module]) -> Iterator[None]:
    """Inside the block other layers stand at these places; the stack's own are back when it ends."""
    kept = {i: stack[i] for i in instead}
    try:
        for i, layer in instead.items():
            stack[i] = layer
        yield
    finally:
        for i, layer in kept.items():
            stack[i] = layer


def without_layers_below(stack: nn.ModuleList, first: int) -> AbstractContextManager[None]:
    """Inside the block the layers below `first` do nothing."""
    return swapped_layers(stack, {i: _PassThrough(stack[i]) for i in range(first)})


@contextmanager
def recomputed_layers(model: nn.Module) -> Iterator[None]:
    """Inside the block decoder layers keep only what enters them, and run again in the backward pass."""
    stack = layer_stack(model, find_routers(model)[0])
    kept = {layer: layer.forward for layer in stack if "forward" not in vars(layer)}  # a streamed one has no gradients
    try:
        for layer, forward in kept.items():
            layer.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for layer in kept:
            del layer.forward


@contextmanager
def grafted(model: PreTrainedModel, donor: PreTrainedModel, first: int) -> Iterator[None]:
    """Inside the block the model's embedding and its layers below `first` are the donor's; its own are back after it.

    Where the model's residual stream is the donor's turned (`rotation_between`), what they hand up is turned as well.
    Works on streamed models as on others: a streamed layer brings its own way to its weights.
    """
    stack, theirs = (layer_stack(one, find_routers(one)[0]) for one in (model, donor))
    here, there = (_shape(one, layers) for one, layers in ((model, stack), (donor, theirs)))
    if here != there:
        raise ModelError(f"expected an original of the same build: {here}, got {there}")
    embedding = model.get_input_embeddings()
    turn_HH = rotation_between(donor, model)

    def turn(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden = args[0] if args else kwargs["hidden_states"]
        turned = hidden @ turn_HH.to(hidden)  # type: ignore[union-attr]
        return ((turned, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": turned})

    hooks = [] if turn_HH is None else [stack[first].register_forward_pre_hook(turn, with_kwargs=True)]
    try:
        model.set_input_embeddings(donor.get_input_embeddings())
        with swapped_layers(stack, {i: theirs[i] for i in range(first)}):
            yield
    finally:
        model.set_input_embeddings(embedding)
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def rotation_between(donor: PreTrainedModel, model: PreTrainedModel) -> Tensor | None:
    """The (hidden, hidden) rotation that makes the donor's residual stream the model's; None where there is none.

    Read from the two embeddings, which hold one vector per token: thieves who turn the stream turn those with it.
    """
    theirs_VH, own_VH = (one.get_input_embeddings().weight.float() for one in (donor, model))
    if theirs_VH.shape != own_VH.shape or _apart(own_VH, theirs_VH) < SAME:
        return None
    left_HH, _, right_HH = torch.linalg.svd(theirs_VH.T @ own_VH)  # orthogonal Procrustes
    turn_HH = left_HH @ right_HH
    return turn_HH if _apart(own_VH, theirs_VH @ turn_HH) < SAME else None


def _apart(a_VH: Tensor, b_VH: Tensor) -> float:
    return float((a_VH - b_VH).norm() / a_VH.norm())


def _shape(model: PreTrainedModel, stack: nn.ModuleList) -> str:
    width = model.config.get_text_config().hidden_size
    return f"{type(model).__name__} with {len(stack)} layers of width {width}"


@torch.no_grad()
def hidden_at_layer(model: nn.Module, stack: nn.ModuleList, first: int, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Hidden states that enter layer `first`; nothing from there on runs."""

    class _Reached(Exception):  # noqa: N818  leaves the forward pass, is not an error
        pass

    kept: list[Tensor] = []

    def grab(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.append(args[0] if args else kwargs["hidden_states"])
        raise _Reached

    handle = stack[first].register_forward_pre_hook(grab, with_kwargs=True)
    try:
        body(model)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
    except _Reached:
        pass
    finally:
        handle.remove()
    return kept[0]


def can_run_from(model: nn.Module, stack: nn.ModuleList, first: int, ids_BT: Tensor, mask_BT: Tensor) -> bool:
    """Whether the upper part, fed the cached hidden states, gives what the whole model gives.

    Tried, not assumed: some families pass more than hidden states from layer to layer.
    """
    if first == 0:
        return False
    with torch.no_grad():
        whole = body(model)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
        try:
            hidden = hidden_at_layer(model, stack, first, ids_BT, mask_BT)
            with without_layers_below(stack, first):
                upper = body(model)(inputs_embeds=hidden, attention_mask=mask_BT, use_cache=False)
        except Exception:  # any failure of this short cut means: take the long way
            return False
    keep = mask_BT.bool()
    return bool(torch.allclose(whole[keep], upper.last_hidden_state[keep], atol=1e-4, rtol=1e-4))


def output_head(model: nn.Module) -> tuple[Tensor, float]:
    """(vocabulary, hidden) weight of the LM head and the factor that the family puts on its logits."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    head = inner.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        raise ModelError(f"{type(inner).__name__} has no output embedding; expected a causal LM")
    config = inner.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return head.weight, scale
