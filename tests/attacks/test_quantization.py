"""Weights really land on the grid, nothing else moves, and a library that skips experts is caught."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import zoo
from attack_helpers import Count, changed, logits, routers
from embed_helpers import LARGER, save_family

from pathmark.attacks import quantization
from pathmark.attacks.grids import fit_grid, in_groups, on_grid, round_to_grid, solve_gptq
from pathmark.attacks.kit import Kit
from pathmark.attacks.quantization import (
    AutoRound,
    Gptq,
    RoundToNearest,
    auto_round,
    gptq,
    quantizable,
    round_to_nearest,
)
from pathmark.attacks.quantizers import Job, quantize_folder
from pathmark.errors import AttackError, ModelError
from pathmark.models import bundled_segments, find_routers, load_model, load_tokenizer
from pathmark.progress import Silent

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]


@pytest.fixture
def kit():
    return Kit(tokenizer=load_tokenizer("bundled:tiny"), texts=bundled_segments()[:64], progress=Count())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_rounding_of_the_bundled_model(bundled, kit, bits, symmetric):
    before = {n: p.clone() for n, p in bundled.named_parameters()}
    config = RoundToNearest(bits=bits, symmetric=symmetric)
    after = round_to_nearest(bundled, config, kit)
    expected = {n for n in before if "proj" in n and not n.endswith("bias")} | routers(bundled)
    assert changed(bundled, after) == set(quantizable(bundled, routers=True)) == expected
    assert len(expected) == 8 * (2 + 4 + 1)  # experts, attention, router
    for name, new in quantizable(after, routers=True).items():
        values = in_groups(new.detach(), 32).sort(-1).values
        distinct = 1 + (values.diff(dim=-1) > 0).sum(-1)
        assert distinct.max() <= 2**bits
        assert on_grid(new, bits, 32)
        old = in_groups(before[name], 32)
        step = 2 * old.abs().amax(-1, keepdim=True) / (2**bits - 1)  # an asymmetric grid is never coarser
        assert ((in_groups(new, 32) - old).abs() <= step * 0.5001).all()
    assert kit.progress.stages == [[f"round to {bits} bits", len(expected), len(expected)]]
    assert all(torch.equal(p, before[n]) for n, p in bundled.named_parameters())  # the given model is untouched


def test_routers_only_where_asked(bundled, kit):
    after = round_to_nearest(bundled, RoundToNearest(routers=False), kit)
    assert changed(bundled, after) == set(quantizable(bundled, routers=False))
    assert not changed(bundled, after) & routers(bundled)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_survives_a_save_and_a_load(name, kit, tmp_path):
    model = zoo.tiny_model(name)
    after = round_to_nearest(model, RoundToNearest(bits=4, group_size=0), kit)
    assert changed(model, after) == set(quantizable(model, routers=True)) > routers(model)
    after.save_pretrained(tmp_path)
    assert torch.equal(logits(load_model(tmp_path)), logits(after))
    assert (logits(after) - logits(model)).abs().max() > 1e-5


def test_dense_layers_are_quantized_too(kit):
    config = zoo.tiny_config("qwen3_moe")
    config.mlp_only_layers = [1]
    model = type(zoo.tiny_model("qwen3_moe"))(config).eval()
    after = round_to_nearest(model, RoundToNearest(bits=2, group_size=16), kit)
    assert "model.layers.1.mlp.up_proj.weight" in changed(model, after)


def test_a_grid_by_hand():
    values = torch.tensor([[-1.0, -0.4, 0.1, 2.0]])
    lopsided = fit_grid(values, 2, symmetric=False)  # step 1 from -1 to 2
    assert (lopsided.scale.item(), lopsided.zero.item()) == (1, 1)
    assert lopsided.round(values).tolist() == [[-1, 0, 0, 2]]
    even = fit_grid(values, 2, symmetric=True)  # step 4/3, from -8/3 to 4/3
    assert even.round(values)[0].tolist() == pytest.approx([-4 / 3, 0, 0, 4 / 3])
    assert round_to_grid(torch.zeros(2, 4), 4, 2, True).tolist() == [[0] * 4] * 2


def test_ordinary_floats_and_finer_grids_are_not_on_the_grid():
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    for bits in (8, 4, 3, 2):
        assert not on_grid(weight, bits, 16)
        rounded = round_to_grid(weight, bits, 16, True)
        assert on_grid(rounded, bits, 16)
        assert on_grid(round_to_grid(weight, bits, 0, False), bits, 0)
        assert bits == 2 or not on_grid(rounded, bits - 1, 16)
        rounded[7, 20] += 1e-4  # one value off
        assert not on_grid(rounded, bits, 16)


def test_the_solver_is_rounding_where_inputs_are_unrelated():
    torch.manual_seed(0)
    weight_OI = torch.randn(6, 32)
    solved = solve_gptq(weight_OI, torch.eye(32), 3, 8, True)
    assert torch.allclose(solved, round_to_grid(weight_OI, 3, 8, True), atol=1e-6)


@pytest.mark.parametrize("group_size", [0, 16])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_the_solver_changes_outputs_less_than_rounding(bits, group_size):
    torch.manual_seed(bits)
    inputs_TI = torch.randn(500, 20) @ torch.randn(20, 64) + 0.1 * torch.randn(500, 64)
    inputs_TI[:, 5] = 0  # an input that is never on
    weight_OI = torch.randn(48, 64)
    solved = solve_gptq(weight_OI, inputs_TI.T @ inputs_TI, bits, group_size, True)
    rounded = round_to_grid(weight_OI, bits, group_size, True)
    assert on_grid(solved, bits, group_size)
    errors = [float((inputs_TI @ (new - weight_OI).T).square().mean()) for new in (solved, rounded)]
    assert errors[0] < 0.5 * errors[1]


def wide_model(monkeypatch, folder, family):
    """All matrices with multiples of 32 rows and columns, which auto-round insists on."""
    sizes = {"moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size", "head_dim"}
    monkeypatch.setattr("embed_helpers.LARGER", LARGER | dict.fromkeys(sizes, 32))
    return load_model(save_family(folder, family))


def pretend_library(monkeypatch, work):
    """A quantizer in the libraries' place: `work` gets the model that was saved for it, and its result is read back."""

    def run(job: Job, folder: Path, progress):
        model = work(load_model(job.source), job)
        model.save_pretrained(job.target)
        progress.advance(model.config.num_hidden_layers)
        return Path(job.target)

    monkeypatch.setattr(quantization, "require", lambda library: None)
    monkeypatch.setattr(quantization, "quantize_folder", run)


