"""The loop: it optimises, stops, resumes to the same bits, and never mixes runs."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch

from pathmark.errors import EmbeddingError
from pathmark.training import LoopConfig, run_loop


def problem():
    torch.manual_seed(0)
    return {"w": torch.nn.Parameter(torch.randn(8, 4))}


def make_loss(parameters, stop_at=None):
    """Noisy least squares; the noise comes from the step's generator alone."""

    def loss(step, generator):
        if stop_at is not None and step == stop_at:
            raise RuntimeError("killed")
        x = torch.randn(16, 4, generator=generator)
        error = (x @ parameters["w"].T - x.sum(-1, keepdim=True)).pow(2).mean()
        return {"loss": error, "error": error}

    return loss


CONFIG = LoopConfig(steps=60, lr=0.05, checkpoint_every=7)


def test_it_minimises():
    parameters = problem()
    first = float(make_loss(parameters)(0, torch.Generator().manual_seed(0))["loss"].detach())
    result = run_loop(parameters, make_loss(parameters), CONFIG)
    assert result.steps == 60
    assert result.losses["loss"] < first / 5


@pytest.mark.parametrize("homing", [0.0, 2.0])
@pytest.mark.parametrize("stop_at", [3, 7, 20, 33, 59])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, stop_at, homing):
    config = replace(CONFIG, homing=homing)
    whole = problem()
    run_loop(whole, make_loss(whole), config)
    broken, path = problem(), tmp_path / "checkpoint.pt"
    with pytest.raises(RuntimeError, match="killed"):
        run_loop(broken, make_loss(broken, stop_at), config, checkpoint=path, fingerprint="a")
    again = problem()
    run_loop(again, make_loss(again), config, checkpoint=path, resume=True, fingerprint="a")
    assert torch.equal(again["w"], whole["w"])


def test_homing_pulls_what_is_not_asked_to_change_back_to_its_start():
    """One coordinate is asked for, the other only shaken by noise; Adam's steps carry both equally far."""

    def distance(homing):
        weights = {"w": torch.nn.Parameter(torch.tensor([3.0, 3.0]))}

        def loss(step, generator):
            shaken = torch.randn(1, generator=generator)[0] * weights["w"][1]
            return {"loss": (weights["w"][0] - 5).pow(2) + shaken}

        run_loop(weights, loss, replace(CONFIG, steps=200, homing=homing))
        return (weights["w"].detach() - torch.tensor([5.0, 3.0])).abs().tolist()

    (asked, free), (asked_homing, held) = distance(0.0), distance(1.0)
    assert held < free / 2
    assert asked < 0.1
    assert asked_homing < 1.5  # it gives way


def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint(tmp_path):
    whole = problem()
    run_loop(whole, make_loss(whole), CONFIG)
    broken, path = problem(), tmp_path / "checkpoint.pt"
    inner = make_loss(broken)

    def loss(step, generator):
        if step == 31:
            os.kill(os.getpid(), signal.SIGINT)
        return inner(step, generator)

    with pytest.raises(KeyboardInterrupt):
        run_loop(broken, loss, CONFIG, checkpoint=path, fingerprint="a")
    assert torch.load(path, weights_only=True)["step"] == 32
    assert path.stat().st_mode & 0o077 == 0
    again = problem()
    run_loop(again, make_loss(again), CONFIG, checkpoint=path, resume=True, fingerprint="a")
    assert torch.equal(again["w"], whole["w"])


def test_another_run_s_checkpoint_is_refused(tmp_path):
    parameters, path = problem(), tmp_path / "checkpoint.pt"
    run_loop(parameters, make_loss(parameters), CONFIG, checkpoint=path, fingerprint="a")
    with pytest.raises(EmbeddingError, match="another run"):
        run_loop(parameters, make_loss(parameters), CONFIG, checkpoint=path, resume=True, fingerprint="b")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(EmbeddingError, match="cannot be read"):
        run_loop(parameters, make_loss(parameters), CONFIG, checkpoint=path, resume=True, fingerprint="a")


def test_a_loss_that_is_not_finite_ends_the_run():
    parameters = problem()
    with pytest.raises(EmbeddingError, match="smaller --lr"):
        run_loop(parameters, lambda s, g: {"loss": (parameters["w"] * float("nan")).sum()}, CONFIG)
