"""The person at the terminal: mistakes told at once, errors as JSON, quiet, no colours, doctor, card, completion."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from key_fixtures import make_key
from page_fixtures import CHECK
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from verify_helpers import PASSPHRASE

import pathmark
from pathmark.cli.embed import FOREIGN
from pathmark.cli.main import cli
from pathmark.embedding import default_config
from pathmark.errors import VerificationError
from pathmark.front_door import doctor as examination
from pathmark.keys import commit_key, commit_release, write_commitment
from pathmark.keys.safefile import write_private
from pathmark.models import inspect_model
from pathmark.reach import require_reachable
from test_house import HEAVY, leaves

MISTAKES = {
    "verify ./nosuch --key KEY": "'./nosuch' does not exist",
    "verify bundled:other --key KEY": "expected one of bundled:tiny",
    "verify bundled:tiny --key nosuch.key": "cannot read nosuch.key: No such file or directory; expected a key",
    "verify bundled:tiny --key KEY --texts nosuch.txt": "cannot read nosuch.txt",
    "verify bundled:tiny --key KEY --significance 7": "7.0 is not in the range 0<x<1",
    "verify bundled:tiny --key KEY --gamma 7": "7.0 is not in the range 0<x<1",
    "verify bundled:tiny --key KEY --suspect-published 2099-01-01": "yet to come",
    "verify bundled:tiny --key KEY --commitment nosuch.json": "cannot read nosuch.json",
    "verify bundled:tiny --key KEY --original ./nosuch": "'./nosuch' does not exist",
    "embed bundled:tiny --key KEY -o KEY": "already exists",
    "embed bundled:tiny --key KEY -o new --steps 3 --epochs 3": "either --steps or --epochs",
    "embed bundled:tiny --key KEY -o new --objective paper --margin 2": "--margin has no meaning for the paper",
    "embed bundled:tiny --key nosuch.key -o new": "cannot read nosuch.key",
    "keygen bundled:tiny -o KEY": "already exists",
    "keygen bundled:other -o new": "is not bundled",
    "trace ./nosuch --key KEY --registry KEY": "'./nosuch' does not exist",
    "trace bundled:tiny --key KEY --registry nosuch.db": "`pathmark issue` makes it",
    "inspect ./nosuch": "expected a model folder, a hub id or bundled:tiny",
    "apply bundled:tiny nosuch.safetensors -o new": "expected a delta",
    "verify-routes nosuch.jsonl --key KEY": "expected recorded routes",
    "report nosuch.json -o new.html": "expected a result file or an evidence bundle",
    "robustness bundled:tiny --key nosuch.key -o new": "cannot read nosuch.key",
    "verify-api http://127.0.0.1:PORT --model x --key KEY": "nobody answers at 127.0.0.1",
    "latency http://127.0.0.1:PORT --model x --key KEY": "nobody answers at 127.0.0.1",
    "card nosuch.json": "expected a commitment",
    "verify": "Missing argument 'SUSPECT'",
    "verfy": "did you mean verify",
}  # fmt: skip
SCRIPT = """
import contextlib, io, json, sys
from pathmark.cli.main import main
told = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["pathmark", *words]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try: main()
        except SystemExit as end: code = end.code
    told.append([code, said.getvalue(), sorted({name.split(".")[0] for name in sys.modules})])
