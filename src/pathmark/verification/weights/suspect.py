"""From a model, or the name of one, to evidence: open it, whatever it is, and run the probes through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from pathmark.errors import ModelError, PathmarkError, VerificationError
from pathmark.keys import ClaimedKey, OwnerKey, VerifierKey
from pathmark.keys.rederive import underivable
from pathmark.models import bundled_probes, load_tokenizer, local_folder
from pathmark.models.devices import Placement, settled
from pathmark.models.loading import load_config, use_fast_experts
from pathmark.models.original import FACTS, VOCABULARY, Original, behaviour, read_original
from pathmark.models.streaming import should_stream, stream_model
from pathmark.models.suspects import is_adapter, load_suspect
from pathmark.models.tokenization import HFTextCodec
from pathmark.models.vocabulary import renumbered
from pathmark.progress import Progress, Silent
from pathmark.verdicts.criteria import Criteria
from pathmark.verification.decoys import decoy_triggers
from pathmark.verification.paths.alignment import profile_texts
from pathmark.verification.paths.evidence import Evidence, Examined, ReadWith
from pathmark.verification.paths.judging import PathVerdict, judge
from pathmark.verification.weights.profiles import attach_profiles
from pathmark.verification.weights.reading import Reading, choose_reading
from pathmark.verification.weights.recording import count_rows, encode_probes, record_evidence, record_grafted

Stream = Literal["auto", "always", "never"]
DECOY_PROBES = 20
OLD_KEY = (
    "the key holds neither config nor vocabulary of its original, so a suspect whose config or token numbers were "
    "changed may go unnoticed; give --original"
)


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
    placement: Placement = field(default_factory=Placement)
    """Where it runs. What is read layer by layer runs on the CPU."""

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
    if base is None and is_adapter(name):
        base = original
    read_with, public, tokenizer, notes = _read_with(name if base is None else base, key, config, texts, again)
    probes, decoys = list(read_with.probes), list(read_with.decoys)
    if original is None and base is None and not key.attachments.keys() >= {FACTS, VOCABULARY}:
        notes.append(OLD_KEY)
    if config.align and not public and again is None and isinstance(key, ClaimedKey):
        config = replace(config, align=False)
        notes.append("no public texts came with the claim to recognise experts on, so they were taken by their numbers")
    say.stage("loading", None)
    reading = choose_reading(
        partial(_open, name, base, config, say, 1 if original is None else 2),
        _original(key, original, config) if base is None else Original(),  # an adapter's base is the examiner's
        _own_config(name, config) if base is None else None,
        tokenizer,
        probes,
    )
    donor = None
    if original is not None:
        same = replace(config, stream="always" if reading.streamed else "never")
        donor, _ = _open(original, None, same, say, 1, None)
    few = min(DECOY_PROBES, len(probes))
    n_rows = count_rows(key, probes, aligned=config.align) + few * len(decoys)
    settings: dict[str, Any] = {
        "aligned": config.align,
        "decoys": decoys,
        "decoy_probes": few,
        # streamed layers are read once per call and chunk their rows themselves
        "batch_tokens": 2**62 if reading.streamed else 4096,
        "progress": say,
    }
    say.stage("probes", n_rows)
    with _running(name):
        evidence, fed, unfed = _recorded(reading, donor, key, probes, n_rows, settings)
    if config.align and evidence.alignment is None:
        notes.append("the key has no expert profiles attached, so experts were taken by their numbers")
    access: Literal["weights", "streamed weights"] = "streamed weights" if reading.streamed else "weights"
    evidence = replace(evidence, public=public, rests_on=reading.rests_on)
    return Examined(evidence, access, (*reading.notes, *notes, *unfed), reading.mute, fed, read_with)


@contextmanager
def _running(name: str) -> Iterator[None]:
    """What torch raises inside a forward pass is about the suspect's files."""
    try:
        yield
    except PathmarkError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise VerificationError(
            f"{name} cannot be run: {reason[:200]}; expected a complete, consistent model"
        ) from error


