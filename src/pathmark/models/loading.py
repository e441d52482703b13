"""From a name to a model: folders, hub ids, `bundled:tiny`; safetensors only, no remote code unless asked."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    WatermarkingConfig,
)

from pathmark.errors import ModelError
from pathmark.models.bounds import MAX_CONFIG_BYTES, check_against_files, check_config
from pathmark.models.bundled import BUNDLED_PREFIX, bundled_folder
from pathmark.models.headers import MAX_HEADER_BYTES, StoredTensor, read_header, read_json
from pathmark.models.skeleton import build_skeleton

MAX_TOKENIZER_BYTES = 100_000_000
"""One file beside a tokenizer; the largest released one has a third of it."""
MAX_PACKED = 16
"""Weights that a quantized checkpoint may pack into one stored element: 2 bits each in 32."""
RUN = {"return_dict": True, "output_attentions": False, "output_hidden_states": False, "output_router_logits": False}
"""What a model gives back is asked for by whoever runs it."""
GENERATION = "generation_config.json"
SLACK = 1 << 24
"""Missing parameters that may be random for a moment, until the loading report names them."""


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
        refuse_odd_files(path)
        return text
    if path.exists():
        hint = f"; unpack it first: pathmark unpack {text} -o FOLDER" if path.suffix.lower() == ".gguf" else ""
        raise ModelError(f"{text} is a file; expected a model folder, a hub id or bundled:tiny{hint}")
    if text.startswith(("/", ".", "~")) or text.count("/") > 1:
        raise ModelError(f"{text!r} does not exist; expected a model folder, a hub id or bundled:tiny")
    return text


def refuse_odd_files(folder: Path) -> None:
    """Only regular files, and no link that leads out: a pipe would wait for ever, a link would read or copy our own.

    A snapshot in the hub's cache links to its own blobs.
    """
    inside = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        inside.append(folder.resolve().parent.parent / "blobs")
    for root, folders, names in os.walk(folder):
        for name in (*names, *(entry for entry in folders if Path(root, entry).is_symlink())):
            file = Path(root, name)
            if not any(file.resolve().is_relative_to(place) for place in inside):
                raise ModelError(f"{file} is a link that leaves its folder; expected the model's own files")
            if not file.is_file() and not file.is_dir():
                raise ModelError(f"{file} is no regular file; expected the model's own files")


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
        said = _checked_config(source)
        if any(Path(source).glob("*.safetensors")):
            packed = 1 if said.get("quantization_config") is None else MAX_PACKED
            check_against_files(said, packed * parameters_on_disk(Path(source)))
        return run_our_way(AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code))
    except ModelError:
        raise
    except Exception as error:  # transformers raises many kinds here, all of them about this one file
        raise _config_error(source, error) from error


def run_our_way(config: Any) -> Any:
    """The config without a say in how it is run: a suspect's may name kernels that fail, or somebody's code."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part._attn_implementation_internal = part._experts_implementation_internal = None
            for name, value in RUN.items():
                if getattr(part, name, value) is not value:
                    setattr(part, name, value)
    return config


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = torch.float32,
    config: Any | None = None,
    trust_remote_code: bool = False,
    device_map: str | dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A causal LM from safetensors, in eval mode. dtype None keeps the checkpoint's own, config None its config.

    `device_map` spreads it over devices, as in transformers.
    """
    source = resolve_model(name)
    config = config or load_config(source, trust_remote_code=trust_remote_code)
    if not trust_remote_code:  # remote code lies beside the weights and is not part of what local_folder fetches
        source = str(local_folder(source))
    if Path(source).is_dir():
        check_safetensors(Path(source))
        _check_room(name, Path(source), config, trust_remote_code)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            generation_config=_generation_config(source),
            dtype=dtype or "auto",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            device_map=device_map,
        )
    except Exception as error:  # of safetensors, torch and transformers; all of them about these files
        raise ModelError(f"{name} could not be loaded: {_first_line(error)}") from error
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ModelError(
            f"{name} lacks {len(missing)} tensors that its config asks for, such as {missing[0]}; "
            "expected a complete checkpoint (they would be random)"
        )
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def use_fast_experts(model: PreTrainedModel) -> None:
    """grouped_mm is the fastest implementation on CPU and GPU; families without it keep their own."""
    try:
        model.set_experts_implementation("grouped_mm")
    except (ValueError, ImportError):  # what transformers raises where it cannot dispatch
        return


def load_tokenizer(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """The fast tokenizer beside a model."""
    source = resolve_model(name)
    _check_file_sizes(source)
    try:
        if Path(source).is_dir():
            _checked_config(source)  # transformers builds the model's config to choose a tokenizer class
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except ModelError:
        raise
    except Exception as error:  # as with configs: many kinds, one meaning
        raise ModelError(f"{name} has no tokenizer that transformers can read: {_first_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # made up by transformers for a folder without one
        raise ModelError(f"{name} has no tokenizer that transformers can read; expected a tokenizer.json")
    return tokenizer


def check_safetensors(folder: Path) -> list[Path]:
    """Weight files of a folder whose headers are sound and whose bytes are all there.

    Reads headers only. A truncated download is found here and not as a crash in the middle of a run.
    """
    return list(_headers(folder))


def stored_weights(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor that loading a folder reads, from the headers alone; each name stands once."""
    headers = _headers(folder)
    whole = [file for file in headers if file.name == "model.safetensors"]
    # as transformers chooses: the one file, or the files that the index names
    chosen = whole or _indexed(folder, list(headers))
    if not chosen:
        raise ModelError(f"{folder} has neither model.safetensors nor an index; found {next(iter(headers)).name}")
    found: dict[str, StoredTensor] = {}
    for file in chosen:
        for name, entry in headers[file].items():
            if name in found:
                raise ModelError(f"{name[:80]} is stored twice, in {found[name].file.name} and {file.name}")
            found[name] = entry
    return found


