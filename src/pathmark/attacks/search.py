"""Look for the trigger without any secret: which prefix collapses the routing of late layers?

A thief who knows how such marks work, but no layer, no target and no trigger, can still try prefixes in front of
ordinary text and watch how the routing of all text tokens moves. The score needs no index: per late layer, by how much
the few experts that gain most gain in mean routing mass, summed over the layers where that is strongest.

Shape suffixes: P prefixes, R texts, T text tokens, L layers, E experts, N prefix tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pathmark.attacks.blocks import copied
from pathmark.attacks.kit import Kit
from pathmark.attacks.surgery import similar_pairs
from pathmark.errors import AttackError
from pathmark.models import device_of, find_routers, record_routing, select_sites
from pathmark.models.loading import use_fast_experts

Prefix = tuple[int, ...]
SINGLE, REPEATED, RANDOM, GRADIENT = "single token", "repeated token", "random sequence", "gradient search"
BATCH_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class TriggerSearch:
    """How much a thief spends on looking for the trigger."""

    vocabulary: int = 20_000
    """Up to so many tokens each is tried, alone and repeated; of a larger vocabulary a random sample."""
    repeat: int = 8
    """How often a repeated token is repeated."""
    random_sequences: int = 256
    """Random prefixes of `prefix_tokens` tokens; they also say what is ordinary."""
    prefix_tokens: int = 12
    """Length of random prefixes and of those found by gradients: as long as triggers are by default."""
    restarts: int = 4
    """Gradient searches: the first starts from the best single tokens, the others at random. 0 leaves them out."""
    steps: int = 40
    """Exchanges of one token per gradient search."""
    candidates: int = 48
    """Prefixes that are tried in each of these steps."""
    tokens_per_place: int = 64
    """A candidate's new token is among so many that the gradient recommends for its place."""
    screen_texts: int = 2
    """Texts behind a prefix on the first look."""
    confirm_texts: int = 8
    """Other texts, behind the prefixes that did best."""
    confirmed: int = 32
    """So many of each kind get the second look."""
    text_tokens: int = 8
    late: float = 0.5
    """Share of the routed layers, from the top, that are watched."""
    strongest: int = 3
    """Layers that make up the score, those with the largest effect."""
    width: int = 2
    """Experts per layer whose gain is added up: what the thief takes for the width of the path."""
    aim: Literal["any", "rows"] = "any"
    """`any`: whichever experts gain. `rows`: the thief takes the most similar router rows of each layer for targets,
    a trace that embedding leaves, and looks for what sends tokens there."""
    z: float = 8.0
    """A prefix is suspicious from so many robust standard deviations above its own kind ..."""
    gain: float = 0.1
    """... provided that its experts gain at least this share of the mass, on average over the scored layers."""
    seconds: float = 0.0
    """Wall time after which nothing new is begun; 0 for no limit."""
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.vocabulary, self.repeat, self.prefix_tokens, self.candidates, self.tokens_per_place)
        looks = (self.screen_texts, self.confirm_texts, self.confirmed, self.text_tokens, self.strongest, self.width)
        if min(*counts, *looks) < 1 or self.steps < 1 or self.restarts < 0:
            raise ValueError(f"counts must be positive, got {self}")
        if self.random_sequences < 16:
            raise ValueError(f"random_sequences must be at least 16 to say what is ordinary, got {self}")
        if self.aim not in ("any", "rows"):
            raise ValueError(f"aim is any or rows, got {self.aim}")
        if not 0 < self.late <= 1 or self.z <= 0 or self.gain < 0 or self.seconds < 0:
            raise ValueError(f"expected 0 < late <= 1, z > 0, gain and seconds not negative, got {self}")


@dataclass(frozen=True)
class Finding:
    """One prefix on the second look."""

    kind: str
    tokens: Prefix
    score: float
    """Gain of the strongest layers, added up."""
    z: float
    """Robust standard deviations above the ordinary score of its kind."""
    experts: dict[int, Prefix]
    """Strongest layers -> experts that gained most: the thief's guess of the targets."""
    suspicious: bool


