"""A GGUF file, which llama.cpp and what is built on it serve, as a folder that everything else here reads.

transformers knows how llama.cpp names and packs the weights of an architecture, and passes over what it does not know.
So here it is checked that every tensor of the file is in the model, that every weight of the model was in the file, and
that the file states nothing about the computation that would get lost. What is packed in few bits comes out as the
values that an engine computes with.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pathmark.errors import MissingLibraryError, ModelError
from pathmark.models.checkpoint import write_model
from pathmark.models.routers import find_routers
from pathmark.models.skeleton import build_skeleton
from pathmark.models.weights import refuse_bad_weights

MAGIC = b"GGUF"
ARCHITECTURES = ("qwen2moe", "qwen3moe")
"""As llama.cpp calls them: those that were compared with what transformers computes."""
STATED = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "expert_count",
    "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count",
}  # fmt: skip
"""What a file may say of its architecture: sizes, and what transformers carries over."""
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
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


@dataclass(frozen=True)
class _Header:
    architecture: str
    tensors: dict[str, int]
    """Name -> elements."""
    packed: dict[str, int]
    expert_width: int
    """Neurons of one routed expert."""
    shared_width: int | None

    @property
    def elements(self) -> int:
        return sum(self.tensors.values())


def unpack_gguf(file: Path, out: Path, dtype: Literal["fp32", "bf16"] = "fp32") -> Unpacked:
    """Write the model in a GGUF file as a folder in the hub's layout, which appears whole or not at all."""
    header = _header(file)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    _require_room(file, out, header.elements * kind.itemsize)
    with tempfile.TemporaryDirectory(prefix="pathmark-") as alone:
        # in a folder of its own: transformers would read adapters, configs and tokenizers that lie beside the file
        (Path(alone) / "model.gguf").symlink_to(file.resolve())
        where = {"pretrained_model_name_or_path": alone, "gguf_file": "model.gguf", "trust_remote_code": False}
        model = _model(file, where, header, kind)
        tokenizer = _tokenizer(where)
    refuse_bad_weights(model)
    write_model(model, tokenizer, out)
    return Unpacked(architecture=header.architecture, packed=header.packed, tokenizer=tokenizer is not None)


def _header(file: Path) -> _Header:
    """The architecture and all tensors by name; refuses what would not be the same model afterwards."""
    reads = _bounded_reader()
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ModelError(f"{file} is no GGUF file; expected one as llama.cpp's converter writes it")
    try:
        reader = reads(file)

        def stated(name: str, otherwise: Any = None) -> Any:
            field = reader.get_field(name)
            return otherwise if field is None else field.contents()

        architecture, parts = str(stated("general.architecture")), int(stated("split.count", 1))
        width = int(stated(f"{architecture}.expert_feed_forward_length", 0))
        shared = int(stated(f"{architecture}.expert_shared_feed_forward_length", 0))
        tensors = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
        packed = Counter(tensor.tensor_type.name for tensor in reader.tensors)
        known = {f"{architecture}.{name}" for name in STATED}
        beyond = sorted(name for name in reader.fields if name.startswith(f"{architecture}.") and name not in known)
    except Exception as error:  # the reader trusts its file: whatever goes wrong is about these bytes
        raise ModelError(f"{file} is damaged or cut off ({type(error).__name__}); get it again") from error
    if parts > 1:
        raise ModelError(f"{file} is one of {parts} parts; join them with `llama-gguf-split --merge` first")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file} holds the architecture {_shown(architecture)!r}; expected {' or '.join(ARCHITECTURES)}. "
            f"{ADVICE.capitalize()}"
        )
    if beyond:
        raise ModelError(
            f"{file} says more of its computation than can be carried over, such as {_shown(beyond[0])}; {ADVICE}"
        )
    _require_experts(file, tensors)
    return _Header(architecture, tensors, dict(packed.most_common()), width, shared or None)


