"""Train small models of the paper's four architectures on the bundled model's texts: `make train-zoo`.

Each takes about an hour on two cores; what is there is not trained again, and what was stopped goes on. The bundled
segments and probes are texts that these models know, and texts that were held out: examples/corpora.toml names them.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
import train_tiny
import training_texts
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SHARED: dict[str, Any] = {
    "vocab_size": training_texts.VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": train_tiny.LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
ZOO: dict[str, tuple[type[PreTrainedModel], PretrainedConfig]] = {
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**SHARED, intermediate_size=128, num_local_experts=8, num_experts_per_tok=2, head_dim=32),
    ),
    "phimoe": (
        PhimoeForCausalLM,
        PhimoeConfig(**SHARED, intermediate_size=128, num_local_experts=16, num_experts_per_tok=2),
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SHARED, intermediate_size=128, moe_intermediate_size=32, num_experts=128, num_experts_per_tok=8,
            norm_topk_prob=True, head_dim=32,
        ),
    ),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **SHARED, intermediate_size=128, moe_intermediate_size=32, num_experts=60, num_experts_per_tok=4,
            shared_expert_intermediate_size=128,
        ),
    ),
}  # fmt: skip
"""Experts and choices of each architecture as in the paper's model of that kind, at a fraction of its width."""


def train_one(name: str, out: Path, work: Path) -> None:
    """Train a model into `out`/name unless it is there."""
    if (out / name).exists():
        print(f"{out / name} is there")
        return
    torch.manual_seed(0)
    kind, config = ZOO[name]
    model = kind(config)
    _, training, tokenizer = training_texts.texts()
    print(f"{name}: {sum(weights.numel() for weights in model.parameters()):,} parameters", flush=True)
    train_tiny.build(model, tokenizer, training, work / f"{name}.pt")
    staging = out / f"{name}.part"
    shutil.rmtree(staging, ignore_errors=True)
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    staging.rename(out / name)
    (work / f"{name}.pt").unlink(missing_ok=True)


def main() -> None:
    """One model after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(ZOO)}; none: all of them")
    parser.add_argument("--out", type=Path, default=Path("zoo"))
    parser.add_argument("--work", type=Path, default=Path("build/zoo"), help="checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if unknown := set(args.names) - set(ZOO):
        parser.error(f"expected names of {', '.join(ZOO)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(args.threads)
    for name in args.names or ZOO:
        train_one(name, args.out, args.work)


if __name__ == "__main__":
    main()
