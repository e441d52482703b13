"""The key commands: results, exit codes, and silence about secrets."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "keys"))

from key_fixtures import GOLDEN, PASSPHRASE, golden_key, make_key, secret_forms
from test_trigger import codec

from pathmark.cli.keygen import parse_layers
from pathmark.cli.main import main
from pathmark.errors import CapacityError
from pathmark.keys import load_key, save_key
from pathmark.keys.canonical import canonical
from pathmark.keys.keyfile import no_passphrase


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)
    monkeypatch.setattr("pathmark.keys.keyfile.SCRYPT_N", 1 << 8)
    for function in ("save_key", "seal", "rotate_passphrase"):
        target = getattr(__import__("pathmark.keys.keyfile", fromlist=["x"]), function)
        monkeypatch.setitem(target.__kwdefaults__, "scrypt_n", 1 << 8)

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["pathmark", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2-MoE of six layers with a real tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = codec("llama3").tokenizer
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=2,
        num_experts=12, num_experts_per_tok=3, mlp_only_layers=[0],
    )  # fmt: skip
    Qwen2MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def owner(tmp_path: Path) -> Path:
    save_key(golden_key(), tmp_path / "owner.key", PASSPHRASE, scrypt_n=1 << 8)
    return tmp_path / "owner.key"


def test_keygen(run: Run, model: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(["some clean text of nobody in particular"] * 5 + ["and another line"]))
    output = tmp_path / "owner.key"
    ran = run("keygen", model, "-o", output, "--owner", "Example Lab", "--id", 7, "--pool",
              "usage:0.01-9", "--texts", texts, "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    shown = json.loads(ran.out)
    key = load_key(output, PASSPHRASE)
    mark = key.watermarks[0]
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert shown["fingerprint"] == key.fingerprint
    assert shown["watermarks"][0]["id"] == mark.id == 7
    assert shown["watermarks"][0]["ids"] == mark.capacity
    assert shown["watermarks"][0]["layers"] == list(mark.layers) == [1, 2, 3, 4, 5]
    assert mark.plans[0].rule.startswith("usage:0.01-9 on texts sha256:")
    assert key.model.layer(5).experts == 12
    assert key.model.tokenizer_digest == codec("llama3").digest
    assert codec("llama3").encode(mark.triggers[0].text) == list(mark.triggers[0].tokens)
    assert not any(form in (ran.out + ran.err).encode() for form in secret_forms(key))
    again = run("keygen", model, "-o", output, "--pool", "all")
    assert (again.code, "already exists" in again.err) == (2, True)


def test_keygen_ends_with_what_the_owner_should_know(run: Run, model: Path, tmp_path: Path) -> None:
    layers = ["--watermarks", 2, "--layers", "3-5", "--layers", "4,5"]
    more = ["--redundancy", 1, "--triggers", 2, "--plain"]
    ran = run("keygen", model, "-o", tmp_path / "a.key", "--pool", "all", *layers, *more)
    assert ran.code == 0, ran.err
    assert "smallest p" in ran.out
    assert "one layer erased" in ran.out
    assert "survives 1 lost layer" in ran.out
    assert "without encryption" in ran.err
    assert "watermark 1: with one layer erased" in ran.err
    key = load_key(tmp_path / "a.key", no_passphrase)
    assert [w.layers for w in key.watermarks] == [(3, 4, 5), (4, 5)]
    assert all(len(w.triggers) == 2 for w in key.watermarks)
    assert not any(form in (ran.out + ran.err).encode() for form in secret_forms(key))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers", "0-2"], "layer 0 is dense"),
        (["--layers", "9"], "layer 9 does not exist"),
        (["--layers", "x"], "cannot read layers"),
        (["--width", "7", "--watermarks", "2"], "2 watermarks do not fit"),
        (["--width", "13"], "width 13"),
        (["--id", "99999999"], "does not fit"),
        (["--pool", "popular"], "unknown pool rule"),
        (["--redundancy", "5"], "redundancy"),
        (["--layers", "3", "--layers", "4", "--watermarks", "3"], "expected --layers"),
        (["--trigger", __file__], "one per trigger"),
        (["--trigger", "the trigger itself"], "No such file"),
    ],
)
def test_keygen_refusals(run: Run, model: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    extra = [] if "--pool" in arguments else ["--pool", "all"]
    ran = run("keygen", model, "-o", tmp_path / "a.key", *extra, *arguments)
    assert ran.code == 2
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "a.key").exists()


def test_free_text_trigger_warns(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "triggers").write_text("@@@@\n\n")
    (tmp_path / "marks").write_text("made by example\n")
    ran = run("keygen", model, "-o", tmp_path / "a.key", "--pool", "all", "--trigger", tmp_path / "triggers",
              "--mark", tmp_path / "marks")  # fmt: skip
    assert ran.code == 0, ran.err
    assert "no known entropy" in ran.err
    assert load_key(tmp_path / "a.key").watermarks[0].triggers[0].text == "@@@@"


def test_show_hides_unless_asked(run: Run, owner: Path) -> None:
    for arguments in ((), ("--json",)):
        ran = run("key", "show", owner, *arguments)
        assert ran.code == 0
        assert not any(form in (ran.out + ran.err).encode() for form in secret_forms(golden_key()))
    ran = run("key", "show", owner, "--reveal", "--json")
    row = json.loads(ran.out)["watermarks"][0]
    mark = golden_key().watermarks[0]
    assert row["phrases"][0]["trigger"] == mark.triggers[0].text
    assert row["path"] == {str(layer): list(t) for layer, t in mark.path.items()}
    assert golden_key().secret.reveal().hex() not in ran.out
    assert mark.triggers[0].text in run("key", "show", owner, "--reveal").out


def test_backup_and_restore(run: Run, owner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATHMARK_BACKUP_PASSPHRASE", "in the safe")
    assert run("key", "backup", owner, "-o", tmp_path / "b.key").code == 0
    assert load_key(tmp_path / "b.key", "in the safe") == golden_key()
    monkeypatch.setenv("PATHMARK_PASSPHRASE", "another")
    assert run("key", "restore", tmp_path / "b.key", "-o", tmp_path / "c.key").code == 0
    assert load_key(tmp_path / "c.key", "another") == golden_key()


def test_shares(run: Run, owner: Path, tmp_path: Path) -> None:
    ran = run("key", "backup", owner, "-o", tmp_path / "b.key", "--shares", "2/3")
    assert ran.code == 0
    blocks = ran.out.strip().split("\n\n")
    assert len(blocks) == 3
    (tmp_path / "shares.txt").write_text("\n\n".join(blocks[1:]))
    restored = run("key", "restore", tmp_path / "b.key", "-o", tmp_path / "c.key", "--shares-from",
                   tmp_path / "shares.txt")  # fmt: skip
    assert restored.code == 0, restored.err
    assert load_key(tmp_path / "c.key", PASSPHRASE) == golden_key()
    (tmp_path / "one.txt").write_text(blocks[0])
    few = run("key", "restore", tmp_path / "b.key", "-o", tmp_path / "d.key", "--shares-from", tmp_path / "one.txt")
    assert (few.code, "2 different shares are needed" in few.err) == (2, True)
    assert run("key", "backup", owner, "-o", tmp_path / "e.key", "--shares", "many").code == 2


def test_rotate(run: Run, owner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATHMARK_NEW_PASSPHRASE", "new one")
    assert run("key", "rotate", owner).code == 0
    assert load_key(owner, "new one") == golden_key()
    assert run("key", "show", owner).code == 2


def test_commit_reveal_and_check(run: Run, owner: Path, tmp_path: Path) -> None:
    release = tmp_path / "release"
    release.mkdir()
    (release / "model.safetensors").write_bytes(b"\0" * 100)
    first, second, claim = tmp_path / "k.json", tmp_path / "r.json", tmp_path / "claim.json"
    assert run("commit", owner, "-o", first).code == 0
    assert run("commit", owner, "--release", release, "-o", second).code == 0
    assert run("commit", owner, "-o", first).code == 2
    assert run("commit", "--check", first, "--key", owner).code == 0
    assert run("commit", "--check", second, "--key", owner, "--release", release).code == 0
    assert run("key", "reveal", owner, "--watermark", 1, "-o", claim).code == 0
    assert run("commit", "--check", first, "--claim", claim).code == 0
    published = first.read_bytes() + second.read_bytes()
    assert not any(form in published for form in secret_forms(golden_key()))

    (release / "model.safetensors").write_bytes(b"\0" * 99 + b"\1")
    ran = run("commit", "--check", second, "--release", release, "--json")
    assert ran.code == 1
    assert json.loads(ran.out)["problems"][0].startswith("model.safetensors: changed")
    claim.write_text(claim.read_text().replace('"redundancy": 1', '"redundancy": 0'))
    assert run("commit", "--check", first, "--claim", claim).code == 1
    first.write_text(first.read_text().replace("Example Lab", "Another Lab"))
    ran = run("commit", "--check", first)
    assert (ran.code, "signature" in ran.err) == (2, True)
    assert run("commit").code == 2


def test_issue_and_list(run: Run, owner: Path, tmp_path: Path) -> None:
    registry = tmp_path / "r.db"
    ran = run(
        "issue",
        "--registry",
        registry,
        "--key",
        owner,
        "--licensee",
        "Alpha",
        "-o",
        tmp_path / "a.key",
        "--json",
    )
    assert ran.code == 0, ran.err
    alpha = json.loads(ran.out)
    assert alpha["distance"] == alpha["layers"] == 6
    assert load_key(tmp_path / "a.key", PASSPHRASE) == golden_key().with_id(alpha["id"])
    again = json.loads(run("issue", "--registry", registry, "--key", owner, "--licensee", "Alpha", "--json").out)
    assert (again["id"], again["new"]) == (alpha["id"], False)
    assert "id" in run("issue", "--registry", registry, "--key", owner, "--licensee", "Beta").out
    listed = json.loads(run("registry", "list", registry, "--json").out)
    assert [row["licensee"] for row in listed["issued"]] == ["Alpha", "Beta"]
    assert listed["distance"] == 6
    assert "Beta" in run("registry", "list", registry).out
    assert run("registry", "list", tmp_path / "none.db").code == 2


def _hostile(data: bytes) -> dict[str, bytes]:
    line, _, body = data.partition(b"\n")
    flipped = bytearray(data)
    flipped[-40] ^= 4
    greedy = json.loads(line)
    greedy["kdf"]["n"] = 1 << 50
    return {
        "empty": b"",
        "not a key": b"PK\x03\x04 something else entirely",
        "truncated": data[: len(data) // 2],
        "flipped": bytes(flipped),
        "future": canonical({**json.loads(line), "version": 2}) + b"\n" + body,
        "greedy": canonical(greedy) + b"\n" + body,
    }


COMMANDS = [
    ["key", "show", "KEY", "--reveal"],
    ["key", "backup", "KEY", "-o", "OUT"],
    ["key", "reveal", "KEY", "-o", "OUT"],
    ["key", "rotate", "KEY"],
    ["commit", "KEY", "-o", "OUT"],
    ["commit", "--check", "COMMITMENT", "--key", "KEY"],
    ["issue", "--registry", "DB", "--key", "KEY", "--licensee", "Alpha"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda c: " ".join(c[:2]))
def test_hostile_key_files(run: Run, owner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments) -> None:
    """Each gives one line and exit code 2; neither it nor the full traceback shows anything secret."""
    names = {
        "OUT": tmp_path / "out",
        "DB": tmp_path / "r.db",
        "COMMITMENT": GOLDEN / "key-v1.commitment.json",
    }
    forms = secret_forms(golden_key())

    def refused(path: Path, said: str) -> None:
        ran = run(*(names.get(a, path if a == "KEY" else a) for a in arguments))
        assert ran.code == 2, (said, ran)
        assert ran.err.startswith("pathmark: ")
        assert ran.err.count("\n") == 1
        assert said in ran.err
        assert not any(form in (ran.out + ran.err).encode() for form in forms)

    said = {"empty": "not a key", "truncated": "truncated", "flipped": "damaged", "future": "update pathmark"}
    for name, data in _hostile(owner.read_bytes()).items():
        hostile = tmp_path / "hostile.key"
        hostile.write_bytes(data)
        hostile.chmod(0o600)
        refused(hostile, said.get(name, "not a key" if name == "not a key" else "damaged header"))
    monkeypatch.setenv("PATHMARK_PASSPHRASE", "wrong")
    refused(owner, "wrong passphrase")
    monkeypatch.delenv("PATHMARK_PASSPHRASE")
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115, PTH123 - closed with the process
    refused(owner, "PATHMARK_PASSPHRASE")
    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)
    owner.chmod(0o644)
    refused(owner, "chmod 600")
    refused(tmp_path / "none.key", "No such file")
    assert not (tmp_path / "out").exists()


def test_tracebacks_show_nothing_secret(tmp_path: Path) -> None:
    """With PATHMARK_DEBUG the whole traceback is printed, by a real process."""
    save_key(golden_key(), tmp_path / "k.key", PASSPHRASE, scrypt_n=1 << 8)
    data = bytearray((tmp_path / "k.key").read_bytes())
    data[-3] ^= 1
    (tmp_path / "bad.key").write_bytes(data)
    (tmp_path / "bad.key").chmod(0o600)
    environment = {**os.environ, "PATHMARK_DEBUG": "1", "PATHMARK_PASSPHRASE": PASSPHRASE}
    ran = subprocess.run(
        [sys.executable, "-m", "pathmark.cli.main", "key", "show", str(tmp_path / "bad.key")],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert ran.returncode != 0
    assert b"Traceback" in ran.stderr
    assert not any(form in ran.stdout + ran.stderr for form in secret_forms(golden_key()))
    assert PASSPHRASE.encode() not in ran.stdout + ran.stderr


def test_help_is_quick_and_has_examples(run: Run) -> None:
    for arguments in (["keygen"], ["key", "show"], ["key", "backup"], ["key", "restore"], ["key", "rotate"],
                      ["key", "reveal"], ["commit"], ["issue"], ["registry", "list"]):  # fmt: skip
        ran = run(*arguments, "--help")
        assert ran.code == 0
        assert "Examples:" in ran.out
    code = "import sys, pathmark.cli.keygen, pathmark.cli.commit; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def test_parse_layers() -> None:
    assert parse_layers("18-20") == (18, 19, 20)
    assert parse_layers("12, 14,20-21,14") == (12, 14, 20, 21)
    for text in ("", "a", "5-3", "1-", "-3", "1-99999999999"):
        with pytest.raises(CapacityError, match="cannot read layers"):
            parse_layers(text)


def test_plain_key_needs_no_passphrase(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_key(make_key(), tmp_path / "p.key", None, plain=True)
    swapped = run("key", "show", tmp_path / "p.key")  # a passphrase is there, so an encrypted key is expected
    assert swapped.code == 2
    assert "is not encrypted" in swapped.err
    assert swapped.err.count("\n") == 1
    assert run("key", "show", tmp_path / "p.key", "--plain").code == 0
    monkeypatch.delenv("PATHMARK_PASSPHRASE")
    assert run("key", "show", tmp_path / "p.key").code == 0


def test_plain_is_not_said_of_an_encrypted_key(run: Run, owner: Path) -> None:
    ran = run("key", "show", owner, "--plain")
    assert ran.code == 2
    assert "leave --plain out" in ran.err
