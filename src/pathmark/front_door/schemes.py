"""`pathmark.make_scheme_key`, `embed_scheme`, `verify_scheme`: marks of other people, to compare ours with."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pathmark.baselines import configure, find_scheme
from pathmark.errors import EmbeddingError, KeyFileError
from pathmark.front_door.suspect import at_hand, confined
from pathmark.keys.keyfile import PassphraseSource, passphrase_from_environment
from pathmark.keys.schemekey import SchemeKey, load_scheme_key, save_scheme_key
from pathmark.models import bundled_probes, bundled_segments, load_config, load_model, load_tokenizer, local_folder
from pathmark.models import perplexity as measure_perplexity
from pathmark.models.checkpoint import changed_tensors, write_folder
from pathmark.models.loading import GENERATION, generation_watermark, use_fast_experts
from pathmark.models.ranks import require_alone
from pathmark.models.texts import Texts, given_texts, split_held_out
from pathmark.progress import Progress, Silent
from pathmark.verdicts import Criteria, Verdict

SchemeKeyLike = SchemeKey | str | os.PathLike[str]
"""The key of a scheme, or the file that holds it."""
HELD_OUT, TOKENS = 100, 128
"""Texts that the perplexity is measured on, and tokens of each."""


@dataclass(frozen=True, kw_only=True)
class SchemePlan:
    """With which texts, judged by what."""

    texts: Texts | None = None
    """Ordinary texts: to embed, to train on, a tenth held out; to verify, to begin with. None: the bundled ones."""
    criteria: Criteria = field(default_factory=Criteria)
    trust_remote_code: bool = False
    sandbox: bool = False
    """Read a suspect in a child process without network, as the command line does."""


@dataclass(frozen=True)
class MadeSchemeKey:
    """A new key of a scheme."""

    key: SchemeKey
    file: Path | None

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark keygen --scheme --json`."""
        return {"file": None if self.file is None else str(self.file), **self.key.summary()}

    def words(self) -> str:
        """One sentence for people."""
        kept = "kept in memory only" if self.file is None else f"written to {self.file}"
        return f"Key {self.key.fingerprint} for the scheme {self.key.scheme}, {kept}."


