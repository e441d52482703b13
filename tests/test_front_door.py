"""The front door: lazy, documented, and each function's result in summary and in words."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import fake_api
import pytest
from embed_helpers import key_for
from verify_helpers import PASSPHRASE

import pathmark
from pathmark.errors import AttackError, KeyFileError, ReportError, VerificationError
from pathmark.models import bundled_probes
from pathmark.release.scan import ScanConfig
from pathmark.verification import LocalBackend

ROOT = Path(__file__).parent.parent
FUNCTIONS = [
    "inspect_model", "make_key", "embed", "verify", "verify_api", "verify_routes", "trace", "trace_routes", "attack",
    "commit", "report", "check_evidence", "replay_evidence",
]  # fmt: skip
FEW = {"steps": 4, "n_texts": 16, "n_held_out": 8, "seq_len": 32, "batch_size": 6}
SCAN = ScanConfig(random_sequences=5, per_count=2)


@pytest.fixture(autouse=True)
def _passphrase(monkeypatch):
    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)


def told(result):
    """What a result says, as JSON; its words are sentences."""
    assert result.words().strip()
    return json.loads(json.dumps(result.summary()))


def test_nothing_is_loaded_before_it_is_used():
    code = (
        "import sys, pathmark; dir(pathmark); pathmark.__version__; pathmark.commit\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example_one_config_and_few_parameters(name):
    function = getattr(pathmark, name)
    assert "Example:\n" in function.__doc__
    assert f"pathmark.{name}(" in function.__doc__.partition("Example:")[2]
    parameters = inspect.signature(function).parameters.values()
    assert len(parameters) <= 8
    result = re.sub(r"^.*\.", "", str(inspect.signature(function).return_annotation))
    assert {"summary", "words"} <= set(dir(getattr(pathmark, result)))


def test_inspect_model():
    seen = pathmark.inspect_model("bundled:tiny", pathmark.InspectConfig(width=2, watermark_layers=4))
    assert told(seen)["watermark_layers"] == [4, 5, 6, 7]
    assert "evidence" in seen.words()


def test_make_key_in_memory_and_on_disk(tmp_path):
    plan = pathmark.KeyPlan(owner="Example Lab", ids=(7,), pool="all")
    assert pathmark.make_key("bundled:tiny", plan).file is None
    made = pathmark.make_key("bundled:tiny", plan, output=tmp_path / "owner.key")
    assert told(made)["watermarks"][0]["id"] == 7
    assert made.key.watermarks[0].triggers[0].text not in made.words() + json.dumps(made.summary())
    assert pathmark.load_key(tmp_path / "owner.key").fingerprint == made.key.fingerprint
    with pytest.raises(KeyFileError, match="already exists"):
        pathmark.make_key("bundled:tiny", plan, output=tmp_path / "owner.key")


def test_embed_amends_the_key_file_and_leaves_its_report(tmp_path, monkeypatch):
    monkeypatch.setattr("pathmark.release.scan.WHOLE_VOCABULARY", 200)
    plan = pathmark.KeyPlan(pool="all")
    owner = pathmark.make_key("bundled:tiny", plan, output=tmp_path / "owner.key", passphrase="another").key
    given = pathmark.EmbedPlan(id=5, scan=SCAN, **FEW)
    copy = pathmark.embed("bundled:tiny", tmp_path / "owner.key", tmp_path / "out", given, passphrase="another")
    assert told(copy)["output"] == str(tmp_path / "out")
    assert not copy.fit
    assert "The copy is not fit for release" in copy.words()
    assert json.loads(copy.report.read_text()) == copy.summary()
    kept = pathmark.load_key(tmp_path / "owner.key", "another")
    assert "profiles.npz" in kept.attachments
    assert (kept.watermarks[0].id, copy.key.watermarks[0].id) == (owner.watermarks[0].id, 5)


def test_verify_a_folder_and_a_loaded_model(case, tmp_path):
    config = pathmark.VerifyConfig(examine=pathmark.ExamineConfig(n_probes=8))
    by_name = pathmark.verify(case.marked, case.key_file, config)
    assert by_name.marked
    assert told(by_name)["access"] == "weights"
    loaded = pathmark.load_model(case.marked)
    in_memory = pathmark.verify(loaded, case.key, config)
    assert in_memory.p.log10 == pytest.approx(by_name.p.log10)
    original = pathmark.load_model(case.base)
    assert not pathmark.verify(original, case.key, config).marked
    both = pathmark.verify(loaded, case.key, pathmark.VerifyConfig(examine=config.examine, original=original))
    assert both.verdict.other is not None
    in_memory.write_log(tmp_path / "log", obtained="made here")
    assert json.loads((tmp_path / "log" / "suspect.json").read_text())["obtained"] == "made here"
    with pytest.raises(VerificationError, match="give a model folder"):
        pathmark.verify(loaded, case.key, pathmark.VerifyConfig(texts=["some text"]))
    with pytest.raises(VerificationError, match="between 0 and 1"):
        pathmark.Criteria(significance=0)


def test_texts_of_ones_own_replace_those_in_the_key(case):
    examine = pathmark.ExamineConfig(n_probes=6, tokens=32, decoys=0)
    found = pathmark.verify(
        case.marked, case.key, pathmark.VerifyConfig(examine=examine, texts=bundled_probes()[30:40])
    )
    assert found.verdict.n_probes == 6
    assert found.marked


def test_verify_api_asks_a_server_or_a_model_in_memory(case):
    key = key_for("bundled:tiny", triggers=4)
    config = pathmark.ApiConfig(model="suspect", trials=6, max_tokens=16)
    with fake_api.FakeApi(fake_api.marked(key)) as api:
        found = pathmark.verify_api(api.url, key, config)
    assert found.marked
    assert told(found)["access"] == "replies"
    with pytest.raises(VerificationError, match="ApiConfig"):
        found.write_log("nowhere")
    backend = LocalBackend(pathmark.load_model(case.base), pathmark.load_tokenizer(case.base))
    assert not pathmark.verify_api(backend, case.key, pathmark.ApiConfig(trials=3, max_tokens=8)).marked


def test_trace_takes_a_registry_or_its_file(case, tmp_path):
    book = pathmark.Registry(tmp_path / "licensees.db")
    book.issue(case.key, "Ada Ltd")
    config = pathmark.TraceConfig(examine=pathmark.ExamineConfig(n_probes=10), significance=1e-3)
    by_file = pathmark.trace(case.marked, case.key_file, tmp_path / "licensees.db", config)
    in_memory = pathmark.trace(pathmark.load_model(case.marked), case.key, book, config)
    assert told(by_file)["licensee"] == told(in_memory)["licensee"] == "(the owner's own copy)"


def test_an_attack_in_memory_goes_into_verify(case, tmp_path):
    loaded = pathmark.load_model(case.marked)
    attacked = pathmark.attack("permute-experts", loaded, config=pathmark.AttackConfig(settings={"seed": 3}))
    assert told(attacked) == {"attack": "permute-experts", "settings": {"seed": 3}, "output": None}
    assert attacked.model is not loaded
    assert pathmark.verify(attacked.model, case.key).marked
    for settings, said in (({"seed": "x", "bits": 1}, "permute-experts"),):
        with pytest.raises(AttackError, match=said):
            pathmark.attack("permute-experts", loaded, config=pathmark.AttackConfig(settings=settings))
    with pytest.raises(AttackError, match="tokenizer"):
        pathmark.attack("permute-experts", loaded, tmp_path / "out")


def test_commit(case, tmp_path):
    made = pathmark.commit(case.key_file, tmp_path / "key.json")
    assert told(made)["kind"] == "key"
    assert "only what you say" in made.words()
    bound = pathmark.commit(case.key, release=case.marked)
    assert told(bound)["files"] == len(list(case.marked.iterdir()))
    with pytest.raises(KeyFileError, match="already exists"):
        pathmark.commit(case.key, tmp_path / "key.json")


def test_report_of_a_verdict_and_what_it_refuses(case, tmp_path):
    found = pathmark.verify(case.marked, case.key, pathmark.VerifyConfig(examine=pathmark.ExamineConfig(n_probes=6)))
    page = pathmark.report(found.summary(), tmp_path / "verdict.html")
    assert told(page)["kind"] == "verification"
    text = page.output.read_text()
    assert "The chance of that is 1 in" in text
    assert "What would weaken this" in text
    assert "<script" not in text
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "other.json").write_text('{"format": "x"}')
    (tmp_path / "damaged.json").write_text('{"verdict": "marked", "marked": true, "p_value": 0.1, "layers": [{}]}')
    for name, said in (
        ("none", "cannot read"), ("list", "no JSON object"), ("other", "no result"), ("damaged", "damaged")
    ):  # fmt: skip
        with pytest.raises(ReportError, match=said):
            pathmark.report(tmp_path / f"{name}.json", tmp_path / "new.html")
    assert not (tmp_path / "new.html").exists()