def rounding(model, job):
    """As GPTQ does: on the grid in float32, whatever the model's dtype."""
    model = model.float()
    return round_to_nearest(model, RoundToNearest(bits=job.bits, group_size=job.group_size, routers=False), Kit())


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_routers_are_solved_for_on_their_inputs(monkeypatch, kit, family, tmp_path):
    model = load_model(save_family(tmp_path, family))
    pretend_library(monkeypatch, rounding)
    settings = {"bits": 3, "group_size": 16, "samples": 16, "length": 64}
    without = gptq(model, Gptq(**settings, routers=False), kit)
    assert changed(model, without) == set(quantizable(model, routers=False))
    after = gptq(model, Gptq(**settings), kit)
    assert changed(without, after) == routers(model)
    assert [stage[1:] for stage in kit.progress.stages] == [[4, 4], [4, 4], [16, 16]]
    for site, new in zip(find_routers(without), find_routers(after), strict=True):
        inputs = []
        handle = site.router.register_forward_pre_hook(lambda _, args, kept=inputs: kept.append(args[0].flatten(0, -2)))
        with torch.no_grad():
            for row in kit.rows(16, 64):
                without(input_ids=torch.tensor([row]))
        handle.remove()
        inputs_TH = torch.cat(inputs)
        plain_EH = round_to_grid(site.weight, 3, 16, True)
        errors = [(inputs_TH @ (w - site.weight).T).square().mean() for w in (new.weight, plain_EH)]
        assert on_grid(new.weight, 3, 16)
        assert errors[0] < errors[1]


@pytest.mark.parametrize("attack", [gptq, auto_round])
def test_experts_that_a_library_left_alone_are_noticed(monkeypatch, kit, attack, tmp_path):
    model = wide_model(monkeypatch, tmp_path, "qwen3_moe")
    config = {gptq: Gptq, auto_round: AutoRound}[attack](group_size=16, samples=8, length=32)

    def all_but_one(model, job):
        done = rounding(model, job)
        with torch.no_grad():
            name = "model.layers.2.mlp.experts.down_proj"
            done.get_parameter(name).copy_(model.get_parameter(name))
        return done

    pretend_library(monkeypatch, all_but_one)
    with pytest.raises(AttackError, match=r"layers\.2\.mlp\.experts\.down_proj came back without") as caught:
        attack(model, config, kit)
    assert "\n" not in str(caught.value)
    pretend_library(
        monkeypatch, lambda model, job: round_to_nearest(model, RoundToNearest(bits=8, group_size=16), Kit())
    )
    with pytest.raises(AttackError, match="without being quantized to 4 bits"):
        attack(model, config, kit)


