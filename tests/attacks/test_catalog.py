"""The catalogue of attacks: what each says about itself, and what it refuses."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
from attack_helpers import family, kit_for

from pathmark.attacks import ATTACKS, Attacked, find_attack
from pathmark.errors import AttackError


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_explains_itself_and_its_options(name):
    attack = find_attack(name)
    assert attack.name == name
    assert "adversary" in attack.knowledge
    assert attack.summary.endswith(".")
    assert is_dataclass(attack.config)
    options = attack.options()
    assert [option.name for option in options] == [field.name for field in fields(attack.config)]
    for option in options:
        assert option.help.endswith("."), option
        assert option.kind in (int, float, bool, str) or option.default in option.kind.__args__
    assert attack.configure() == attack.config()
    with pytest.raises(AttributeError):
        attack.config().seed = 1


def test_settings_reach_the_attack_and_wrong_ones_are_named():
    attack = find_attack("average")
    assert attack.configure(weight=0.25).weight == 0.25
    for settings, message in (
        ({"wieght": 0.25}, "average has no setting 'wieght'; did you mean weight"),
        ({"bits": 4}, "average has no setting 'bits'; expected one of weight"),
        ({"weight": 2.0}, "average: weight must be between 0 and 1, got 2.0"),
        ({"weight": "a"}, "average: .*not supported"),
    ):
        with pytest.raises(AttackError, match=message):
            attack.configure(**settings)


def test_a_mistyped_attack_gets_advice():
    with pytest.raises(AttackError, match="there is no attack 'fine-tuen'; did you mean fine-tune"):
        find_attack("fine-tuen")
    with pytest.raises(AttackError, match="there is no attack 'zzz'; expected one of rtn, gptq"):
        find_attack("zzz")


@pytest.mark.parametrize("name", ["permute-experts", "average", "top-k"])
def test_every_attack_is_run_the_same_way(name):
    model = family("mixtral")
    attack = find_attack(name)
    settings = {"top_k": 1} if name == "top-k" else {}
    left = attack.run(model, attack.configure(**settings), kit_for(model))
    assert isinstance(left, Attacked)
    assert left.key is None
    assert left.model is not model
