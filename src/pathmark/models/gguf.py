"""A GGUF file, which llama.cpp and what is built on it serve, as a folder that everything else here reads.

transformers knows how llama.cpp names and packs the weights of an architecture. Here it is checked that nothing is
missing, and counted how they were packed. What is packed in few bits comes out as the values that an engine computes
with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pathmark.errors import MissingLibraryError, ModelError
from pathmark.models.checkpoint import write_model
from pathmark.models.routers import find_routers
from pathmark.models.weights import refuse_bad_weights

MAGIC = b"GGUF"
ADVICE = "record its routes where it runs and use `pathmark verify-routes`, or ask it with `pathmark verify-api`"


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """What was in the file."""

    architecture: str
    """As llama.cpp calls it."""
    packed: Mapping[str, int]
    """How weights are stored -> how many tensors are, the most frequent first."""
    tokenizer: bool
    """Whether one could be read; without it, probes are the token ids in the key."""


def unpack_gguf(file: Path, out: Path, dtype: Literal["fp32", "bf16"] = "fp32") -> Unpacked:
    """Write the model in a GGUF file as a folder in the hub's layout, which appears whole or not at all."""
    if out.exists():
        raise ModelError(f"{out} already exists; choose another name, nothing is overwritten")
    header = _header(file)
    model = _model(file, header, torch.bfloat16 if dtype == "bf16" else torch.float32)
    find_routers(model)  # says what is not one of ours
    refuse_bad_weights(model)
    tokenizer = _tokenizer(file)
    write_model(model, tokenizer, out)
    return Unpacked(architecture=header.architecture, packed=header.packed, tokenizer=tokenizer is not None)


@dataclass(frozen=True)
class _Header:
    architecture: str
    packed: dict[str, int]
    expert_width: int | None
    """Neurons of one routed expert."""


def _header(file: Path) -> _Header:
    """The architecture, how its tensors are stored, and what transformers overlooks."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingLibraryError("GGUF files need the package gguf; install pathmark[gguf]") from None
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ModelError(f"{file} is no GGUF file; expected one as llama.cpp's converter writes it")
    try:
        reader = GGUFReader(file)

        def stated(name: str) -> Any | None:
            field = reader.get_field(name)
            return None if field is None else field.contents()

        architecture, count = str(stated("general.architecture")), int(stated("split.count") or 1)
        width = stated(f"{architecture}.expert_feed_forward_length")
        packed = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    except Exception as error:  # the reader trusts its file: whatever goes wrong is about these bytes
        raise ModelError(f"{file} is damaged or cut off ({type(error).__name__}); get it again") from error
    if count > 1:
        raise ModelError(f"{file} is one of {count} parts; join them with `llama-gguf-split --merge` first")
    return _Header(architecture, dict(packed.most_common()), None if width is None else int(width))


def _config(file: Path, header: _Header) -> Any:
    """The config that the file describes.

    transformers takes the width of experts from its own defaults for some architectures. Numbers are stored in 32 bits:
    what was 1e-6 comes out as 9.99999997e-7, which would look like another config than the original's.
    """
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    if header.expert_width is not None and hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size = header.expert_width
    for name, value in config.to_dict().items():
        if isinstance(value, float) and float(np.float32(value)) == value:
            setattr(config, name, float(str(np.float32(value))))
    return config


def _model(file: Path, header: _Header, dtype: torch.dtype) -> PreTrainedModel:
    try:
        from transformers import GgufConfig
    except ImportError:
        raise MissingLibraryError("GGUF files need transformers 5.22 or newer; upgrade it") from None
    architecture = header.architecture
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype,
            config=_config(file, header), output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # of gguf, numpy and transformers; all of them about this file
        said = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(
            f"{file} holds the architecture {architecture!r}, which transformers could not read from it "
            f"({said[:160]}); {ADVICE}"
        ) from error
    for problem in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, report.get(problem, ()))):
            raise ModelError(
                f"{file}: {len(names)} {problem.replace('_', ' ')} after unpacking, such as {names[0][:80]}; expected "
                f"every tensor that {architecture!r} has. {ADVICE.capitalize()}"
            )
    assert isinstance(model, PreTrainedModel)
    model.hf_quantizer = None  # nothing is packed any more, so it can be written
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval()


def _tokenizer(file: Path) -> Any | None:
    """The tokenizer in the file; many cannot be put together again, and verification does without."""
    try:
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception:  # of tokenizers and transformers, many kinds: there is none to be had
        return None
