"""100 probes against the reference procedure, in one run.

The reference: one text at a time, the whole model, router logits asked of the model, a Python loop over tokens that
sorts and counts. Ours: batches of one length, nothing above the last watermarked layer, arrays.

python benchmarks/verify_speed.py
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from marked import bundled_header, fixed_key
from pathmark.keys import OwnerKey
from pathmark.models import bundled_probes, find_routers, load_model, load_tokenizer
from pathmark.results import Header, write_result
from pathmark.verification import encode_probes, measure_layers, record_routes, score_path

FORMAT, VERSION = "pathmark-verify-speed", 1
RESULT = Path(__file__).parent / "results" / "verify_speed.json"


@dataclass(frozen=True, kw_only=True)
class VerifySpeed:
    """Seconds of both procedures, each time."""

    header: Header
    threads: int
    tokens: int
    ours: tuple[float, ...]
    reference: tuple[float, ...]
    gflops: float
    """Of one large float32 product."""
    matmul_share: float
    """Of that rate, what the matrix products of the layers that run reach."""

    @property
    def ratio(self) -> float:
        """Of the best times."""
        return min(self.reference) / min(self.ours)


def ours(model, key: OwnerKey, probes) -> float:
    watermark = key.watermarks[0]
    behind = record_routes(model, probes, watermark.layers, prefix=watermark.triggers[0].tokens)
    clean = record_routes(model, probes, watermark.layers)
    measure_layers(watermark, behind, clean)
    return score_path(watermark, behind, clean).accuracy.value


@torch.no_grad()
def reference(model, key: OwnerKey, probes) -> float:
    watermark = key.watermarks[0]
    trigger = watermark.triggers[0].tokens
    hits = tokens = 0
    for prefix in (trigger, ()):
        for probe in probes:
            ids = torch.tensor([[*prefix, *probe]])
            logits = model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits
            for layer in watermark.layers:
                probs = torch.softmax(logits[layer].float(), dim=-1)
                targets = set(watermark.targets(layer))
                for token in range(len(prefix), ids.shape[1]):
                    top = torch.topk(probs[token], len(targets)).indices.tolist()
                    if prefix:
                        hits += any(expert in targets for expert in top)
                        tokens += 1
    return hits / tokens


def matmul_rate(seconds: float = 2.0) -> float:
    """GFLOP/s of one large float32 product on as many threads as torch uses."""
    a = torch.randn(1024, 1024)
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        a @ a
        done += 1
    return 2 * 1024**3 * done / (time.perf_counter() - started) / 1e9


def flops(model, layers, tokens: int, length: int) -> float:
    """Multiply-adds, twice, of the matrix products in the layers that run; attention scores included."""
    config = model.config
    hidden, last = config.hidden_size, max(layers)
    heads = config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
    per_token = 4 * hidden * heads + length * heads
    site = find_routers(model)[0]
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    moe = 3 * hidden * (site.top_k * config.moe_intermediate_size + shared) + hidden * site.n_experts
    # the last layer stops at its router
    return 2.0 * tokens * ((last + 1) * (per_token + moe) - moe + hidden * site.n_experts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    key, model = fixed_key(0), load_model("bundled:tiny")
    probes = encode_probes(load_tokenizer("bundled:tiny"), bundled_probes(), n_probes=args.probes, length=args.tokens)
    times: dict[str, list[float]] = {"ours": [], "reference": []}
    values = {}
    for _ in range(args.repeat):
        for name, run in (("ours", ours), ("reference", reference)):
            model.set_experts_implementation("grouped_mm" if name == "ours" else "eager")
            started = time.perf_counter()
            values[name] = run(model, key, probes)
            times[name].append(time.perf_counter() - started)
            print(name, round(times[name][-1], 2), values[name], flush=True)
    assert abs(values["ours"] - values["reference"]) < 1e-3, values
    rate = matmul_rate()
    done = flops(model, key.watermarks[0].layers, len(probes) * (2 * args.tokens + 8), args.tokens)
    result = VerifySpeed(
        header=bundled_header(FORMAT, VERSION, key=key.fingerprint, n_probes=len(probes), settings={}),
        threads=torch.get_num_threads(),
        tokens=args.tokens,
        ours=tuple(times["ours"]),
        reference=tuple(times["reference"]),
        gflops=rate,
        matmul_share=done / 1e9 / min(times["ours"]) / rate,
    )
    print(f"{result.ratio:.1f} times as fast")
    write_result(RESULT, result)
    RESULT.chmod(0o644)


if __name__ == "__main__":
    main()
