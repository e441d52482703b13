"""Record what the routers of one forward pass computed and decided.

Shape suffixes: B batch, T tokens, N valid tokens, E experts, K experts chosen per token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from pathmark.errors import ModelError
from pathmark.models.routers import RouterSite, find_routers, select_sites


@dataclass(frozen=True, eq=False)
class LayerRouting:
    """One layer's routing for one batch; padding has zero logits and decision -1."""

    site: RouterSite
    logits_BTE: Tensor
    decision_BTK: Tensor
    """Experts the model sent each token to: what its experts module received."""
    mask_BT: Tensor

    @property
    def probs_BTE(self) -> Tensor:
        """The routing distribution g, zero on padding."""
        return self.site.distribution(self.logits_BTE) * self.mask_BT.unsqueeze(-1)


@dataclass(eq=False)
class RoutingTrace:
    """Filled by the forward pass inside `record_routing`; layer index -> routing."""

    layers: dict[int, LayerRouting] = field(default_factory=dict)
    mask_BT: Tensor | None = None
    """True on real tokens."""

    def __getitem__(self, layer: int) -> LayerRouting:
        if layer not in self.layers:
            raise ModelError(f"layer {layer} was not recorded; got layers {sorted(self.layers)}")
        return self.layers[layer]


class _EnoughError(Exception):
    """Ends a forward pass once the last wanted layer has been recorded."""


@contextmanager
def record_routing(
    model: nn.Module,
    layers: Iterable[int] | None = None,
    *,
    gradients: bool = False,
    stop_early: bool = False,
) -> Iterator[RoutingTrace]:
    """Record the routing of the one forward pass that runs inside the `with` block.

    >>> with record_routing(model, layers=[10, 11]) as trace:
    ...     model(input_ids=ids, attention_mask=mask)
    >>> trace[11].probs_BTE

    `gradients` keeps the logits attached to the graph. `stop_early` leaves the forward pass (and the `with`
    block) as soon as the last wanted layer has routed: nothing above it runs, no logits come back. A model may
    send the rows of the batch through its routers in several calls, in order. Hooks are gone when the block
    ends, however it ends. A router that computes NaN or inf is an error, never a recording
    (with `gradients` it is the training loop's to notice).
    """
    sites = find_routers(model)
    sites = sites if layers is None else select_sites(sites, layers)
    for site in sites:
        if not 0 < site.top_k <= site.n_experts:
            raise ModelError(
                f"layer {site.layer} chooses {site.top_k} of {site.n_experts} experts; its config is broken"
            )
    recorder = _Recorder(sites, gradients=gradients, stop_early=stop_early)
    handles: list[RemovableHandle] = []
    try:
        recorder.attach(model, handles)
        yield recorder.trace
    except _EnoughError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    if len(recorder.trace.layers) < len(sites):
        raise ModelError(
            f"expected one forward pass inside record_routing, recorded {len(recorder.trace.layers)} of "
            f"{len(sites)} routers; call the model inside the with block"
        )


