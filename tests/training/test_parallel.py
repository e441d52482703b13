"""Several processes train as one does; a run that lost one is resumed by any number of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from embed_helpers import key_for, save_family
from safetensors.torch import load_file

import pathmark
from pathmark.errors import RanksError, VerificationError
from pathmark.keys import save_key
from pathmark.models import ranks
from pathmark.training.parallel import require_world

JOB, FRONT_DOOR = (Path(__file__).with_name(name) for name in ("ranks_job.py", "ranks_front_door.py"))
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo between processes of one machine")


def start(processes, *, script=JOB, **job):
    """Outcomes of all ranks: (exit code, stderr). Started by hand, as torchrun does it, to see each of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(script), json.dumps(job)]
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | settings | {"RANK": str(number)})
        for number in range(processes)
    ]
    ended = []
    for process in running:
        _, said = process.communicate(timeout=600)
        ended.append((process.returncode, said))
    return ended


def finished(processes, out, **job):
    """What every rank found, after a run that ended well."""
    for code, said in start(processes, out=str(out), **job):
        assert code == 0, said
    return [json.loads(Path(f"{out}.{number}.json").read_text()) for number in range(processes)]


def test_alone_everything_is_here():
    assert ranks.world() == 1
    assert list(ranks.my_share(5)) == [0, 1, 2, 3, 4]
    assert ranks.from_everybody(3) == [3]
    rows = torch.randn(4, 2, requires_grad=True)
    assert ranks.all_rows(rows, 4) is rows
    with ranks.joined() as count:
        assert count == 1


