"""MMLU and GSM8K before and after, through lm-eval, offline: task files of our own over files that the user names."""

from __future__ import annotations

import csv
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from pathmark.errors import MissingLibraryError, ModelError
from pathmark.evaluate.reproduce.bench import OURS, Bench
from pathmark.evaluate.reproduce.running import Cell, Figure
from pathmark.stats import Rate

SUBJECTS = ("global_facts", "machine_learning", "professional_law", "high_school_physics")
LETTERS = ("A", "B", "C", "D")
MMLU_SHOTS, GSM_SHOTS = 5, 8
GSM_TOKENS, ANSWER_TOKENS = 256, 8
"""Of an answer, as in lm-eval's own task: shorter ones are cut off before their result; and room for a letter."""
LIMITS, QUICK_LIMITS = (300, 100), (4, 2)
"""Questions of each MMLU subject, and of GSM8K."""
GSM = "GSM8K"
ASKED = (LIMITS, QUICK_LIMITS, MMLU_SHOTS, GSM_SHOTS, GSM_TOKENS)
"""What decides the figures besides the files."""
QUIETLY = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
"""Files are all that it gets, and its bars are not ours to show."""


def benchmarks(bench: Bench) -> Iterable[Cell]:
    """Right answers of the original and of marked copies; of these also the difference on the same questions."""
    limit = bench.pick(LIMITS, QUICK_LIMITS)

    @cache
    def original(task: str) -> tuple[tuple[int, ...], int]:
        return _right(bench, task, bench.original, limit)

    def measured(task: str, key: int | None) -> Mapping[str, Figure]:
        before, shots = original(task)
        if key is None:
            return {"accuracy": Rate(sum(before), len(before)), "examples before a question": shots}
        after, _ = _right(bench, task, bench.ours(key).model, limit)
        change = np.array(after) - np.array(before)
        error = float(change.std(ddof=1) / len(change) ** 0.5) if len(change) > 1 else 0.0
        return {
            "accuracy": Rate(sum(after), len(after)),
            "difference, %": 100 * float(change.mean()),
            "its standard error, %": 100 * error,
        }

    tasks = [*(f"MMLU {subject.replace('_', ' ')}" for subject in SUBJECTS), GSM]
    for task in tasks:
        yield Cell("original", task, 0, partial(measured, task, None))
    for key in range(bench.keys):
        for task in tasks:
            yield Cell(OURS, task, key, partial(measured, task, key))


def _right(bench: Bench, task: str, model: PreTrainedModel, limit: tuple[int, int]) -> tuple[tuple[int, ...], int]:
    """1 or 0 for each question, and how many examples stood before it."""
    folder, room = bench.folder / "tasks", Room(bench.tokenizer, model.config.get_text_config().max_position_embeddings)
    if task == GSM:
        train, test = (bench.corpora.path("gsm8k", use) for use in ("train", "test"))
        name, shots = write_gsm8k(train, test, folder, room, limit[1])
        return evaluated(model, bench.tokenizer, name, folder, limit[1], "exact_match"), shots
    subject = task.removeprefix("MMLU ").replace(" ", "_")
    dev, test = (bench.corpora.path("mmlu", use) for use in ("dev", "test"))
    name, shots = write_mmlu(subject, dev, test, folder, room, limit[0])
    return evaluated(model, bench.tokenizer, name, folder, limit[0], "acc"), shots


@dataclass(frozen=True)
class Room:
    """What fits before a question; what does not, lm-eval would cut off on the left."""

    tokenizer: Any
    tokens: int
    """Of the model's context."""

    def shots(self, about: str, examples: Sequence[str], questions: Sequence[str], answer: int = ANSWER_TOKENS) -> int:
        """So many of the examples leave room for every question and its answer."""

        def size(text: str) -> int:
            return len(self.tokenizer(text)["input_ids"])

        left = self.tokens - answer - size(about) - max(map(size, questions))
        fitting = takewhile(lambda used: used <= left, accumulate(size(text + "\n\n") for text in examples))
        return len(list(fitting))