class _Recorder:
    """The hooks' shared state: inputs seen so far, and the trace they fill."""

    def __init__(self, sites: list[RouterSite], *, gradients: bool, stop_early: bool) -> None:
        self.sites = sites
        self.gradients = gradients
        self.stop_early = stop_early
        self.trace = RoutingTrace()
        self.owner: nn.Module | None = None
        self.finished = False
        self.inputs: dict[int, Tensor] = {}
        self.logits: dict[int, Tensor] = {}
        self.pieces: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Layer -> (logits_bTE, decision_bTK) of the first rows, where rows pass through in several calls."""

    def attach(self, model: nn.Module, handles: list[RemovableHandle]) -> None:
        """Hook the model for shape and mask, and every site for its input and decision."""
        # Callers may run the whole model or only its body; whichever is entered first owns the pass.
        bodies = {module for module in model.modules() if isinstance(module, PreTrainedModel)}
        for module in {model, *bodies}:
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        for site in self.sites:
            if site.projection is not site.router:
                handles.append(site.projection.register_forward_pre_hook(self._projection_hook(site)))
            handles.append(site.router.register_forward_hook(self._router_hook(site), with_kwargs=True))
            if site.experts is not None and site.hands_on_decision:
                handles.append(site.experts.register_forward_pre_hook(self._experts_hook(site), with_kwargs=True))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.finished:
            raise ModelError("record_routing holds one forward pass; open a new block for the next one")
        if self.owner is not None:
            return
        self.owner = module
        tokens = kwargs.get("input_ids")
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
        if tokens is None:
            tokens = next(iter(args), None)
        if not isinstance(tokens, Tensor) or tokens.ndim < 2:
            raise ModelError("expected input_ids or inputs_embeds of shape (batch, tokens, ...) in the recorded call")
        _check_tokens(module, tokens)
        mask = kwargs.get("attention_mask")
        shape = tokens.shape[:2]
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self.trace.mask_BT = mask[:, -shape[1] :].bool()
        else:
            self.trace.mask_BT = torch.ones(shape, dtype=torch.bool, device=tokens.device)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if module is self.owner:
            # Gradient checkpointing runs layers again in the backward pass: that is the same forward.
            self.finished = True

    def _recording(self) -> bool:
        if self.owner is None:
            raise ModelError("the recorded call must go through the model itself, not through one of its layers")
        return not self.finished

    def _projection_hook(self, site: RouterSite) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._recording():
                self.inputs[site.layer] = args[0]

        return hook

    def _router_hook(self, site: RouterSite) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
            if not self._recording():
                return
            hidden = self.inputs.pop(site.layer, None)
            if hidden is None:  # the weight is used without calling the module that owns it
                hidden = args[0] if args else kwargs["hidden_states"]
            with _uncounted(), torch.set_grad_enabled(self.gradients and torch.is_grad_enabled()):
                self.logits[site.layer] = site.logits(hidden if self.gradients else hidden.detach())
            if not site.hands_on_decision:
                self._store(site, self.logits[site.layer].detach().topk(site.top_k, dim=-1).indices)

        return hook

    def _experts_hook(self, site: RouterSite) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if not self._recording():
                return
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            chosen = next(t for t in tensors if not t.is_floating_point())
            if site.is_a("ZayaRouter"):
                # Its last class means "no expert"; the experts get index 0 with weight 0 for it.
                weights = tensors[-1]
                chosen = chosen.masked_fill(weights == 0, site.n_experts - 1)
            self._store(site, chosen)

        return hook

    def _store(self, site: RouterSite, decision: Tensor) -> None:
        """Keep one router call; the layer is recorded once its calls have covered all rows of the batch."""
        mask_BT = self.trace.mask_BT
        assert mask_BT is not None
        n_rows, n_tokens = mask_BT.shape
        pieces = self.pieces.setdefault(site.layer, [])
        with _uncounted():
            logits_bTE = self.logits.pop(site.layer).reshape(-1, n_tokens, site.n_experts)
            pieces.append((logits_bTE, decision.reshape(logits_bTE.shape[0], n_tokens, -1)))
            if sum(len(logits) for logits, _ in pieces) < n_rows:
                return
            padding_BT1 = ~mask_BT.unsqueeze(-1)
            logits_BTE = _joined([logits for logits, _ in pieces]).masked_fill(padding_BT1, 0.0)
        # in training the loss shows it, and the loop decides
        if not self.gradients and not bool(torch.isfinite(logits_BTE).all()):
            raise ModelError(
                f"the router of layer {site.layer} computes NaN or inf; expected finite weights and inputs. "
                "Nothing can be said about such a model"
            )
        self.trace.layers[site.layer] = LayerRouting(
            site=site,
            logits_BTE=logits_BTE,
            decision_BTK=_joined([chosen for _, chosen in pieces]).masked_fill(padding_BT1, -1),
            mask_BT=mask_BT,
        )
        pieces.clear()
        if self.stop_early and len(self.trace.layers) == len(self.sites):
            raise _EnoughError


def _check_tokens(model: nn.Module, tokens: Tensor) -> None:
    """A tokenizer may know more tokens than the model: one line instead of an index error deep inside."""
    embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    if tokens.is_floating_point() or not isinstance(embedding, nn.Embedding) or not tokens.numel():
        return
    highest = int(tokens.max())
    if highest >= embedding.num_embeddings or int(tokens.min()) < 0:
        raise ModelError(
            f"token {highest} is beyond the model's embedding of {embedding.num_embeddings:,}; "
            "expected the model's own tokenizer"
        )


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _uncounted() -> saved_tensors_hooks:
    """Keep what a hook saves for the backward pass out of gradient checkpointing's count.

    Checkpointing counts the tensors that a layer saves and runs the layer again in the backward pass, when
    our hooks don't record any more. The innermost saved-tensor hooks win, so these plain ones hide ours.
    """
    return saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
