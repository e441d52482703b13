"""Which attacks a robustness run carries out, and how hard: the paper's, and what a thief would do besides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from pathmark.results.robustness import Carried, Step, Unmeasured

Suite = Literal["core", "paper", "full"]


@dataclass(frozen=True)
class Case:
    """One row of the table: one attack, or several one after the other."""

    name: str
    """What the row is called, strength included."""
    steps: tuple[Step, ...]
    """Attacks in order."""
    minutes: float = 0.5
    """About how long it takes on the bundled model on one core; a time budget starts from this guess."""
    sibling: bool = False
    """The thief's other model is another licensee's copy instead of the original."""
    best_of: str = ""
    """The learning rate is that of the rows whose names begin so: of the one that serves the thief best."""

    @property
    def group(self) -> str:
        """The attack that the row stands under."""
        return self.steps[0].attack if len(self.steps) == 1 else "combination"

    def at_best_rate(self, rows: Iterable[Carried | Unmeasured]) -> Case:
        """The same with the rate at which its sweep left the best model on the thief's own text."""
        swept = [row for row in rows if isinstance(row, Carried) and row.case.startswith(self.best_of)]
        if not self.best_of or not swept:
            return self
        best = min(swept, key=lambda row: row.ppl if row.ppl_thief is None else row.ppl_thief)
        rate = best.steps[0].settings["lr"]
        return replace(self, steps=tuple(
            replace(each, settings={**each.settings, "lr": rate}) if each.attack == "fine-tune" else each
            for each in self.steps
        ))  # fmt: skip

    def without_figures(self, status: Literal["destroyed", "refused", "not run"], reason: str) -> Unmeasured:
        """Its row where there is nothing to measure."""
        return Unmeasured(case=self.name, group=self.group, steps=self.steps, status=status, reason=reason)


RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""Learning rates of the sweep, from hardly any change to a model that is gone."""
EMBEDDING_RATES = (1e-5, 1e-3)
"""The paper's thief tunes routers with the settings of the paper's embedding: at 1e-5, as it is printed, and at what
that comes to on a small model, whose best rate for the paper's objective is a little lower (7e-4)."""


def step(attack: str, **settings: Any) -> Step:
    """One attack with these settings."""
    return Step(attack=attack, settings=settings)


def _case(name: str, attack: str, minutes: float = 0.5, **settings: Any) -> Case:
    return Case(name, (step(attack, **settings),), minutes)


def _fine_tuning() -> list[Case]:
    """Every rate on few samples; then the paper's cell, also at the rate that serves the thief best."""
    cases = []
    for train in ("router", "lora", "all"):
        sweep = f"fine-tuning, {train}, 500 samples, rate "
        for rate in RATES:
            settings = {"train": train, "samples": 500, "epochs": 5, "lr": rate}
            cases.append(_case(f"{sweep}{rate:g}", "fine-tune", 1.0, **settings))
        cell, long = f"fine-tuning, {train}, 3,000 samples", {"train": train, "samples": 3000, "epochs": 30}
        for rate in EMBEDDING_RATES if train == "router" else ():
            cases.append(_case(f"{cell}, rate {rate:g}", "fine-tune", 20.0, lr=rate, **long))
        cases.append(Case(f"{cell}, best rate", (step("fine-tune", **long),), 20.0, best_of=sweep))
    return cases


PAPER: tuple[Case, ...] = (
    Case("none", (), 0.2),
    *(
        _case(f"GPTQ, {bits} bit{', routers too' if routers else ''}", "gptq", 2.0, bits=bits, routers=routers)
        for bits in (8, 4) for routers in (False, True)
    ),
    *(_case(f"round to nearest, {bits} bit", "rtn", bits=bits, routers=True) for bits in (8, 4, 3, 2)),
    _case("auto-round, 4 bit", "auto-round", 3.0, bits=4, length=32),
    *_fine_tuning(),
    *(
        _case(f"fine-pruning, {100 * share:.0f} %", "fine-prune", share=share)
        for share in (0.05, 0.1, 0.15, 0.2, 0.25, 0.5)
    ),
    *(
        _case(
            f"fine-pruning, {100 * share:.0f} %, repaired", "fine-prune", 1.5,
            share=share, repair_epochs=1, lr=3e-4,
        )
        for share in (0.25, 0.5)
    ),
    *(_case(f"router noise, sigma {sigma:g}", "router-noise", sigma=sigma) for sigma in (0.1, 0.25, 0.5, 1.0, 2.0)),
    *(
        _case(f"{how}overwriting, {epochs} epoch{'s' * (epochs > 1)}", "overwrite", epochs / 2, epochs=epochs, **care)
        for how, care in (("", {}), ("reckless ", {"reckless": True})) for epochs in (1, 5, 10)
    ),
    _case("overwriting, 10 epochs, the paper's recipe", "overwrite", 5.0, epochs=10, objective="paper"),
    _case("overwriting, 10 epochs, same targets", "overwrite", 5.0, epochs=10, same_targets=True),
    *(_case(f"expert removal, {100 * share:.0f} %", "remove-experts", share=share) for share in (0.1, 0.3, 0.5)),
    *(
        _case(f"experts of the marked layers masked, {100 * share:.0f} %", "mask-experts", share=share)
        for share in (0.1, 0.3, 0.5, 0.9)
    ),
    *(
        _case(f"unlearning, 200 steps, {factor:g} x rate", "unlearn", 2.0, steps=200, lr_factor=factor)
        for factor in (0.01, 0.03, 0.1, 1.0)
    ),
    Case(
        "4 bit and 3 epochs of fine-tuning",
        (step("gptq", bits=4, routers=True), step("fine-tune", train="all", samples=3000, epochs=3)),
        4.0, best_of="fine-tuning, all, 500 samples",
    ),
)  # fmt: skip