def _bounded_reader() -> Any:
    """The package's reader, which goes on reading nothing behind the end of a file: a list of 2^60 numbers is soon
    told."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingLibraryError("GGUF files need the package gguf; install pathmark[gguf]") from None

    class Bounded(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) != int(count):
                raise ValueError("the file ends too early")
            return found

    return Bounded


def _require_experts(file: Path, tensors: Mapping[str, int]) -> None:
    """transformers fills what is missing of a layer's experts with zeros, and says nothing."""
    blocks = [match[1] for name in tensors if (match := re.fullmatch(r"(blk\.\d+)\.ffn_gate_inp\.weight", name))]
    missing = [f"{block}.{part}.weight" for block in blocks for part in EXPERTS]
    missing = [name for name in missing if name not in tensors]
    if missing:
        raise ModelError(f"{file} lacks {len(missing)} tensors, such as {missing[0]}; get it again")
    if not blocks:
        raise ModelError(f"{file} has no MoE router; expected a Mixture-of-Experts model")


def _require_room(file: Path, out: Path, need: int) -> None:
    """Memory and disk for the unpacked weights, before hours go into them."""
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(out.parent).free
    for name, there in (("memory", memory), (f"space in {out.parent}", disk)):
        if need > there:
            raise ModelError(
                f"{file} takes {need / 1e9:.1f} GB unpacked, and there are {there / 1e9:.1f} GB of {name}; "
                "try --dtype bf16, or a larger machine"
            )


def _model(file: Path, where: dict[str, Any], header: _Header, dtype: torch.dtype) -> PreTrainedModel:
    try:
        from transformers import GgufConfig
    except ImportError:
        raise MissingLibraryError("GGUF files need transformers 5.22 or newer; install pathmark[gguf]") from None
    try:
        config = _config(where, header)
        model, report = AutoModelForCausalLM.from_pretrained(
            **where, quantization_config=GgufConfig(dequantize=True), dtype=dtype, config=config,
            output_loading_info=True,
        )  # fmt: skip
    except MemoryError as error:
        raise ModelError(f"{file} does not fit in memory unpacked; try --dtype bf16, or a larger machine") from error
    except Exception as error:  # of gguf, numpy and transformers; all of them about this file
        said = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(f"{file} could not be read by transformers: {_shown(said, 160)}; {ADVICE}") from error
    assert isinstance(model, PreTrainedModel)
    if names := sorted(map(str, report.get("missing_keys", ()))):
        raise ModelError(
            f"{file} lacks {len(names)} tensors that {header.architecture} has, such as {_shown(names[0])}; "
            "get it again"
        )
    expected = {name: parameter.shape for name, parameter in build_skeleton(file, config, False).named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.shape != expected[name]:  # transformers puts in whatever there is
            raise ModelError(
                f"{file}: {name} has shape {tuple(parameter.shape)}, expected {tuple(expected[name])}; {ADVICE}"
            )
    held = sum(parameter.numel() for parameter in model.parameters())
    if held != header.elements:
        raise ModelError(
            f"{file} holds {header.elements:,} weights, of which the unpacked model has {held:,}; expected the same "
            f"number, or something would be lost. {ADVICE.capitalize()}"
        )
    find_routers(model)
    model.hf_quantizer = None  # nothing is packed any more, so it can be written,
    model._weight_conversions = None  # and in the hub's layout
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval()


def _config(where: Mapping[str, Any], header: _Header) -> Any:
    """The config that the file describes.

    transformers takes widths of experts from its own defaults. Numbers are stored in 32 bits: what was 1e-6 comes out
    as 9.99999997e-7, which would look like another config than the original's.
    """
    config = AutoConfig.from_pretrained(**where)
    config.moe_intermediate_size = header.expert_width
    if header.shared_width is not None:
        config.shared_expert_intermediate_size = header.shared_width
    config.tie_word_embeddings = "output.weight" not in header.tensors
    for name, value in config.to_dict().items():
        if isinstance(value, float) and float(np.float32(value)) == value:
            setattr(config, name, float(str(np.float32(value))))
    return config


def _tokenizer(where: Mapping[str, Any]) -> Any | None:
    """The tokenizer in the file; many cannot be put together again, and verification does without."""
    try:
        return AutoTokenizer.from_pretrained(**where)
    except Exception:  # of tokenizers and transformers, many kinds: there is none to be had
        return None


def _shown(text: str, most: int = 40) -> str:
    """Words of a suspect's, harmless to a terminal."""
    return "".join(letter for letter in text if letter.isprintable())[:most]
