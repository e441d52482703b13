"""From a model, or the name of one, to evidence: open it, whatever it is, and run the probes through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from transformers import PreTrainedModel

from pathmark.errors import ModelError, VerificationError
from pathmark.keys import ClaimedKey, OwnerKey, VerifierKey
from pathmark.keys.rederive import underivable
from pathmark.models import bundled_probes, load_tokenizer
from pathmark.models.loading import use_fast_experts
from pathmark.models.streaming import should_stream, stream_model
from pathmark.models.suspects import is_adapter, load_suspect
from pathmark.models.tokenization import HFTextCodec
from pathmark.progress import Progress, Silent
from pathmark.verification.criteria import Criteria
from pathmark.verification.decoys import decoy_triggers
from pathmark.verification.paths.alignment import profile_texts
from pathmark.verification.paths.evidence import Examined, ReadWith
from pathmark.verification.paths.judging import PathVerdict, judge
from pathmark.verification.weights.profiles import attach_profiles
from pathmark.verification.weights.recording import count_rows, encode_probes, record_evidence, record_grafted

Stream = Literal["auto", "always", "never"]
DECOY_PROBES = 20


@dataclass(frozen=True, kw_only=True)
class ExamineConfig:
    """How to look at a suspect."""

    n_probes: int = 100
    tokens: int = 128
    """Length of probe texts that are given as text; the key's own texts have the length they were made with."""
    decoys: int = 3
    """Triggers of other keys, as a control."""
    align: bool = True
    """Match experts first; False takes them by their numbers."""
    stream: Stream = "auto"
    """`auto` streams what needs more than half of the free memory."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.n_probes < 1 or self.tokens < 4 or self.decoys < 0:
            raise ValueError(f"expected at least one probe of 4 tokens, got {self}")


def examine(
    name: str,
    key: VerifierKey,
    config: ExamineConfig,
    *,
    texts: Sequence[str] | None = None,
    base: str | None = None,
    original: str | None = None,
    again: ReadWith | None = None,
    progress: Progress | None = None,
) -> Examined:
    """Open a model folder, a hub id or an adapter (on `base`), and record everything that a verdict needs.

    `texts` replace the probes kept in the key. With the unmarked `original` the suspect is also read behind its lower
    layers (`record_grafted`); where their builds differ, a note says so.
    `again` gives exactly these texts and decoys to read once more.
    """
    say = progress or Silent()
    read_with, public, notes = _read_with(name if base is None else base, key, config, texts, again)
    probes, decoys = list(read_with.probes), list(read_with.decoys)
    if config.align and not public and again is None and isinstance(key, ClaimedKey):
        config = replace(config, align=False)
        notes.append("no public texts came with the claim to recognise experts on, so they were taken by their numbers")
    say.stage("loading", None)
    model, streamed = _open(name, base, config, say, copies=1 if original is None else 2)
    donor = None
    if original is not None:
        donor, _ = _open(original, None, replace(config, stream="always" if streamed else "never"), say)
    few = min(DECOY_PROBES, len(probes))
    n_rows = count_rows(key, probes, aligned=config.align) + few * len(decoys)
    settings: dict[str, Any] = {
        "aligned": config.align,
        "decoys": decoys,
        "decoy_probes": few,
        # streamed layers are read once per call and chunk their rows themselves
        "batch_tokens": 2**62 if streamed else 4096,
        "progress": say,
    }
    say.stage("probes", n_rows)
    fed = None
    try:
        evidence = record_evidence(model, key, probes, **settings)
        if donor is not None:
            say.stage("probes, fed by the original", n_rows)
            try:
                fed = record_grafted(model, donor, key, probes, **settings)
            except ModelError as error:
                notes.append(f"the suspect was not read behind the original's lower layers: {error}")
    except (RuntimeError, IndexError, TypeError) as error:  # of torch, inside a forward pass that the files promised
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise VerificationError(
            f"{name} cannot be run: {reason[:200]}; expected a complete, consistent model"
        ) from error
    if config.align and evidence.alignment is None:
        notes.append("the key has no expert profiles attached, so experts were taken by their numbers")
    evidence = replace(evidence, public=public)
    return Examined(evidence, "streamed weights" if streamed else "weights", tuple(notes), fed, read_with)


def verify_model(
    model: PreTrainedModel,
    key: VerifierKey,
    probes: Sequence[Sequence[int]],
    *,
    criteria: Criteria | None = None,
    original: PreTrainedModel | None = None,
    align: bool = True,
    batch_tokens: int = 4096,
    progress: Progress | None = None,
) -> PathVerdict:
    """Run the probes with and without each watermark's trigger through a loaded model, and judge.

    `align` matches the suspect's experts to the original's first, where the key has profiles attached. With the
    unmarked `original` the suspect is also read behind its lower layers (`record_grafted`).
    """
    say = progress or Silent()
    rows = count_rows(key, probes, aligned=align)
    settings: dict[str, Any] = {"aligned": align, "batch_tokens": batch_tokens, "progress": say}
    say.stage("probes", rows)
    evidence = record_evidence(model, key, probes, **settings)
    if original is None:
        return judge(key, evidence, criteria=criteria)
    say.stage("probes, fed by the original", rows)
    return judge(key, evidence, record_grafted(model, original, key, probes, **settings), criteria)


def with_reference(key: OwnerKey, reference: str, *, trust_remote_code: bool = False) -> OwnerKey:
    """The key with expert profiles of another model than the one it was embedded into; nothing is stored.

    For keys that have no profiles, or whose owner would rather match to the release itself. A release is marked,
    so its profiles depend on the targets a little: prefer the original.
    """
    texts = profile_texts(key)
    if not texts:
        raise VerificationError("the key holds no probe texts, so no profile can be made; embed with it first")
    model = load_suspect(reference, trust_remote_code=trust_remote_code)
    return attach_profiles(key, model, texts)


def _open(
    name: str, base: str | None, config: ExamineConfig, say: Progress, *, copies: int = 1
) -> tuple[PreTrainedModel, bool]:
    trusted = config.trust_remote_code
    small = config.stream == "never" or base is not None or is_adapter(name)
    if config.stream != "always" and (small or not should_stream(name, copies=copies, trust_remote_code=trusted)):
        model = load_suspect(name, base=base, trust_remote_code=trusted)
        use_fast_experts(model)
        return model, False
    if base is not None or is_adapter(name):
        raise ModelError("an adapter cannot be streamed; merge it into its base first, or use --stream never")
    model = stream_model(
        name,
        trust_remote_code=trusted,
        progress=lambda done, total: say.advance(0, f"layer {done}/{total}"),
    )
    return model, True


def _read_with(
    name: str, key: VerifierKey, config: ExamineConfig, texts: Sequence[str] | None, again: ReadWith | None
) -> tuple[ReadWith, bool, list[str]]:
    """Probe texts and decoys, whether the profiles rest on public texts, and what could not be had."""
    if again is not None:
        return again, False, []
    codec, notes = _codec(name, key, config)
    probes = _probes(key, codec, texts, config)
    decoys = decoy_triggers(key, codec, config.decoys) if codec is not None and config.decoys else []
    return ReadWith(tuple(probes), tuple(decoys)), _public(key, codec, texts), notes


def _codec(name: str, key: VerifierKey, config: ExamineConfig) -> tuple[HFTextCodec | None, list[str]]:
    """The suspect's tokenizer, if it is the owner's: thieves may change it, and token ids need none."""
    try:
        codec = HFTextCodec(load_tokenizer(name, trust_remote_code=config.trust_remote_code))
    except ModelError:
        return None, ["the suspect has no readable tokenizer, so no decoy triggers were drawn"]
    if codec.digest != key.model.tokenizer_digest:
        return None, ["the suspect's tokenizer is not the owner's, so no decoy triggers were drawn"]
    if isinstance(key, ClaimedKey) and (wrong := underivable(key, codec)):
        raise VerificationError(f"the claim does not follow from its secret ({wrong[0]}); it proves nothing")
    return codec, []


def _public(key: VerifierKey, codec: HFTextCodec | None, texts: Sequence[str] | None) -> bool:
    """Whether all texts of the key's profiles are openings of public ones, or of those that the reader gave.

    Whoever chooses them freely can have them name the experts that a trigger calls, in any model: the trigger may stand
    in them.
    """
    rows = profile_texts(key)
    if codec is None or not rows:
        return False
    known = [
        codec.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*bundled_probes(), *(texts or ()))
    ]
    openings = {tuple(tokens[:n]) for tokens in known for n in {len(row) for row in rows}}
    return all(row in openings for row in rows)


def _probes(
    key: VerifierKey, codec: HFTextCodec | None, texts: Sequence[str] | None, config: ExamineConfig
) -> list[tuple[int, ...]]:
    kept = profile_texts(key)
    if texts is None and kept:
        return kept[: config.n_probes]
    if codec is None:
        raise VerificationError(
            "texts can only be probed with the owner's tokenizer, which the suspect does not have; "
            "leave --probes out and use a key that holds its own (made by `pathmark embed`)"
        )
    if texts is None:
        raise VerificationError(
            "the key holds no probe texts (it was never used by `pathmark embed`); give some with --probes"
        )
    return encode_probes(codec.tokenizer, texts, n_probes=config.n_probes, length=config.tokens)