def _headers(folder: Path) -> dict[Path, dict[str, StoredTensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
        found = f"found {others[0]}, which is a pickle and is never opened" if others else "found no weights"
        raise ModelError(f"{folder} holds no *.safetensors; {found}. Try saving with save_pretrained")
    headers = {file: read_header(file) for file in files}
    _indexed(folder, files)
    return headers


def _indexed(folder: Path, files: list[Path]) -> list[Path]:
    """The shards that the index names; every one must be there, in this folder."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        named = set(read_json(index, MAX_HEADER_BYTES)["weight_map"].values())
    except ModelError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is damaged: {_first_line(error)}; download it again") from error
    for name in named:
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {str(name)[:80]!r}; expected safetensors files of its own folder")
    missing = sorted(named - {file.name for file in files})
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} of {len(named)} weight files, such as {missing[0]}")
    return [file for file in files if file.name in named]


def parameters_on_disk(folder: Path) -> int:
    """Elements of all tensors that loading a folder reads, from the headers."""
    return sum(math.prod(entry.shape) for entry in stored_weights(folder).values())


def refuse_quantized(folder: Path, config: Any) -> None:
    """Streaming knows no packed weights."""
    method = getattr(config, "quantization_config", None)
    if method is not None:
        kind = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", None)
        raise ModelError(
            f"{folder} is quantized ({kind}); streaming reads plain safetensors. Load it whole (--stream never)"
        )


def _generation_config(source: str) -> GenerationConfig:
    """Which tokens end a text, and nothing else: how texts are drawn is for whoever draws them to say."""
    try:
        said = GenerationConfig.from_pretrained(source)
        named = ("bos_token_id", "eos_token_id", "pad_token_id")
        return GenerationConfig(**{name: getattr(said, name) for name in named})
    except Exception:  # absent, or nothing that transformers can read: a model runs without
        return GenerationConfig()


def generation_watermark(name: str | os.PathLike[str]) -> WatermarkingConfig | None:
    """The bias towards green tokens that a model's generation settings ask for, where they do.

    Settings that cannot be read are refused: a mark might be in them.
    """
    folder = local_folder(name)
    if not (folder / GENERATION).exists():
        return None
    try:
        found = GenerationConfig.from_pretrained(folder).watermarking_config
    except Exception as error:  # as with configs: many kinds, one meaning
        raise ModelError(f"{folder / GENERATION} could not be read: {_first_line(error)}") from error
    return found if isinstance(found, WatermarkingConfig) else None


def _check_room(name: str | os.PathLike[str], folder: Path, config: Any, trust_remote_code: bool) -> None:
    """Missing tensors are filled with noise before anybody is told: no more of them than the files justify."""
    skeleton = build_skeleton(name, config, trust_remote_code)
    asked = sum(parameter.numel() for parameter in skeleton.parameters())
    stored = parameters_on_disk(folder)
    packed = 1 if getattr(config, "quantization_config", None) is None else MAX_PACKED
    if asked > 2 * packed * stored + SLACK:
        raise ModelError(
            f"{folder} holds {stored:,} of the {asked:,} parameters that its config asks for; "
            "expected a complete checkpoint (the rest would be random)"
        )


def _checked_config(source: str) -> dict[str, Any]:
    """Bounds on what the file says, before any config object is built: it would spell out a list per layer."""
    folder = Path(source)
    if folder.is_dir():
        for file in folder.glob("config*.json"):
            if file.stat().st_size > MAX_CONFIG_BYTES:
                raise ModelError(f"{file} has {file.stat().st_size:,} bytes; expected at most {MAX_CONFIG_BYTES:,}")
        read_json(folder / "config.json", MAX_CONFIG_BYTES)  # depth, before transformers follows it
    said: dict[str, Any] = PreTrainedConfig.get_config_dict(source)[0]
    check_config(said)
    if said.get("transformers_weights") is not None:
        raise ModelError(f"{source}/config.json names a weight file of its own; expected model.safetensors or an index")
    return said


def _check_file_sizes(source: str) -> None:
    """A tokenizer's files are read whole, by several parsers."""
    for pattern in ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"):
        for file in Path(source).glob(pattern):
            if file.stat().st_size > MAX_TOKENIZER_BYTES:
                size = file.stat().st_size
                raise ModelError(f"{file} has {size:,} bytes; expected at most {MAX_TOKENIZER_BYTES:,}")


def _config_error(source: str, error: Exception) -> ModelError:
    text = _first_line(error)
    if not Path(source).is_dir():
        return ModelError(f"{source} is no folder here and could not be had from the hub: {text}")
    try:
        stated = read_json(Path(source) / "config.json", MAX_CONFIG_BYTES).get("model_type")
    except (ValueError, OSError, AttributeError):
        return ModelError(f"{source}/config.json is not a JSON object; expected a Hugging Face config")
    if stated is None:
        return ModelError(f"{source}/config.json names no model_type; expected a causal LM's config")
    if "trust_remote_code" in str(error):
        return ModelError(f"{source} brings Python code of its own; --trust-remote-code runs it, if you trust it")
    if "does not recognize this architecture" in str(error) or "model type" in text:
        return ModelError(
            f"architecture {stated!r} is unknown to the installed transformers; try a newer transformers, or "
            "--trust-remote-code if you trust the folder's own code"
        )
    return ModelError(f"{source}/config.json is not valid for {stated!r}: {text}")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