@dataclass(frozen=True)
class SchemeVerification:
    """The verdict of a scheme on one suspect."""

    suspect: str
    verdict: Verdict
    access: str = "weights"

    @property
    def exit_code(self) -> int:
        """0 marked, 1 not marked, 2 undecided."""
        return self.verdict.exit_code

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark verify --scheme --json`."""
        return {"suspect": self.suspect, "access": self.access, **self.verdict.summary()}

    def words(self) -> str:
        """The verdict for people."""
        return self.verdict.words()


@dataclass(frozen=True)
class SchemeEmbedded:
    """A folder that a scheme has marked, and what its own check says of it."""

    key: SchemeKey
    output: Path
    changed: int
    """Tensors that differ from the original's."""
    perplexity: tuple[float, float]
    """Before and after, on held-out text."""
    n_probes: int
    check: Verdict
    seconds: float

    @property
    def fit(self) -> bool:
        """Whether the scheme finds its mark."""
        return self.check.marked

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark embed --scheme --json`."""
        before, after = self.perplexity
        return {
            "output": str(self.output),
            "scheme": self.key.scheme,
            "fingerprint": self.key.fingerprint,
            "changed_tensors": self.changed,
            "perplexity": {"before": before, "after": after, "n": self.n_probes},
            "check": self.check.summary(),
            "seconds": self.seconds,
        }

    def words(self) -> str:
        """One paragraph for people."""
        before, after = self.perplexity
        found = "finds its mark in it" if self.fit else "does not find its mark in it"
        served = "" if self.changed else (
            f" The mark is the setting in {GENERATION}, which holds its secret. Serve this folder, "
            "and hand it to nobody."
        )  # fmt: skip
        return (
            f"{self.output} is written, and {self.key.scheme} {found} (p = {self.check.p}). On {self.n_probes} "
            f"held-out texts the perplexity changes by {100 * (after / before - 1):+.2f} % ({before:.2f} to "
            f"{after:.2f}). {self.changed} tensors changed.{served}"
        )


def make_scheme_key(
    model: str | os.PathLike[str],
    scheme: str,
    settings: Mapping[str, Any] | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    passphrase: PassphraseSource = None,
    plain: bool = False,
) -> MadeSchemeKey:
    """A new secret for a scheme, with its settings for a model; a file is encrypted unless `plain`.

    Example:
        pathmark.make_scheme_key("bundled:tiny", "kgw", {"samples": 30}, output="kgw.key")
    """
    file, chosen = None if output is None else Path(output), find_scheme(scheme)
    if file is not None and os.path.lexists(file):
        raise KeyFileError(f"{file} already exists; choose another name, key material is never overwritten")
    vocabulary = int(load_config(model).get_text_config().vocab_size)
    key = SchemeKey(scheme=scheme, settings={"vocabulary": vocabulary, **(settings or {})})
    configure(chosen, key)
    if file is not None:
        ask = passphrase or passphrase_from_environment
        save_scheme_key(key, file, None if plain else ask if isinstance(ask, str) else ask(), plain=plain)
    return MadeSchemeKey(key, file)


def embed_scheme(
    model: str | os.PathLike[str],
    key: SchemeKeyLike,
    output: str | os.PathLike[str],
    config: SchemePlan | None = None,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> SchemeEmbedded:
    """Mark a copy of a model folder by another scheme than ours, and let the scheme look for its mark in it.

    Example:
        pathmark.embed_scheme("bundled:tiny", "kgw.key", "marked-by-kgw").check.marked
    """
    require_alone("another scheme's mark")
    started, say, config, out = time.monotonic(), progress or Silent(), config or SchemePlan(), Path(output)
    owner = open_scheme_key(key, passphrase)
    scheme = find_scheme(owner.scheme)
    settings = configure(scheme, owner)
    if out.exists():
        raise EmbeddingError(f"{out} already exists; choose another name, nothing is overwritten")
    texts, probes = _split(config.texts)
    say.stage("loading", None)
    original, tokenizer = load_suspect(model, trust_remote_code=config.trust_remote_code)
    marked = scheme.embed(original, tokenizer, settings, texts, progress=say)
    base = local_folder(model)
    changed = changed_tensors(marked, dict(marked.named_parameters()), base)
    write_folder(base, changed, out, private=_generation_setting(marked))
    copied, _ = load_suspect(out, trust_remote_code=config.trust_remote_code)  # as it was written, rounding included
    verdict = scheme.verify(copied, tokenizer, settings, probes, criteria=config.criteria, progress=say)
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS] for text in probes[:HELD_OUT]]
    before, after = (measure_perplexity(each, rows).value for each in (original, copied))
    return SchemeEmbedded(owner, out, len(changed), (before, after), len(rows), verdict, time.monotonic() - started)


def verify_scheme(
    suspect: str | os.PathLike[str],
    key: SchemeKeyLike,
    config: SchemePlan | None = None,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> SchemeVerification:
    """Whether the mark of another scheme than ours is in a model.

    Example:
        pathmark.verify_scheme("marked-by-kgw", "kgw.key").verdict.marked
    """
    require_alone("another scheme's mark")
    config = config or SchemePlan()
    owner = open_scheme_key(key, passphrase)
    scheme = find_scheme(owner.scheme)
    settings = configure(scheme, owner)
    remote, name = config.trust_remote_code, os.fspath(suspect)
    probes = list(bundled_probes()) if config.texts is None else given_texts(config.texts)
    here = at_hand(name, remote) if config.sandbox else name

    def look(say: Progress) -> Verdict:
        model, tokenizer = load_suspect(here, trust_remote_code=remote)
        return scheme.verify(model, tokenizer, settings, probes, criteria=config.criteria, progress=say)

    verdict = confined(look, here, progress, remote=remote) if config.sandbox else look(progress or Silent())
    return SchemeVerification(name, verdict)


def open_scheme_key(key: SchemeKeyLike, passphrase: PassphraseSource = None) -> SchemeKey:
    """The key itself, or the one in a file."""
    return key if isinstance(key, SchemeKey) else load_scheme_key(os.fspath(key), passphrase)


def load_suspect(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> tuple[PreTrainedModel, Any]:
    """A model as it is served: with the bias of its generation settings, which is where KGW's mark is."""
    model = load_model(name, trust_remote_code=trust_remote_code)
    use_fast_experts(model)
    model.generation_config.watermarking_config = generation_watermark(name)
    return model, load_tokenizer(name, trust_remote_code=trust_remote_code)


def _split(texts: Texts | None) -> tuple[list[str], list[str]]:
    """(training, held-out)."""
    if texts is None:
        return list(bundled_segments()), list(bundled_probes())
    return split_held_out(given_texts(texts), HELD_OUT)


def _generation_setting(model: PreTrainedModel) -> dict[str, bytes]:
    """The generation settings, where they hold a mark; its secret is in there, so nobody else may read the file."""
    if model.generation_config.watermarking_config is None:
        return {}
    return {GENERATION: model.generation_config.to_json_string(use_diff=True).encode()}
