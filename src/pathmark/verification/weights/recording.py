"""Run texts through a suspect, behind every prefix and once: routes, and the evidence made of them.

Shape suffixes: B probes, T text tokens, E experts, K experts chosen per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from pathmark.errors import VerificationError
from pathmark.keys import VerifierKey
from pathmark.models import count_layers, device_of, find_routers, pad_rows, record_routing, select_sites
from pathmark.models.ranks import from_everybody, rank, shares_rows, world
from pathmark.models.sketches import expert_sketches
from pathmark.models.upper import grafted
from pathmark.progress import Progress
from pathmark.verification.paths.alignment import align, layers_to_record, profile_texts
from pathmark.verification.paths.evidence import Evidence
from pathmark.verification.paths.routes import Routes


def encode_probes(tokenizer: Any, texts: Iterable[str], *, n_probes: int, length: int) -> list[tuple[int, ...]]:
    """The first n_probes texts that have `length` tokens, cut to it; shorter ones fill up what is missing."""
    rows = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"][:length]) for text in texts]
    full = [row for row in rows if len(row) == length]
    short = sorted((row for row in rows if 4 <= len(row) < length), key=len, reverse=True)
    chosen = (full + short)[:n_probes]
    if not chosen:
        raise VerificationError("expected probe texts of at least 4 tokens, got none")
    return chosen


@torch.no_grad()
def record_routes(
    model: nn.Module,
    probes: Sequence[Sequence[int]],
    layers: Sequence[int],
    *,
    prefix: Sequence[int] | Sequence[tuple[int, ...]] = (),
    pad: int = 0,
    batch_tokens: int = 4096,
    progress: Progress | None = None,
) -> Routes:
    """Run prefix + text through the layers up to the last wanted one; keep the text tokens' routing.

    `prefix` is one for all probes, or one per probe. Layers above the last one and the head never run. Several
    processes that each have the model share the rows out, and all have all routes.
    """
    prefixes = _per_probe(prefix, len(probes))
    rows = [(*head, *text) for head, text in zip(prefixes, probes, strict=True)]
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    width = max(len(text) for text in probes)
    sites = select_sites(find_routers(model), layers)
    mask_BT = np.zeros((len(rows), width), dtype=bool)
    probs = {s.layer: np.zeros((len(rows), width, s.n_experts), dtype=np.float32) for s in sites}
    decisions = {s.layer: np.full((len(rows), width, s.top_k), -1, dtype=np.int64) for s in sites}
    everybodys = shares_rows(model)
    if everybodys:
        order = order[rank() :: world()]
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // len(rows[order[start]]))
        chosen = order[start : start + size]
        start += size
        ids_BT, attention_BT = pad_rows([rows[i] for i in chosen], pad, device_of(model))
        with record_routing(model, layers, stop_early=True) as trace:
            model(input_ids=ids_BT, attention_mask=attention_BT, use_cache=False)
        for layer in layers:
            probs_BTE = trace[layer].probs_BTE.cpu().numpy()
            decision_BTK = trace[layer].decision_BTK.cpu().numpy()
            for b, i in enumerate(chosen):
                first, last = len(prefixes[i]), len(rows[i])
                probs[layer][i, : last - first] = probs_BTE[b, first:last]
                decisions[layer][i, : last - first, : decision_BTK.shape[-1]] = decision_BTK[b, first:last]
        for i in chosen:
            mask_BT[i, : len(probes[i])] = True
        if progress is not None:
            progress.advance(len(chosen))
    if everybodys:
        _fill_in(probs, decisions, mask_BT, order)
    return Routes(probs, decisions, mask_BT)


def _fill_in(
    probs: dict[int, NDArray[np.float32]],
    decisions: dict[int, NDArray[np.int64]],
    mask_BT: NDArray[Any],
    own: list[int],
) -> None:
    """What the other processes recorded of their rows."""
    told = ({n: a[own] for n, a in probs.items()}, {n: a[own] for n, a in decisions.items()}, mask_BT[own])
    for rows, (theirs, chosen, kept) in from_everybody((own, told)):
        mask_BT[rows] = kept
        for layer in probs:
            probs[layer][rows], decisions[layer][rows] = theirs[layer], chosen[layer]


def record_evidence(
    model: nn.Module,
    key: VerifierKey,
    probes: Sequence[Sequence[int]],
    *,
    aligned: bool = True,
    decoys: Sequence[tuple[int, ...]] = (),
    decoy_probes: int = 20,
    batch_tokens: int = 4096,
    progress: Progress | None = None,
) -> Evidence:
    """Run all texts behind all prefixes through the suspect, once.

    A suspect larger than memory is read layer by layer, so everything goes through it together: clean and
    triggered probes, decoys, and the texts of the key's profiles where the probes are others. `progress` advances
    by rows; there are `count_rows` of them.
    """
    asked = [tuple(text) for text in probes]
    profile = profile_texts(key) if aligned else []
    row_of = {text: row for row, text in reversed(list(enumerate(asked)))}
    extra = [text for text in dict.fromkeys(profile) if text not in row_of]
    row_of |= {text: len(asked) + i for i, text in enumerate(extra)}
    few = asked[:decoy_probes]
    rows = [*asked, *extra]
    prefixes: list[tuple[int, ...]] = [()] * len(rows)
    for trigger, texts in [
        *((watermark.triggers[0].tokens, asked) for watermark in key.watermarks),
        *((decoy, few) for decoy in decoys),
    ]:
        rows += texts
        prefixes += [tuple(trigger)] * len(texts)
    sites = find_routers(model)
    n_layers = count_layers(model, sites)
    layers = layers_to_record(key, [site.layer for site in sites], n_layers) if profile else list(key.layers)
    routes = record_routes(model, rows, layers, prefix=prefixes, batch_tokens=batch_tokens, progress=progress)
    start = len(asked) + len(extra)
    triggered = []
    for _ in key.watermarks:
        triggered.append(routes.part(slice(start, start + len(asked))))
        start += len(asked)
    parts = []
    for _ in decoys:
        parts.append(routes.part(slice(start, start + len(few))))
        start += len(few)
    evidence = Evidence(routes.part(slice(0, len(asked))), tuple(triggered), tuple(parts))
    if not profile:
        return evidence
    alignment = align(
        key,
        routes.part([row_of[text] for text in profile]),
        sketches=expert_sketches(model, layers),
        n_layers=n_layers,
    )
    return evidence.aligned(alignment)


def record_grafted(
    model: PreTrainedModel,
    original: PreTrainedModel,
    key: VerifierKey,
    probes: Sequence[Sequence[int]],
    **settings: Any,
) -> Evidence:
    """The same with the suspect's marked layers, and the one below that brings them the trigger, fed by the original.

    What a thief broke further down, and what broke the trigger on its way up, is left out of the measurement. The
    original must not know the targets: whoever may choose it can make any model take any path.
    """
    with grafted(model, original, max(0, key.layers[0] - 1)):
        return record_evidence(model, key, probes, **settings)


def count_rows(key: VerifierKey, probes: Sequence[Sequence[int]], *, aligned: bool = True) -> int:
    """Rows that `record_evidence` will run without decoys: what a progress bar counts up to."""
    known = {tuple(text) for text in probes}
    extra = set(profile_texts(key)) - known if aligned else set()
    return len(probes) * (1 + len(key.watermarks)) + len(extra)


def _per_probe(prefix: Sequence[int] | Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    nested = [part for part in prefix if isinstance(part, tuple)]
    if nested:
        return nested
    return [tuple(part for part in prefix if isinstance(part, int))] * count
