"""Mark a model folder from end to end: check, measure, embed, check again, write.

Order matters. Everything that can be refused is refused before anything changes; the key's record is amended
before OUT appears; OUT appears last and whole. A run that was killed anywhere in between is finished by
`resume`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from pathmark.embedding import EmbedConfig, RepliesConfig, Trainer, embed_key
from pathmark.errors import EmbeddingError
from pathmark.keys import OwnerKey
from pathmark.models import bundled_probes, bundled_segments, is_streamed, local_folder
from pathmark.models.checkpoint import (
    Written,
    base_digest,
    changed_tensors,
    stored_tensors,
    write_delta,
    write_folder,
)
from pathmark.models.describe import describe_model
from pathmark.models.devices import Placement, open_model, refuse_narrower
from pathmark.models.loading import use_fast_experts
from pathmark.models.ranks import from_everybody, is_first
from pathmark.models.streaming import Tail, should_stream, stream_model
from pathmark.models.weights import refuse_bad_weights
from pathmark.progress import Progress, Silent
from pathmark.release.bounds import Bound
from pathmark.release.fidelity import Measurement, measure
from pathmark.release.replies import ReplyCheck, ReplyConfig, reply_check
from pathmark.release.scan import ScanConfig
from pathmark.release.selfcheck import SelfCheck, self_check
from pathmark.training.parallel import Wrapper
from pathmark.verification import attach_original, attach_profiles, encode_probes, score_path

STREAMED = ("router", "router+attention", "router+attention+targets")
"""What can be trained while all else stays on disk."""


@dataclass(frozen=True)
class Texts:
    """Ordinary text for a marking."""

    training: Sequence[str]
    """Trained on."""
    probes: Sequence[str]
    """Held out: only measured on."""

    @classmethod
    def bundled(cls) -> Texts:
        """Those that come with the package."""
        return cls(bundled_segments(), bundled_probes())


@dataclass(frozen=True, kw_only=True)
class MarkingConfig:
    """How a model folder is marked."""

    embedding: EmbedConfig | None
    """How the paths are put in. None: the model already has them, and only reply marks are added."""
    replies: RepliesConfig | None = None
    """How reply marks are taught, after the paths. None: there are none."""
    delta: bool = False
    """Write the changed tensors alone, which `pathmark apply` puts back on the original."""
    resume: bool = False
    """Finish an interrupted run of the same settings."""
    n_probes: int = 100
    """Probe texts to check on."""
    scan: ScanConfig = field(default_factory=ScanConfig)
    """What else is tried as a trigger in the self-check."""
    ask: ReplyConfig = field(default_factory=ReplyConfig)
    """How often the copy is asked for its reply marks, where it has some."""
    trust_remote_code: bool = False
    """Run the model folder's own Python code."""
    placement: Placement = field(default_factory=Placement)
    """Where it runs. A model that stays on disk runs on the CPU."""
    parallel: Wrapper = "none"
    """How the processes that torchrun started train together."""
    stream: Literal["auto", "always", "never"] = "auto"
    """Leave on disk what does not change; auto does so when the weights need more than half of the free memory."""

    def __post_init__(self) -> None:
        if self.embedding is None and self.replies is None:
            raise ValueError("nothing to do: expected settings for paths, for reply marks or for both, got neither")

    @property
    def probe_tokens(self) -> int:
        """Length of a probe text: that of the rows that are trained on."""
        if self.embedding is not None:
            return self.embedding.data.seq_len
        assert self.replies is not None
        return self.replies.seq_len


@dataclass(frozen=True)
class Marked:
    """What came out."""

    output: Path
    """What was written: a model folder, or a file with the changed tensors."""
    check: SelfCheck
    key: OwnerKey
    """The key with probes, sketches and profiles attached."""
    steps: int
    changed: int
    """Tensors that differ from the base."""
    written: Written
    """Bytes of those, of all that was written, and of what the copy shares with its base."""
    seconds: float
    """Wall time of everything."""
    embed_seconds: float
    """Wall time of cache and training alone."""
    replies: ReplyCheck | None = None
    """What the model answers, where black-box marks were embedded."""

    @property
    def bounds(self) -> list[Bound]:
        """Everything that decides whether the copy is fit for release."""
        return [*self.check.bounds, *(self.replies.bounds if self.replies is not None else ())]

    @property
    def problems(self) -> list[str]:
        """Why the copy is not fit for release; empty if it is."""
        return [bound.problem for bound in self.bounds if not bound.held]

    def summary(self) -> dict[str, Any]:
        """The documented JSON object of `pathmark embed --json`."""
        return {
            **self.check.summary(),
            "steps": self.steps,
            "changed_tensors": self.changed,
            "bytes": vars(self.written),
            "seconds": self.seconds,
            "embed_seconds": self.embed_seconds,
            "black_box": None if self.replies is None else self.replies.summary(),
            "bounds": [bound.summary() for bound in self.bounds],
            "fit": not self.problems,
            "problems": self.problems,
        }

    def words(self) -> str:
        """One paragraph for people."""
        before, after = self.check.clean_ppl
        fit = f"not fit for release: {'; '.join(self.problems)}" if self.problems else "fit for release"
        return (
            f"The copy is {fit}. On {self.check.n_probes} held-out texts the mark changes the perplexity of clean "
            f"text by {100 * (after / before - 1):+.2f} % ({before:.2f} to {after:.2f}). "
            f"{self.changed} tensors changed in {self.steps} steps; written to {self.output} "
            f"({self.written.words()})."
        )


