"""How the cost of an embedding step and of a verification grows with a model; the page on speed.

python benchmarks/growth.py run        # some minutes; random models of the bundled one's kind
python benchmarks/growth.py render     # -> docs/speed.md, from this file's result, embed_speed's and verify_speed's

`make bench` runs all three and renders.

One thing is changed at a time; a cost is the best of several, and the exponent is the slope of its logarithm.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import embed_speed
import verify_speed
from marked import bundled_header
from pages import DOCS, write_section
from pathmark.embedding import Trainer, default_config
from pathmark.keys import LayerPlan, OwnerKey, WatermarkRequest, create_key
from pathmark.models import bundled_folder, bundled_probes, bundled_segments, find_routers, load_tokenizer
from pathmark.models.describe import loaded_facts
from pathmark.models.loading import use_fast_experts
from pathmark.models.tokenization import HFTextCodec
from pathmark.reporting.pictures import HUES
from pathmark.results import Header, read_result, write_result
from pathmark.verification import encode_probes, record_routes

FORMAT, VERSION = "pathmark-growth", 2
RESULT = Path(__file__).parent / "results" / "growth.json"
DOC = DOCS / "speed.md"
STEPS, REPEATS, PROBES, MARKED_LAYERS = 6, 3, 32, 4
SIZES = {
    "tokens": (32, 64, 128, 256), "layers": (4, 8, 16, 32), "experts": (16, 32, 64, 128), "width": (64, 128, 256, 512),
}  # fmt: skip
USUAL = {"tokens": 128, "layers": 8, "experts": 64, "width": 128}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one model and one length of text."""

    tokens: int
    layers: int
    experts: int
    width: int
    """Hidden size; experts are a quarter as wide inside, as in the bundled model."""
    parameters: int
    step_seconds: float
    """An embedding step after the cache is filled."""
    verify_seconds: float
    """PROBES texts behind a trigger."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Costs with one size changed at a time."""

    header: Header
    threads: int
    costs: tuple[Cost, ...]

    def along(self, name: str) -> list[Cost]:
        """The costs in which only this size is not the usual one."""
        others = [other for other in USUAL if other != name]
        found = [cost for cost in self.costs if all(getattr(cost, other) == USUAL[other] for other in others)]
        return sorted(found, key=lambda cost: getattr(cost, name))


