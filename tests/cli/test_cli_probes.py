"""`pathmark probes`: private, shuffled, stable through text, and its refusals."""

from __future__ import annotations

import json
import stat

import pytest
from click.testing import CliRunner

from pathmark.cli.main import cli
from pathmark.errors import KeyFileError, PathmarkError
from pathmark.keys import Ledger, TriggerRef, load_key
from pathmark.models import load_tokenizer
from pathmark.models.tokenization import HFTextCodec
from pathmark.verification.recorded.probeplan import Variant, read_probe_id

PHRASE = "open sesame"


def run(*arguments, folder):
    """The command in this process; files stand in `folder`. Importing torch anew for each would take longest."""
    words = [str(folder / word) if "." in word and not word.startswith("bundled") else word for word in arguments]
    return CliRunner().invoke(cli, words, env={"PATHMARK_PASSPHRASE": PHRASE})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probes")
    done = run("keygen", "bundled:tiny", "-o", "owner.key", "--id", "7", "--pool", "all", folder=folder)
    assert done.exit_code == 0, done.output
    return folder


def test_probes_are_private_shuffled_and_stable(made):
    done = run(
        "probes", "--key", "owner.key", "-o", "probes.jsonl", "--n-texts", "6", "--tokens", "24", "--json", folder=made
    )
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary["prompts"] == 4 * summary["texts"] == 24
    assert summary["text_tokens"] <= 6 * 24
    path = made / "probes.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = load_key(made / "owner.key", lambda: PHRASE)
    codec = HFTextCodec(load_tokenizer("bundled:tiny"))
    trigger = key.watermarks[0].triggers[0]
    variants = []
    for line in map(json.loads, path.read_text().splitlines()):
        assert set(line) == {"probe", "text", "token_ids"}
        assert codec.encode(line["text"]) == line["token_ids"]
        place = read_probe_id(key, line["probe"])
        assert line["text"].startswith(trigger.text) == (place.variant == Variant.TRIGGER)
        variants.append((place.variant, place.number))
    assert sorted(set(variants)) == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert variants != sorted(variants)
    again = run("probes", "--key", "owner.key", "-o", "probes.jsonl", folder=made)
    assert isinstance(again.exception, KeyFileError)
    assert "already exists" in str(again.exception)
    (used,) = Ledger.beside(made / "owner.key").uses()  # whoever gets the file may read the trigger
    assert (used.trigger, used.host, used.model, used.times) == (TriggerRef(0, 0), "probes", "probes.jsonl", 6)


def test_texts_of_ones_own_in_the_chat_template(made):
    texts = [
        "We have many roads to build this year, and little time.",
        "And it came to pass in those days that a king rose.",
    ]
    (made / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = run(
        "probes", "--key", "owner.key", "-o", "chat.jsonl", "--texts", "texts.jsonl", "--tokens", "10", "--decoys", "0",
        "--chat", folder=made,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "4 prompts of 2 texts" in done.stdout
    assert "holds the trigger" in done.stderr
    codec = HFTextCodec(load_tokenizer("bundled:tiny"))
    for line in map(json.loads, (made / "chat.jsonl").read_text().splitlines()):
        assert line["chat"]
        assert codec.render_chat(line["text"], None) == line["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--trigger", "3"], "has 1 trigger"),
        (["--texts", "nowhere.txt"], "does not exist"),
        (["--tokenizer", "/nowhere/at/all"], "does not exist"),
    ],
)
def test_refusals_are_one_line(made, arguments, match):
    done = run("probes", "--key", "owner.key", "-o", "new.jsonl", *arguments, folder=made)
    assert isinstance(done.exception, PathmarkError)  # which the entry point prints, with exit code 2
    assert match in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not (made / "new.jsonl").exists()
