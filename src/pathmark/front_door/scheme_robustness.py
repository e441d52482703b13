"""A suite of attacks on a model that another scheme than ours has marked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.baselines import configure, find_scheme
from pathmark.evaluate.scheme_robustness import SchemeSuspects
from pathmark.evaluate.stolen import run_suite
from pathmark.evaluate.thief import make_kit
from pathmark.front_door.attack import thief_texts
from pathmark.front_door.robustness import RobustnessPlan, sources_of
from pathmark.front_door.schemes import SchemeKeyLike, load_suspect, open_scheme_key
from pathmark.keys.keyfile import PassphraseSource
from pathmark.models import bundled_probes
from pathmark.progress import Progress, Silent
from pathmark.reporting.scheme_robustness import scheme_table
from pathmark.results.schema import to_json
from pathmark.results.schemes import SchemeMeasured, SchemeRobustness


@dataclass(frozen=True)
class MeasuredScheme:
    """The rows of a suite, kept in a folder with a table."""

    results: SchemeRobustness
    output: Path

    def summary(self) -> dict[str, Any]:
        """The content of results.json."""
        found: dict[str, Any] = to_json(self.results)
        return found

    def words(self) -> str:
        """One sentence for people."""
        measured = [row for row in self.results.rows if isinstance(row, SchemeMeasured)]
        return (
            f"{sum(row.marked for row in measured)} of {len(measured)} measured attacks leave the mark of "
            f"{self.results.scheme} provable at 1e-6. Results: {self.output / 'results.json'}, "
            f"{self.output / 'table.md'}"
        )


def measure_scheme(
    model: str | os.PathLike[str],
    key: SchemeKeyLike,
    output: str | os.PathLike[str],
    config: RobustnessPlan | None = None,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> MeasuredScheme:
    """Carry out the suite on a model that a scheme has marked; a folder that was begun goes on.

    The thief has the same attacks, seeds and texts as against ours, and knows nothing of the secret.
    """
    config = config or RobustnessPlan()
    say, name, out = progress or Silent(), os.fspath(model), Path(output)
    owner = open_scheme_key(key, passphrase)
    scheme = find_scheme(owner.scheme)
    settings, cases, texts = configure(scheme, owner), config.cases(), thief_texts(config.texts)
    say.stage("loading", None)
    suspect, tokenizer = load_suspect(name, trust_remote_code=config.trust_remote_code)
    original, sibling = (
        None if source is None else load_suspect(source, trust_remote_code=config.trust_remote_code)[0]
        for source in (config.original, config.sibling)
    )
    kit = make_kit(tokenizer, texts, original=original, sibling=sibling, progress=say)
    suspects = SchemeSuspects(suspect, owner, kit, config.measure, scheme, settings, bundled_probes())
    results = run_suite(suspects, cases, out, sources_of(name, config), progress=say)
    (out / "table.md").write_text(scheme_table(results), encoding="utf-8")
    return MeasuredScheme(results, out)