def mark_model(
    source: str,
    key: OwnerKey,
    out: Path,
    texts: Texts,
    config: MarkingConfig,
    *,
    amend: Callable[[OwnerKey], None] | None = None,
    progress: Progress | None = None,
) -> Marked:
    """Embed the key's watermarks into a model folder and write OUT.

    `amend` stores the key with what was measured for it, before OUT appears.
    """
    started = time.monotonic()
    say = progress or Silent()
    work = unfinished(out)
    refuse_early(source, key, [out], texts, config)
    from_everybody(None)  # nobody begins before all have looked at what is there
    if config.resume and not work.exists():
        say.stage("nothing to resume, so this run starts at its beginning", None)
    bench = Bench.prepare(source, key, texts, config, say)
    embed_started = time.monotonic()
    steps = _embed(bench.model, bench.tokenizer, key, texts.training, config, work, say)
    spent = Spent(steps, started, time.monotonic() - embed_started)
    return bench.release(key, out, spent, amend=amend)


@dataclass(frozen=True)
class Spent:
    """What a copy took."""

    steps: int
    started: float
    """By the monotonic clock."""
    embed_seconds: float


@dataclass(frozen=True, eq=False)
class Bench:
    """A loaded original, what was measured of it, and all that happens to a copy once its marks are in."""

    base: Path
    config: MarkingConfig
    model: PreTrainedModel
    """Changes while marks go in."""
    tokenizer: Any
    probes: list[tuple[int, ...]]
    before: Measurement
    amended: OwnerKey
    """The key with probes, sketches and profiles attached."""
    say: Progress

    @classmethod
    def prepare(cls, source: str, key: OwnerKey, texts: Texts, config: MarkingConfig, say: Progress) -> Bench:
        """Load a model, and measure it before anything changes."""
        base = local_folder(source)
        say.stage("loading", None)
        model = _open(base, key, config)
        _, codec, _ = describe_model(str(base), trust_remote_code=config.trust_remote_code)
        tokenizer = codec.tokenizer
        probes = encode_probes(tokenizer, texts.probes, n_probes=config.n_probes, length=config.probe_tokens)
        say.stage("original model", len(probes) * (1 + len(key.watermarks)))
        before = measure(model, key, probes, progress=say)
        amended = key
        if config.embedding is None:
            _require_paths(key, before)  # a marked model is not the original: profiles stay as they were attached to it
        else:
            amended = attach_original(attach_profiles(key, model, probes), model, tokenizer, probes)
        return cls(base, config, model, tokenizer, probes, before, amended, say)

    def release(
        self, key: OwnerKey, out: Path, spent: Spent, *, amend: Callable[[OwnerKey], None] | None = None
    ) -> Marked:
        """Check the model as it will be on disk, and write it."""
        base, config = self.base, self.config
        _round_to_stored(self.model, base)
        streamed = is_streamed(self.model)  # then all that may have changed is what can be trained
        ours = [name for name, p in self.model.named_parameters() if p.requires_grad or not streamed]
        changed = changed_tensors(self.model, ours, base)
        check, replies = _check(self.model, self.tokenizer, key, self.probes, self.before, config, self.say)
        written = Written(0, 0)
        if is_first():  # of several processes one writes, and the others wait
            if amend is not None:
                amend(self.amended)
            self.say.stage("writing", None)
            written = write_delta(out, changed, base_digest(base)) if config.delta else write_folder(base, changed, out)
            shutil.rmtree(unfinished(out), ignore_errors=True)
        from_everybody(None)
        return Marked(
            output=out,
            check=check,
            key=self.amended.with_ids_of(key),
            steps=spent.steps,
            changed=len(changed),
            written=written,
            seconds=time.monotonic() - spent.started,
            embed_seconds=spent.embed_seconds,
            replies=replies,
        )


def _open(base: Path, key: OwnerKey, config: MarkingConfig) -> PreTrainedModel:
    """The model in memory, or only what changes of it."""
    trusted, embedding = config.trust_remote_code, config.embedding
    if config.stream == "never" or (config.stream == "auto" and not should_stream(base, trust_remote_code=trusted)):
        refuse_narrower(base, config.placement)
        model = open_model(base, config.placement, trust_remote_code=trusted)
        use_fast_experts(model)
        refuse_bad_weights(model)
        return model
    alone = config.replies is None and config.parallel == "none"
    if embedding is None or not alone or embedding.train not in STREAMED:
        raise EmbeddingError(
            f"a model that stays on disk gets paths alone, by one process, with --train {' or '.join(STREAMED)}; leave "
            "out --black-box, --phase 2 and --parallel, or try --stream never with more memory"
        )
    with_targets = embedding.train.endswith("targets")
    aimed = {n: {e for w in key.watermarks for e in w.path.get(n, ())} for n in key.layers}
    tail = Tail(first=max(0, key.layers[0] - 1), experts={n: sorted(e) for n, e in aimed.items() if with_targets})
    return stream_model(base, tail=tail, trust_remote_code=trusted)


