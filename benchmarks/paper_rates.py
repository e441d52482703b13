"""The learning rate at which the paper's objective is best by its own criteria, for a fair comparison.

python benchmarks/paper_rates.py [--rates 2e-4 7e-4 2e-3 7e-3 2e-2]

One random key with the paper's trigger @@@@@@@@. The criteria are the paper's: WSR behind the trigger less the share of
clean texts that count as triggered, then clean perplexity.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from marked import bundled_header
from pathmark.embedding import Trainer, default_config
from pathmark.errors import TrainingError
from pathmark.keys import OwnerKey
from pathmark.models import bundled_probes, bundled_segments, load_model, load_tokenizer, perplexity
from pathmark.models.loading import use_fast_experts
from pathmark.release.planning import KeyPlan, plan_key
from pathmark.results import Header, write_result
from pathmark.stats import Rate
from pathmark.verification import encode_probes, record_routes, score_path

FORMAT, VERSION = "pathmark-paper-rates", 1
RESULT = Path(__file__).parent / "results" / "paper-rates.json"
TRIGGER = "@@@@@@@@"


@dataclass(frozen=True, kw_only=True)
class AtRate:
    """The paper's objective at one rate."""

    lr: float
    train: str
    wsr: Rate | None = None
    """None where the training diverged."""
    false_positives: Rate | None = None
    clean_ppl: tuple[float, float] | None = None
    """Of the original and of the marked model."""


@dataclass(frozen=True, kw_only=True)
class PaperRates:
    """A sweep on one key."""

    header: Header
    rows: tuple[AtRate, ...]


def measured(key: OwnerKey, lr: float) -> AtRate:
    """Mark at this rate and measure what the paper measures."""
    config = default_config("paper")
    config = replace(config, loop=replace(config.loop, lr=lr))
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    use_fast_experts(model)
    probes = encode_probes(tokenizer, bundled_probes(), n_probes=100, length=128)
    before = perplexity(model, probes).value
    try:
        Trainer(model, tokenizer, key, bundled_segments(), config.build()).run()
    except TrainingError:
        return AtRate(lr=lr, train=config.train)
    watermark = key.watermarks[0]
    trigger = watermark.triggers[0].tokens
    return AtRate(
        lr=lr,
        train=config.train,
        wsr=score_path(watermark, record_routes(model, probes, watermark.layers, prefix=trigger)).wsr,
        false_positives=score_path(watermark, record_routes(model, probes, watermark.layers)).wsr,
        clean_ppl=(before, perplexity(model, probes).value),
    )


def best(rows: tuple[AtRate, ...]) -> AtRate:
    """By the paper's criteria."""

    def merit(row: AtRate) -> tuple[float, float]:
        if row.wsr is None or row.false_positives is None or row.clean_ppl is None:
            return (-1.0, 0.0)
        return (row.wsr.value - row.false_positives.value, -row.clean_ppl[1])

    return max(rows, key=merit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-4, 7e-4, 2e-3, 7e-3, 2e-2])
    args = parser.parse_args()
    key = plan_key("bundled:tiny", KeyPlan(trigger_texts=(TRIGGER,)))[0]
    settings = {"config": repr(default_config("paper"))}
    result = PaperRates(header=bundled_header(FORMAT, VERSION, key=key.fingerprint, settings=settings), rows=())
    for lr in args.rates:
        result = replace(result, rows=(*result.rows, measured(key, lr)))
        write_result(RESULT, result)
        print(result.rows[-1], flush=True)
    RESULT.chmod(0o644)
    print("best:", best(result.rows).lr)


if __name__ == "__main__":
    main()
