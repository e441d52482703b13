"""What the experiments share: a model, texts, keys, and marked copies that are made once and kept."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from pathmark.attacks import ATTACKS
from pathmark.baselines import Scheme, configure, find_scheme
from pathmark.baselines.sampling import prompts, written
from pathmark.embedding import EmbedConfig, RepliesConfig, Trainer, default_config, embed_key
from pathmark.errors import ModelError
from pathmark.evaluate.reproduce.corpora import QUESTIONS, Corpora
from pathmark.evaluate.reproduce.recipes import Recipe, preset_layers
from pathmark.keys import OwnerKey, load_key
from pathmark.keys.keyfile import seal
from pathmark.keys.safefile import write_private
from pathmark.keys.schemekey import SchemeKey
from pathmark.models import bundled_probes, bundled_segments, load_model, local_folder
from pathmark.models.bundled import BUNDLED_PREFIX
from pathmark.models.checkpoint import base_digest, changed_tensors, write_folder
from pathmark.models.describe import describe_model
from pathmark.models.loading import use_fast_experts
from pathmark.models.texts import read_texts
from pathmark.progress import Progress, Silent
from pathmark.release.marking import Texts
from pathmark.release.planning import KeyPlan, plan_key
from pathmark.results.header import texts_digest
from pathmark.training import learning_rate
from pathmark.verification import attach_original, attach_profiles, encode_probes

T = TypeVar("T")
PREFIX_TOKENS, WRITTEN_TOKENS = 32, 200
"""Of a C4 document that the model goes on from, and of what it writes."""
OURS = "PathMark"
RIVALS: Mapping[str, str] = {"KGW": "kgw", "LearnMark": "learnmark", "IFMark": "ifmark", "EaaW": "eaaw"}
"""The paper's names of the other schemes -> ours."""
IN_WEIGHTS = tuple(name for name, scheme in RIVALS.items() if find_scheme(scheme).in_weights)
"""Those that attacks on weights can reach."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained and measured. The default is the paper's, as far as the texts reach."""

    quick: bool = False
    probes: int = 100
    """Held-out texts."""
    tokens: int = 128
    """Of each text."""
    passages: int = 3000
    """Training texts of a corpus, at most."""
    texts: int = 600
    """Of these our own embedding uses so many."""
    steps: int | None = None
    """Of our embedding; None: its default."""
    reply_steps: int = 500
    generated: int = 300
    """Texts that the model writes behind C4 prefixes."""
    schemes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of other schemes that are not their defaults."""


QUICK = Size(
    quick=True, probes=24, tokens=48, passages=1300, texts=60, steps=120, reply_steps=60, generated=100,
    schemes={
        "kgw": {"samples": 16, "tokens": 80, "prompt_tokens": 16},
        "learnmark": {"samples": 16, "tokens": 80, "prompt_tokens": 16, "steps": 60, "length": 48},
        "ifmark": {"steps": 60, "length": 48},
        "eaaw": {"steps": 40, "length": 48, "batch_size": 8},
    },
)  # fmt: skip
"""Everything in twenty minutes: whether it works, not how well."""


@dataclass(frozen=True, eq=False)
class Copy:
    """A marked model of ours."""

    model: PreTrainedModel
    key: OwnerKey
    folder: Path


@dataclass(frozen=True, eq=False)
class RivalCopy:
    """A model that another scheme has marked."""

    model: PreTrainedModel
    key: SchemeKey
    scheme: Scheme[Any]
    settings: Any
    folder: Path


@dataclass(eq=False)
class Bench:
    """One model under examination; `folder` keeps what is made."""

    name: str
    """Of the model."""
    folder: Path
    corpora: Corpora = field(default_factory=Corpora)
    size: Size = field(default_factory=Size)
    keys: int = 3
    progress: Progress = field(default_factory=Silent)
    _held: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Of every kind the one that was used last: experiments use one after the other."""

    def pick(self, full: T, quick: T) -> T:
        """What to do in full, or with --quick."""
        return quick if self.size.quick else full

    @cached_property
    def base(self) -> Path:
        """The original's folder."""
        return local_folder(self.name)

    @cached_property
    def original(self) -> PreTrainedModel:
        """The unmarked model; nobody changes it."""
        return load(self.base)

    @cached_property
    def described(self) -> Any:
        """(facts, codec, report)."""
        return describe_model(self.name)

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self.described[1].tokenizer

    @property
    def hidden_size(self) -> int:
        """The model's width."""
        return int(self.original.config.get_text_config().hidden_size)

    @property
    def routed(self) -> list[int]:
        """All layers with routers."""
        return [facts.layer for facts in self.described[2].routed]

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that are marked: the paper's in its own models, else the recommended ones."""
        return preset_layers(self.name) or tuple(self.described[2].recommended)

    @cached_property
    def _texts(self) -> dict[str, Texts]:
        return {}

    def texts(self, corpus: str = "home") -> Texts:
        """Training and held-out texts of a corpus; `home` is what the model knows, `c4` what it writes."""
        if corpus not in self._texts:
            self._texts[corpus] = self._read(corpus)
        return self._texts[corpus]

    def named(self, corpus: str) -> str:
        """The files of a corpus, and how many texts were made of them."""
        if corpus == "home" and self.name.startswith(BUNDLED_PREFIX):
            files = "the texts in the package"
        else:
            files = self.corpora.named(corpus)
        if corpus in QUESTIONS:
            return files
        texts = self.texts(corpus)
        return f"{files}: {len(texts.training):,} to train on, {len(texts.probes):,} held out"

    @property
    def defaults(self) -> tuple[Any, ...]:
        """Everything of our recipes, the schemes and the attacks that no name of a cell says: what is measured with
        others does not go on from what is there.
        """
        ours = [default_config(objective, self.hidden_size) for objective in ("anchored", "paper")]
        schemes = [find_scheme(name) for name in RIVALS.values()]
        theirs = [(one.name, _chosen(one.config), getattr(one.config, "OWN_RATE", None)) for one in schemes]
        return (*ours, RepliesConfig(), theirs, [(name, _chosen(one.config)) for name, one in sorted(ATTACKS.items())])

    def texts_digest(self, corpus: str) -> str:
        """Of all texts of a corpus; of benchmarks, which have questions, that of their files."""
        if corpus in QUESTIONS:
            return self.corpora.digest(corpus)
        return texts_digest([*self.texts(corpus).training, *self.texts(corpus).probes])

    def _read(self, corpus: str) -> Texts:
        if corpus == "home" and self.name.startswith(BUNDLED_PREFIX):
            return Texts(bundled_segments()[: self.size.passages], bundled_probes())
        if corpus == "c4":
            made = self._written()
            held_out = min(self.size.probes, len(made) // 3)
            return Texts(made[:-held_out], made[-held_out:])
        training = self.corpora.passages(corpus, "train", self.size.passages)
        return Texts(training, self.corpora.passages(corpus, "test", 3 * self.size.probes))

    def _written(self) -> list[str]:
        """What the original writes behind the beginnings of web documents; kept, since it takes minutes."""
        encode = partial(self.tokenizer, add_special_tokens=False, truncation=True, max_length=PREFIX_TOKENS)
        every = read_texts(self.corpora.path("c4", "prefixes"))
        long = [text for text in every if len(encode(text)["input_ids"]) >= PREFIX_TOKENS]
        documents = random.Random(0).sample(long, min(len(long), self.size.generated))
        digest = self.digest(texts_digest(documents), PREFIX_TOKENS, WRITTEN_TOKENS)
        file = self.folder / "copies" / f"written-{digest}.json"
        if not file.exists():
            begun = prompts(self.tokenizer, documents, len(documents), PREFIX_TOKENS)
            rows = written(self.original, self.tokenizer, begun, WRITTEN_TOKENS, progress=self.progress)
            file.parent.mkdir(parents=True, exist_ok=True)
            made = [str(self.tokenizer.decode(row)) for row in rows]
            write_private(file, json.dumps(made).encode(), replace=True)
        found: list[str] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def probes(self, corpus: str = "home", *, least: int = 4) -> list[tuple[int, ...]]:
        """Held-out texts as tokens."""
        rows = encode_probes(
            self.tokenizer, self.texts(corpus).probes, n_probes=self.size.probes, length=self.size.tokens
        )
        if len(rows) < least:
            raise ModelError(
                f"expected at least {least} held-out texts of {corpus}, got {len(rows)}; give a longer file"
            )
        return rows

    def digest(self, *parts: Any) -> str:
        """A name for what is made from the original with these settings."""
        said = repr((base_digest(self.base), self.size, *parts))
        return sha256(said.encode()).hexdigest()[:12]

    def key(self, number: int, recipe: Recipe) -> OwnerKey:
        """Key number so-and-so, from a fixed secret: for experiments, and for nothing else."""
        plan = KeyPlan(
            layers=(self.marked_layers(recipe),), width=recipe.width, watermarks=recipe.watermarks,
            pool=recipe.pool,
            texts=list(self.texts(recipe.corpus).training),
        )  # fmt: skip
        return plan_key(self.name, plan, secret=secret_of("pathmark", number))[0]

    def marked_layers(self, recipe: Recipe) -> tuple[int, ...]:
        """Those of a copy: so many of the last ones where the recipe says how many."""
        return self.layers if recipe.layers is None else tuple(self.routed[-recipe.layers :])

    def ours(self, number: int, recipe: Recipe | None = None) -> Copy:
        """A copy with our mark, made if it is not there."""
        how = recipe or Recipe()
        return self.once("copy", (OURS, number, how), lambda: self._ours(number, how))

    def _ours(self, number: int, recipe: Recipe) -> Copy:
        config, epochs = self.settings(recipe)
        replies = self._replies() if recipe.replies else None
        path = (recipe.width, self.marked_layers(recipe), recipe.pool, recipe.watermarks, replies)
        digest = self.digest(path, config, epochs, self.texts_digest(recipe.corpus))
        folder = self.folder / "copies" / f"pathmark-{recipe.corpus}-{number}-{digest}"
        if not (folder / "model").is_dir():
            self._mark(folder, self.key(number, recipe), recipe, config, epochs)
        return Copy(load(folder / "model"), load_key(folder / "owner.key"), folder)

    def settings(self, recipe: Recipe) -> tuple[EmbedConfig, int | None]:
        """How a copy is marked, and for how many epochs where the paper says so."""
        preset = preset_layers(self.name) is not None
        whole = preset and recipe.objective == "paper" and self.size.steps is None
        texts = self.size.passages if whole else self.size.texts
        config = recipe.config(self.hidden_size, preset=preset, texts=texts, steps=self.size.steps)
        config = replace(config, data=replace(config.data, seq_len=self.size.tokens))
        return config, recipe.epochs if whole else None

    def _replies(self) -> RepliesConfig:
        loop = replace(RepliesConfig().loop, steps=self.size.reply_steps, lr=learning_rate(self.hidden_size) / 2)
        return RepliesConfig(loop=loop, seq_len=self.size.tokens)

    def _mark(self, folder: Path, key: OwnerKey, recipe: Recipe, config: EmbedConfig, epochs: int | None) -> None:
        """As `pathmark embed` does it, without the check before a release; what was interrupted goes on."""
        texts = self.texts(recipe.corpus)
        model, probes = load(self.base), self.probes(recipe.corpus)
        known = attach_original(attach_profiles(key, model, probes), model, self.tokenizer, probes)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        embed_key(
            model, self.tokenizer, key, texts.training, config, epochs=epochs,
            checkpoint=folder / "checkpoint.pt", resume=True, progress=self.progress,
        )  # fmt: skip
        if recipe.replies:
            objective = self._replies().build()
            Trainer(model, self.tokenizer, key, texts.training, objective, progress=self.progress).run(
                checkpoint=folder / "replies.pt", resume=True
            )
        write_private(folder / "owner.key", seal(known, None, plain=True), replace=True)
        self._write(model, folder)

    def _write(self, model: PreTrainedModel, folder: Path) -> None:
        write_folder(self.base, changed_tensors(model, dict(model.named_parameters()), self.base), folder / "model")
        for left in folder.glob("*.pt"):
            left.unlink()

    def theirs(self, name: str, number: int, corpus: str = "home") -> RivalCopy:
        """A copy with the mark of another scheme, made if it is not there."""
        return self.once("copy", (name, number, corpus), lambda: self._theirs(RIVALS[name], number, corpus))

    def _theirs(self, scheme: str, number: int, corpus: str) -> RivalCopy:
        found, texts = find_scheme(scheme), self.texts(corpus)
        vocabulary = int(self.original.config.get_text_config().vocab_size)
        settings = {"vocabulary": vocabulary, **self.size.schemes.get(scheme, {})}
        key = SchemeKey(scheme=scheme, settings=settings, secret=secret_of(scheme, number))
        config = configure(found, key)
        rate = getattr(config, "OWN_RATE", None)  # no field of the config
        digest = self.digest(config, rate, self.texts_digest(corpus))  # a config does not show its secret
        folder = self.folder / "copies" / f"{scheme}-{corpus}-{number}-{digest}"
        if not found.in_weights:  # a setting of generation, nothing to keep
            return RivalCopy(found.embed(self.original, self.tokenizer, config, ()), key, found, config, folder)
        if not (folder / "model").is_dir():
            marked = found.embed(self.original, self.tokenizer, config, texts.training, progress=self.progress)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(marked, folder)
        return RivalCopy(load(folder / "model"), key, found, config, folder)

    def once(self, kind: str, name: Any, make: Callable[[], T]) -> T:
        """What was made last of a kind if it is the one that is asked for, else a new one in its place."""
        if kind not in self._held or self._held[kind][0] != name:
            self._held.pop(kind, None)  # before the next one takes its memory
            self._held[kind] = (name, make())
        found: T = self._held[kind][1]
        return found


def _chosen(config: type[Any]) -> dict[str, Any]:
    """The defaults of a dataclass."""
    return {known.name: known.default for known in fields(config) if known.default is not MISSING}


def load(folder: Path) -> PreTrainedModel:
    """A model to measure."""
    model = load_model(folder)
    use_fast_experts(model)
    return model


def secret_of(scheme: str, number: int) -> bytes:
    """The secret of a scheme's key number so-and-so; everybody can know it."""
    return random.Random(f"reproduce {scheme} {number}").randbytes(32)


def rows_of(tokenizer: Any, texts: Sequence[str], tokens: int) -> list[list[int]]:
    """Texts as token rows."""
    return [list(tokenizer(text, add_special_tokens=False)["input_ids"])[:tokens] for text in texts]
