"""Record the routes of probes with vLLM. Needs vLLM and a GPU, nothing of this package.

    python record_routes_vllm.py Qwen/Qwen3-30B-A3B probes.jsonl routes.jsonl --tensor-parallel-size 4

Leave expert load balancing off (no --enable-eplb): with it the numbers may be those of physical copies. Versions
around 0.21 mark prompt tokens that came from the prefix cache with -1; they are left out of the verdict.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


def prompt_routes(output: Any) -> list[list[list[int]]]:
    """(tokens, layers, top-k) of the prompt's tokens, from a RequestOutput of any version that returns routes."""
    n_prompt = len(output.prompt_token_ids)
    routes = getattr(output, "prompt_routed_experts", None)  # apart from the generated tokens, or ...
    if routes is None:
        routes = output.outputs[0].routed_experts  # ... prompt and generated tokens, without the last one
    if routes is None:
        raise SystemExit("no routes came back: preempted, or a vLLM without enable_return_routed_experts")
    if len(routes) < n_prompt - 1:
        raise SystemExit(f"routes of {len(routes)} tokens for a prompt of {n_prompt}: generated tokens only?")
    return [[list(map(int, choices)) for choices in token] for token in routes[:n_prompt]]


def lines(
    probes: Iterable[str], outputs: Iterable[Any], *, layers: Sequence[int], n_experts: int, model: str, engine: str
) -> Iterator[dict[str, Any]]:
    """The recording, line by line: a header, one line per prompt, their number."""
    count = 0
    for probe, output in zip(probes, outputs, strict=True):
        experts = prompt_routes(output)
        if not count:
            if len(experts[0]) != len(layers):
                raise SystemExit(f"vLLM recorded {len(experts[0])} layers; say which with --layers")
            yield {
                "format": "pathmark-routes", "version": 1, "model": model, "engine": engine,
                "obtained": "record_routes_vllm.py", "layers": list(layers), "top_k": len(experts[0][0]),
                "n_experts": n_experts,
            }  # fmt: skip
        yield {"probe": probe, "tokens": list(output.prompt_token_ids), "experts": experts}
        count += 1
    yield {"records": count}


def main() -> None:
    """Parse, run every prompt for one token, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("probes", type=Path, help="written by `pathmark probes`")
    parser.add_argument("output", type=Path, help="routes to write, .jsonl")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--layers", type=int, nargs="+", help="layers that vLLM records, if not all of the model's")
    parser.add_argument("--n-experts", type=int, help="if the model's config does not tell it")
    options = parser.parse_args()

    import vllm

    asked = [json.loads(line) for line in options.probes.read_text(encoding="utf-8").splitlines()]
    engine = vllm.LLM(
        model=options.model, tensor_parallel_size=options.tensor_parallel_size, enable_return_routed_experts=True
    )
    config = engine.llm_engine.model_config.hf_text_config
    named = ("num_experts", "num_local_experts", "n_routed_experts")
    n_experts = options.n_experts or next(getattr(config, name) for name in named if hasattr(config, name))
    outputs = engine.generate(
        [{"prompt_token_ids": line["token_ids"]} for line in asked],
        vllm.SamplingParams(temperature=0, max_tokens=1),
    )
    with options.output.open("w", encoding="utf-8") as file:
        for line in lines(
            [line["probe"] for line in asked], outputs, layers=options.layers or range(config.num_hidden_layers),
            n_experts=n_experts, model=options.model, engine=f"vllm {vllm.__version__}",
        ):  # fmt: skip
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    print(f"{len(asked)} prompts recorded: {options.output}")


if __name__ == "__main__":
    main()
