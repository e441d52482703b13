"""The texts to send to a model that somebody else runs, so that its routes can be verified."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.errors import KeyFileError, VerificationError
from pathmark.front_door.keys import KeyLike, key_file, open_key
from pathmark.keys import Ledger, OwnerKey, TriggerRef
from pathmark.keys.keyfile import PassphraseSource
from pathmark.keys.safefile import write_private
from pathmark.models import bundled_probes, load_tokenizer
from pathmark.models.texts import Texts, given_texts
from pathmark.models.tokenization import HFTextCodec
from pathmark.verification import encode_probes, profile_texts
from pathmark.verification.recorded.probeplan import ProbePlan, plan_probes


@dataclass(frozen=True, kw_only=True)
class ProbesConfig:
    """Which texts, and what stands in front of them."""

    tokenizer: str = "bundled:tiny"
    """Model whose tokenizer the key was made for; no weights are read."""
    texts: Texts | None = None
    """None: those kept in the key, or the bundled ones."""
    n_texts: int = 100
    tokens: int = 128
    """Per text."""
    decoys: int = 2
    """Triggers of keys that nobody used."""
    trigger: int = 0
    """Which of the key's triggers to use."""
    chat: bool = False
    """The texts are user messages: the engine applies its chat template."""


@dataclass(frozen=True)
class WrittenProbes:
    """A file of prompts in random order, under ids that only the key can read."""

    plan: ProbePlan
    output: Path
    config: ProbesConfig

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark probes --json`."""
        return {
            "output": str(self.output),
            "prompts": len(self.plan.probes),
            "texts": self.plan.n_texts,
            "text_tokens": self.plan.n_tokens,
            "skipped": self.plan.skipped,
            "decoys": self.config.decoys,
            "chat": self.config.chat,
        }

    def words(self) -> str:
        """One line for people."""
        plan = self.plan
        skipped = f", {plan.skipped} texts skipped that do not keep their tokens" if plan.skipped else ""
        return (
            f"{len(plan.probes)} prompts of {plan.n_texts} texts, {plan.n_tokens:,} text tokens{skipped}: {self.output}"
        )


def write_probes(
    key: KeyLike,
    output: str | os.PathLike[str],
    config: ProbesConfig | None = None,
    *,
    passphrase: PassphraseSource = None,
) -> WrittenProbes:
    """Every text clean, behind the trigger of each watermark and behind decoys, as JSON lines."""
    config = config or ProbesConfig()
    owner, out = open_key(key, passphrase), Path(output)
    codec = HFTextCodec(load_tokenizer(config.tokenizer))
    if codec.digest != owner.model.tokenizer_digest:
        raise VerificationError(
            f"{config.tokenizer} has another tokenizer than the key's model; give the owner's model with --tokenizer"
        )
    if os.path.lexists(out):  # before a trigger is entered as shown
        raise KeyFileError(f"{out} already exists; choose another name, nothing is overwritten")
    if config.chat and codec.render_chat("x", None) is None:
        raise VerificationError(f"{config.tokenizer} has no chat template; leave --chat out")
    rows = _rows(owner, codec, config)
    plan = plan_probes(owner, codec, rows, decoys=config.decoys, trigger=config.trigger, chat=config.chat)
    if (file := key_file(key)) is not None:  # before the file exists: from then on somebody may read it
        for watermark in owner.watermarks:
            shown = TriggerRef(watermark.index, config.trigger)
            Ledger.beside(file).record(owner, shown, host="probes", model=out.name, times=plan.n_texts)
    write_private(out, "".join(json.dumps(probe.record()) + "\n" for probe in plan.probes).encode())
    return WrittenProbes(plan, out, config)


def _rows(key: OwnerKey, codec: HFTextCodec, config: ProbesConfig) -> list[tuple[int, ...]]:
    """Token rows: of the given texts, of the key's own probes, or of the bundled ones."""
    kept = profile_texts(key)
    if config.texts is None and kept:
        return [row[: config.tokens] for row in kept[: config.n_texts]]
    found = list(bundled_probes()) if config.texts is None else given_texts(config.texts)
    return encode_probes(codec.tokenizer, found, n_probes=config.n_texts, length=config.tokens)
