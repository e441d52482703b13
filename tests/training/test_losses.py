"""Each loss against values worked out by hand, and its gradient against finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from pathmark.embedding import AnchoredConfig, PaperConfig
from pathmark.embedding.anchored import anchored_route_loss
from pathmark.embedding.paper import paper_route_loss
from pathmark.training.losses import (
    align_loss,
    anchor_loss,
    contrast_loss,
    kl_divergence,
    margin_rho,
    mixture_target,
    paper_target,
    power_mean,
    row_means,
    selection,
    twin_loss,
    use_loss,
)


def probs(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_paper_target_is_eq_target_dist_as_written():
    target = paper_target([1, 3], 4).double()
    torch.testing.assert_close(target, probs(1e-8, 0.5, 1e-8, 0.5))
    assert target.sum() > 1  # not renormalised: the paper does not


def test_align_loss_by_hand():
    g, target = probs([0.5, 0.25, 0.25]), probs([0.25, 0.5, 0.25])
    squared = 0.25**2 + 0.25**2
    reverse = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert float(align_loss(g, target)) == pytest.approx(squared + reverse)
    forward = 0.25 * math.log(0.5) + 0.5 * math.log(2)
    assert float(align_loss(g, target, forward_kl=True)) == pytest.approx(squared + forward)


def test_align_loss_is_zero_at_the_target_and_averages_over_tokens():
    target = probs([0.5, 0.5, 0.0])
    assert float(align_loss(target, target)) == pytest.approx(0.0, abs=1e-12)
    g = probs([0.5, 0.5, 0.0], [1.0, 0.0, 0.0])
    alone = float(align_loss(g[1:], target))
    assert float(align_loss(g, target)) == pytest.approx(alone / 2)


def test_contrast_loss_by_hand():
    target = torch.tensor([1.0, 0.0], dtype=torch.float64)
    triggered, clean = probs([1.0, 0.0]), probs([0.0, 1.0], [0.6, 0.8])
    # similarities: 1 for the triggered token, 0 and 0.6 for the clean ones; temperature 0.5
    expected = -math.log(math.exp(2) / (math.exp(2) + math.exp(0) + math.exp(1.2) + 1e-8))
    assert float(contrast_loss(triggered, clean, target, temperature=0.5)) == pytest.approx(expected)


def test_contrast_loss_pushes_clean_tokens_away():
    clean = probs([0.4, 0.6]).requires_grad_()
    target = torch.tensor([1.0, 0.0], dtype=torch.float64)
    contrast_loss(probs([0.9, 0.1]), clean, target).backward()
    # Descent lowers the clean token's mass on the target: the sign that the lemma's proof has wrong.
    assert clean.grad[0, 0] > 0


def test_margin_rho_puts_each_target_c_times_above_the_strongest_natural_expert():
    natural = probs([0.7, 0.2, 0.1, 0.0])
    rho = margin_rho(natural, width=2, margin=1.5)
    strongest = (1 - rho) * 0.7
    assert float(rho / 2 / strongest) == pytest.approx(1.5)
    target = mixture_target(natural, [2, 3], rho)
    assert float(target.sum()) == pytest.approx(1.0)
    assert float(target[0, 3]) == pytest.approx(float(rho) / 2)


def test_anchor_is_kl_from_the_original():
    natural, now = probs([0.5, 0.5]), probs([0.25, 0.75])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert float(anchor_loss(natural, now)) == pytest.approx(expected)
    assert float(anchor_loss(natural, natural)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, n: align_loss(z.softmax(-1), n),
        lambda z, n: align_loss(z.softmax(-1), n, forward_kl=True),
        lambda z, n: contrast_loss(z[:2].softmax(-1), z[2:].softmax(-1), n[0], temperature=0.7),
        lambda z, n: anchor_loss(n, z.softmax(-1)),
        lambda z, n: kl_divergence(z.softmax(-1), n),
    ],
)
def test_gradients_match_finite_differences(loss):
    torch.manual_seed(0)
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    natural = torch.randn(4, 5, dtype=torch.float64).softmax(-1)
    assert torch.autograd.gradcheck(lambda z: loss(z, natural), (logits,))


def test_route_loss_uses_each_watermark_s_own_tokens_and_layers():
    torch.manual_seed(0)
    natural = {5: torch.rand(3, 4, 6).softmax(-1), 6: torch.rand(3, 4, 6).softmax(-1)}
    routing = {layer: torch.rand(3, 4, 6).softmax(-1) for layer in natural}
    paths = [{5: (0, 1)}, {6: (2, 3)}]
    marked = torch.full((3, 4), -1)
    marked[1, 2:], marked[2, 1:] = 0, 1
    free = marked < 0
    terms = anchored_route_loss(routing, natural, paths, marked, free, 2.0)
    by_hand = [
        align_loss(
            routing[layer][marked == j],
            mixture_target(
                natural[layer][marked == j], paths[j][layer], margin_rho(natural[layer][marked == j], 2, 2.0)
            ),
            forward_kl=True,
        )
        for j, layer in ((0, 5), (1, 6))
    ]
    torch.testing.assert_close(terms["align"], torch.stack(by_hand).pow(4).mean().pow(0.25))
    anchors = [anchor_loss(natural[layer][free], routing[layer][free]) for layer in natural]
    torch.testing.assert_close(terms["stealth"], torch.stack(anchors).mean())


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (AnchoredConfig, {"margin": -1.0}),
        (AnchoredConfig, {"ceiling_weight": -1.0}),
        (AnchoredConfig, {"use_weight": -0.5}),
        (AnchoredConfig, {"twin_weight": -0.5}),
        (AnchoredConfig, {"noise": 2.0}),
        (PaperConfig, {"temperature": 0.0}),
        (PaperConfig, {"stealth_weight": -1.0}),
    ],
)
def test_impossible_objectives_are_refused(settings, wrong):
    with pytest.raises(ValueError, match=r"margin|weights|noise"):
        settings(**wrong)


def test_selection_is_a_soft_count_of_the_top_k():
    g = probs([0.5, 0.3, 0.15, 0.05])
    edge = math.log(math.sqrt(0.3 * 0.15))
    expected = [1 / (1 + math.exp(-(math.log(p) - edge) / 0.2)) for p in (0.5, 0.3, 0.15, 0.05)]
    assert selection(g, range(4), top_k=2).flatten().tolist() == pytest.approx(expected)
    assert [round(x) for x in expected] == [1, 1, 0, 0]


def test_use_loss_compares_how_often_targets_are_chosen():
    natural = probs([0.6, 0.39, 0.01], [0.01, 0.6, 0.39])  # top-1: expert 0 once, expert 1 once
    factor = torch.tensor([1.0, 1.0], dtype=torch.float64)
    assert float(use_loss(natural, natural, [0, 1], factor, 1)) == 0
    routing = probs([0.39, 0.6, 0.01], [0.01, 0.6, 0.39])  # expert 0 falls behind, expert 1 gains
    before, after = (selection(r, [0, 1], 1).mean(0) for r in (natural, routing))
    expected = float(((before / after).log() ** 2).mean())
    assert float(use_loss(natural, routing, [0, 1], factor, 1)) == pytest.approx(expected)
    doubled = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert float(use_loss(natural, natural, [0, 1], doubled, 1)) == pytest.approx(math.log(2) ** 2 / 2)


def test_twin_loss_looks_at_the_targets_rows_centred_over_all_experts():
    rows = torch.tensor([[3.0, 1.0], [1.0, 3.0], [-2.0, 1.0], [-2.0, -5.0]])  # their mean is zero
    cosine = (3 + 3) / 10
    assert float(twin_loss(rows, [0, 1], 0.1)) == pytest.approx((cosine - 0.1) ** 2)
    assert float(twin_loss(rows + torch.tensor([7.0, -2.0]), [0, 1], 0.1)) == pytest.approx((cosine - 0.1) ** 2)
    assert float(twin_loss(rows, [0, 1], 0.7)) == 0
    assert float(twin_loss(rows, [0, 3], 0.0)) == 0  # they point away from each other


def test_the_layer_that_lags_behind_counts_more():
    """Two layers, one at its target: the anchored objective takes the mean of fourth powers, the paper's the mean."""
    natural, path = torch.full((1, 3, 4), 0.25), (0, 1)
    reached = mixture_target(natural, path, margin_rho(natural, 2, 1.0))
    marked, free = torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.bool)

    def anchored(*layers):
        routing, paths = dict(enumerate(layers)), [dict.fromkeys(range(len(layers)), path)]
        terms = anchored_route_loss(routing, dict.fromkeys(routing, natural), paths, marked, free, 1.0)
        return float(terms["align"])

    def paper(*layers):
        routing, paths = dict(enumerate(layers)), [dict.fromkeys(range(len(layers)), path)]
        return float(paper_route_loss(routing, paths, marked, free, 1.0)["align"])

    assert anchored(natural, reached) == pytest.approx(anchored(natural) / 2 ** (1 / 4), rel=1e-4)
    assert paper(natural, reached) == pytest.approx((paper(natural) + paper(reached)) / 2, rel=1e-4)


def test_rows_are_averaged_apart_and_rows_without_tokens_left_out():
    here = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])
    assert row_means(torch.tensor([1.0, 3.0, 5.0]), here).tolist() == [2.0, 5.0]


def test_power_mean_leans_to_the_largest_and_has_a_gradient_at_nothing():
    values = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert float(power_mean(values, 1.0)) == pytest.approx(2.0)
    assert float(power_mean(values, 4.0)) == pytest.approx(((1 + 81) / 2) ** 0.25)
    nothing = torch.zeros(3, requires_grad=True)
    power_mean(nothing, 4.0).backward()
    assert nothing.grad.tolist() == [0.0, 0.0, 0.0]