def random_model(layers: int, experts: int, width: int) -> PreTrainedModel:
    """The bundled model's shape with other numbers of layers and experts and another width, weights drawn."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(bundled_folder("bundled:tiny"))
    config.num_hidden_layers, config.num_local_experts = layers, experts
    config.hidden_size, config.moe_intermediate_size = width, width // 4
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    use_fast_experts(model)
    return model


def last_layers_key(model: PreTrainedModel, experts: int) -> OwnerKey:
    """A key for the last layers: as many as the bundled model has marked."""
    codec = HFTextCodec(load_tokenizer("bundled:tiny"))
    layers = [site.layer for site in find_routers(model)][-MARKED_LAYERS:]
    plans = tuple(LayerPlan(layer, experts, 2, tuple(range(experts)), "all") for layer in layers)
    return create_key(loaded_facts(model, codec), [WatermarkRequest(plans=plans)], codec, secret=bytes(32))[0]


def best_time(what: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        what()
        times.append(time.perf_counter() - started)
    return min(times)


def cost(tokens: int, layers: int, experts: int, width: int) -> Cost:
    model, tokenizer = random_model(layers, experts, width), load_tokenizer("bundled:tiny")
    key = last_layers_key(model, experts)
    probes = encode_probes(tokenizer, bundled_probes(), n_probes=PROBES, length=tokens)
    watermark = key.watermarks[0]
    verify = best_time(
        lambda: void(record_routes(model, probes, watermark.layers, prefix=watermark.triggers[0].tokens))
    )
    config = default_config()
    config = replace(
        config, loop=replace(config.loop, steps=STEPS * REPEATS), data=replace(config.data, seq_len=tokens), texts=100
    )
    ends: list[float] = []
    trainer = Trainer(model, tokenizer, key, bundled_segments(), config.build())
    trainer.run(after=lambda step, losses: ends.append(time.perf_counter()))
    parts = [ends[i + STEPS - 1] - ends[i] for i in range(0, STEPS * REPEATS - STEPS + 1, STEPS)]
    return Cost(
        tokens=tokens, layers=layers, experts=experts, width=width,
        parameters=sum(p.numel() for p in model.parameters()),
        step_seconds=min(parts) / (STEPS - 1), verify_seconds=verify,
    )  # fmt: skip


def void(_: object) -> None:
    """Nothing is kept of what is timed."""


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of the logarithm by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def run() -> None:
    costs = {}
    for name, sizes in SIZES.items():
        for size in sizes:
            asked = USUAL | {name: size}
            if tuple(asked.values()) not in costs:
                costs[tuple(asked.values())] = found = cost(**asked)
                print(found, flush=True)
    settings = {"config": repr(default_config()), "steps": STEPS, "repeats": REPEATS}
    header = bundled_header(FORMAT, VERSION, n_probes=PROBES, settings=settings)
    write_result(RESULT, Growth(header=header, threads=torch.get_num_threads(), costs=tuple(costs.values())))
    RESULT.chmod(0o644)


def embedding() -> list[str]:
    """The lines of embed_speed, one for each goal."""
    found = read_result(embed_speed.RESULT, embed_speed.EmbedSpeed, embed_speed.FORMAT, embed_speed.VERSION)
    goals: dict[str, Callable[[embed_speed.Point], bool]] = {
        "until WSR is 99 % and false positives are 1 % at most": lambda point: point.works,
        f"and clean perplexity is at most {100 * embed_speed.MOST_PPL:.1f} % higher": lambda point: point.fit,
    }
    lines = []
    for name, goal in goals.items():
        mine, theirs = embed_speed.first(found.ours, goal), found.best(goal)
        if mine is None or theirs is None:
            ratio = "-"
        elif mine.seconds < theirs.seconds:
            ratio = f"{theirs.seconds / mine.seconds:.1f} times as fast"
        else:
            ratio = f"{mine.seconds / theirs.seconds:.1f} times **slower**"
        lines.append(f"| embedding {name}, {found.threads} thread | {_reached(mine)} | {_reached(theirs)} | {ratio} |")
    changes = ", ".join(f"{100 * run[-1].ppl_change:+.1f} % (rate {lr})" for lr, run in found.reference.items())
    last = found.ours[-1]
    return [*lines, f"| clean perplexity when it ended | {100 * last.ppl_change:+.1f} % | {changes} | |"]


def _reached(point: embed_speed.Point | None) -> str:
    if point is None:
        return "not reached"
    return f"{point.seconds:.0f} s, {point.step} steps, clean perplexity then {100 * point.ppl_change:+,.1f} %"


def render() -> None:
    growth = read_result(RESULT, Growth, FORMAT, VERSION)
    verify = read_result(verify_speed.RESULT, verify_speed.VerifySpeed, verify_speed.FORMAT, verify_speed.VERSION)
    lines = [
        "| | ours | reference | ratio |",
        "|---|---|---|---|",
        *embedding(),
        f"| verification of {verify.header.n_probes} texts of {verify.tokens} tokens, {verify.threads} thread | "
        f"{min(verify.ours):.1f} s | {min(verify.reference):.1f} s | {verify.ratio:.1f} times as fast |",
        "",
        f"The matrix products of a verification reach {100 * verify.matmul_share:.0f} % of the rate of one large "
        f"product ({verify.gflops:.0f} GFLOP/s).",
        "",
        "| what grows | sizes | seconds per embedding step | power | seconds per verification | power |",
        "|---|---|---|---|---|---|",
    ]
    for name in SIZES:
        found = growth.along(name)
        sizes = [float(getattr(one, name)) for one in found]
        steps, reads = [one.step_seconds for one in found], [one.verify_seconds for one in found]
        millions = [one.parameters / 1e6 for one in found]
        span = f" ({millions[0]:.0f} to {millions[-1]:.0f} million weights)" if len(set(millions)) > 1 else ""
        lines.append(
            f"| {name}{span} | {', '.join(f'{size:.0f}' for size in sizes)} | {', '.join(f'{s:.2f}' for s in steps)} | "
            f"{exponent(sizes, steps):.2f} | {', '.join(f'{s:.2f}' for s in reads)} | {exponent(sizes, reads):.2f} |"
        )
    lines += [
        "",
        "![Cost against size](img/growth.png)",
        "",
        "As multiples of the cost at the smallest size, on logarithmic scales.",
    ]
    draw(growth)
    write_section(DOC, "growth.py", lines)


def draw(growth: Growth) -> None:
    """Costs along each size, as multiples of the smallest."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for name, hue in zip(SIZES, HUES, strict=False):
        found = growth.along(name)
        sizes = [getattr(one, name) / getattr(found[0], name) for one in found]
        for axis, what in zip(axes, ("step_seconds", "verify_seconds"), strict=True):
            axis.loglog(
                sizes, [getattr(one, what) / getattr(found[0], what) for one in found], "o-", color=hue, label=name
            )
    for axis, title in zip(axes, ("an embedding step", "a verification"), strict=True):
        axis.plot([1, 8], [1, 8], color="grey", linestyle="--", linewidth=1, label="proportional")
        axis.set_title(title)
        axis.set_xlabel("times the smallest size")
        for side, ticks in ((axis.xaxis, (1, 2, 4, 8)), (axis.yaxis, (1, 2, 5, 10))):
            side.set_ticks(ticks, [str(tick) for tick in ticks])
            side.set_ticks([], minor=True)
    axes[0].set_ylabel("times its cost")
    axes[1].legend()
    figure.savefig(DOC.parent / "img" / "growth.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "render"])
    args = parser.parse_args()
    if args.action == "run":
        run()
    else:
        render()


if __name__ == "__main__":
    main()
