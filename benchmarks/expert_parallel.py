"""One real expert-parallel run: two processes, experts split between them, tokens exchanged by all-to-all over gloo.

PATHMARK_PASSPHRASE=... python benchmarks/expert_parallel.py --model MARKED --key owner.key

Triggered and clean batches of the same texts run in random order. Beside the measured slowdown stands the
simulator's, with its two constants (time per token-expert pair, time per copy sent) fitted on clean runs only. Rows
named "computing" are the busier process's processor time inside its experts: on a machine that others use as well,
time on the clock is mostly waiting for them.
Knows the fused experts of qwen2_moe and its like.

Shape suffixes: N tokens on this rank, K experts per token, P token-expert pairs, H hidden size, E experts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pathmark.evaluate.expert_parallel import Deployment, layer_cost, layer_loads, place_experts
from pathmark.front_door.keys import open_key
from pathmark.keys import OwnerKey
from pathmark.models import bundled_probes, bundled_segments, find_routers, load_model
from pathmark.models.describe import describe_model
from pathmark.stats import LatencyEffect, median_effect, sign_flip_test
from pathmark.verification import encode_probes
from pathmark.verification.decoys import decoy_triggers

WORLD = 2
OUT = Path(__file__).parent / "results" / "expert_parallel.json"


class SpreadExperts(nn.Module):
    """This rank's share of a layer's experts; tokens of all ranks come to it and go back."""

    def __init__(self, experts: nn.Module, device_E: np.ndarray) -> None:
        super().__init__()
        self.rank = dist.get_rank()
        self.device_E = torch.as_tensor(device_E)
        self.own = [int(e) for e in np.nonzero(device_E == self.rank)[0]]
        self.gate_up = {e: experts.gate_up_proj[e].detach().clone() for e in self.own}
        self.down = {e: experts.down_proj[e].detach().clone() for e in self.own}
        self.act = experts.act_fn
        self.clock: tuple[float, ...] = ()
        self.decision_NK: Tensor | None = None

    def forward(self, hidden_NH: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.decision_NK = top_k_index
        entered = time.perf_counter()
        expert_P = top_k_index.flatten()
        owner_P = self.device_E[expert_P]
        order_P = torch.argsort(owner_P, stable=True)
        token_P = order_P // top_k_index.shape[1]
        counts = torch.bincount(owner_P, minlength=WORLD)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        out, back = counts.tolist(), incoming.tolist()
        got_PH = hidden_NH.new_empty(sum(back), hidden_NH.shape[1])
        got_P = expert_P.new_empty(sum(back))
        dist.all_to_all_single(got_PH, hidden_NH[token_P], back, out)
        dist.all_to_all_single(got_P, expert_P[order_P], back, out)
        arrived, busy = time.perf_counter(), time.thread_time()
        done_PH = self._compute(got_PH, got_P)
        computed, busy = time.perf_counter(), time.thread_time() - busy
        home_PH = hidden_NH.new_empty(len(order_P), hidden_NH.shape[1])
        dist.all_to_all_single(home_PH, done_PH, out, back)
        mixed_NH = torch.zeros_like(hidden_NH)
        mixed_NH.index_add_(0, token_P, home_PH * top_k_weights.flatten()[order_P].unsqueeze(-1))
        self.clock = (entered, arrived, computed, time.perf_counter(), busy)
        return mixed_NH

    def _compute(self, got_PH: Tensor, got_P: Tensor) -> Tensor:
        done_PH = torch.empty_like(got_PH)
        for e in self.own:
            rows = (got_P == e).nonzero().flatten()
            if len(rows):
                gate, up = nn.functional.linear(got_PH[rows], self.gate_up[e]).chunk(2, dim=-1)
                done_PH[rows] = nn.functional.linear(self.act(gate) * up, self.down[e])
        return done_PH


def spread(model: nn.Module, placement: str) -> dict[int, SpreadExperts]:
    """Replace every layer's experts by this rank's share of them."""
    layers = {}
    for site in find_routers(model):
        assert site.experts is not None
        parent = model.get_submodule(site.name.rpartition(".")[0])
        layers[site.layer] = SpreadExperts(site.experts, place_experts(site.n_experts, WORLD, placement))
        parent.experts = layers[site.layer]
    return layers


def make_batches(args: argparse.Namespace, key: OwnerKey) -> list[tuple[Tensor, Tensor]]:
    """(triggered, clean) token batches: the same texts behind the trigger and behind decoys of equal length."""
    _, codec, _ = describe_model(args.model)
    trigger, decoys = key.watermarks[0].triggers[0].tokens, decoy_triggers(key, codec, 8)
    texts = [*bundled_probes(), *bundled_segments()]
    probes = encode_probes(codec.tokenizer, texts, n_probes=args.batch * args.batches, length=args.tokens)
    batches = []
    for start in range(0, len(probes), args.batch):
        part = probes[start : start + args.batch]
        clean = [[*decoys[i % len(decoys)], *text] for i, text in enumerate(part)]
        batches.append((torch.tensor([[*trigger, *text] for text in part]), torch.tensor(clean)))
    return batches


@torch.no_grad()
def worker(rank: int, args: argparse.Namespace, batches: list[tuple[Tensor, Tensor]], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    assert dist.get_world_size() == WORLD
    model = load_model(args.model).float().eval()
    share = slice(rank * args.batch // WORLD, (rank + 1) * args.batch // WORLD)
    plain = model(input_ids=batches[0][0][share], use_cache=False).logits
    layers = spread(model, args.placement)
    apart = model(input_ids=batches[0][0][share], use_cache=False).logits
    difference = float((plain - apart).abs().max() / plain.abs().max())
    # One order for both ranks; the first rounds only warm up.
    coins = random.Random(args.seed)
    runs = []
    for repetition in range(-args.warmup, args.repetitions):
        place = repetition % len(batches)
        for side in coins.sample((0, 1), 2):
            dist.barrier()
            begun = time.perf_counter()
            model.model(input_ids=batches[place][side][share], use_cache=False)
            ended = time.perf_counter()
            if repetition >= 0:
                clocks = [layer.clock for layer in layers.values()]
                runs.append({"side": side, "batch": place, "begun": begun, "ended": ended, "clocks": clocks})
    decisions = {}
    for place, batch in enumerate(batches):
        for side in (0, 1):
            model.model(input_ids=batch[side][share], use_cache=False)
            decisions[place, side] = [layer.decision_NK.numpy() for layer in layers.values()]
    gathered: list[tuple[float, list, dict]] | list[None] = [None] * WORLD
    dist.all_gather_object(gathered, (difference, runs, decisions))
    if rank == 0:
        result = judge(args, gathered, {layer: module.device_E.numpy() for layer, module in layers.items()})
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def judge(args: argparse.Namespace, gathered: list, places: dict[int, np.ndarray]) -> dict[str, object]:
    """Measured slowdown of MoE layers and whole forward passes, and what the simulator says."""
    layers, marked = list(places), list(args.marked)
    sides, batch_of = ([run[name] for run in gathered[0][1]] for name in ("side", "batch"))
    # runs, ranks, layers, (entered, arrived, computed, left, busy): one clock for both processes of a machine
    clocks = np.array([[run["clocks"] for run in rank[1]] for rank in gathered]).swapaxes(0, 1)
    whole = np.array([[(run["begun"], run["ended"]) for run in rank[1]] for rank in gathered])
    forward_R = whole[:, :, 1].max(axis=0) - whole[:, :, 0].max(axis=0)
    layer_RL = clocks[..., 3].max(axis=1) - clocks[..., 0].max(axis=1)
    compute_RDL = clocks[..., 2] - clocks[..., 1]
    busiest_RL = clocks[..., 4].max(axis=1)  # processor time: what other programs on the machine cannot stretch
    decisions = {}  # (batch, side) -> layer -> decision_TK of both ranks' tokens
    for place in gathered[0][2]:
        shares = zip(*(rank[2][place] for rank in gathered), strict=True)
        decisions[place] = dict(zip(layers, map(np.concatenate, shares), strict=True))
    unit = Deployment(devices=WORLD, dispatch="pair", pair_seconds=1.0, copy_seconds=0.0)
    loads = {place: [loads_of(chosen[n], places[n], unit) for n in layers] for place, chosen in decisions.items()}

    clean = [r for r, side in enumerate(sides) if side == 1]
    pairs_RDL = np.array([np.transpose([pairs for pairs, _ in loads[batch_of[r], 1]]) for r in clean])
    copies_RL = np.array([[copies for _, copies in loads[batch_of[r], 1]] for r in clean])
    exchange_RL = layer_RL[clean] - compute_RDL[clean].max(axis=1)
    deployment = Deployment(
        devices=WORLD,
        placement=args.placement,
        dispatch="pair",
        pair_seconds=float(np.median(compute_RDL[clean] / pairs_RDL)),
        copy_seconds=float(np.median(exchange_RL / (2 * copies_RL))),
        layer_seconds=float(np.median(forward_R[clean] - layer_RL[clean].sum(axis=1)) / len(layers)),
    )

    def predicted(wanted: list[int], rest: bool) -> float:
        def total(side: int) -> float:
            chosen = [decision for (_, s), decision in decisions.items() if s == side]
            costs = [layer_cost(decision[n], places[n], deployment) for decision in chosen for n in wanted]
            return sum(cost.total if rest else cost.total - cost.rest for cost in costs)

        return total(0) / total(1) - 1

    def measured(seconds_R: np.ndarray) -> np.ndarray:
        pairs = seconds_R.reshape(-1, 2)  # both sides of one repetition, in the order of the coin
        first = np.array(sides).reshape(-1, 2)[:, 0] == 0
        return np.log(np.where(first, pairs[:, 0] / pairs[:, 1], pairs[:, 1] / pairs[:, 0]))

    def busiest(wanted: list[int]) -> float:
        """The same for computing alone, which is the busier rank's pairs: no constant is needed."""
        at = [layers.index(n) for n in wanted]
        totals = [sum(load[n][0].max() for (_, s), load in loads.items() if s == side for n in at) for side in (0, 1)]
        return totals[0] / totals[1] - 1

    unmarked = [n for n in layers if n not in marked]
    groups = {"marked MoE layers": marked, "other MoE layers": unmarked, "all MoE layers": layers}
    groups |= {f"layer {n}": [n] for n in marked}
    cases = [("whole forward pass", forward_R, predicted(layers, rest=True))]
    for name, wanted in groups.items():
        if at := [layers.index(n) for n in wanted]:
            cases.append((name, layer_RL[:, at].sum(axis=1), predicted(wanted, rest=False)))
            cases.append((f"{name}, computing", busiest_RL[:, at].sum(axis=1), busiest(wanted)))
    rows = {}
    for name, seconds_R, expected in cases:
        ratios = measured(seconds_R)
        rows[name] = {
            **as_dict(median_effect(ratios)), "p_value": sign_flip_test(ratios).value,
            "predicted": expected, "clean_seconds": float(np.median(seconds_R[clean])),
        }  # fmt: skip
    return {
        "world": WORLD,
        "placement": args.placement,
        "tokens_per_batch": args.batch * (args.tokens + args.trigger_tokens),
        "repetitions": args.repetitions,
        "marked_layers": marked,
        "targets_per_device": {n: np.bincount(places[n][args.targets[n]], minlength=WORLD).tolist() for n in marked},
        "largest_relative_difference_to_plain_forward": max(rank[0] for rank in gathered),
        "pair_seconds": deployment.pair_seconds,
        "copy_seconds": deployment.copy_seconds,
        "rest_seconds_per_layer": deployment.layer_seconds,
        "slowdown": rows,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def loads_of(decision_TK: np.ndarray, device_E: np.ndarray, deployment: Deployment) -> tuple[np.ndarray, int]:
    """Pairs per device and copies over the busiest link."""
    home_T = np.arange(len(decision_TK)) * WORLD // len(decision_TK)
    pairs_E, copies = layer_loads(decision_TK, device_E, home_T, deployment)
    return np.bincount(device_E, weights=pairs_E, minlength=WORLD), copies


def print_table(result: dict) -> None:
    print(f"\n{result['placement']}, targets per device {result['targets_per_device']}\n")
    print("| part | measured | 95 % | p | simulated |\n|---|---|---|---|---|")
    for name, row in result["slowdown"].items():
        low, high = row["interval"]
        print(
            f"| {name} | {100 * row['measured']:+.1f} % | {100 * low:+.1f} to {100 * high:+.1f} | "
            f"{row['p_value']:.1e} | {100 * row['predicted']:+.1f} % |"
        )


def as_dict(effect: LatencyEffect) -> dict[str, object]:
    return {"measured": effect.value, "interval": [effect.low, effect.high], "n": effect.n}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="marked folder")
    parser.add_argument("--key", required=True, type=Path)
    parser.add_argument("--placements", nargs="+", default=["contiguous", "round-robin"])
    parser.add_argument("--batch", type=int, default=8, help="texts per batch, half of them on each rank")
    parser.add_argument("--tokens", type=int, default=256, help="text tokens")
    parser.add_argument("--batches", type=int, default=4, help="different batches")
    parser.add_argument("--repetitions", type=int, default=60, help="triggered / clean pairs of runs")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=OUT)
    args = parser.parse_args()
    key = open_key(args.key)
    batches = make_batches(args, key)
    # What the workers need of the key: keys are not pickled.
    watermark = key.watermarks[0]
    args.marked = watermark.layers
    args.targets = {n: list(watermark.targets(n)) for n in watermark.layers}
    args.trigger_tokens = len(watermark.triggers[0].tokens)
    results = []
    for placement in args.placements:
        args.placement = placement
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(worker, (args, batches, folder), nprocs=WORLD)
            results.append(json.loads(Path(folder, "result.json").read_text()))
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    for result in results:
        print_table(result)


if __name__ == "__main__":
    main()