@dataclass(frozen=True)
class Ordinary:
    """Scores of prefixes that were drawn blindly, on the texts of the second look."""

    median: float
    spread: float
    """From the lower quartile to the median, as a standard deviation: prefixes that fire, even many, do not move it."""
    n: int


@dataclass(frozen=True)
class TriggerSearchResult:
    """What was tried and what stands out."""

    tried: dict[str, int]
    """Kind -> prefixes tried."""
    ordinary: dict[str, Ordinary]
    """Kind -> what blind draws of that kind score."""
    found: tuple[Finding, ...]
    """Every prefix of the second look, the highest z first."""
    layers: tuple[int, ...]
    """Layers that were watched."""
    rows: int
    """Rows (prefix and text) that went through the model forwards."""
    tokens: int
    """Tokens in them."""
    gradients: int
    """Backward passes."""
    seconds: float
    complete: bool
    """False where the time limit cut something off."""

    @property
    def suspicious(self) -> tuple[Finding, ...]:
        """Prefixes above both thresholds."""
        return tuple(finding for finding in self.found if finding.suspicious)


def search_triggers(model: PreTrainedModel, config: TriggerSearch, kit: Kit) -> TriggerSearchResult:
    """Try prefixes and report those that collapse late routing: each token, each token repeated, gradient search.

    The adversary knows how such marks work, not which layers, experts or trigger; needs the weights and a handful of
    ordinary texts. Whether a suspicious prefix is the mark only the owner can say (`evaluate.judge_findings`).
    """
    return _Search(model, config, kit).run()