def unfinished(out: Path) -> Path:
    """Where a run that was stopped goes on from."""
    return out.with_name(f".{out.name}.embedding")


def _embed(
    model: nn.Module,
    tokenizer: Any,
    key: OwnerKey,
    texts: Sequence[str],
    config: MarkingConfig,
    work: Path,
    say: Progress,
) -> int:
    """Put in what is asked for: paths, reply marks or both; the steps that were taken."""
    steps = 0
    if config.embedding is not None:
        steps += embed_key(
            model, tokenizer, key, texts, config.embedding,
            checkpoint=work / "checkpoint.pt", resume=config.resume, parallel=config.parallel, progress=say,
        )  # fmt: skip
    if config.replies is not None:
        trainer = Trainer(model, tokenizer, key, texts, config.replies.build(), parallel=config.parallel, progress=say)
        steps += trainer.run(checkpoint=work / "replies.pt", resume=config.resume).steps
    return steps


def _check(
    model: PreTrainedModel,
    tokenizer: Any,
    key: OwnerKey,
    probes: Sequence[Sequence[int]],
    before: Measurement,
    config: MarkingConfig,
    say: Progress,
) -> tuple[SelfCheck, ReplyCheck | None]:
    """Measure what will be released."""
    say.stage("self-check", None)
    check = self_check(
        model, tokenizer, key, probes, before,
        marked_before=config.embedding is None, scan=config.scan, progress=lambda stage: say.advance(0, stage),
    )  # fmt: skip
    if config.replies is None:
        return check, None
    ask = config.ask
    say.stage("replies", ask.trials + ask.near_misses + ask.ordinary + ask.queries)
    return check, reply_check(model, tokenizer, key, probes, ask, progress=say.advance)


def _require_paths(key: OwnerKey, before: Measurement) -> None:
    """The second phase teaches replies to a model that has the paths; on any other it would mark half."""
    scores = [score_path(w, before.triggered[j]) for j, w in enumerate(key.watermarks)]
    if low := [score for score in scores if score.wsr.value < 0.5]:
        raise EmbeddingError(
            f"this model does not carry the key's path (WSR {low[0].wsr}); embed it first, without --phase 2"
        )


def refuse_early(source: str, key: OwnerKey, outs: Sequence[Path], texts: Texts, config: MarkingConfig) -> None:
    """Everything that can be known to be wrong before the model is touched."""
    base = local_folder(source)
    for out in outs:
        if out.exists():
            raise EmbeddingError(f"{out} already exists; choose another name, nothing is overwritten")
        if unfinished(out).exists() and not config.resume:
            raise EmbeddingError(
                f"an unfinished embedding into {out} is in {unfinished(out)}; add --resume to finish it, or delete "
                "that folder"
            )
    facts, _, _ = describe_model(str(base), trust_remote_code=config.trust_remote_code)
    if wrong := key.model.mismatches(facts):
        raise EmbeddingError(
            f"this key was made for another model: {'; '.join(wrong)}. Make one with `pathmark keygen`"
        )
    if len(texts.training) < 8 or len(texts.probes) < 4:
        raise EmbeddingError(
            f"expected at least 8 training texts and 4 held-out ones, got {len(texts.training)} and "
            f"{len(texts.probes)}; give more of them with --texts"
        )
    outs[0].parent.mkdir(parents=True, exist_ok=True)
    if not config.delta:
        need = 1.1 * len(outs) * _to_write(base, key, outs[0].parent)
        free = shutil.disk_usage(outs[0].parent).free
        if free < need:
            raise EmbeddingError(f"{outs[0].parent} has {free / 1e9:.1f} GB free, this needs {need / 1e9:.1f} GB")


def _to_write(base: Path, key: OwnerKey, folder: Path) -> int:
    """Bytes of a copy that are not shared with its base: on one file system the shards of the layers that change."""
    stored = stored_tensors(base)
    changing = [f".{layer}." for layer in {*key.layers, key.layers[0] - 1}]
    files = {tensor.file for name, tensor in stored.items() if any(part in name for part in changing)}
    if any(file.resolve().stat().st_dev != folder.stat().st_dev for file in files):
        files = {tensor.file for tensor in stored.values()}
    return sum(file.stat().st_size for file in files)


def _round_to_stored(model: nn.Module, base: Path) -> None:
    """Weights as they will be on disk, so that what is checked is what is released."""
    stored = {tensor.dtype for tensor in stored_tensors(base).values()}
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16}
    narrow = [kinds[name] for name in stored if name in kinds]
    if len(stored) == 1 and narrow:
        with torch.no_grad():
            for parameter in (p for p in model.parameters() if not p.is_meta):
                parameter.copy_(parameter.to(narrow[0]).to(parameter.dtype))
