"""Record the routes of probes with transformers, on a machine that has the model but not the key.

    python examples/record_routes_transformers.py ./suspect probes.jsonl routes.npz
    python examples/record_routes_transformers.py ./suspect probes.jsonl routes.jsonl --masses

Runs on CPU. `--masses` keeps the whole routing distribution and not only the chosen experts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn

from pathmark.models import device_of, find_routers, load_model, pad_rows, record_routing
from pathmark.verification.recorded.routefile import RecordedProbe, Recording, RouteHeader, write_routes


@torch.no_grad()
def record(
    model: nn.Module,
    prompts: Sequence[tuple[str, Sequence[int]]],
    *,
    name: str = "",
    masses: bool = False,
    batch_tokens: int = 4096,
) -> Recording:
    """Routes of (probe, token ids) in every routed layer of the model."""
    sites = find_routers(model)
    layers = [site.layer for site in sites]
    header = RouteHeader(
        layers=tuple(layers), top_k=sites[0].top_k, n_experts=sites[0].n_experts, model=name,
        engine=f"transformers {transformers.__version__}", obtained="record_routes_transformers.py",
    )  # fmt: skip
    probes = []
    size = max(1, batch_tokens // max(len(tokens) for _, tokens in prompts))
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        ids_BT, mask_BT = pad_rows([tokens for _, tokens in batch], 0, device_of(model))
        with record_routing(model, layers, stop_early=True) as trace:
            model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
        experts_BTLK = torch.stack([trace[layer].decision_BTK for layer in layers], dim=2).cpu().numpy()
        probs_BTLE = None
        if masses:
            probs_BTLE = torch.stack([trace[layer].probs_BTE for layer in layers], dim=2).float().cpu().numpy()
        for row, (probe, tokens) in enumerate(batch):
            probes.append(
                RecordedProbe(
                    probe=probe,
                    tokens=tuple(tokens),
                    experts_TLK=experts_BTLK[row, : len(tokens)].astype(np.int32),
                    probs_TLE=None if probs_BTLE is None else probs_BTLE[row, : len(tokens)],
                )
            )
    return Recording(header, tuple(probes))


def main() -> None:
    """Parse, record, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("probes", type=Path, help="written by `pathmark probes`")
    parser.add_argument("output", type=Path, help="routes to write, .npz or .jsonl")
    parser.add_argument("--masses", action="store_true")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.probes.read_text(encoding="utf-8").splitlines()]
    prompts = [(line["probe"], line["token_ids"]) for line in lines]
    write_routes(options.output, record(load_model(options.model), prompts, name=options.model, masses=options.masses))
    print(f"{len(prompts)} prompts recorded: {options.output}")


if __name__ == "__main__":
    main()
