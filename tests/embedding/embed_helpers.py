"""Small marked-to-be models of several families, and keys for them."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
import zoo
from transformers import AutoConfig, AutoModelForCausalLM

from pathmark.embedding import EmbedConfig, default_config
from pathmark.keys import LayerPlan, WatermarkRequest, create_key
from pathmark.models import load_tokenizer
from pathmark.models.describe import describe_model

LARGER = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def save_family(folder, family, seed=0, dtype=torch.float32):
    """A random model of a family with the bundled tokenizer, 16 experts and 4 layers."""
    config = zoo.tiny_config(family).to_dict() | LARGER
    config.pop("model_type")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # spread the routers, so that there is a natural routing to keep
            if name.endswith(("gate.weight", "router.weight")) and parameter.ndim == 2:
                parameter.normal_(std=0.5)
    tokenizer = load_tokenizer("bundled:tiny")
    # as every chat model has it: a server that does not stop at a turn's end returns only what follows the last one
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def key_for(folder, *, layers=None, seed=0, number=None, watermarks=1, triggers=1, trigger_tokens=6):
    """A key with the whole layer as pool; the same for the same seed."""
    facts, codec, report = describe_model(folder)
    chosen = layers or report.recommended
    plans = tuple(
        LayerPlan(layer, report.facts(layer).experts, 2, tuple(range(report.facts(layer).experts)), "all")
        for layer in chosen
    )
    request = WatermarkRequest(plans=plans, id=number, triggers=triggers, trigger_tokens=trigger_tokens)
    secret = random.Random(seed).randbytes(32)
    return create_key(facts, [request] * watermarks, codec, secret=secret, created="2026-01-01T00:00:00Z")[0]


def quick_config(*, steps=120, lr=5e-3, data=None, **changes) -> EmbedConfig:
    """The default with few steps and texts: enough for the exact test, not for a release."""
    config = default_config()
    return replace(
        config,
        data=replace(config.data, **({"seq_len": 32} | (data or {}))),
        # in so few steps a random model has learnt too little for any of it to be taken back
        loop=replace(config.loop, steps=steps, lr=lr, homing=0.0),
        texts=40,
        batch_size=12,
        # in so few steps a random model would learn to keep off its targets, and not yet when to go there
        objective=replace(config.objective, ceiling_weight=0.5),
        **changes,
    )