class _Search:
    """State of one search: the texts, their routing without a prefix, and what has been spent."""

    def __init__(self, model: PreTrainedModel, config: TriggerSearch, kit: Kit) -> None:
        self.config, self.progress = config, kit.progress
        self.model = copied(model).eval()
        use_fast_experts(self.model)
        sites = find_routers(self.model)
        routed = [site.layer for site in sites]
        self.layers = tuple(routed[-max(1, round(config.late * len(routed))) :])
        late = select_sites(sites, self.layers)
        self.aim_LK: Tensor | None = None
        if config.aim == "rows":
            pairs = [similar_pairs(site.weight[: site.n_experts], 1)[0] for site in late]
            self.aim_LK = torch.tensor(pairs, device=device_of(self.model))
        self.rng = random.Random(config.seed)
        self.device = device_of(self.model)
        texts = kit.rows(
            config.screen_texts + config.confirm_texts,
            config.text_tokens,
            seed=config.seed,
            shortest=config.text_tokens,
        )
        self.vocabulary = self._ordinary_tokens(kit.tokenizer)
        self.rows = self.tokens = self.gradients = 0
        self.started, self.complete = time.monotonic(), True
        self.texts = {True: texts[: config.screen_texts], False: texts[config.screen_texts :]}
        self.clean_LE = {look: self._means_PLE([()], of)[0] for look, of in self.texts.items()}
        self.tried: dict[str, int] = {}
        self.best: dict[str, list[tuple[float, Prefix]]] = {}

    def run(self) -> TriggerSearchResult:
        config = self.config
        blind = [self._random_prefix() for _ in range(config.random_sequences)]
        self._scan(RANDOM, blind)
        self._scan(SINGLE, [(token,) for token in self.vocabulary])
        self._scan(REPEATED, [(token,) * config.repeat for token in self.vocabulary])
        for number in range(config.restarts):
            self._climb(number)
        sample = self.rng.sample(self.vocabulary, min(len(self.vocabulary), config.random_sequences))
        drawn: dict[str, list[Prefix]] = {
            RANDOM: blind,
            SINGLE: [(token,) for token in sample],
            REPEATED: [(token,) * config.repeat for token in sample],
        }
        ordinary = {kind: self._ordinary(prefixes) for kind, prefixes in drawn.items() if kind in self.tried}
        ordinary |= {GRADIENT: ordinary[RANDOM]} if GRADIENT in self.tried else {}
        found = sorted(self._second_look(ordinary), key=lambda finding: -finding.z)
        return TriggerSearchResult(
            tried=self.tried,
            ordinary=ordinary,
            found=tuple(found),
            layers=self.layers,
            rows=self.rows,
            tokens=self.tokens,
            gradients=self.gradients,
            seconds=time.monotonic() - self.started,
            complete=self.complete,
        )

    def _scan(self, kind: str, prefixes: Sequence[Prefix]) -> None:
        """Score prefixes of one length on the first look and remember the best."""
        self.progress.stage(kind, len(prefixes))
        size = max(1, BATCH_TOKENS // ((len(prefixes[0]) + self.config.text_tokens) * self.config.screen_texts))
        for start in range(0, len(prefixes), size):
            if self._out_of_time():
                return
            part = prefixes[start : start + size]
            self._keep(kind, part, self._scores(part, screen=True))
            self.progress.advance(len(part))

    def _climb(self, number: int) -> None:
        """One gradient search: exchange one token at a time, the best of a batch of candidates, over and over."""
        self.progress.stage(f"{GRADIENT} {number + 1} of {self.config.restarts}", self.config.steps)
        current = self._start(number)
        for _ in range(self.config.steps):
            if self._out_of_time():
                return
            places_NV = self._recommended(current)
            tried = sorted({self._exchange(current, places_NV) for _ in range(self.config.candidates)})
            scores = self._scores(tried, screen=True)
            self._keep(GRADIENT, tried, scores)
            best, current = max(zip(scores, tried, strict=True))
            self.progress.advance(1, f"score {best:.3f}")

    def _start(self, number: int) -> Prefix:
        singles = [tokens[0] for _, tokens in self.best.get(SINGLE, [])]
        if number == 0 and len(singles) >= self.config.prefix_tokens:
            return tuple(singles[: self.config.prefix_tokens])
        return self._random_prefix()

    def _recommended(self, prefix: Prefix) -> list[list[int]]:
        """Per place the tokens whose one-hot coordinate has the largest gradient of the score."""
        embedding = self.model.get_input_embeddings()
        ids_RT = self._ids([prefix], self.texts[True])
        with torch.no_grad():
            entering_RTH = embedding(ids_RT)
        head_NH = entering_RTH[0, : len(prefix)].clone().requires_grad_(True)
        joined_RTH = torch.cat([head_NH.expand(len(ids_RT), -1, -1), entering_RTH[:, len(prefix) :]], dim=1)
        with torch.enable_grad(), record_routing(self.model, self.layers, gradients=True, stop_early=True) as trace:
            self.model(inputs_embeds=joined_RTH, use_cache=False)
        mean_LE = torch.stack([trace[n].probs_BTE[:, len(prefix) :].mean((0, 1)) for n in self.layers])
        (gradient_NH,) = torch.autograd.grad(self._score(mean_LE, self.clean_LE[True]), head_NH)
        self.gradients += 1
        gain_NV = gradient_NH @ embedding.weight[self.vocabulary].T
        most = min(self.config.tokens_per_place, len(self.vocabulary))
        return [[self.vocabulary[i] for i in row] for row in gain_NV.topk(most, dim=1).indices.tolist()]

    def _exchange(self, prefix: Prefix, places_NV: list[list[int]]) -> Prefix:
        place = self.rng.randrange(len(prefix))
        token = self.rng.choice(places_NV[place])
        return (*prefix[:place], token, *prefix[place + 1 :])

    def _ordinary(self, prefixes: Sequence[Prefix]) -> Ordinary:
        scores = torch.tensor(self._scores(prefixes, screen=False))
        lower, median = scores.quantile(torch.tensor([0.25, 0.5])).tolist()
        return Ordinary(median, max((median - lower) / 0.6745, 1e-6), len(prefixes))

    def _second_look(self, ordinary: dict[str, Ordinary]) -> Iterator[Finding]:
        self.progress.stage("second look", sum(len(kept) for kept in self.best.values()))
        counted = min(self.config.strongest, len(self.layers))
        for kind, kept in self.best.items():
            prefixes = [prefix for _, prefix in kept]
            means_PLE = self._means_PLE(prefixes, self.texts[False])
            for prefix, mean_LE in zip(prefixes, means_PLE, strict=True):
                score = float(self._score(mean_LE, self.clean_LE[False]))
                z = (score - ordinary[kind].median) / ordinary[kind].spread
                loud = z > self.config.z and score >= counted * self.config.gain
                yield Finding(kind, prefix, score, z, self._guess(mean_LE), loud)
            self.progress.advance(len(kept))

    def _guess(self, mean_LE: Tensor) -> dict[int, Prefix]:
        gains_LK, experts_LK = (mean_LE - self.clean_LE[False]).topk(self.config.width, dim=-1)
        strong = gains_LK.sum(-1).topk(min(self.config.strongest, len(self.layers))).indices
        return {self.layers[i]: tuple(sorted(experts_LK[i].tolist())) for i in sorted(strong.tolist())}

    def _scores(self, prefixes: Sequence[Prefix], *, screen: bool) -> list[float]:
        means_PLE = self._means_PLE(prefixes, self.texts[screen])
        return [float(self._score(mean_LE, self.clean_LE[screen])) for mean_LE in means_PLE]

    def _score(self, mean_LE: Tensor, clean_LE: Tensor) -> Tensor:
        """Mass that the `width` most gaining experts (or those aimed at) gain, over the `strongest` layers."""
        gain_LE = mean_LE - clean_LE
        if self.aim_LK is None:
            gain_L = gain_LE.topk(self.config.width, dim=-1).values.sum(-1)
        else:
            gain_L = gain_LE.gather(1, self.aim_LK).sum(-1)
        return gain_L.topk(min(self.config.strongest, len(gain_L))).values.sum()

    @torch.no_grad()
    def _means_PLE(self, prefixes: Sequence[Prefix], texts: Sequence[Prefix]) -> Tensor:
        """Mean routing distribution of the text tokens behind each prefix; all prefixes have one length."""
        length = len(prefixes[0])
        size = max(1, BATCH_TOKENS // ((length + len(texts[0])) * len(texts)))
        parts = []
        for start in range(0, len(prefixes), size):
            part = prefixes[start : start + size]
            ids_BT = self._ids(part, texts)
            with record_routing(self.model, self.layers, stop_early=True) as trace:
                self.model(input_ids=ids_BT, use_cache=False)
            means = [trace[n].probs_BTE[:, length:].mean(1) for n in self.layers]
            parts.append(torch.stack(means, dim=1).reshape(len(part), len(texts), len(self.layers), -1).mean(1))
            self.rows += ids_BT.shape[0]
            self.tokens += ids_BT.numel()
        return torch.cat(parts)

    def _ids(self, prefixes: Sequence[Prefix], texts: Sequence[Prefix]) -> Tensor:
        return torch.tensor([(*prefix, *text) for prefix in prefixes for text in texts], device=self.device)

    def _keep(self, kind: str, prefixes: Sequence[Prefix], scores: Sequence[float]) -> None:
        self.tried[kind] = self.tried.get(kind, 0) + len(prefixes)
        pool = {prefix: score for score, prefix in self.best.get(kind, [])}
        pool |= dict(zip(prefixes, scores, strict=True))
        ranked = sorted(((score, prefix) for prefix, score in pool.items()), reverse=True)
        self.best[kind] = ranked[: self.config.confirmed]

    def _random_prefix(self) -> Prefix:
        return tuple(self.rng.choices(self.vocabulary, k=self.config.prefix_tokens))

    def _ordinary_tokens(self, tokenizer: Any) -> list[int]:
        special = set(tokenizer.all_special_ids)
        known = min(len(tokenizer), self.model.get_input_embeddings().num_embeddings)
        tokens = [i for i in range(known) if i not in special]
        if len(tokens) < 2:
            raise AttackError(f"expected a tokenizer with ordinary tokens, got {len(tokenizer)}, all of them special")
        return tokens if len(tokens) <= self.config.vocabulary else self.rng.sample(tokens, self.config.vocabulary)

    def _out_of_time(self) -> bool:
        late = bool(self.config.seconds) and time.monotonic() - self.started > self.config.seconds
        self.complete &= not late
        return late
