"""`pathmark.attack`: do to a model what a thief would do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pathmark.attacks import find_attack
from pathmark.errors import AttackError
from pathmark.evaluate.thief import make_kit
from pathmark.front_door.keys import KeyLike, open_key
from pathmark.front_door.suspect import ModelLike
from pathmark.keys import OwnerKey
from pathmark.keys.keyfile import PassphraseSource
from pathmark.models import bundled_segments, load_tokenizer
from pathmark.models.checkpoint import write_model
from pathmark.models.devices import Placement, open_model
from pathmark.models.loading import use_fast_experts
from pathmark.models.ranks import is_first, joined
from pathmark.models.texts import Texts, given_texts
from pathmark.progress import Progress, Silent
from pathmark.training.parallel import Wrapper, require_world


@dataclass(frozen=True, kw_only=True)
class AttackConfig:
    """The attack's settings, and what the thief has."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the attack itself, by name (`pathmark attack NAME --help`)."""
    texts: Texts | None = None
    """The thief's ordinary text. None: the bundled one."""
    original: ModelLike | None = None
    """The unmarked original, or another model of the same shapes, where the attack needs one."""
    key: KeyLike | None = None
    """Lets the thief know the marked layers and targets, where the attack needs them."""
    tokenizer: Any = None
    """Of a loaded model; a folder has its own."""
    trust_remote_code: bool = False
    placement: Placement = field(default_factory=Placement)
    """Where it runs; attacks compute in 32 bits."""
    parallel: Wrapper = "none"
    """How the processes that torchrun started fine-tune together; none for a single one."""


@dataclass(frozen=True)
class AttackResult:
    """An attacked model, and where it was written."""

    name: str
    settings: dict[str, Any]
    model: PreTrainedModel
    key: OwnerKey | None
    """The thief's own key, where the attack embedded one."""
    output: Path | None

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark attack NAME --json`."""
        output = None if self.output is None else str(self.output)
        return {"attack": self.name, "settings": self.settings, "output": output}

    def words(self) -> str:
        """One sentence for people."""
        where = "kept in memory" if self.output is None else f"written to {self.output}"
        return f"{self.name} was carried out, and the attacked model {where}."


def attack(
    name: str,
    model: ModelLike,
    output: str | os.PathLike[str] | None = None,
    config: AttackConfig | None = None,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> AttackResult:
    """Carry out one attack; the model that goes in is not touched. What comes out is written as a folder if asked.

    Example:
        attacked = pathmark.attack("rtn", "./marked", config=pathmark.AttackConfig(settings={"bits": 4}))
        pathmark.verify(attacked.model, "owner.key").marked
    """
    config = config or AttackConfig()
    say, chosen = progress or Silent(), find_attack(name)
    out = None if output is None else Path(output)
    if chosen.at_inference and out is not None:
        raise AttackError(
            f"{name} acts while the model runs and leaves no weights to write; `pathmark robustness` measures it"
        )
    if out is not None and out.exists():
        raise AttackError(f"{out} already exists; choose another name, nothing is overwritten")
    settings = chosen.configure(**config.settings)
    key = None if config.key is None else open_key(config.key, passphrase)
    tokenizer = config.tokenizer
    if tokenizer is None and not isinstance(model, PreTrainedModel):
        tokenizer = load_tokenizer(model, trust_remote_code=config.trust_remote_code)
    if out is not None and tokenizer is None:
        raise AttackError("a model folder holds a tokenizer; give the loaded model's with AttackConfig(tokenizer=...)")
    with joined(model.device if isinstance(model, PreTrainedModel) else config.placement.chosen()):
        require_world(config.parallel)
        say.stage("loading", None)
        loaded = load_fast(model, config.trust_remote_code, config.placement)
        original = (
            None if config.original is None else load_fast(config.original, config.trust_remote_code, config.placement)
        )
        kit = make_kit(tokenizer, thief_texts(config.texts), key, original=original, progress=say)
        attacked = chosen.run(loaded, settings, replace(kit, parallel=config.parallel))
    if out is not None and is_first():
        say.stage("writing", None)
        write_model(attacked.model, attacked.tokenizer or tokenizer, out)
    return AttackResult(name, dict(config.settings), attacked.model, attacked.key, out)


def load_fast(model: ModelLike, trust_remote_code: bool = False, placement: Placement | None = None) -> PreTrainedModel:
    """A model by name, with the quickest experts; one in memory as it is."""
    if isinstance(model, PreTrainedModel):
        return model
    loaded = open_model(model, placement, trust_remote_code=trust_remote_code)
    use_fast_experts(loaded)
    return loaded


def thief_texts(texts: Texts | None) -> list[str]:
    """Ordinary text, the bundled one by default."""
    return list(bundled_segments()) if texts is None else given_texts(texts)
