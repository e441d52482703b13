"""The commands that verify and trace: exit codes, JSON, logs, refusals; nothing secret in what they print."""

from __future__ import annotations

import datetime
import json
import shutil
import stat
import sys
from importlib.resources import files
from pathlib import Path

import fake_api
import jsonschema
import pytest
import torch
from click.testing import CliRunner
from embed_helpers import key_for
from tsa import Authority
from verify_helpers import PASSPHRASE

from pathmark.cli.main import cli
from pathmark.errors import PathmarkError, VerificationError
from pathmark.keys import Ledger, Registry, save_key
from pathmark.keys.timestamps import existed_by
from pathmark.models import load_model, load_tokenizer
from pathmark.models.checkpoint import write_model
from pathmark.verdicts import claims
from pathmark.verification.recorded.routefile import write_routes

DAY = datetime.timedelta(days=1)
REPLIES = json.loads(files("pathmark.verification").joinpath("blackbox.schema.json").read_text())
SCHEMA = json.loads(files("pathmark.verification").joinpath("verify.schema.json").read_text())


@pytest.fixture(autouse=True)
def _passphrase(monkeypatch):
    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)


def run(*arguments):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit | PathmarkError):
        raise result.exception
    return result


def test_marked_is_zero_and_json_follows_the_schema(case):
    result = run("verify", case.marked, "--key", case.key_file, "--n-texts", 8, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    jsonschema.validate(found, SCHEMA)
    assert found["marked"]
    assert found["id"] in (3, None)  # a mark of 60 steps may be found before its id can be read
    assert found["n_probes"] == 8
    assert not found["anchored"]
    assert found["alignment"]["identity"]


def test_unmarked_is_one_in_words(case):
    result = run("verify", case.base, "--key", case.key_file, "--n-texts", 6)
    assert result.exit_code == 1
    assert "\nNot found.\n" in result.output


def test_nothing_secret_is_printed_or_logged(case, tmp_path):
    log = tmp_path / "case-1"
    result = run("verify", case.marked, "--key", case.key_file, "--n-texts", 6, "--log", log, "--obtained", "bought")
    assert result.exit_code == 0, result.output
    trigger = case.key.watermarks[0].triggers[0]
    written = result.output + "".join(path.read_text() for path in log.iterdir())
    for secret in (trigger.phrase.text.strip(), str(list(trigger.tokens)), case.key.secret.reveal().hex()):
        assert secret not in written
    for layer in case.key.watermarks[0].layers:
        assert str(list(case.key.watermarks[0].targets(layer))) not in written
    assert {path.name for path in log.iterdir()} == {"verdict.json", "probes.jsonl", "suspect.json"}
    assert stat.S_IMODE(log.stat().st_mode) == 0o700
    provenance = json.loads((log / "suspect.json").read_text())
    assert provenance["obtained"] == "bought"
    assert any(file["path"] == "model.safetensors" for file in provenance["files"])
    lines = [json.loads(line) for line in (log / "probes.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert all(line["accuracy_triggered_0"] > line["accuracy_clean_0"] for line in lines)
    again = run("verify", case.marked, "--key", case.key_file, "--n-texts", 6, "--log", log, "--obtained", "x")
    assert isinstance(again.exception, PathmarkError)


def break_embedding(case, out):
    """The marked model with the rows of its embedding shuffled."""
    model = load_model(case.marked)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.copy_(weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))])
    write_model(model, load_tokenizer(case.marked), out)


@pytest.mark.parametrize("stream", ["never", "always"])
def test_a_graft_is_logged_with_its_original(case, stream, tmp_path):
    """This key marks all layers, so what is broken below them is the embedding."""
    break_embedding(case, tmp_path / "broken")
    common = ("verify", tmp_path / "broken", "--key", case.key_file, "--n-texts", 8, "--stream", stream)
    assert run(*common).exit_code == 1
    log = tmp_path / "case-2"
    result = run(*common, "--original", case.base, "--json", "--log", log, "--obtained", "found")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    jsonschema.validate(found, SCHEMA)
    assert found["grafted"]
    assert found["id"] in (3, None)  # a mark of 60 steps may be found before its id can be read
    assert not found["other_reading"]["grafted"]
    assert found["other_reading"]["p_value"] > 1e-3
    lines = [json.loads(line) for line in (log / "probes.jsonl").read_text().splitlines()]
    assert all(line["accuracy_grafted_triggered_0"] > line["accuracy_triggered_0"] for line in lines)
    original = json.loads((log / "suspect.json").read_text())["original"]
    assert any(file["path"] == "model.safetensors" for file in original["files"])
    assert run(*common, "--original", case.base, "--strict").exit_code != 0  # a third party need not trust the original


