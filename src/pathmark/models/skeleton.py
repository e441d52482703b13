"""The model on the meta device: modules and shapes, no memory."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops
from transformers.utils import logging as transformers_logging

from pathmark.errors import ModelError
from pathmark.models.bounds import MAX_COMPUTED


def build_skeleton(
    name: str | os.PathLike[str], config: Any, trust_remote_code: bool, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A causal LM from its config alone; dtype None takes the config's."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    chosen = {} if dtype is None else {"dtype": dtype}
    try:
        with torch.device("meta"), meta_device_safe_creation_ops():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **chosen)
    except Exception as error:  # whatever a constructor raises is about the config's values
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(
            f"{name} is not a causal language model that transformers can build: {reason[:200]}"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    assert isinstance(model, PreTrainedModel)
    computed = sum(buffer.numel() for _, buffer in model.named_non_persistent_buffers())
    if computed > MAX_COMPUTED:
        raise ModelError(
            f"{name} would compute tables of {computed:,} elements; expected at most {MAX_COMPUTED:,}: "
            "its config is broken or hostile"
        )
    return model
