"""Result files: what is written is read, what is foreign, damaged or mixed is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pathmark.errors import ResultError
from pathmark.reporting.robustness import table
from pathmark.results import Header, RobustnessResult, pooled, read_robustness, write_result
from pathmark.results.robustness import Measured, Replies, Step, Unmeasured
from pathmark.results.schema import from_json, to_json
from pathmark.stats import Rate

HEADER = Header(
    format="pathmark-robustness",
    version=3,
    package="0.1.0",
    torch="2.0",
    model_sha256="a" * 64,
    original_sha256="b" * 64,
    texts_sha256={"thief": "c" * 64},
    key="1234-5678",
    seed=0,
    n_probes=100,
    settings={"trials": 0},
)
EMPTY = RobustnessResult(header=HEADER, corpus="bundled", n_texts=10, layers=(2, 3))
KEPT = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("robustness-*.json"))
ROW = Measured(
    case="noise", group="weight-noise", steps=(Step(attack="weight-noise", settings={"scale": 0.5}),), wsr=Rate(9, 10),
    accuracy=0.9, p_value=1e-9, log10_p=-9.0, erased_layers=(3,), alignment=None, ppl_before=10.0, ppl=11.0,
    ppl_thief_before=None, ppl_thief=None,
    p_floor=1e-10, grafted=None, marked=True, id=7, id_right=True, n_probes=10, n_tokens=100,
    black_box=Replies(hits=1, n=2, p_value=None), thief_wsr=None, dispute=None, attack_seconds=1.0, seconds=2.0,
)  # fmt: skip
LOST = Unmeasured(case="top-k", group="top-k", steps=(), status="refused", reason="no such layer")
FULL = replace(EMPTY, rows=(ROW, LOST))


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "deep" / "results.json"
    write_result(path, FULL)
    assert read_robustness(path) == FULL
    assert path.stat().st_mode & 0o077 == 0
    write_result(path, EMPTY)  # over the old one, in one move
    assert read_robustness(path) == EMPTY
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def change(*places_and_value):
    *places, last, value = places_and_value

    def apply(content):
        inner = content
        for place in places:
            inner = inner[place]
        if value is None:
            del inner[last]
        else:
            inner[last] = value

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            change("header", "format", "pathmark-many-keys"),
            "expected pathmark-robustness, version 3, got path",
        ),
        (change("header", "version", 2), "version 3, got pathmark-robustness, version 2"),
        (change("header", None), "is no result file"),
        (change("header", "seed", None), "damaged: it.header: expected the field seed"),
        (change("header", "note", "x"), "it.header: expected no field note"),
        (change("header", "model_sha256", "nonsense"), "expected a sha256"),
        (change("header", "n_probes", "ten"), "it.header.n_probes: expected a whole number"),
        (change("rows", 0, "wsr", "hits", 11), r"it.rows\[0\].wsr: expected 0 <= hits <= n"),
        (change("rows", 0, "marked", 1), r"it.rows\[0\].marked: expected true or false"),
        (change("rows", 0, "ppl", float("nan")), r"it.rows\[0\].ppl: expected a number"),
        (change("rows", 1, "status", "won"), r"it.rows\[1\].status: expected measured or destroyed or refused"),
        (change("rows", 1, "wsr", {}), r"it.rows\[1\]: expected no field wsr"),
    ],
)
def test_foreign_and_damaged_files_are_refused_in_one_line(tmp_path, spoil, message):
    content = json.loads(json.dumps(to_json(FULL)))
    spoil(content)
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ResultError, match=message) as caught:
        read_robustness(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b'{"header": 3}'])
def test_what_is_no_result_at_all_is_refused(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(ResultError, match="is no result file; expected pathmark-robustness, version 3"):
        read_robustness(path)
    with pytest.raises(ResultError, match=r"cannot read .*No such file"):
        read_robustness(tmp_path / "missing.json")


def test_files_of_one_measurement_are_pooled_and_a_mixture_is_refused():
    other = replace(EMPTY, header=replace(HEADER, key="8765-4321", model_sha256="d" * 64, seed=1))
    assert pooled({"a": EMPTY, "b": other}) == [EMPTY, other]
    assert pooled({}) == []
    foreign = replace(other, header=replace(other.header, texts_sha256={"thief": "e" * 64}, n_probes=50))
    with pytest.raises(ResultError, match="b and a do not mix: they differ in texts_sha256, n_probes"):
        pooled({"a": EMPTY, "b": foreign})
    with pytest.raises(ResultError, match="c and b are the same measurement; keep one"):
        pooled({"a": EMPTY, "b": other, "c": other})


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_the_kept_files_are_read_and_rendered(path):
    result = read_robustness(path)
    assert from_json(type(result), to_json(result)) == result
    assert result.rows[0].case == "none"
    assert table(result.rows).count("\n") == 2 + len({row.case for row in result.rows})


def test_there_are_kept_files():
    assert KEPT
