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


CONFIG = LoopConfig(steps=60, lr=0.05, checkpoint_every=7, check_every=10)


def test_it_minimises():
    parameters = problem()
    first = float(make_loss(parameters)(0, torch.Generator().manual_seed(0))["loss"].detach())
    result = run_loop(parameters, make_loss(parameters), CONFIG)
    assert result.steps == 60
    assert result.losses["loss"] < first / 5


@pytest.mark.parametrize("stop_at", [3, 7, 20, 33, 59])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, stop_at):
    whole = problem()
    run_loop(whole, make_loss(whole), CONFIG)
    broken, path = problem(), tmp_path / "checkpoint.pt"
    with pytest.raises(RuntimeError, match="killed"):
        run_loop(broken, make_loss(broken, stop_at), CONFIG, checkpoint=path, fingerprint="a")
    again = problem()
    run_loop(again, make_loss(again), CONFIG, checkpoint=path, resume=True, fingerprint="a")
    assert torch.equal(again["w"], whole["w"])


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


def test_it_stops_when_the_check_held_long_enough_also_across_a_resume(tmp_path):
    flat = replace(CONFIG, decay=False)

    def run(parameters, **kwargs):
        return run_loop(parameters, make_loss(parameters), flat, check=lambda step: step >= 20, **kwargs)

    whole = problem()
    result = run(whole)
    assert (result.steps, result.stopped_early) == (40, True)
    broken, path = problem(), tmp_path / "checkpoint.pt"
    with pytest.raises(RuntimeError):
        run_loop(broken, make_loss(broken, 37), flat, check=lambda step: step >= 20, checkpoint=path, fingerprint="a")
    again = problem()
    assert run(again, checkpoint=path, resume=True, fingerprint="a").steps == 40
    assert torch.equal(again["w"], whole["w"])


def test_it_does_not_stop_before_the_rate_has_fallen():
    """The cosine is at three tenths of its peak after 69 % of its way."""
    config = replace(CONFIG, steps=600, warmup=20, check_every=10, patience=2)
    parameters = problem()
    result = run_loop(parameters, make_loss(parameters), config, check=lambda step: True)
    assert result.stopped_early
    first = min(step for step in range(20, 601, 10) if config.rate(step) <= 0.3 * config.lr)
    assert result.steps == first + 10
    assert 0.66 < first / 600 < 0.72


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
