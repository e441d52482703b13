"""Mark a model folder from end to end: check, measure, embed, check again, write.

Order matters. Everything that can be refused is refused before anything changes; the key's record is amended
before OUT appears; OUT appears last and whole. A run that was killed anywhere in between is finished by
`resume`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pathmark.embedding import EmbedConfig, Embedder, MarkConfig, MarkEmbedder
from pathmark.errors import EmbeddingError
from pathmark.keys import OwnerKey
from pathmark.models import load_model, local_folder
from pathmark.models.checkpoint import base_digest, changed_tensors, stored_tensors, write_delta, write_folder
from pathmark.models.describe import describe_model
from pathmark.models.loading import use_fast_experts
from pathmark.models.weights import refuse_bad_weights
from pathmark.progress import Progress, Silent
from pathmark.release.fidelity import Measurement, measure
from pathmark.release.replies import ReplyCheck, ReplyConfig, reply_check
from pathmark.release.scan import ScanConfig
from pathmark.release.selfcheck import SelfCheck, self_check
from pathmark.training.adapters import add_adapters, merge_adapters
from pathmark.verification import attach_profiles, encode_probes, score_path


@dataclass(frozen=True)
class Marked:
    """What came out."""

    check: SelfCheck
    key: OwnerKey
    """The key with probes, sketches and profiles attached."""
    steps: int
    changed: int
    """Tensors that differ from the base."""
    seconds: float
    """Wall time of everything."""
    embed_seconds: float
    """Wall time of cache and training alone."""
    replies: ReplyCheck | None = None
    """What the model answers, where black-box marks were embedded."""

    @property
    def problems(self) -> list[str]:
        """Why the copy is not fit for release; empty if it is."""
        return [*self.check.problems, *(self.replies.problems if self.replies is not None else ())]

    def summary(self) -> dict[str, Any]:
        """The documented JSON object of `pathmark embed --json`."""
        return {
            **self.check.summary(),
            "steps": self.steps,
            "changed_tensors": self.changed,
            "seconds": self.seconds,
            "embed_seconds": self.embed_seconds,
            "black_box": None if self.replies is None else self.replies.summary(),
            "fit": not self.problems,
            "problems": self.problems,
        }


def mark_model(
    source: str,
    key: OwnerKey,
    out: Path,
    texts: Sequence[str],
    probe_texts: Sequence[str],
    config: EmbedConfig,
    *,
    marks: MarkConfig | None = None,
    paths: bool = True,
    delta: bool = False,
    resume: bool = False,
    n_probes: int = 100,
    scan: ScanConfig | None = None,
    ask: ReplyConfig | None = None,
    amend: Callable[[OwnerKey], None] | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Marked:
    """Embed the key's watermarks into a model folder and write OUT (or, with `delta`, the changed tensors).

    `texts` are trained on, `probe_texts` only measured on. `marks` adds the second phase: black-box marks. Without
    `paths` only that one runs, on a model that already has the key's paths. `amend` stores the amended key.
    """
    started = time.monotonic()
    say = progress or Silent()
    base = local_folder(source)
    work = out.with_name(f".{out.name}.embedding")
    _refuse_early(source, base, key, out, work, resume, delta, texts, probe_texts, trust_remote_code)
    if resume and not work.exists():
        say.stage("nothing to resume, so this run starts at its beginning", None)
    say.stage("loading", None)
    model = load_model(base, trust_remote_code=trust_remote_code)
    use_fast_experts(model)
    refuse_bad_weights(model)
    _, codec, _ = describe_model(str(base), trust_remote_code=trust_remote_code)
    tokenizer = codec.tokenizer
    length = config.data.seq_len
    probes = encode_probes(tokenizer, probe_texts, n_probes=n_probes, length=length)
    say.stage("original model", len(probes) * (1 + len(key.watermarks)))
    before = measure(model, key, probes, progress=say)
    if not paths:
        _require_paths(key, before)
    # an already marked model is not the original: profiles stay as the first phase attached them
    amended = attach_profiles(key, model, probes) if paths else key

    embed_started = time.monotonic()
    steps = 0
    if paths:
        model, steps = _embed(model, tokenizer, key, texts, config, work, resume, say)
    if marks is not None:
        steps += _embed_marks(model, tokenizer, key, texts, marks, work, resume, say)
    embed_seconds = time.monotonic() - embed_started
    names = [name for name, _ in model.named_parameters()]
    _round_to_stored(model, base)
    changed = changed_tensors(model, names, base)

    say.stage("self-check", None)
    check = self_check(
        model, tokenizer, key, probes, before,
        marked_before=not paths, scan=scan, progress=lambda stage: say.advance(0, stage),
    )  # fmt: skip
    replies = None
    if marks is not None:
        asked = ask or ReplyConfig()
        say.stage("replies", asked.trials + asked.near_misses + asked.ordinary + asked.queries)
        replies = reply_check(model, tokenizer, key, probes, asked, progress=say.advance)
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
        changed=len(changed),
        seconds=time.monotonic() - started,
        embed_seconds=embed_seconds,
        replies=replies,
    )


def _embed_marks(
    model: nn.Module,
    tokenizer: Any,
    key: OwnerKey,
    texts: Sequence[str],
    marks: MarkConfig,
    work: Path,
    resume: bool,
    say: Progress,
) -> int:
    embedder = MarkEmbedder(model, tokenizer, key, texts, marks, announce=say.stage, progress=say.advance)
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    say.stage("marks", marks.loop.steps)
    return embedder.run(checkpoint=work / "marks.pt", resume=resume, progress=_reporter(say)).steps


def _reporter(say: Progress) -> Callable[[int, Mapping[str, float]], None]:
    """Loss terms behind the bar; a resumed run jumps to where it was."""
    reported = 0

    def report(step: int, losses: Mapping[str, float]) -> None:
        nonlocal reported
        say.advance(
            step - reported, " ".join(f"{name} {value:.3f}" for name, value in losses.items() if name != "loss")
        )
        reported = step

    return report


def _require_paths(key: OwnerKey, before: Measurement) -> None:
    """The second phase teaches replies to a model that has the paths; on any other it would mark half."""
    scores = [score_path(w, before.triggered[j]) for j, w in enumerate(key.watermarks)]
    if low := [score for score in scores if score.wsr.value < 0.5]:
        raise EmbeddingError(
            f"this model does not carry the key's path (WSR {low[0].wsr}); embed it first, without --phase 2"
        )


def _embed(
    model: PreTrainedModel,
    tokenizer: Any,
    key: OwnerKey,
    texts: Sequence[str],
    config: EmbedConfig,
    work: Path,
    resume: bool,
    say: Progress,
) -> tuple[Any, int]:
    """Put the paths in; the model, and the steps that were taken."""
    layers = list(key.layers)
    trained: Any = add_adapters(model, layers) if config.train == "lora" else model
    embedder = Embedder(trained, tokenizer, key, texts, config, announce=say.stage, progress=say.advance)
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    say.stage("embedding", config.loop.steps)
    result = embedder.run(checkpoint=work / "checkpoint.pt", resume=resume, progress=_reporter(say))
    return merge_adapters(trained) if config.train == "lora" else trained, result.steps


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


def _round_to_stored(model: nn.Module, base: Path) -> None:
    """Weights as they will be on disk, so that what is checked is what is released."""
    stored = {tensor.dtype for tensor in stored_tensors(base).values()}
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16}
    narrow = [kinds[name] for name in stored if name in kinds]
    if len(stored) == 1 and narrow:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(narrow[0]).to(parameter.dtype))
