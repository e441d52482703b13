"""`pathmark inspect` through the real entry point: what it prints, and one line for what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import zoo
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig

from pathmark.cli.main import main

KEYS = {
    "source", "model_type", "architecture", "parameters", "vocabulary", "weights", "layers",
    "watermark_layers", "width", "id_bits", "evidence_bits", "can", "why_not", "embedding",
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    zoo.tiny_model("deepseek_v2").save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `pathmark ...` in this process; (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["pathmark", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return call


def broken(kind, folder, sound):
    """A model folder with one thing wrong."""
    weights = folder / "model.safetensors"
    if kind == "missing path":
        return folder / "nothing-here"
    if kind == "file instead of folder":
        (folder / "model").touch()
        return folder / "model"
    if kind == "no config":
        return folder
    if kind == "dense":
        config = LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        return folder
    config = json.loads((sound / "config.json").read_text())
    if kind == "unknown architecture":
        config["model_type"] = "frobnicate"
    if kind == "10^9 layers":
        config["num_hidden_layers"] = 10**9
    (folder / "config.json").write_text(json.dumps(config))
    data = (sound / "model.safetensors").read_bytes()
    if kind.startswith("truncated"):
        weights.write_bytes(data[: int(kind.split()[-1])])
    elif kind == "padded":
        weights.write_bytes(data + b"\0")
    elif kind == "missing tensors":
        tensors = load_file(sound / "model.safetensors")
        tensors.popitem()
        save_file(tensors, weights, {"format": "pt"})
    elif kind == "pickle only":
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    return folder


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing path", "does not exist"),
        ("file instead of folder", "is a file"),
        ("no config", "has no config.json"),
        ("dense", "LlamaForCausalLM has no MoE router"),
        ("unknown architecture", "architecture 'frobnicate' is unknown"),
        ("10^9 layers", "num_hidden_layers = 1000000000"),
        ("truncated 0", "truncated"),
        ("truncated 5", "truncated"),
        ("truncated 1000", "truncated"),
        ("truncated 90000", "truncated"),
        ("padded", "padded"),
        ("missing tensors", "parameters that its config asks for"),
        ("pickle only", "is a pickle and is never opened"),
    ],
)
def test_one_line_and_exit_code_2(kind, words, run, tmp_path, sound):
    code, out, err = run("inspect", broken(kind, tmp_path, sound))
    assert code == 2
    assert out == ""
    assert err.startswith("pathmark: ")
    assert err.count("\n") == 1
    assert words in err


def test_the_installed_command_prints_one_line_too(tmp_path, sound):
    folder = broken("truncated 1000", tmp_path, sound)
    done = subprocess.run(
        [sys.executable, "-m", "pathmark.cli.main", "inspect", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_json(run, sound):
    code, out, err = run("inspect", sound, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report.keys() == KEYS
    assert [layer["kind"] for layer in report["layers"]] == ["dense"] + ["softmax, group-limited"] * 3
    assert report["watermark_layers"] == [1, 2, 3]
    assert report["can"] == {"embed": True, "verify": True, "stream": True}
    assert report["id_bits"] == pytest.approx(6.0)  # three layers of 8 / 2 = 4 groups
    assert report["evidence_bits"] == pytest.approx(14.42, abs=0.01)  # 3 log2 C(8, 2)


def test_table(run, sound):
    code, out, _ = run("inspect", sound, "--watermark-layers", "2", "--width", "1")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "-", "-", "dense"] in rows
    assert ["1", "8", "2", "softmax,", "group-limited"] in rows
    assert ["2-3", "8", "2", "softmax,", "group-limited", "yes"] in rows


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--width", "5"], "choose a smaller --width"), (["--watermark-layers", "4"], "at most 3")],
)
def test_what_does_not_fit(run, sound, arguments, words):
    code, _, err = run("inspect", sound, *arguments)
    assert code == 2
    assert words in err


def test_a_model_far_larger_than_memory_needs_no_weights(run, tmp_path):
    # Qwen1.5-MoE-A2.7B's true shape: 57 GB if its weights were made in float32
    Qwen2MoeConfig(architectures=["Qwen2MoeForCausalLM"]).save_pretrained(tmp_path)
    code, out, _ = run("inspect", tmp_path, "--json")
    assert code == 0
    report = json.loads(out)
    assert report["parameters"] == 14_315_784_192
    assert report["weights"] == "absent"
    assert report["can"] == {"embed": False, "verify": False, "stream": False}
    assert len(report["layers"]) == 24
    assert {layer["experts"] for layer in report["layers"]} == {60}
    assert report["watermark_layers"] == [18, 19, 20, 21, 22, 23]
    # the paper's example: ids 29.4 bits, evidence 64.7 bits
    assert report["id_bits"] == pytest.approx(29.4, abs=0.05)
    assert report["evidence_bits"] == pytest.approx(64.7, abs=0.05)
