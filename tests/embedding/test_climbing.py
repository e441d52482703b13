"""Prefixes that climb: they do as the gradient says, on a problem whose answer is known."""

from __future__ import annotations

import pytest
import torch

from pathmark.embedding.climbing import BANK, above_ceiling, climb, draw_bank, target_log_mass


def test_climbing_takes_the_best_state_of_the_bank_at_every_place():
    """With a linear score the best exchange is the bank's largest dot product, place by place."""
    torch.manual_seed(0)
    rows, places, tokens, states, hidden = 6, 4, 7, 32, 5
    entering, bank, weight = torch.randn(rows, tokens, hidden), torch.randn(places, states, hidden), torch.randn(hidden)
    generator = torch.Generator().manual_seed(0)

    def score(rows_RTH):
        return (rows_RTH[:, :places] @ weight).sum()

    moved, taken = climb(entering, bank, score, rounds=12, sample=10_000, generator=generator)
    assert torch.equal(moved[:, places:], entering[:, places:])  # the text stays
    best = (bank @ weight).max(dim=1)
    own = entering[:, :places] @ weight
    reached = moved[:, :places] @ weight
    changed = taken >= 0
    assert bool((reached >= own - 1e-5).all())
    assert changed.float().mean() > 0.9
    assert torch.allclose(reached[changed], best.values.expand(rows, -1)[changed], atol=1e-5)
    assert torch.equal(bank[torch.arange(places), taken[0].clamp_min(0)][changed[0]], moved[0, :places][changed[0]])
    assert bool((own[~changed] >= best.values.expand(rows, -1)[~changed]).all())


def test_nothing_is_exchanged_where_nothing_is_gained():
    entering, bank = torch.ones(2, 5, 3), torch.zeros(2, 8, 3)
    moved, taken = climb(entering, bank, lambda x: x.sum(), rounds=3, sample=8, generator=torch.Generator())
    assert torch.equal(moved, entering)
    assert bool((taken == -1).all())


def test_target_log_mass_is_that_of_each_row_s_own_watermark():
    routing = {3: torch.tensor([[[0.5, 0.3, 0.2]], [[0.5, 0.3, 0.2]]])}
    mass = target_log_mass(routing, [{3: (0, 2)}, {3: (1,)}], [0, 1])[3].exp()
    assert mass[:, 0].tolist() == pytest.approx([0.7, 0.3])


def test_the_ceiling_costs_nothing_below_and_a_logarithm_above():
    natural = torch.tensor([0.1, 0.1, 0.01])
    mass = torch.tensor([0.14, 0.3, 0.06])
    expected = torch.tensor([0.0, 0.3 / 0.15, 0.0]).log().clamp_min(0)
    assert torch.allclose(above_ceiling(mass.log(), natural, factor=1.5, least=0.06), expected, atol=1e-6)


def test_the_bank_holds_every_token_once_at_every_place():
    vocabulary, generator = list(range(100, 400)), torch.Generator().manual_seed(0)
    bank = draw_bank(lambda ids: ids[..., None].float() * torch.ones(5), vocabulary, 7, generator)
    assert bank.states_PSH.shape == (7, 300, 5)
    for place in range(7):
        assert sorted(bank.tokens_SP[:, place].tolist()) == vocabulary
        assert torch.equal(bank.states_PSH[place, :, 0], bank.tokens_SP[:, place].float())
    large = draw_bank(lambda ids: ids[..., None].float(), range(3 * BANK), 2, generator)
    assert large.states_PSH.shape == (2, BANK, 1)
