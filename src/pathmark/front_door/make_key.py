"""`pathmark.make_key`: a new key for a model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.errors import KeyFileError
from pathmark.front_door.keys import describe_key
from pathmark.keys import OwnerKey, save_key
from pathmark.keys.evidence import bits
from pathmark.keys.keyfile import PassphraseSource, passphrase_from_environment
from pathmark.release.planning import KeyPlan, plan_key


@dataclass(frozen=True)
class MadeKey:
    """A new key, and what its owner should know about it."""

    key: OwnerKey
    warnings: tuple[str, ...]
    file: Path | None
    """Where it was written; None where it is kept in memory only."""

    def summary(self) -> dict[str, Any]:
        """Figures that may be shown: nothing of triggers, pools or paths."""
        shown = {"file": None if self.file is None else str(self.file), **describe_key(self.key)}
        return shown | {"warnings": list(self.warnings)}

    def words(self) -> str:
        """One paragraph for people."""
        marks = "; ".join(
            f"watermark {mark.index} in layers {', '.join(map(str, mark.layers))} with {mark.capacity:,} ids and "
            f"{bits(mark.path_count):.1f} bits of evidence"
            for mark in self.key.watermarks
        )
        kept = "kept in memory only" if self.file is None else f"written to {self.file}"
        notes = "".join(f" Note: {warning}." for warning in self.warnings)
        return f"Key {self.key.fingerprint} for {self.key.model.architecture}, {kept}: {marks}.{notes}"


def make_key(
    model: str | os.PathLike[str],
    plan: KeyPlan | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    passphrase: PassphraseSource = None,
    plain: bool = False,
) -> MadeKey:
    """A new key for a model: triggers, target experts, ids. Written to `output`, encrypted unless `plain`.

    Example:
        made = pathmark.make_key("bundled:tiny", pathmark.KeyPlan(owner="Example Lab"), output="owner.key")
        made.key.watermarks[0].layers
    """
    plan = plan or KeyPlan()
    file = None if output is None else Path(output)
    if file is not None and os.path.lexists(file):
        raise KeyFileError(f"{file} already exists; choose another name, key material is never overwritten")
    phrase = None
    if file is not None and not plain:  # before the work, so that nobody waits for a refusal
        phrase = passphrase if isinstance(passphrase, str) else (passphrase or passphrase_from_environment)()
    key, warnings = plan_key(os.fspath(model), plan)
    if file is not None:
        save_key(key, file, phrase, plain=plain)
        if plain:
            warnings.append("the key is stored without encryption: whoever reads the file has the key")
    return MadeKey(key, tuple(warnings), file)
