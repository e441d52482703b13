"""From a name to a model: folders, hub ids, `bundled:tiny`; safetensors only, no remote code unless asked."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from pathmark.errors import ModelError
from pathmark.models.bundled import BUNDLED_PREFIX, bundled_folder

MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own bound on its header."""
MAX_LAYERS, MAX_EXPERTS, MAX_WIDTH = 2_000, 65_536, 10_000_000
"""No released model comes near; a config beyond these is a mistake or a trap."""


def resolve_model(name: str | os.PathLike[str]) -> str:
    """A folder that exists, or a hub id as it is. `bundled:tiny` becomes the folder inside the package."""
    text = os.fspath(name)
    if text.startswith(BUNDLED_PREFIX):
        return str(bundled_folder(text))
    if not text.strip():
        raise ModelError("the model's name is empty; expected a model folder, a hub id or bundled:tiny")
    path = Path(text)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{text} has no config.json; expected a Hugging Face model folder")
        return text
    if path.exists():
        raise ModelError(f"{text} is a file; expected a model folder, a hub id or bundled:tiny")
    if text.startswith(("/", ".", "~")) or text.count("/") > 1:
        raise ModelError(f"{text!r} does not exist; expected a model folder, a hub id or bundled:tiny")
    return text


def local_folder(name: str | os.PathLike[str]) -> Path:
    """The folder that holds a model's files; a hub id is downloaded, safetensors and text files only."""
    source = resolve_model(name)
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(source, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"])
        )
    except Exception as error:  # the hub client raises a dozen kinds, network errors among them
        raise ModelError(
            f"{source} is no folder here and could not be had from the hub: {_first_line(error)}"
        ) from error


def load_config(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """The model's config; one clear line for everything that can be wrong with it."""
    source = resolve_model(name)
    try:
        # Before any config object is built: it would spell out a list entry per layer.
        _check_bounds(PreTrainedConfig.get_config_dict(source)[0])
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except ModelError:
        raise
    except Exception as error:  # transformers raises many kinds here, all of them about this one file
        raise _config_error(source, error) from error


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = torch.float32,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal LM from safetensors, in eval mode. dtype None keeps the checkpoint's own."""
    source = resolve_model(name)
    load_config(source, trust_remote_code=trust_remote_code)
    if Path(source).is_dir():
        check_safetensors(Path(source))
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype or "auto",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{name} could not be loaded: {_first_line(error)}") from error
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ModelError(
            f"{name} lacks {len(missing)} tensors that its config asks for, such as {missing[0]}; "
            "expected a complete checkpoint (they would be random)"
        )
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def load_tokenizer(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """The fast tokenizer beside a model."""
    source = resolve_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # as with configs: many kinds, one meaning
        raise ModelError(f"{name} has no tokenizer that transformers can read: {_first_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # made up by transformers for a folder without one
        raise ModelError(f"{name} has no tokenizer that transformers can read; expected a tokenizer.json")
    return tokenizer


def check_safetensors(folder: Path) -> list[Path]:
    """Weight files of a folder whose headers are sound and whose bytes are all there.

    Reads headers only. A truncated download is found here and not as a crash in the middle of a run.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
        found = f"found {others[0]}, which is a pickle and is never opened" if others else "found no weights"
        raise ModelError(f"{folder} holds no *.safetensors; {found}. Try saving with save_pretrained")
    for file in files:
        _check_header(file)
    _check_index(folder, files)
    return files


def _check_index(folder: Path, files: list[Path]) -> None:
    """Every shard that the index names must be there; transformers notices only while it loads."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is damaged: {_first_line(error)}; download it again") from error
    missing = sorted(named - {file.name for file in files})
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} of {len(named)} weight files, such as {missing[0]}")


def _check_header(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise ModelError(f"{file} is truncated or not safetensors: {size} bytes, its header asks for {length + 8}")
    try:
        ends = [entry["data_offsets"][1] for name, entry in _header(file).items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{file} has a damaged safetensors header: {_first_line(error)}") from error
    if size != expected:
        raise ModelError(f"{file} is truncated or padded: expected {expected} bytes, got {size}. Download it again")


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise TypeError("expected a JSON object")
    return header


def parameters_on_disk(folder: Path) -> int:
    """Elements of all tensors in a folder's safetensors, from their headers."""
    total = 0
    for file in check_safetensors(folder):
        tensors = (entry for name, entry in _header(file).items() if name != "__metadata__")
        total += sum(math.prod(entry["shape"]) for entry in tensors)
    return total


def _check_bounds(config: dict[str, Any]) -> None:
    """Refuse configs whose mere skeleton would not end: module objects cost time even without weights."""
    for field, value in config.items():
        if isinstance(value, dict):
            _check_bounds(value)
        if not isinstance(value, int):
            continue
        if "layers" in field:
            bound = MAX_LAYERS
        elif "experts" in field:
            bound = MAX_EXPERTS
        elif field.endswith(("_size", "_dim", "_heads", "_rank")):
            bound = MAX_WIDTH
        else:
            continue
        if value > bound:
            raise ModelError(f"config says {field} = {value}; expected at most {bound}: broken or hostile")


def _config_error(source: str, error: Exception) -> ModelError:
    text = _first_line(error)
    if not Path(source).is_dir():
        return ModelError(f"{source} is no folder here and could not be had from the hub: {text}")
    try:
        stated = json.loads((Path(source) / "config.json").read_text()).get("model_type")
    except (ValueError, OSError, AttributeError):
        return ModelError(f"{source}/config.json is not a JSON object; expected a Hugging Face config")
    if stated is None:
        return ModelError(f"{source}/config.json names no model_type; expected a causal LM's config")
    if "does not recognize this architecture" in str(error) or "model type" in text:
        return ModelError(
            f"architecture {stated!r} is unknown to the installed transformers; try a newer transformers, or "
            "--trust-remote-code if you trust the folder's own code"
        )
    return ModelError(f"{source}/config.json is not valid for {stated!r}: {text}")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