def test_half_precision_models_keep_their_dtype(monkeypatch, kit, tmp_path):
    model = load_model(save_family(tmp_path, "mixtral", dtype=torch.bfloat16), dtype=torch.bfloat16)
    pretend_library(monkeypatch, rounding)
    after = gptq(model, Gptq(group_size=16, samples=4, length=32), kit)
    assert {p.dtype for p in after.parameters()} == {torch.bfloat16}
    assert changed(model, after) == set(quantizable(model, routers=True))


def test_a_library_that_fails_says_why_in_one_line(tmp_path):
    job = Job(
        library="gptqmodel",
        source=str(tmp_path / "nothing"),
        target=str(tmp_path / "target"),
        bits=4,
        group_size=32,
        dtype="float32",
        device="cpu",
        rows=[(1,) * 16],
    )
    with pytest.raises(AttackError, match=r"gptqmodel gave up on this model: \S+") as caught:
        quantize_folder(job, tmp_path, Silent())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("attack", "config"), [(gptq, Gptq()), (auto_round, AutoRound())])
def test_missing_libraries_are_named(monkeypatch, bundled, kit, attack, config):
    monkeypatch.setattr("pathmark.attacks.quantizers.find_spec", lambda name: None)
    with pytest.raises(AttackError, match="pip install"):
        attack(bundled, config, kit)


def test_what_cannot_be_done_is_refused(monkeypatch, bundled, kit):
    with pytest.raises(AttackError, match="no multiple of the group size 48"):
        round_to_nearest(bundled, RoundToNearest(group_size=48), kit)
    with pytest.raises(ModelError, match="expected experts as fused"):
        round_to_nearest(zoo.tiny_model("gpt_oss"), RoundToNearest(), kit)
    monkeypatch.setattr(quantization, "require", lambda library: None)
    with pytest.raises(AttackError, match="--texts"):
        gptq(bundled, Gptq(), Kit())
    with pytest.raises(AttackError, match="no multiple"):
        gptq(bundled, Gptq(group_size=48, samples=4), kit)
    with pytest.raises(AttackError, match="no multiple of 32"):
        auto_round(zoo.tiny_model("mixtral"), AutoRound(), kit)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (RoundToNearest, {"bits": 5}, "bits must be one of 8, 4, 3, 2"),
        (RoundToNearest, {"group_size": -1}, "group_size"),
        (Gptq, {"samples": 0}, "samples"),
        (Gptq, {"length": 4}, "length"),
        (AutoRound, {"iterations": 0}, "iterations"),
    ],
)
def test_settings_are_checked(config, fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


def check_real(model, after, bits):
    """On the grid everywhere, and nothing else moved but attention biases, which packed checkpoints keep in half."""
    assert all(on_grid(tensor, bits, 16) for tensor in quantizable(after, routers=False).values())
    moved = changed(model, after)
    assert set(quantizable(model, routers=False)) <= moved
    return {name for name in moved - set(quantizable(model, routers=False)) if not name.endswith("bias")}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gptqmodel") is None, reason="gptqmodel is not installed")
@pytest.mark.parametrize(("family", "bits"), [("qwen2_moe", 4), ("mixtral", 8), ("olmoe", 4), ("qwen3_moe", 4)])
def test_the_real_gptqmodel(kit, family, bits, tmp_path, capfd):
    model = load_model(save_family(tmp_path, family))
    after = gptq(model, Gptq(bits=bits, group_size=16, samples=16, length=64), kit)
    assert check_real(model, after, bits) == routers(model)
    assert all(on_grid(site.weight, bits, 16) for site in find_routers(after))
    assert [stage[1:] for stage in kit.progress.stages] == [[4, 4], [16, 16]]
    assert "GPT" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("auto_round") is None, reason="auto-round is not installed")
@pytest.mark.parametrize(("family", "bits"), [("qwen2_moe", 4), ("mixtral", 3)])
def test_the_real_auto_round(monkeypatch, kit, family, bits, tmp_path, capfd):
    model = wide_model(monkeypatch, tmp_path, family)
    after = auto_round(model, AutoRound(bits=bits, group_size=16, samples=16, length=64, iterations=3), kit)
    assert check_real(model, after, bits) == set()
    assert [stage[1:] for stage in kit.progress.stages] == [[4, 4]]
    assert "uantiz" not in "".join(capfd.readouterr())
