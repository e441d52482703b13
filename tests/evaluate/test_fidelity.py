"""MMLU and GSM8K: task files of our own, and lm-eval over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pathmark.errors import ModelError
from pathmark.evaluate.reproduce.fidelity import Room, evaluated, write_gsm8k, write_mmlu
from pathmark.models import load_model, load_tokenizer


def test_task_files_hold_the_questions_that_were_named(tmp_path):
    write_questions(tmp_path)
    room = Room(letters, 1000)
    name, shots = write_mmlu("global_facts", tmp_path, tmp_path, tmp_path / "tasks", room, 4)
    task = json.loads((tmp_path / "tasks" / f"{name}.yaml").read_text())
    assert task["num_fewshot"] == shots == 5
    asked = Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
    assert json.loads(asked[0]) == {"question": "1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1}
    (tmp_path / "global_facts_test.csv").write_text("only,three,columns\n")
    with pytest.raises(ModelError, match="expected question, four choices and a letter"):
        write_mmlu("global_facts", tmp_path, tmp_path, tmp_path / "tasks", room, 4)
    with pytest.raises(ModelError, match="expected MMLU's file of that name"):
        write_mmlu("machine_learning", tmp_path, tmp_path, tmp_path / "tasks", room, 4)
    (tmp_path / "bad.jsonl").write_text('{"question": "1 + 1?"}\n')
    with pytest.raises(ModelError, match="expected JSON lines with question and answer"):
        write_gsm8k(tmp_path / "bad.jsonl", tmp_path / "gsm_test.jsonl", tmp_path / "tasks", room, 4)


def letters(text):
    """A tokenizer of single letters."""
    return {"input_ids": list(text)}


def test_no_more_examples_than_leave_room_for_every_question():
    about, examples, questions = "about", ["x" * 8] * 5, ["q" * 9, "q" * 20]
    for tokens, shots in ((1000, 5), (8 + 5 + 20 + 3 * 10, 3), (8 + 5 + 20 + 3 * 10 - 1, 2), (10, 0)):
        assert Room(letters, tokens).shots(about, examples, questions) == shots


def write_questions(folder):
    for split, count in (("dev", 5), ("test", 6)):
        (folder / f"global_facts_{split}.csv").write_text("1 + 1?,1,2,3,4,B\n" * count)
        lines = json.dumps({"question": "1 + 1?", "answer": "It is 2.\n#### 2"}) + "\n"
        (folder / f"gsm_{split}.jsonl").write_text(lines * 9)


@pytest.mark.slow
def test_lm_eval_runs_offline_and_gives_one_answer_per_question(tmp_path):
    pytest.importorskip("lm_eval", reason="needs pathmark[eval]")
    write_questions(tmp_path)
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    room = Room(tokenizer, 512)
    name, _ = write_mmlu("global_facts", tmp_path, tmp_path, tmp_path / "tasks", room, 4)
    first = evaluated(model, tokenizer, name, tmp_path / "tasks", 4, "acc")
    assert len(first) == 4
    assert set(first) <= {0, 1}
    assert first == evaluated(model, tokenizer, name, tmp_path / "tasks", 4, "acc")
    name, _ = write_gsm8k(tmp_path / "gsm_dev.jsonl", tmp_path / "gsm_test.jsonl", tmp_path / "tasks", room, 2)
    assert evaluated(model, tokenizer, name, tmp_path / "tasks", 2, "exact_match") == (0, 0)
