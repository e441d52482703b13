"""Every MoE causal-LM type of the installed transformers as a tiny random model.

The list comes from the library; the shrinking rules are general, the exceptions stand in `EXTRA`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SHRUNK: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "shared_expert_intermediate_size": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Applied where a config has the field."""

LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
}
ALTERNATING = ["linear_attention", "full_attention"] * 2

EXTRA: dict[str, dict[str, Any]] = {
    "axk1": LATENT_ATTENTION,
    "axk2": LATENT_ATTENTION,
    "bailing_hybrid": LATENT_ATTENTION | {"layer_types": ALTERNATING},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 4,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT_ATTENTION | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT_ATTENTION,
    "deepseek_v32": LATENT_ATTENTION,
    "deepseek_v4": {
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "num_key_value_heads": 1,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "partial_rotary_factor": 0.5,
    },
    "doge": {"is_moe": True, "num_experts": 16},
    "dots1": {"n_shared_experts": 1},
    "gemma4_text": {
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "global_head_dim": 8,
        "num_experts": 8,
        "moe_intermediate_size": 16,
    },
    "glm4_moe_lite": LATENT_ATTENTION,
    "glm_moe_dsa": LATENT_ATTENTION,
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "layer_types": ["attention"] * 4,
    },
    "hunyuan_v1_moe": {"moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0},
    "kimi_linear": LATENT_ATTENTION
    | {"q_lora_rank": None, "layer_types": ALTERNATING, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["full_attention"] * 4},
    "longcat_flash": LATENT_ATTENTION | {"num_layers": 2, "zero_expert_num": 2},
    "nemotron_h": {"layer_types": ["full_attention", "moe", "full_attention", "moe"]},
    "qwen4_exp_text": {
        "layer_types": ALTERNATING,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def moe_types() -> list[str]:
    """Model types whose causal LM records router logits, straight from the library's own declarations."""
    found = []
    for model_type, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        name = names if isinstance(names, str) else names[0]
        module = inspect.getmodule(getattr(transformers, name))
        if any("router_logits" in (getattr(c, "_can_record_outputs", None) or {}) for c in vars(module).values()):
            found.append(model_type)
    return found


def tiny_config(model_type: str) -> Any:
    """A config small enough to build in milliseconds, with experts in several layers."""
    config = AutoConfig.for_model(model_type)
    if "text_config" in config.sub_configs:
        return AutoConfig.for_model(model_type, text_config=tiny_config(config.text_config.model_type).to_dict())
    known = config.to_dict()
    fields = {k: v for k, v in SHRUNK.items() if k in known or k in config.attribute_map}
    return AutoConfig.for_model(model_type, **(fields | EXTRA.get(model_type, {})))


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """The model with random weights, in eval mode and float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Some families start their routers at zero, where every decision is a tie ...
            if tensor.ndim == 2 and tensor.shape[0] <= 64 and not tensor.any():
                tensor.normal_(std=0.3)
            # ... and every correction bias starts at zero, where it would decide nothing.
            if any(word in name for word in ("e_score_correction_bias", "expert_bias", "balancing_biases")):
                tensor.normal_(std=0.3)
    return model.eval()