def test_an_original_of_another_build_is_a_note(case):
    result = run("verify", case.marked, "--key", case.key_file, "--n-texts", 6, "--original", "bundled:tiny")
    assert result.exit_code == 0, result.output
    assert "not read behind the original's lower layers: expected an original of the same build" in result.output


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command as an authority")
def test_strict_needs_a_commitment_that_somebody_else_dated(case, tmp_path, monkeypatch):
    common = ("verify", case.marked, "--key", case.key_file, "--n-texts", 6, "--strict")
    undecided = run(*common)
    assert undecided.exit_code == 2
    assert "\nUndecided.\n" in undecided.output
    found = json.loads(run(*common, "--json").stdout)
    assert (found["verdict"], found["marked"]) == ("undecided", None)
    authority, commitment = Authority(tmp_path / "authority"), tmp_path / "key.commitment.json"
    request, answer = tmp_path / "q.tsq", tmp_path / "a.tsr"
    made = run("commit", case.key_file, "-o", commitment, "--timestamp-request", request)
    assert made.exit_code == 0, made.output
    today = datetime.datetime.now(datetime.UTC).date()
    dated = (*common, "--commitment", commitment, "--suspect-published", today, "--json")
    trusting = (*dated, "--timestamp-roots", authority.root)
    assert run(*trusting).exit_code == 2  # nobody has stamped it yet
    answer.write_bytes(authority.answer(request.read_bytes()))
    stamped = run("commit", "--stamp", commitment, "--timestamp", answer)
    assert stamped.exit_code == 0, stamped.output
    checked = run("commit", "--check", commitment, "--timestamp-roots", authority.root)
    assert checked.exit_code == 0
    assert f"existed no later than {today}" in checked.output
    assert "which counts for nobody else" in run("commit", "--check", commitment).output
    assert "is not older than the suspect" in json.loads(run(*trusting).stdout)["anchor"]["reason"]
    # as if it had been stamped two days ago; without a stamp there is nothing to move
    monkeypatch.setattr(claims, "existed_by", lambda made, roots: (roots and existed_by(made, roots) - 2 * DAY) or None)
    result = run(*trusting)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["anchored"]
    assert run(*dated).exit_code == 2  # the reader trusts no authority


