"""The loop: it optimises, stops, resumes to the same bits, and never mixes runs."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace

import pytest
import torch

from pathmark.errors import TrainingError
from pathmark.training import Constraints, LoopConfig, run_loop


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


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_no_rate_is_refused(lr):
    with pytest.raises(ValueError, match="positive"):
        replace(CONFIG, lr=lr)


def test_it_minimises():
    parameters = problem()
    first = float(make_loss(parameters)(0, torch.Generator().manual_seed(0))["loss"].detach())
    result = run_loop(parameters, make_loss(parameters), CONFIG)
    assert result.steps == 60
    assert result.losses["loss"] < first / 5


@pytest.mark.parametrize("changes", [{}, {"damping": 0.5}, {"homing": 2.0}])
@pytest.mark.parametrize("stop_at", [3, 7, 20, 33, 59])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, stop_at, changes):
    config = replace(CONFIG, **changes)
    whole = problem()
    run_loop(whole, make_loss(whole), config)
    broken, path = problem(), tmp_path / "checkpoint.pt"
    with pytest.raises(RuntimeError, match="killed"):
        run_loop(broken, make_loss(broken, stop_at), config, checkpoint=path, fingerprint="a")
    again = problem()
    run_loop(again, make_loss(again), config, checkpoint=path, resume=True, fingerprint="a")
    assert torch.equal(again["w"], whole["w"])


def test_damping_leaves_alone_what_is_only_shaken_by_a_little_noise():
    """One coordinate is asked for, the other only shaken; Adam's steps carry both equally far."""

    def distance(damping):
        weights = {"w": torch.nn.Parameter(torch.tensor([3.0, 3.0]))}

        def loss(step, generator):
            shaken = 0.01 * torch.randn(1, generator=generator)[0] * weights["w"][1]
            return {"loss": (weights["w"][0] - 5).pow(2) + shaken}

        run_loop(weights, loss, replace(CONFIG, steps=200, damping=damping))
        return (weights["w"].detach() - torch.tensor([5.0, 3.0])).abs().tolist()

    (asked, free), (asked_damped, still) = distance(0.0), distance(0.5)
    assert still < free / 5
    assert max(asked, asked_damped) < 0.1


def test_homing_takes_back_what_nothing_asks_for_any_more():
    """Both are pushed away for some steps, then only one still is; the other decays towards where it began."""

    def end(homing):
        weights = {"w": torch.nn.Parameter(torch.tensor([3.0, 3.0]))}

        def loss(step, generator):
            wanted = weights["w"] - 5.0
            return {"loss": wanted[0].pow(2) + (wanted[1].pow(2) if step < 100 else 0 * wanted[1])}

        run_loop(weights, loss, replace(CONFIG, steps=400, homing=homing, damping=1e-3))
        return weights["w"].detach().tolist()

    (held, left), (held_home, home) = end(0.0), end(0.5)
    assert min(held, left) > 4.9
    assert held_home > 4.7  # it rests where its pull and the way home balance
    # sum of rate x homing over the last 300 steps, see LoopConfig.rate
    rates = [replace(CONFIG, steps=400).rate(step) for step in range(100, 400)]
    assert abs((home - 3) - 2 * math.prod(1 - 0.5 * rate for rate in rates)) < 0.15
    assert home < 3.3


def test_homing_leads_where_it_is_told():
    weights = problem()
    home = torch.full((8, 4), 3.0)

    def loss(step, generator):
        return {"loss": 0.0 * weights["w"].sum()}

    config = replace(CONFIG, steps=200, homing=20.0)
    run_loop(weights, loss, config, constraints=Constraints({}, {"w": home}))
    assert torch.allclose(weights["w"], home, atol=0.05)


def test_only_what_the_mask_admits_changes_and_it_changes_as_if_it_were_alone():
    mask = torch.zeros(8, 1)
    mask[2:5] = 1.0
    config = replace(CONFIG, damping=0.5)
    masked, alone = problem(), {"w": torch.nn.Parameter(problem()["w"].detach()[2:5].clone())}
    before = masked["w"].detach().clone()

    def loss_of(parameters):
        def loss(step, generator):
            x = torch.randn(16, 4, generator=generator)
            rows = x @ parameters["w"].T - x.sum(-1, keepdim=True)
            return {"loss": rows.pow(2).mean(0).sum()}

        return loss

    run_loop(masked, loss_of(masked), config, constraints=Constraints({"w": mask}, {}))
    run_loop(alone, loss_of(alone), config)
    assert torch.equal(masked["w"][:2], before[:2])
    assert torch.equal(masked["w"][5:], before[5:])
    assert torch.allclose(masked["w"][2:5], alone["w"], atol=1e-6)


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
    with pytest.raises(TrainingError, match="another run"):
        run_loop(parameters, make_loss(parameters), CONFIG, checkpoint=path, resume=True, fingerprint="b")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TrainingError, match="cannot be read"):
        run_loop(parameters, make_loss(parameters), CONFIG, checkpoint=path, resume=True, fingerprint="a")


def test_a_loss_that_is_not_finite_ends_the_run():
    parameters = problem()
    with pytest.raises(TrainingError, match="smaller --lr"):
        run_loop(parameters, lambda s, g: {"loss": (parameters["w"] * float("nan")).sum()}, CONFIG)