print(json.dumps(told))
"""


def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_mistakes_are_told_before_anything_heavy_is_loaded(tmp_path):
    (tmp_path / "owner.key").touch()
    port = str(closed_port())
    words = [line.replace("KEY", "owner.key").replace("PORT", port).split() for line in MISTAKES]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(words)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    for (line, expected), (code, said, loaded) in zip(MISTAKES.items(), json.loads(done.stdout), strict=True):
        assert code == 2, line
        assert len(said.splitlines()) == 1, line
        assert expected in said, line
        assert not set(loaded) & (HEAVY | {"numpy"}), line


def test_the_options_of_each_objective_are_those_of_its_settings():
    asked = {"margin", "route_weight", "stealth_weight", "temperature"}
    for objective, foreign in FOREIGN.items():
        config = default_config(objective, 64)
        assert set(foreign) == asked - {setting.name for setting in fields(config.objective)}


def test_an_address_where_nobody_answers_is_told_in_seconds(monkeypatch):
    started = time.monotonic()
    with pytest.raises(VerificationError, match=r"nobody answers at 127\.0\.0\.1:\d+ \(Connection refused\)"):
        require_reachable(f"http://127.0.0.1:{closed_port()}/v1")
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: time.sleep(5) or socket.socket())
    with pytest.raises(VerificationError, match=r"no answer within 0\.2 s"):
        require_reachable("https://slow.example", seconds=0.2)
    assert time.monotonic() - started < 3
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        monkeypatch.undo()
        listening.listen()
        require_reachable(f"http://127.0.0.1:{listening.getsockname()[1]}")


def run_main(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "pathmark.cli.main", *words], capture_output=True, text=True,
        env=os.environ | environment, check=False,
    )  # fmt: skip


def test_with_json_an_error_is_json_too():
    for words in (("inspect", "./nosuch", "--json"), ("inspect", "--json")):
        done = run_main(*words)
        assert done.returncode == 2
        told = json.loads(done.stdout)
        follows_schema("error", told)
        assert told["exit"] == 2
        assert done.stderr == f"pathmark: {told['error']}\n"
    assert run_main("inspect", "./nosuch").stdout == ""


@pytest.mark.parametrize("words", [words for words, _ in leaves(cli, [])], ids=" ".join)
def test_every_command_takes_json_and_quiet(words):
    command = next(found for name, found in leaves(cli, []) if name == words)
    options = {option for parameter in command.params for option in parameter.opts}
    assert {"--json", "--quiet"} <= options


def test_quiet_prints_the_result_alone(case):
    words = [
        "verify",
        str(case.marked),
        "--key",
        str(case.key_file),
        "--n-texts",
        "4",
        "--tokens",
        "16",
        "--decoys",
        "0",
    ]
    environment = {"PATHMARK_PASSPHRASE": PASSPHRASE}
    loud, quiet = (CliRunner().invoke(cli, [*words, *more], env=environment) for more in ([], ["--quiet"]))
    assert "... " in loud.stderr
    assert quiet.stderr == ""
    assert quiet.stdout == loud.stdout


def test_no_color_is_obeyed():
    from rich.console import Console

    for colour, said in (({}, True), ({"NO_COLOR": "1"}, False)):
        console = Console(force_terminal=True, color_system="truecolor", _environ={"TERM": "xterm", **colour})
        with console.capture() as shown:
            console.print("[bold green]holds[/]")
        assert ("\x1b[1;32m" in shown.get()) == said


def test_doctor_knows_what_is_there_and_what_is_missing(monkeypatch):
    found = pathmark.doctor()
    assert found.problems == []
    assert {"torch", "transformers"} <= {part.name for part in found.parts if part.extra is None}
    assert found.extras()["plots"]
    assert "dev" not in found.extras()
    assert found.devices[0].memory > found.devices[0].free > 0
    monkeypatch.setattr(
        examination, "requires", lambda _: ["torch>=99", "no-such-thing>=1", "peft>=1; extra == 'lora'"]
    )
    poor = examination.doctor()
    assert len(poor.problems) == 2
    assert "expected >=99; run: pip install 'torch>=99'" in poor.problems[0]
    assert poor.extras() == {"lora": False}
    assert "pip install 'pathmark[lora]'" in poor.words()
    assert CliRunner().invoke(cli, ["doctor"]).exit_code == 2


@pytest.fixture
def published(tmp_path):
    key = make_key(owner="Example | <Lab>")
    release = tmp_path / "release"
    release.mkdir()
    (release / "model.safetensors").write_bytes(b"weights")
    write_commitment(commit_key(key), tmp_path / "owner.json")
    write_commitment(commit_release(key, release), tmp_path / "release.json")
    return key, tmp_path


def test_a_card_tells_what_is_published_and_no_secret(published):
    key, folder = published
    done = CliRunner().invoke(cli, ["card", str(folder / "release.json"), "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert key.fingerprint in made["section"]
    assert r"Example \| \<Lab\>" in made["section"]
    assert "pathmark commit --check release.json --release ." in made["section"]
    everything = made["section"] + made["badge"]
    for watermark in key.watermarks:
        assert watermark.subkey.reveal().hex() not in everything
        for trigger in watermark.triggers:
            assert trigger.phrase.text not in everything
            assert trigger.mark.text not in everything
    public = (folder / "release.json").read_text()
    said = set(re.findall(r"[0-9a-f]{16,}", everything))
    assert said
    assert all(digits in public for digits in said)  # whatever looks like a digest was published before
    key_only = CliRunner().invoke(cli, ["card", str(folder / "owner.json")])
    assert "--release" not in key_only.stdout


def test_a_card_and_a_badge_are_written_and_nothing_is_overwritten(published):
    _, folder = published
    files = [folder / "OWNERSHIP.md", folder / "badge.svg"]
    words = ["card", str(folder / "owner.json"), "-o", str(files[0]), "--badge", str(files[1])]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert files[0].read_text().startswith("## Ownership")
    assert files[1].read_text().startswith("<svg")
    assert "already exists" in str(CliRunner().invoke(cli, words).exception)


def test_inspect_says_why_not_and_what_an_embedding_takes(tmp_path):
    report = inspect_model("bundled:tiny")
    assert report.active < report.parameters / 2  # 4 of 64 experts
    effort = pathmark.inspect_model("bundled:tiny").embedding
    assert effort["memory"] > 4 * report.parameters
    assert effort["seconds_at_least"] > 0
    for file in (Path(pathmark.__file__).parent / "bundled" / "tiny").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    bare = pathmark.inspect_model(tmp_path)
    assert bare.summary()["can"] == {"embed": False, "verify": False, "stream": False}
    assert "weights are not here" in bare.words()
    assert "PathMark can: nothing yet." in bare.words()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete_commands(shell):
    done = run_main(_PATHMARK_COMPLETE=f"{shell}_source")
    assert done.returncode == 0
    assert "_PATHMARK_COMPLETE" in done.stdout


SCHEMAS = {path.name: json.loads(path.read_text()) for path in Path(pathmark.__file__).parent.rglob("*.schema.json")}


def follows_schema(words, printed):
    """Whether the JSON of a command is what the published schema says."""
    stored = Registry().with_resources([(name, DRAFT202012.create_resource(text)) for name, text in SCHEMAS.items()])
    schema = {"$ref": f"output.schema.json#/$defs/{words.replace(' ', '%20')}"}
    jsonschema.Draft202012Validator(schema, registry=stored).validate(printed)


def test_every_command_has_a_published_schema():
    names = {" ".join(words) for words, _ in leaves(cli, [])}
    names = {"attack" if re.match(r"attack (?!list)", name) else name for name in names}
    variants = {"commit --check", "barcode --read", "embed --all", "embed --estimate"}
    variants |= {"keygen --scheme", "embed --scheme", "verify --scheme", "robustness --scheme"}
    assert names | variants | {"error"} == SCHEMAS["output.schema.json"]["$defs"].keys()


def test_what_commands_print_follows_the_schema(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    for name in ("PATHMARK_PASSPHRASE", "PATHMARK_BACKUP_PASSPHRASE", "PATHMARK_NEW_PASSPHRASE"):
        monkeypatch.setenv(name, PASSPHRASE)
    (tmp_path / "owner.key").write_bytes(case.key_file.read_bytes())
    (tmp_path / "owner.key").chmod(0o600)
    licensee = Ed25519PrivateKey.generate()
    pem = licensee.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(tmp_path / "licensee.pem", pem)
    (tmp_path / "check.json").write_text(json.dumps(CHECK))
    for words, more in {
        "inspect": f"{case.base}",
        "doctor": "",
        "key show": "owner.key",
        "key reveal": "owner.key -o claim.json",
        "key backup": "owner.key -o backup.key",
        "key restore": "backup.key -o restored.key",
        "key rotate": "restored.key",
        "commit": "owner.key -o owner.json",
        "commit --check": "owner.json",
        "card": "owner.json",
        "issue": "--registry book.db --key owner.key --licensee Alpha -o alpha.key --receipt alpha.receipt",
        "registry list": "book.db",
        "registry check": "book.db",
        "registry countersign": "alpha.receipt --signing-key licensee.pem -o alpha.signed",
        "barcode": "owner.key -o mark.svg",
        "barcode --read": "mark.svg",
        "attack list": "",
        "report": "check.json -o check.html",
        "evidence root": f"{case.base}",
        "verify": f"{case.marked} --key owner.key --n-texts 4 --tokens 16",
        "trace": f"{case.marked} --key owner.key --registry book.db --n-texts 4 --tokens 16",
    }.items():
        done = CliRunner().invoke(cli, [*words.split(), *more.split(), "--json"])
        assert done.exit_code in (0, 1), (words, done.output, done.exception)
        follows_schema(words, json.loads(done.stdout))
    with pytest.raises(jsonschema.ValidationError):
        follows_schema("card", {"section": 3})
