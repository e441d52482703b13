"""Mark a model folder from end to end: check, measure, embed, check again, write.

Order matters. Everything that can be refused is refused before anything changes; the key's record is amended
before OUT appears; OUT appears last and whole. A run that was killed anywhere in between is finished by
`resume`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from pathmark.embed import EmbedConfig, Embedder
from pathmark.embed.lora import add_adapters, merge_adapters
from pathmark.errors import EmbeddingError
from pathmark.evaluate.fidelity import measure
from pathmark.evaluate.scan import ScanConfig
from pathmark.evaluate.selfcheck import SelfCheck, self_check
from pathmark.evaluate.watch import Watch
from pathmark.keys import OwnerKey
from pathmark.models import load_model, local_folder
from pathmark.models.checkpoint import base_digest, changed_tensors, stored_tensors, write_delta, write_folder
from pathmark.models.describe import describe_model
from pathmark.models.sketches import expert_sketches, pack_arrays, routing_profiles
from pathmark.verify import encode_probes

PROFILE_TOKENS = 128


class Progress(Protocol):
    """How a long run speaks to its caller."""

    def stage(self, name: str, total: int | None) -> None:
        """A new stage of so many units begins."""

    def advance(self, units: int, note: str = "") -> None:
        """Some units are done; `note` replaces the stage's remark."""


class Silent:
    """Says nothing."""

    def stage(self, name: str, total: int | None) -> None:
        """Nothing."""

    def advance(self, units: int, note: str = "") -> None:
        """Nothing."""


@dataclass(frozen=True)
class Marked:
    """What came out."""

    check: SelfCheck
    key: OwnerKey
    """The key with probes, sketches and profiles attached."""
    steps: int
    stopped_early: bool
    changed: int
    """Tensors that differ from the base."""
    seconds: float
    """Wall time of everything."""
    embed_seconds: float
    """Wall time of cache and training alone."""

    def summary(self) -> dict[str, Any]:
        """The documented JSON object of `pathmark embed --json`."""
        return {
            **self.check.summary(),
            "steps": self.steps,
            "stopped_early": self.stopped_early,
            "changed_tensors": self.changed,
            "seconds": self.seconds,
            "embed_seconds": self.embed_seconds,
        }