def evaluated(
    model: PreTrainedModel, tokenizer: Any, task: str, folder: Path, limit: int, metric: str
) -> tuple[int, ...]:
    """Ask a model in memory the first questions of a task in this folder."""
    os.environ.update(QUIETLY, HF_DATASETS_CACHE=str(folder / "cache"))  # before it is imported
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingLibraryError("benchmarks need lm-eval; install pathmark[eval]") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    done = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4),
        tasks=[task],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        limit=limit,
        log_samples=True,
        bootstrap_iters=0,
    )
    answers = sorted(done["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return tuple(int(sample[metric]) for sample in answers)


def write_mmlu(subject: str, dev: Path, test: Path, folder: Path, room: Room, limit: int) -> tuple[str, int]:
    """The task file of a subject, from the folders with its CSV files; its name, and the examples it shows."""
    name, files, read = f"pathmark_mmlu_{subject}", {}, {}
    for split, place in (("dev", dev), ("test", test)):
        source = place / f"{subject}_{split}.csv"
        if not source.is_file():
            raise ModelError(f"{source} does not exist; expected MMLU's file of that name in {place}")
        rows = []
        with source.open(newline="", encoding="utf-8") as stream:
            for line in csv.reader(stream):
                if len(line) != 6 or line[5] not in LETTERS:
                    raise ModelError(f"{source}: expected question, four choices and a letter per line, got {line[:6]}")
                rows.append({"question": line[0], "choices": line[1:5], "answer": LETTERS.index(line[5])})
        files[split], read[split] = _lines(folder / f"{name}-{split}.jsonl", rows), rows
    shown = "".join(f"\n{letter}. {{{{choices[{place}]}}}}" for place, letter in enumerate(LETTERS))
    about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    asked = {split: list(map(_question, rows)) for split, rows in read.items()}
    shots = room.shots(about, asked["dev"][:MMLU_SHOTS], asked["test"][:limit])
    _task(folder / f"{name}.yaml", name, files, {
        "test_split": "test", "fewshot_split": "dev", "num_fewshot": shots, "description": about,
        "output_type": "multiple_choice", "doc_to_text": "{{question.strip()}}" + shown + "\nAnswer:",
        "doc_to_choice": list(LETTERS), "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    })  # fmt: skip
    return name, shots


def _question(row: Mapping[str, Any]) -> str:
    choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=True))
    return f"{row['question'].strip()}{choices}\nAnswer: {LETTERS[row['answer']]}"


def write_gsm8k(train: Path, test: Path, folder: Path, room: Room, limit: int) -> tuple[str, int]:
    """The task file of GSM8K, from its JSON lines; its name, and the examples it shows."""
    name = "pathmark_gsm8k"
    files = {split: str(place.resolve()) for split, place in (("train", train), ("test", test))}
    examples = [f"Question: {question}\nAnswer: {answer}" for question, answer in _solved(train, GSM_SHOTS)]
    asked = [f"Question: {question}\nAnswer:" for question, _ in _solved(test, limit)]
    shots = room.shots("", examples, asked, GSM_TOKENS)
    _task(folder / f"{name}.yaml", name, files, {
        "test_split": "test", "fewshot_split": "train", "num_fewshot": shots,
        "output_type": "generate_until", "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["Question:"], "do_sample": False, "max_gen_toks": GSM_TOKENS},
        "filter_list": [{"name": "last-number", "filter": [
            {"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"}, {"function": "take_first"},
        ]}],
        "metric_list": [{
            "metric": "exact_match", "aggregation": "mean", "higher_is_better": True,
            "regexes_to_ignore": [",", "(?s).*#### "],
        }],
    })  # fmt: skip
    return name, shots


def _solved(file: Path, count: int) -> list[tuple[str, str]]:
    """The first questions and answers of a file of JSON lines."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:count]]
        return [(str(row["question"]), str(row["answer"])) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: expected JSON lines with question and answer, got {error!r}") from error


def _lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path.resolve())


def _task(path: Path, name: str, files: Mapping[str, str], settings: Mapping[str, Any]) -> None:
    """A task file for lm-eval; JSON is YAML too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    task = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": dict(files)},
        "fewshot_config": {"sampler": "first_n"}, "metadata": {"version": 1.0}, **settings,
    }  # fmt: skip
    path.write_text(json.dumps(task, indent=1) + "\n", encoding="utf-8")
