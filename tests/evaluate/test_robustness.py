"""The robustness run on a small marked model: rows are right, kept, resumed, and failures stand as such."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest

from pathmark.attacks import ATTACKS, finetuning
from pathmark.attacks.kit import Kit
from pathmark.errors import AttackError
from pathmark.evaluate.robustness import Suspects
from pathmark.evaluate.stolen import RESULTS, UNFINISHED, RobustnessConfig, Sources, run_suite
from pathmark.evaluate.suites import BEYOND, PAPER, SUITES, Case, step
from pathmark.evaluate.thief import thief_embedding
from pathmark.models import bundled_segments, load_model, load_tokenizer
from pathmark.progress import Silent
from pathmark.reporting.evidence_plane import KINDS, MARKERS, cost, kinds_of, plot
from pathmark.reporting.pictures import HUES
from pathmark.reporting.robustness import cells, evidence_left, table
from pathmark.reporting.robustness_report import lost, report
from pathmark.results import Header, RobustnessResult, read_robustness
from pathmark.results.robustness import Measured, Reading
from pathmark.stats import Rate

QUICK = (
    Case("none", ()),
    Case("permuted", (step("permute-experts"),)),
    Case("half the experts", (step("remove-experts", share=0.5),)),
    Case("destroyed", (step("weight-noise", scale=30.0),)),
    Case("diverged", (step("fine-tune", lr=1e34, samples=32, epochs=3, length=16),)),
    Case("average", (step("average"),)),
)
SOURCES = Sources(model_sha256="a" * 64)


@pytest.fixture(scope="module")
def suspects(case):
    kit = Kit(
        tokenizer=load_tokenizer(case.marked), texts=bundled_segments()[:200], layers=case.key.watermarks[0].layers,
        embed=thief_embedding,
    )  # fmt: skip
    return Suspects(load_model(case.marked), case.key, kit, RobustnessConfig(n_probes=20))


def test_rows_say_what_is_left_and_what_it_cost(suspects, tmp_path):
    results = run_suite(suspects, QUICK, tmp_path, SOURCES)
    rows = {row.case: row for row in results.rows}
    assert list(rows) == [case.name for case in QUICK]
    assert rows["none"].marked
    assert rows["none"].ppl_change == 0
    assert rows["permuted"].marked  # matched before it is judged
    assert abs(rows["permuted"].ppl_change) < 1e-3
    assert not rows["destroyed"].marked
    assert rows["destroyed"].ppl_change > 1
    assert rows["diverged"].status == "destroyed"
    assert "the loss became" in rows["diverged"].reason
    assert rows["average"].status == "refused"
    assert "--original" in rows["average"].reason
    assert read_robustness(tmp_path / RESULTS) == results
    header = results.header
    assert (header.model_sha256, header.key, header.seed, header.n_probes) == (
        "a" * 64,
        suspects.key.fingerprint,
        0,
        20,
    )
    assert header.torch.startswith("2.")
    assert (tmp_path / RESULTS).stat().st_mode & 0o077 == 0
    written = table(results.rows)
    assert "| destroyed |" in written
    assert "refused: " in written
    plot([("small", results.rows)], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_a_missing_library_costs_one_row_and_not_the_run(suspects, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    adapters = Case("adapters", (step("fine-tune", train="lora", samples=16, epochs=1),))
    rows = run_suite(suspects, (QUICK[0], adapters, QUICK[1]), tmp_path, SOURCES).rows
    assert [row.status for row in rows] == ["measured", "refused", "measured"]
    assert "adapters need peft" in rows[1].reason


def test_with_the_original_rows_have_both_readings(suspects, case, tmp_path):
    both = Suspects(
        suspects.model, suspects.key, replace(suspects.kit, original=load_model(case.base)), suspects.config
    )
    cases = (
        *QUICK[:2],
        Case("noisy", (step("weight-noise", scale=0.5),)),
        Case("dropped", (step("drop-layers", count=1),)),
    )
    rows = {row.case: row for row in run_suite(both, cases, tmp_path, SOURCES).rows}
    for name in ("none", "permuted"):  # below the marked layers nothing was changed
        fed = rows[name].grafted
        assert fed.wsr == rows[name].wsr
        assert fed.log10_p == pytest.approx(rows[name].log10_p, abs=1e-6)
    assert rows["noisy"].grafted.accuracy != rows["noisy"].accuracy
    assert rows["dropped"].grafted is None  # of another build
    assert rows["dropped"].status == "measured"


def test_a_second_copy_is_asked_for_and_then_mixed_in(suspects, case, tmp_path):
    """Two licensees average their copies: what the one holds is thinned out, what they share stays."""
    kit = replace(suspects.kit, original=load_model(case.base))
    pair = (Case("two copies", (step("average", weight=0.5),), sibling=True),)
    alone = Suspects(suspects.model, suspects.key, kit, suspects.config)
    refused = run_suite(alone, pair, tmp_path, SOURCES).rows
    assert refused[0].status == "refused"
    assert "--sibling" in refused[0].reason
    twin = Suspects(suspects.model, suspects.key, replace(kit, sibling=suspects.model), suspects.config)
    (row,) = run_suite(twin, pair, tmp_path, SOURCES).rows  # what was refused is tried again
    assert row.marked
    assert row.ppl_change == pytest.approx(0, abs=1e-6)  # the mean of a model with itself
    other = Suspects(suspects.model, suspects.key, replace(kit, sibling=kit.original), suspects.config)
    (mixed,) = run_suite(other, pair, tmp_path / "other", SOURCES).rows
    assert mixed.accuracy < row.accuracy


def test_training_that_was_interrupted_goes_on(suspects, tmp_path, monkeypatch):
    monkeypatch.setattr(finetuning, "CHECKPOINT_EVERY", 2)
    steps = []

    class PowerCut(Silent):
        def advance(self, count, note=""):
            steps.append(count)
            if len(steps) == 5:
                raise KeyboardInterrupt

    tuning = {"samples": 32, "epochs": 4, "length": 24, "lr": 7e-4, "batch_size": 16}
    pair = (QUICK[0], Case("tuned", (step("permute-experts"), step("fine-tune", **tuning))))
    cut = Suspects(suspects.model, suspects.key, replace(suspects.kit, progress=PowerCut()), suspects.config)
    with pytest.raises(KeyboardInterrupt):
        run_suite(cut, pair, tmp_path, SOURCES)
    assert len(list((tmp_path / UNFINISHED).glob("*/*.ckpt"))) == 1
    assert [row.case for row in read_robustness(tmp_path / RESULTS).rows] == ["none"]
    steps[:] = [0] * 10
    resumed = run_suite(cut, pair, tmp_path, SOURCES).rows[1]
    assert steps[10:] == [5, 1, 1, 1]  # four were kept
    assert not (tmp_path / UNFINISHED).exists()
    unbroken = run_suite(suspects, pair, tmp_path / "unbroken", SOURCES).rows[1]
    assert replace(resumed, seconds=0.0, attack_seconds=0.0) == replace(unbroken, seconds=0.0, attack_seconds=0.0)


def test_a_model_without_the_mark_is_refused_before_any_attack(suspects, case, tmp_path):
    unmarked = Suspects(load_model(case.base), case.key, suspects.kit, suspects.config)
    with pytest.raises(AttackError, match="does not carry this key's mark"):
        run_suite(unmarked, QUICK, tmp_path / "out", SOURCES)
    assert not (tmp_path / "out").exists()


def test_a_mark_on_top_is_tracked_and_disputed(suspects, tmp_path):
    over = Case("on top", (step("overwrite", epochs=3, samples=64, objective="paper"),))
    (row,) = run_suite(suspects, [over], tmp_path, SOURCES).rows
    assert row.thief_wsr.hits > row.thief_wsr.n / 2
    assert row.dispute.contains[0] is False  # the owner's release has nothing of the thief's
    assert row.dispute.prior != 1
    assert "prior release: owner's" in cells([row])["verdict"]


def test_a_stopped_run_goes_on_and_another_measurement_is_refused(suspects, tmp_path, monkeypatch):
    run_suite(suspects, QUICK[:2], tmp_path, SOURCES)
    measured = []
    monkeypatch.setattr(Suspects, "measure", lambda self, case, unfinished: measured.append(case.name) or failed(case))
    results = run_suite(suspects, QUICK[:3], tmp_path, SOURCES)
    assert measured == ["half the experts"]
    assert [row.case for row in results.rows] == ["none", "permuted", "half the experts"]
    with pytest.raises(AttackError, match="another measurement, which differs in model_sha256, original_sha256"):
        run_suite(suspects, QUICK, tmp_path, Sources(model_sha256="b" * 64, original_sha256="c" * 64))
    other = Suspects(suspects.model, suspects.key, suspects.kit, replace(suspects.config, seed=1))
    with pytest.raises(AttackError, match="differs in seed"):
        run_suite(other, QUICK, tmp_path, SOURCES)


def failed(case):
    return case.without_figures("refused", "in a test")


def test_what_exceeds_the_budget_is_listed_and_run_the_next_time(suspects, tmp_path):
    slow = Case("slow", (step("permute-experts"),), minutes=60.0)
    hurried = Suspects(suspects.model, suspects.key, suspects.kit, replace(suspects.config, hours=0.1))
    results = run_suite(hurried, (QUICK[0], slow), tmp_path, SOURCES)
    assert [row.status for row in results.rows] == ["measured", "not run"]
    assert "not run: it would exceed" in table(results.rows)
    results = run_suite(suspects, (QUICK[0], slow), tmp_path, SOURCES)
    assert [row.status for row in results.rows] == ["measured", "measured"]


def test_every_case_of_the_suites_can_be_configured():
    for case in SUITES["full"]:
        for each in case.steps:
            ATTACKS[each.attack].configure(**each.settings)
    assert SUITES["full"] == (*PAPER, *BEYOND)
    names = [case.name for case in SUITES["full"]]
    assert len(names) == len(set(names))
    used = {each.attack for case in SUITES["full"] for each in case.steps}
    assert used == set(ATTACKS)  # every attack has its row


READING = {"accuracy": 0.9, "erased_layers": (), "alignment": None, "log10_p": -9.0}
ROW = Measured(
    case="a", group="a", steps=(), wsr=Rate(90, 100), p_value=1e-9, black_box=None, ppl_before=10.0, ppl=11.0,
    ppl_thief_before=None, ppl_thief=None,
    marked=True, id=1, id_right=True, p_floor=1e-9, grafted=None, n_probes=100, n_tokens=1000, thief_wsr=None,
    dispute=None, attack_seconds=1.0, seconds=2.0, **READING,
)  # fmt: skip
HEADER = Header(
    format="pathmark-robustness", version=3, package="0", torch=None, model_sha256=None, original_sha256=None,
    texts_sha256={}, key=None, seed=0, n_probes=100, settings={},
)  # fmt: skip


def test_every_attack_has_its_place_in_the_legend():
    of = {group: kind for kind, groups in KINDS.items() for group in groups}
    assert of.keys() - {"combination"} == ATTACKS.keys()
    assert len(KINDS) <= len(MARKERS) <= len(HUES)  # two kinds never look alike
    several = [replace(ROW, group=group, steps=(step("rtn"),)) for group in ("combination", "reap", "rtn", "gptq")]
    assert kinds_of(several) == ["fewer bits", of["reap"], of["combination"]]


def test_keys_are_pooled_in_one_line():
    row, reading = ROW, READING
    other = replace(row, wsr=Rate(100, 100), p_value=1e-3, marked=False, ppl=13.0)
    wsr, p, right, asked, ppl, thief, verdict = cells([row, other]).values()
    assert wsr.startswith("190/200")
    assert p == "1.0e-03"  # the worst
    assert evidence_left(row) == 9.0
    fed = Reading(**reading | {"log10_p": -12.0}, wsr=Rate(99, 100), p_value=1e-8)
    both = [replace(row, grafted=fed), replace(other, grafted=fed)]
    assert evidence_left(both[0]) == pytest.approx(12 - math.log10(2))  # the better of two tries
    assert cells([replace(each, marked=True) for each in both])["verdict"].endswith(
        "**lost** in 1 (found in 1 behind the original's lower layers)"
    )
    assert (right, asked, ppl, thief) == ("2 of 2", "", "12.0 (+20.0 %)", "")
    assert "black box" not in table([row, other])
    assert verdict == "marked 1 of 2, **lost** in 1"


def test_a_ruined_model_decides_nothing_and_a_useful_one_does():
    ruined = replace(ROW, ppl=30.0, ppl_thief_before=20.0, ppl_thief=31.0, p_value=0.5, log10_p=-0.3, marked=False)
    ruined = replace(ruined, steps=(step("rtn", bits=2),))
    tuned = replace(ruined, ppl_thief=12.0)  # useless for what the original did, and better at what the thief wants
    assert ruined.destroyed
    assert not tuned.destroyed
    assert list(cells([ruined]).values())[-2:] == ["31.0 (+55.0 %)", "destroyed"]
    assert list(cells([tuned]).values())[-2:] == ["12.0 (-40.0 %)", "**lost**"]
    assert (cost(ruined), cost(tuned)) == (pytest.approx(55), 0.01)
    assert lost(tuned)
    assert not lost(ruined)
    assert not lost(ROW)
    told = report(
        {"PTB": [RobustnessResult(header=HEADER, corpus="PTB", n_texts=9, layers=(1,), rows=(ruined, tuned))]}
    )
    assert told.startswith("2 measurements of attacks that need no other model; 1 of them left")
    assert "**Lost** in 1: a." in told
    assert "| a | 1 of 1 | 5.0e-01 | The weights moved further than the mark reaches. |" in told
    for train, remedy in (("lora", "What adapters do not touch stays as it was"), ("router", "Mark more layers")):
        trained = replace(tuned, group="fine-tune", steps=(step("fine-tune", train=train),))
        result = RobustnessResult(header=HEADER, corpus="PTB", n_texts=9, layers=(1,), rows=(trained,))
        assert remedy in report({"PTB": [result]})
    cheapest = "Of the attacks that win without another model the cheapest on clean text is a: +200.0 % on clean text"
    assert f"{cheapest} and -40.0 % on the thief's, p 5.0e-01 on that key; it wins on 1 of 1 keys." in told
    assert "1 of the usable ones are worse by that much on clean text" in told
    pruned = replace(tuned, case="b", ppl=10.4, ppl_thief=20.2)  # less on clean text, more on the other
    both = RobustnessResult(header=HEADER, corpus="PTB", n_texts=9, layers=(1,), rows=(pruned, tuned))
    assert "cheapest on clean text is b: +4.0 %" in report({"PTB": [both]})
    assert "Counted on the text that suffers less, it is a: " in report({"PTB": [both]})


def test_what_came_of_another_text_stands_beside_the_first():
    tuned = replace(ROW, steps=(step("rtn"),), p_value=0.5, marked=False, ppl=30.0, ppl_thief=2.0, ppl_thief_before=2.0)
    only_there = replace(tuned, case="b")
    first, second = (
        RobustnessResult(header=HEADER, corpus=corpus, n_texts=9, layers=(1,), rows=rows)
        for corpus, rows in (("PTB", (tuned,)), ("C4", (replace(tuned, p_value=1e-9), only_there)))
    )
    told = report({"PTB": [first], "C4": [second]}, {"Other": {"PTB": [first], "C4": [second]}})
    heading, _, of_a = told.partition("the thief's text is PTB")[2].strip().splitlines()[:3]
    assert heading.endswith("| verdict | with C4 | Other | Other with C4 |")
    found = "90/100 [82.4, 95.1]; 1.0e-09; +200.0 % / +0.0 %"
    missed = "90/100 [82.4, 95.1]; 5.0e-01; +200.0 % / +0.0 %; **lost**"
    assert [cell.strip() for cell in of_a.split("|")[-4:-1]] == [found, missed, found]
    assert told.count("\n| a |") == 2  # in its table, and among those that win
    assert "the thief's text is C4\n\n| attack" in told
    assert "| a | 1 of 1 with PTB | 5.0e-01 |" in told
    assert "cheapest on clean text is a with PTB: +200.0 %" in told


def test_every_case_stands_in_one_table():
    cases = {
        "none": (), "tuned": ("fine-tune",), "4 bit and tuned": ("gptq", "fine-tune"), "turned": ("rotate",),
        "turned and pruned": ("rotate", "fine-prune"), "averaged": ("average",), "averaged, tuned": ("average", "rtn"),
    }  # fmt: skip
    rows = tuple(replace(ROW, case=name, steps=tuple(step(one) for one in each)) for name, each in cases.items())
    told = report({"PTB": [RobustnessResult(header=HEADER, corpus="PTB", n_texts=9, layers=(1,), rows=rows)]})
    tables = {part.splitlines()[0]: part for part in told.split("### ") if "| attack | WSR" in part}
    where = [[title for title, part in tables.items() if f"\n| {name} |" in part] for name in cases]
    survives, else_, other = tables
    assert where == [[survives], [survives], [survives], [else_], [else_], [other], [other]]


def test_the_paper_s_cell_is_run_at_the_rate_that_serves_the_thief_best():
    sweep = [
        replace(ROW, case=f"tuning, rate {rate:g}", steps=(step("fine-tune", lr=rate),), ppl_thief=ppl)
        for rate, ppl in ((1e-4, 30.0), (1e-3, 20.0), (1e-2, 90.0))
    ]
    cell = Case("cell", (step("rtn", bits=4), step("fine-tune", samples=9)), best_of="tuning, rate")
    assert cell.at_best_rate(sweep).steps == (step("rtn", bits=4), step("fine-tune", samples=9, lr=1e-3))
    assert cell.at_best_rate([]) == cell


def test_a_p_that_no_attack_could_have_left_smaller_says_so():
    floor = replace(ROW, p_value=1.006e-6, p_floor=1.006e-6, marked=False)
    assert cells([ROW, floor])["exact p"] == "1.006e-06 (no smaller one is left)"
    assert cells([replace(floor, p_floor=1e-9)])["exact p"] == "1.006e-06"
    assert cells([ROW])["exact p"] == "1.0e-09"


def test_a_row_that_only_a_later_key_has_stands_where_it_belongs():
    first = [replace(ROW, case=name) for name in ("none", "a", "c")]
    later = [replace(ROW, case=name) for name in ("none", "a", "b", "c", "d")]
    lines = table([*first, *later]).splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == ["none", "a", "b", "c", "d"]
    lines = table([*first, *later], order=["d", "none", "c", "b"]).splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == ["d", "none", "c", "b", "a"]