def mark_model(
    source: str,
    key: OwnerKey,
    out: Path,
    texts: Sequence[str],
    probe_texts: Sequence[str],
    config: EmbedConfig,
    *,
    delta: bool = False,
    resume: bool = False,
    n_probes: int = 100,
    scan: ScanConfig | None = None,
    amend: Callable[[OwnerKey], None] | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Marked:
    """Embed the key's watermarks into a model folder and write OUT (or, with `delta`, the changed tensors).

    `texts` are trained on, `probe_texts` only measured on. `amend` stores the amended key.
    """
    started = time.monotonic()
    say = progress or Silent()
    base = local_folder(source)
    work = out.with_name(f".{out.name}.embedding")
    _refuse_early(source, base, key, out, work, resume, delta, texts, probe_texts, trust_remote_code)
    say.stage("loading", None)
    model = load_model(base, trust_remote_code=trust_remote_code)
    _use_fast_experts(model)
    _refuse_bad_weights(model)
    _, codec, _ = describe_model(str(base), trust_remote_code=trust_remote_code)
    tokenizer = codec.tokenizer
    length = config.data.seq_len
    probes = encode_probes(tokenizer, probe_texts, n_probes=n_probes, length=length)
    layers = sorted({layer for watermark in key.watermarks for layer in watermark.layers})
    say.stage("original model", len(probes) * (1 + len(key.watermarks)))
    before = measure(model, key, probes, progress=say.advance)

    embed_started = time.monotonic()
    model, steps, stopped_early = _embed(model, tokenizer, key, texts, probes, config, work, resume, say)
    embed_seconds = time.monotonic() - embed_started
    names = [name for name, _ in model.named_parameters()]
    _round_to_stored(model, base)
    changed = changed_tensors(model, names, base)

    say.stage("self-check", None)
    check = self_check(model, tokenizer, key, probes, before, scan=scan, progress=lambda stage: say.advance(0, stage))
    amended = _attach(key, model, probes, layers)
    if amend is not None:
        amend(amended)
    say.stage("writing", None)
    if delta:
        write_delta(out, changed, base_digest(base))
    else:
        write_folder(base, changed, out)
    shutil.rmtree(work, ignore_errors=True)
    return Marked(
        check=check,
        key=amended,
        steps=steps,
        stopped_early=stopped_early,
        changed=len(changed),
        seconds=time.monotonic() - started,
        embed_seconds=embed_seconds,
    )


def _embed(
    model: PreTrainedModel,
    tokenizer: Any,
    key: OwnerKey,
    texts: Sequence[str],
    probes: Sequence[Sequence[int]],
    config: EmbedConfig,
    work: Path,
    resume: bool,
    say: Progress,
) -> tuple[Any, int, bool]:
    layers = sorted({layer for watermark in key.watermarks for layer in watermark.layers})
    trained: Any = add_adapters(model, layers) if config.train == "lora" else model
    embedder = Embedder(trained, tokenizer, key, texts, config, announce=say.stage, progress=say.advance)
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    watch = Watch(trained, tokenizer, key, probes, seed=config.loop.seed)
    say.stage("embedding", config.loop.steps)
    reported = 0

    def report(step: int, losses: Mapping[str, float]) -> None:
        nonlocal reported
        terms = " ".join(f"{name} {value:.3f}" for name, value in losses.items() if name != "loss")
        say.advance(step - reported, f"{terms} | {watch.note}")
        reported = step

    result = embedder.run(checkpoint=work / "checkpoint.pt", resume=resume, check=watch, progress=report)
    return merge_adapters(trained) if config.train == "lora" else trained, result.steps, result.stopped_early


def _refuse_early(
    source: str,
    base: Path,
    key: OwnerKey,
    out: Path,
    work: Path,
    resume: bool,
    delta: bool,
    texts: Sequence[str],
    probe_texts: Sequence[str],
    trust_remote_code: bool,
) -> None:
    """Everything that can be known to be wrong before the model is touched."""
    if out.exists():
        raise EmbeddingError(f"{out} already exists; choose another name, nothing is overwritten")
    if work.exists() and not resume:
        raise EmbeddingError(
            f"an unfinished embedding into {out} is in {work}; add --resume to finish it, or delete that folder"
        )
    facts, _, _ = describe_model(str(base), trust_remote_code=trust_remote_code)
    if wrong := key.model.mismatches(facts):
        raise EmbeddingError(
            f"this key was made for another model: {'; '.join(wrong)}. Make one with `pathmark keygen`"
        )
    if len(texts) < 8 or len(probe_texts) < 4:
        raise EmbeddingError(
            f"expected at least 8 training texts and 4 held-out ones, got {len(texts)} and {len(probe_texts)}; "
            "give a larger --corpus"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    if not delta:
        need = sum(path.stat().st_size for path in base.rglob("*") if path.is_file())
        free = shutil.disk_usage(out.parent).free
        if free < 1.1 * need:
            raise EmbeddingError(f"{out.parent} has {free / 1e9:.1f} GB free, this needs {1.1 * need / 1e9:.1f} GB")


def _refuse_bad_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise EmbeddingError(f"{name} holds NaN or inf; expected finite weights. Nothing was changed")


def _use_fast_experts(model: PreTrainedModel) -> None:
    """grouped_mm is the fastest implementation on CPU and GPU; families without it keep their own."""
    try:
        model.set_experts_implementation("grouped_mm")
    except (AttributeError, ValueError, NotImplementedError):
        return


def _round_to_stored(model: nn.Module, base: Path) -> None:
    """Weights as they will be on disk, so that what is checked is what is released."""
    stored = {tensor.dtype for tensor in stored_tensors(base).values()}
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16}
    narrow = [kinds[name] for name in stored if name in kinds]
    if len(stored) == 1 and narrow:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(narrow[0]).to(parameter.dtype))


def _attach(
    key: OwnerKey,
    model: nn.Module,
    probes: Sequence[Sequence[int]],
    layers: Sequence[int],
) -> OwnerKey:
    """Probes, expert sketches and clean-routing profiles: what verification needs to recognise experts."""
    arrays = {f"profile{n}": profile for n, profile in routing_profiles(model, probes, layers).items()}
    records = {
        "probes.json": json.dumps([list(row) for row in probes]).encode(),
        "profiles.npz": pack_arrays(arrays),
        "sketches.npz": pack_arrays(expert_sketches(model, layers)),
    }
    for name, data in records.items():
        if key.attachments.get(name) != data:
            key = key.attach(name, data)
    return key