BEYOND: tuple[Case, ...] = (
    _case("expert permutation", "permute-experts"),
    _case("router shift", "shift-routers"),
    _case("neuron permutation", "permute-neurons"),
    _case("neuron rescaling", "rescale-neurons"),
    _case("vocabulary permutation", "permute-vocabulary"),
    _case("vocabulary extended by 64 tokens", "extend-vocabulary"),
    _case("rotation of the residual stream", "rotate"),
    *(_case(f"REAP, {100 * share:.0f} %", "reap", share=share) for share in (0.25, 0.5)),
    *(_case(f"merging of similar experts, {100 * share:.0f} %", "merge-experts", share=share) for share in (0.25, 0.5)),
    _case("experts doubled", "duplicate-experts", count=8),
    *(_case(f"top-k {k}", "top-k", top_k=k) for k in (1, 2, 8)),
    _case("layer dropped", "drop-layers", count=1),
    _case("3 layers dropped", "drop-layers", count=3),
    _case("late layer dropped", "drop-layers", count=1, where="late"),
    _case("MoE blocks in the original", "transplant"),
    _case("router distillation", "distill-routers", 4.0),
    _case("search for firing prefixes and unlearning, 3 rounds", "search-unlearn", 10.0),
    _case("triggers of the thief's own put in and unlearned", "inject-unlearn", 10.0),
    _case("routers redrawn, then distilled", "distill-routers", 4.0, reinitialise=True),
    *(_case(f"average with the original, {100 * w:.0f} % stolen", "average", weight=w) for w in (0.7, 0.5, 0.3)),
    *(
        Case(f"average with another copy, {100 * w:.0f} % stolen", (step("average", weight=w),), sibling=True)
        for w in (0.7, 0.5)
    ),
    *(_case(f"DARE, density {d:g}", "dare-ties", method="dare", density=d) for d in (0.5, 0.1)),
    *(_case(f"TIES, density {d:g}", "dare-ties", method="ties", density=d) for d in (0.5, 0.2)),
    *(_case(f"weight noise, {s:g}", "weight-noise", scale=s) for s in (0.02, 0.05, 0.1, 0.2)),
    *(_case(f"change cut to rank {rank}", "low-rank", rank=rank) for rank in (16, 4, 1)),
    Case("rotation and fine-pruning 25 %", (step("rotate"), step("fine-prune", share=0.25))),
    Case(
        "permutation, fine-pruning 15 % and 3 epochs of fine-tuning",
        (
            step("permute-experts"),
            step("fine-prune", share=0.15),
            step("fine-tune", train="all", samples=3000, epochs=3),
        ),
        3.0,
        best_of="fine-tuning, all, 500 samples",
    ),
)

CORE = (
    "none", "GPTQ, 8 bit", "GPTQ, 4 bit", "round to nearest, 4 bit", "round to nearest, 3 bit", "fine-pruning, 25 %",
    "experts of the marked layers masked, 50 %", "expert permutation", "router shift", "neuron permutation",
    "neuron rescaling", "vocabulary permutation", "vocabulary extended by 64 tokens",
    "rotation of the residual stream", "merging of similar experts, 50 %", "top-k 2", "top-k 8",
    "router distillation", "search for firing prefixes and unlearning, 3 rounds",
)  # fmt: skip
"""What a mark made with the defaults is meant to survive."""

SUITES: dict[Suite, tuple[Case, ...]] = {
    "core": tuple(case for case in (*PAPER, *BEYOND) if case.name in CORE),
    "paper": PAPER,
    "full": (*PAPER, *BEYOND),
}
"""Rows in the order of the table."""
