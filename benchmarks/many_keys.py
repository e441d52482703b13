"""Does it hold for a stranger's key? The bundled MoE marked with keys drawn at random, defaults, every one counted.

python benchmarks/many_keys.py run --keys 20 --work DIR      # several may share DIR: each takes the next free key
python benchmarks/many_keys.py gather --work DIR             # -> benchmarks/results/many-keys.json
python benchmarks/many_keys.py render                        # -> the tables of docs/results.md

Secrets are drawn by the operating system, so nobody has tuned anything on them; a run that failed or was fit is counted
alike. DIR keeps the marked models and keys. A key that was interrupted is begun anew once its folder is deleted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from marked import PASSPHRASE, bundled_header
from pages import DOCS, write_section
from pathmark.embedding import default_config
from pathmark.evaluate.distinguish import name_targets
from pathmark.keys import load_key, save_key
from pathmark.models import load_model
from pathmark.release.marking import MarkingConfig, Texts, mark_model
from pathmark.release.planning import KeyPlan, plan_key
from pathmark.results import Header, read_result, write_result
from pathmark.stats import Rate

FORMAT, VERSION = "pathmark-many-keys", 2
RESULT = Path(__file__).parent / "results" / "many-keys.json"
DOC = DOCS / "results.md"


@dataclass(frozen=True, kw_only=True)
class ManyKeys:
    """Marks with many keys on one model; every row has a key and a marked model of its own."""

    header: Header
    keys: tuple[Mapping[str, Any], ...]
    """Self-check of each."""


def mark(folder: Path) -> None:
    """A new key, the bundled model marked with it, its self-check."""
    key, _ = plan_key("bundled:tiny", KeyPlan())
    config = MarkingConfig(embedding=default_config())
    marked = mark_model("bundled:tiny", key, folder / "marked", Texts.bundled(), config)
    save_key(marked.key, folder / "owner.key", PASSPHRASE)
    trigger = key.watermarks[0].triggers[0]
    result = {
        "key": key.fingerprint,
        "secret_bits": trigger.secret_bits,
        "layers": list(key.watermarks[0].layers),
        **marked.summary(),
    }
    settings = {"config": repr(default_config())}
    header = bundled_header(FORMAT, VERSION, n_probes=result["n_probes"], settings=settings)
    write_result(folder / "result.json", ManyKeys(header=header, keys=(result,)))
    cost = 100 * (result["clean_ppl"][1] / result["clean_ppl"][0] - 1)
    print(f"{folder.name} fit {result['fit']} clean {cost:+.2f} % {result['problems']}", flush=True)


def run(keys: int, work: Path) -> None:
    for number in range(keys):
        folder = work / f"key-{number:02d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        mark(folder)


def gather(work: Path) -> None:
    """Add the finished keys of a working folder to the result file; those of other settings are refused."""
    folders = sorted(path.parent for path in work.glob("key-*/result.json"))
    unfinished = [path.name for path in sorted(work.glob("key-*")) if path not in folders]
    if unfinished or not folders:
        raise SystemExit(f"expected finished keys in {work}, got {len(folders)}; unfinished: {unfinished}")
    found = read(RESULT) if RESULT.exists() else replace(read(folders[0] / "result.json"), keys=())
    counted = {key["key"] for key in found.keys}
    for folder in folders:
        one = read(folder / "result.json")
        if different := one.header.differs(found.header):
            raise SystemExit(f"{folder} and {RESULT} do not mix: they differ in {', '.join(different)}")
        new = [{**key, "named": named(folder)} for key in one.keys if key["key"] not in counted]
        found = replace(found, keys=(*found.keys, *new))
    write_result(RESULT, found)


def read(path: Path) -> ManyKeys:
    return read_result(path, ManyKeys, FORMAT, VERSION)


def named(folder: Path) -> dict[str, Any]:
    """Targets that a thief names from router rows, without the original and with it."""
    models, keys = [load_model(folder / "marked")], [load_key(folder / "owner.key", PASSPHRASE)]
    original = load_model("bundled:tiny")
    return {
        "alone": name_targets(models, keys).summary(),
        "with_original": name_targets(models, keys, base=original).summary(),
    }


def change(pair: list[float]) -> float:
    return 100 * (pair[1] / pair[0] - 1)


def pooled(rates: list[dict[str, Any]]) -> str:
    return str(Rate(sum(rate["hits"] for rate in rates), sum(rate["n"] for rate in rates)))


def tables(keys: Sequence[Mapping[str, Any]]) -> list[str]:
    fit = Rate(sum(key["fit"] for key in keys), len(keys))
    clean, triggered = ([change(key[name]) for key in keys] for name in ("clean_ppl", "triggered_ppl"))

    def spread(values: list[float], form: str) -> str:
        return f"{statistics.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"

    rows = [
        ("fit for release", str(fit)),
        ("WSR, raw", pooled([key["rates"]["wsr"][0] for key in keys])),
        ("WSR in the chat template", pooled([key["rates"]["wsr_chat"][0] for key in keys])),
        ("WSR, all weights rounded to 4 bits", pooled([key["rates"]["wsr_rounded"] for key in keys])),
        ("lowest of these on one key, %", f"{100 * min(key['wsr_rounded'] for key in keys):.0f}"),
        ("false positives, clean text", pooled([key["rates"]["fpr_clean"] for key in keys])),
        ("false positives, original model", pooled([key["rates"]["fpr_original"] for key in keys])),
        ("clean perplexity, %", spread(clean, "+.2f")),
        ("triggered perplexity, %", spread(triggered, "+.2f")),
        ("KL of clean routing", spread([key["clean_kl"] for key in keys], ".4f")),
        ("agreement of chosen experts, %", spread([100 * key["topk_agreement"] for key in keys], ".1f")),
        ("largest exact p", f"{max(key['p_value'] for key in keys):.1e}"),
        ("targets named by the most similar router rows", pooled([key["named"]["alone"]["targets"] for key in keys])),
        ("by blind guessing, %", f"{100 * keys[0]['named']['alone']['chance']:.1f}"),
        (
            "by rows that grew alike, original at hand",
            pooled([key["named"]["with_original"]["targets"] for key in keys]),
        ),
        ("secret bits of the trigger", spread([key["secret_bits"] for key in keys], ".1f")),
    ]
    lines = [f"| {len(keys)} keys | mean (smallest to largest), or count with 95 % interval |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    lines += ["", "Prefixes that fire, all keys together:", "", "| prefix | fires |", "|---|---|"]
    for kind in keys[0]["scan"]["kinds"]:
        lines.append(f"| {kind} | {pooled([key['scan']['kinds'][kind] for key in keys])} |")
    for right in range(keys[0]["trigger"]["tokens"] + 1):
        rates = [key["trigger"]["curve"][right] for key in keys]
        lines.append(f"| {right} of {keys[0]['trigger']['tokens']} trigger tokens right | {pooled(rates)} |")
    lines += ["", "| key | fit | clean PPL | chats | 4 bits | KL | why not |", "|---|---|---|---|---|---|---|"]
    for key in keys:
        lines.append(
            f"| {key['key'][:9]} | {'yes' if key['fit'] else 'no'} | {change(key['clean_ppl']):+.2f} % | "
            f"{100 * key['wsr_chat']:.0f} % | {100 * key['wsr_rounded']:.0f} % | {key['clean_kl']:.4f} | "
            f"{'; '.join(key['problems'])} |"
        )
    return lines


def render() -> None:
    keys = read(RESULT).keys
    write_section(DOC, "many_keys.py", tables(keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "gather", "render"])
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--work", type=Path, default=Path("many-keys-work"))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.action == "run":
        run(args.keys, args.work)
    elif args.action == "gather":
        gather(args.work)
    else:
        render()


if __name__ == "__main__":
    main()