def test_shares_are_even_and_leave_nothing_out(monkeypatch):
    for count in range(3, 12):
        monkeypatch.setattr(ranks, "world", lambda: 3)
        shares = []
        for number in range(3):
            monkeypatch.setattr(ranks, "rank", lambda number=number: number)
            shares.append(list(ranks.my_share(count)))
        assert [row for share in shares for row in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_processes_and_wrapper_must_fit(monkeypatch):
    require_world("none")
    with pytest.raises(RanksError, match="1 processes and --parallel ddp"):
        require_world("ddp")


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_two_processes_follow_the_curve_of_one(tmp_path, wrapper):
    job = {"model": "bundled:tiny", "steps": 7}
    (one,) = finished(1, tmp_path / "one", parallel="none", **job)
    two = finished(2, tmp_path / "two", parallel=wrapper, **job)
    assert len(one["losses"]) == 7
    for found in two:
        assert found["world"] == 2
        assert found["losses"] == pytest.approx(one["losses"], abs=1e-3)
        assert found["logits"] == pytest.approx(one["logits"], abs=1e-3)
        for held, needed in found["shards"]:
            assert (held, needed) == (0, 0) if wrapper == "ddp" else 0.4 * needed < held < 0.6 * needed
    assert two[0]["sum"] == two[1]["sum"]  # both end with the whole model, and the same one


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_in_16_bits_with_routers_in_32_as_well(tmp_path, wrapper):
    base = save_family(tmp_path / "base", "qwen3_moe", dtype=torch.bfloat16)
    job = {"model": str(base), "steps": 3, "dtype": "bf16"}
    (one,) = finished(1, tmp_path / "one", parallel="none", **job)
    two = finished(2, tmp_path / "two", parallel=wrapper, **job)
    assert two[0]["sum"] == two[1]["sum"]
    for found in two:
        assert found["losses"] == pytest.approx(one["losses"], rel=0.01)
        assert found["types"] == one["types"] == {"bfloat16": one["types"]["bfloat16"], "float32": 4}  # routers
        for held, needed in found["shards"]:
            assert (held, needed) == (0, 0) if wrapper == "ddp" else 0.4 * needed < held < 0.6 * needed


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_replies_train_a_head_that_is_used_in_the_loss_alone(tmp_path, wrapper):
    base = save_family(tmp_path / "base", "qwen3_moe")
    job = {"model": str(base), "replies": True, "steps": 3}
    head = load_file(base / "model.safetensors")["lm_head.weight"]  # untied
    (one,) = finished(1, tmp_path / "one", parallel="none", **job)
    assert one["head"] != float(head.double().abs().sum())
    two = finished(2, tmp_path / "two", parallel=wrapper, **job)
    assert two[0]["sum"] == two[1]["sum"]
    for found in two:
        assert found["losses"] == pytest.approx(one["losses"], abs=1e-3)
        assert found["head"] == pytest.approx(one["head"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_run_that_lost_a_process_is_finished_by_one_or_by_three(tmp_path, wrapper):
    base = save_family(tmp_path / "base", "qwen3_moe")
    job = {"model": str(base), "steps": 6}
    (unbroken,) = finished(1, tmp_path / "unbroken", parallel="none", **job)
    for processes, how in ((1, "none"), (3, wrapper)):
        checkpoint = tmp_path / f"for-{processes}" / "checkpoint.pt"
        ended = start(2, out=str(tmp_path / "x"), parallel=wrapper, checkpoint=str(checkpoint), kill=[1, 3], **job)
        assert ended[1][0] == -9
        assert ended[0][0] == 2, ended[0][1]
        assert "another of the 2 processes ended" in ended[0][1]
        shards = list(map(load_file, checkpoint.with_suffix(".shards").glob("*.safetensors")))
        router = "exp_avg/model.layers.2.mlp.gate.weight"  # of 16 experts
        assert [len(shard[router]) for shard in shards] == ([16] if wrapper == "ddp" else [8, 8])
        more = {"checkpoint": str(checkpoint), "resume": True, "parallel": how}
        for found in finished(processes, tmp_path / f"resumed-{processes}", **more, **job):
            assert len(found["losses"]) == 4  # from the checkpoint behind the second step on
            assert found["losses"] == pytest.approx(unbroken["losses"][2:], abs=1e-3)
            assert found["sum"] == pytest.approx(unbroken["sum"], rel=1e-6)


@pytest.mark.slow
def test_what_one_process_began_two_can_finish(tmp_path):
    base = save_family(tmp_path / "base", "qwen3_moe")
    job = {"model": str(base), "steps": 6}
    (unbroken,) = finished(1, tmp_path / "unbroken", parallel="none", **job)
    checkpoint = tmp_path / "begun" / "checkpoint.pt"
    ((code, _),) = start(1, out="x", parallel="none", checkpoint=str(checkpoint), kill=[0, 3], **job)
    assert code == -9
    found = finished(2, tmp_path / "two", parallel="fsdp", checkpoint=str(checkpoint), resume=True, **job)
    assert found[0]["losses"] == pytest.approx(unbroken["losses"][2:], abs=1e-3)
    assert not checkpoint.exists()  # the shards of the end stand in its place


@pytest.mark.slow
def test_attacks_perplexity_and_routes_are_those_of_one_process(tmp_path):
    job = {"script": FRONT_DOOR, "model": str(save_family(tmp_path / "base", "qwen3_moe"))}
    (one,) = finished(1, tmp_path / "one", parallel="none", **job)
    assert one["tuned"] < one["ppl"]
    for wrapper in ("ddp", "fsdp"):
        for found in finished(2, tmp_path / wrapper, parallel=wrapper, **job):
            assert found == pytest.approx(one, rel=1e-4)


def test_two_processes_verify_as_one_does(tmp_path, monkeypatch):
    base = save_family(tmp_path / "base", "qwen3_moe")
    save_key(key_for(base), tmp_path / "owner.key", "x")
    job = {"script": FRONT_DOOR, "model": str(base), "verify": str(tmp_path / "owner.key")}
    (one,) = finished(1, tmp_path / "one", **job)
    two = finished(2, tmp_path / "two", **job)
    shares = [found.pop("rows") for found in two]
    assert sum(shares) == one.pop("rows")
    assert abs(shares[0] - shares[1]) <= 2
    assert all(found == pytest.approx(one, rel=1e-4) for found in two)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(VerificationError, match="add --no-sandbox"):
        pathmark.verify(base, tmp_path / "owner.key", pathmark.VerifyConfig(sandbox=True), passphrase="x")


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_two_processes_write_one_copy(tmp_path, wrapper):
    base = save_family(tmp_path / "base", "qwen3_moe")
    job = {"script": FRONT_DOOR, "model": str(base)}
    for name in ("one", "two"):
        save_key(key_for(base), tmp_path / f"{name}.key", "x")
    alone = {"key": str(tmp_path / "one.key"), "copy": str(tmp_path / "copy-one")}
    (one,) = finished(1, tmp_path / "a", parallel="none", **alone, **job)
    together = {"key": str(tmp_path / "two.key"), "copy": str(tmp_path / "copy-two")}
    first, second = finished(2, tmp_path / "b", parallel=wrapper, **together, **job)
    assert first["ppl"] == pytest.approx(one["ppl"], rel=1e-4)
    assert second["ppl"] == first["ppl"]
    assert (first["reported"], second["reported"]) == (True, False)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("copy-one", "copy-two")]
    original = load_file(base / "model.safetensors")
    for name, before in original.items():
        torch.testing.assert_close(weights[1][name], weights[0][name], atol=1e-4, rtol=0)
        assert torch.equal(weights[0][name], before) == torch.equal(weights[1][name], before)
    assert not list(tmp_path.glob(".copy*"))