def test_the_verdict_outlives_its_log(case, tmp_path, monkeypatch):
    def full(*args, **options):
        raise VerificationError("no space left on device")

    monkeypatch.setattr("pathmark.front_door.verify.write_log", full)
    result = run("verify", case.marked, "--key", case.key_file, "--n-texts", 6, "--log", tmp_path / "log")
    assert isinstance(result.exception, VerificationError)
    assert "\nFound.\n" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "MARKED", "--significance", "0"), "not in the range 0<x<1"),
        (("verify", "/nowhere/at/all"), "does not exist"),
        (("verify", "MARKED", "--original", "/nowhere/at/all"), "does not exist"),
        (("verify", "MARKED", "--log", "/tmp"), "already exists"),
        (("verify", "MARKED", "--suspect-published", "2999-01-01"), "yet to come"),
        (("verify-routes", "/nowhere.jsonl"), "nowhere.jsonl"),
        (("verify-routes", "/nowhere.jsonl", "--log", "/tmp"), "already exists"),
        (("verify-api", "http://127.0.0.1:9/v1"), "needs --model"),
        (("verify-api", "http://127.0.0.1:9/v1", "--model", "m", "--base", "b"), "--base is for a model folder"),
        (("verify-api", "MARKED", "--model", "m"), "--model is for an API"),
        (("verify-api", "MARKED", "--timeout", "5", "--concurrency", "2"), "--timeout, --concurrency is for an API"),
        (("verify-api", "MARKED", "--api-key-env", "X"), "--api-key-env is for an API"),
        (("verify-api", "./no/such/folder"), "the URL of an API begins with http:// or https://"),
    ],
)
def test_bad_input_is_one_line(case, arguments, said):
    given = [str(case.marked) if argument == "MARKED" else argument for argument in arguments]
    result = run(*given, "--key", case.key_file)
    known = isinstance(result.exception, PathmarkError)
    assert known or result.exit_code == 2
    assert said in (str(result.exception) if known else result.output)


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "x", "--model", "m"),
        ("verify", "x", "--trials", "5"),
        ("verify-api", "x", "--original", "y"),
        ("verify-api", "x", "--gamma", "0.5"),
        ("verify-routes", "x", "--base", "y"),
        ("trace-routes", "x", "--registry", "r", "--original", "y"),
    ],
)
def test_options_that_do_not_apply_are_unknown(case, arguments):
    result = run(*arguments, "--key", case.key_file)
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_replies_of_an_api_and_of_a_folder(case, tmp_path):
    key = key_for("bundled:tiny", triggers=4)
    save_key(key, tmp_path / "owner.key", PASSPHRASE)
    log = tmp_path / "replies.jsonl"
    common = ("--key", tmp_path / "owner.key", "--trials", 6, "--max-tokens", 16, "--json")
    with fake_api.FakeApi(fake_api.marked(key)) as api:
        result = run("verify-api", api.url, "--model", "suspect", *common, "--log", log, "--redact")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    jsonschema.validate({name: value for name, value in found.items() if name not in ("suspect", "access")}, REPLIES)
    assert (found["suspect"], found["access"], found["marked"]) == (api.url, "replies", True)
    assert key.watermarks[0].triggers[0].text not in log.read_text()
    assert {use.model for use in Ledger.beside(tmp_path / "owner.key").uses()} == {"suspect"}
    local = run("verify-api", case.base, "--key", case.key_file, "--trials", 4, "--max-tokens", 8)
    assert local.exit_code in (1, 2), local.output  # it was never taught to reply
    assert "from replies (chat)" in local.output


def test_recorded_routes(case, tmp_path):
    assert run("probes", "--key", case.key_file, "-o", tmp_path / "probes.jsonl", "--n-texts", 8).exit_code == 0
    sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
    from record_routes_transformers import record

    lines = [json.loads(line) for line in (tmp_path / "probes.jsonl").read_text().splitlines()]
    prompts = [(line["probe"], line["token_ids"]) for line in lines]
    write_routes(tmp_path / "routes.jsonl", record(load_model(case.marked), prompts, masses=True))
    log = tmp_path / "case-3"
    result = run("verify-routes", tmp_path / "routes.jsonl", "--key", case.key_file, "--json", "--log", log)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    jsonschema.validate(found, SCHEMA)
    assert found["access"] == "routes"
    assert json.loads((log / "suspect.json").read_text())["obtained"] == "not stated"
    Registry(tmp_path / "licensees.db").issue(case.key, "Ada Ltd")
    words = ("--key", case.key_file, "--registry", tmp_path / "licensees.db", "--significance", "1e-3")
    traced = run("trace-routes", tmp_path / "routes.jsonl", *words)
    assert traced.exit_code == 0, traced.output
    assert "(the owner's own copy)" in traced.output


def test_trace(case, tmp_path):
    book = tmp_path / "licensees.db"
    for name in ("Ada Ltd", "Brecht GmbH"):
        Registry(book).issue(case.key, name)
    common = ("--key", case.key_file, "--registry", book, "--n-texts", 10, "--significance", "1e-3", "--json")
    result = run("trace", case.marked, *common)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["licensee"] == "(the owner's own copy)"
    assert found["id"] in (3, None)  # a mark of 60 steps may be found before its id can be read
    assert run("trace", case.base, *common).exit_code == 1
    break_embedding(case, tmp_path / "broken")
    assert run("trace", tmp_path / "broken", *common).exit_code == 1
    result = run("trace", tmp_path / "broken", *common, "--original", case.base)
    assert result.exit_code == 2, result.output  # what only the original shows is a lead and names nobody
    found = json.loads(result.stdout)
    assert (found["decision"], found["licensee"], found["id"]) == ("lead", None, None)
    assert found["grafted"]["best"] == "(the owner's own copy)"
    assert "names nobody" in found["words"]
    both = json.loads(run("trace", case.marked, *common, "--original", case.base).stdout)
    assert both["decision"] == "licensee"
    assert both["family"]["statistics"] == 2
    assert "could have made any licensee's copy" in both["words"]