def _recorded(
    reading: Reading,
    donor: PreTrainedModel | None,
    key: VerifierKey,
    probes: Sequence[Sequence[int]],
    n_rows: int,
    settings: dict[str, Any],
) -> tuple[Evidence, Evidence | None, list[str]]:
    """Evidence of the suspect as it is and, where there is an original, behind it; with what could not be done."""
    model, fed, notes = reading.model, None, []
    with renumbered(model, reading.map_V):
        evidence = record_evidence(model, key, probes, **settings)
        if donor is not None:
            settings["progress"].stage("probes, fed by the original", n_rows)
            try:
                fed = record_grafted(model, donor, key, probes, **settings)
            except ModelError as error:
                notes.append(f"the suspect was not read behind the original's lower layers: {error}")
    return evidence, fed, notes


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
    name: str, base: str | None, config: ExamineConfig, say: Progress, copies: int, under: Any | None
) -> tuple[PreTrainedModel, bool]:
    """A model under the config `under`, None for its own; and whether it is read layer by layer."""
    trusted = config.trust_remote_code
    whole = config.stream == "never" or base is not None or is_adapter(name)
    if config.stream == "auto" and not whole:
        whole = not should_stream(name, copies=copies, config=under, trust_remote_code=trusted)
    if config.stream != "always" and whole:
        plain = base is None and not is_adapter(name) and not trusted
        dtype = config.placement.width(local_folder(name)) if plain else torch.float32
        model = load_suspect(name, base=base, dtype=dtype, config=under, trust_remote_code=trusted)
        use_fast_experts(model)
        return settled(model, config.placement.chosen()), False
    if base is not None or is_adapter(name):
        raise ModelError("an adapter cannot be streamed; merge it into its base first, or use --stream never")
    model = stream_model(
        name,
        config=under,
        trust_remote_code=trusted,
        progress=lambda done, total: say.advance(0, f"layer {done}/{total}"),
    )
    return model, True


def _read_with(
    name: str, key: VerifierKey, config: ExamineConfig, texts: Sequence[str] | None, again: ReadWith | None
) -> tuple[ReadWith, bool, Any | None, list[str]]:
    """Texts and decoys, whether profiles rest on public texts, the suspect's tokenizer, and what could not be had."""
    if again is not None:
        return again, False, None, []
    codec, tokenizer, notes = _codec(name, key, config)
    probes = _probes(key, codec, texts, config)
    decoys = decoy_triggers(key, codec, config.decoys) if codec is not None and config.decoys else []
    return ReadWith(tuple(probes), tuple(decoys)), _public(key, codec, texts), tokenizer, notes


def _codec(name: str, key: VerifierKey, config: ExamineConfig) -> tuple[HFTextCodec | None, Any | None, list[str]]:
    """The suspect's tokenizer, as a codec if it is the owner's: thieves may change it, and token ids need none."""
    try:
        codec = HFTextCodec(load_tokenizer(name, trust_remote_code=config.trust_remote_code))
    except ModelError:
        return None, None, ["the suspect has no readable tokenizer, so no decoy triggers were drawn"]
    if codec.digest != key.model.tokenizer_digest:
        return None, codec.tokenizer, ["the suspect's tokenizer is not the owner's, so no decoy triggers were drawn"]
    if isinstance(key, ClaimedKey) and (wrong := underivable(key, codec)):
        raise VerificationError(f"the claim does not follow from its secret ({wrong[0]}); it proves nothing")
    codec.tokenizer.chat_template = None  # the suspect's, a program that need not end; decoys are token ids
    return codec, codec.tokenizer, []


def _own_config(name: str, config: ExamineConfig) -> Any | None:
    try:
        return load_config(name, trust_remote_code=config.trust_remote_code)
    except ModelError:  # opening the model says so, unless the owner's config does instead
        return None


def _original(key: VerifierKey, name: str | None, config: ExamineConfig) -> Original:
    """The original's config and vocabulary, from the key or, for keys without, from the original itself.

    An arbiter takes no vocabulary from a claimant: it decides which tokens a trigger is.
    """
    known = read_original(key.attachments)
    if isinstance(key, ClaimedKey):
        return replace(known, tokens=None, sketch_VP=None)
    if name is None or known.attached:
        return known
    trusted = config.trust_remote_code
    tokenizer = load_tokenizer(name, trust_remote_code=trusted)
    return Original(
        config=behaviour(load_config(name, trust_remote_code=trusted)),
        tokens=tokenizer.convert_ids_to_tokens(range(len(tokenizer))),
    )


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
            "the key holds no probe texts (it was never used by `pathmark embed`); give some with --texts"
        )
    return encode_probes(codec.tokenizer, texts, n_probes=config.n_probes, length=config.tokens)
