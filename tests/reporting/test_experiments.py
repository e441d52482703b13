"""Pages and pictures of experiments, from the result file alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pathmark.errors import ResultError
from pathmark.reporting.barcode import read_barcode
from pathmark.reporting.experiment_plots import draw
from pathmark.reporting.experiments import comparison, figure_table, page, pooled
from pathmark.results import write_result
from pathmark.results.experiment import Point, read_experiment
from pathmark.results.paper import papers
from pathmark.stats import Rate

GOLDEN = Path(__file__).parent.parent / "golden" / "experiment-v1.json"


@pytest.fixture
def result():
    return read_experiment(GOLDEN)


def test_a_file_of_the_first_version_is_read_and_written_as_it_was(result, tmp_path):
    write_result(tmp_path / "again.json", result)
    assert (tmp_path / "again.json").read_text() == GOLDEN.read_text()


def test_a_table_has_all_keys_together_and_a_dash_where_the_paper_prints_nothing(result):
    lines = figure_table(result, "WSR").splitlines()
    assert lines[0] == "| | PathMark | EaaW | LearnMark |"
    assert lines[2].startswith("| none | 300/300 = 100.0 % [98.8, 100.0] / - | 96/96 = 100.0 % [96.2, 100.0] / - |")
    assert "| none | 42 (41 to 43) / - | 40.5 (40.5 to 40.5) / - |" in figure_table(result, "PPL")


def test_printed_numbers_stand_beside_ours_and_alone_where_ours_are_missing(result):
    pruned = replace(
        result, experiment="fig-pruning", points=tuple(p for p in result.points if p.at == "none" and p.key == 0)
    )
    table = figure_table(pruned, "WSR")
    assert "| none | 100/100 = 100.0 % [96.4, 100.0] / - | 32/32 = 100.0 % [89.1, 100.0] / 97 |" in table
    assert "| fine-pruning, 25 % | - / 90 | - / - | - / - | - / - |" in table
    assert "| strongest pruning | - / - | - / 69 | - / 36 | - / 30 |" in table


def test_one_place_alone_has_its_figures_down(result):
    found = replace(result, experiment="fig-motivation", points=tuple(p for p in result.points if p.at == "none"))
    text = page(found)
    assert "none (ours / paper)\n\n| | PathMark | EaaW | LearnMark |" in text
    assert "| PPL | 42 (41 to 43) / - | 40.5 (40.5 to 40.5) / - | - / - |" in text


def test_better_is_said_only_of_three_keys_and_of_intervals_apart(result):
    said, chance = comparison(result)
    assert chance == "Of EaaW's bits chance alone gets half right."
    above = "LearnMark (none), LearnMark (router noise, sigma 0.5), EaaW (router noise, sigma 0.5)"
    assert f"PathMark is above {above}." in said
    assert "PathMark is below LearnMark (router noise, sigma 2), EaaW (router noise, sigma 2)." in said
    assert "EaaW (none)" not in said  # 300 of 300 and 96 of 96
    nobody = ["With fewer than 3 keys no scheme is called better than another."]
    few = replace(result, points=tuple(point for point in result.points if point.key < 2))
    assert comparison(few) == [*nobody, chance]
    ours_few = replace(result, points=tuple(p for p in result.points if p.key < 1 or p.series != "PathMark"))
    assert comparison(ours_few) == [*nobody, chance]


def test_what_a_mark_costs_is_compared_where_no_two_keys_overlap(result):
    costs = {"PathMark": (0.5, 0.6, 0.7), "EaaW": (-0.7, 0.1, 0.2), "IFMark": (9.0, 12.0, 11.0), "KGW": (0.1, 0.6, 2.0)}
    points = tuple(
        Point(series=name, at="home", figure="change of PPL, %", key=key, value=value)
        for name, found in costs.items() for key, value in enumerate(found)
    )  # fmt: skip
    said = comparison(replace(result, points=points))
    assert said == [
        "PathMark costs less perplexity than IFMark (home).", "PathMark costs more perplexity than EaaW (home)."
    ]  # fmt: skip
    few = replace(result, points=tuple(point for point in points if point.key < 2))
    assert comparison(few) == []


def test_a_model_that_nobody_would_use_is_marked_and_compared_with_nobody(result):
    points = tuple(replace(p, destroyed=p.at == "router noise, sigma 2") for p in result.points)
    broken = replace(result, points=points)
    said, _ = comparison(broken)
    assert "PathMark is below" not in said
    assert "† / -" in figure_table(broken, "WSR")
    assert "perplexity rose by over 50 %" in page(broken)
    assert "†" not in page(result)


def test_a_page_says_what_stands_for_what_and_what_is_missing(result):
    text = page(result)
    for told in (
        "## Noise on the router's logits", '`fig-noise`, Figure "Robustness under router noise injection" of the paper',
        "3 keys, 100 held-out texts", "ptb for Penn Treebank", "compare directions, not numbers",
        "its perplexity on others means little", "- IFMark, none, key 0: the model does not carry this key's mark",
    ):  # fmt: skip
        assert told in text
    assert "--quick" not in text
    texts = {"home": "0" * 64, "ptb": "0" * 64}
    header = replace(
        result.header, texts_sha256=texts, settings={**result.header.settings, "files": {"ptb": "a/b.txt"}}
    )
    assert "Texts: home for WikiText-103; ptb (a/b.txt), where the paper" in page(replace(result, header=header))
    on_ptb = replace(result, header=header, points=tuple(replace(p, at="ptb") for p in result.points))
    assert "Texts: ptb (a/b.txt), where" in page(on_ptb)  # where rows are texts, no others were used
    quick = replace(result, header=replace(result.header, settings={"quick": True, "size": ""}))
    assert "Measured with --quick" in page(quick)


def test_every_experiment_has_a_page_before_anything_is_measured(result):
    for name in papers():
        text = page(replace(result, experiment=name, points=(), missing={}))
        assert f"`{name}`" in text


def test_a_figure_is_drawn_and_paths_become_barcodes_that_can_be_read(result, tmp_path):
    spread = tuple(
        Point(series=name, at="layer 7", figure="choices", key=0, values=(0.5, 0.2, 0.3)) for name in ("a", "b")
    )
    (picture,) = draw(replace(result, points=(*result.points, *spread)), tmp_path)
    assert picture.name == "fig-noise.png"
    assert picture.stat().st_size > 10_000
    path = Point(series="watermark 1", at="one model", figure="path", key=0, values=(11.0, 24.0, 5.0))
    for _ in range(2):  # again over what is there
        (barcode,) = draw(replace(result, experiment="real-case", points=(path,)), tmp_path)
        assert tuple(read_barcode(barcode)) == (11, 24, 5)


def test_a_point_has_one_value_and_keys_are_added_up():
    with pytest.raises(ValueError, match="expected a rate, a value or values"):
        Point(series="a", at="b", figure="c", key=0)
    both = [Point(series="a", at="b", figure="c", key=k, rate=Rate(k, 2)) for k in (1, 2)]
    assert pooled(both) == str(Rate(3, 4))
    assert pooled([]) == "-"


def test_other_files_are_refused(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"header": {"format": "other", "version": 1}}))
    with pytest.raises(ResultError, match="expected pathmark-experiment, version 1, got other"):
        read_experiment(tmp_path / "x.json")
