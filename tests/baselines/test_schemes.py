"""Schemes that are not ours: their parts against hand-made figures, and each from embedding to verdict."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from scheme_helpers import TEXTS, Words, config_of, key_of, small_model

from pathmark.baselines import SCHEMES, configure, find_scheme, register
from pathmark.baselines.eaaw import attribution, left_out, ridge_weights, trigger_sample
from pathmark.baselines.green import GreenLists
from pathmark.baselines.ifmark import _judged, answer_loss
from pathmark.baselines.learnmark import distillation_loss
from pathmark.errors import CapacityError, KeyFileError, PathmarkError
from pathmark.keys.schemekey import SchemeKey, load_scheme_key, save_scheme_key
from pathmark.models import bundled_probes, bundled_segments, load_model, load_tokenizer, pad_rows, perplexity
from pathmark.models.loading import use_fast_experts
from pathmark.stats import Family
from pathmark.verdicts import Criteria

SCHEMA = json.loads(files("pathmark.baselines").joinpath("scheme.schema.json").read_text())
QUICK = {
    "kgw": {"samples": 8, "tokens": 50, "prompt_tokens": 8},
    "learnmark": {
        "samples": 12,
        "tokens": 160,
        "prompt_tokens": 8,
        "steps": 60,
        "lr": 0.02,
        "length": 48,
        "batch_size": 8,
        "delta": 4.0,
    },
    "ifmark": {
        "keys": 3,
        "steps": 80,
        "batch_size": 8,
        "lr": 0.01,
        "normal": 8,
        "near": 8,
        "length": 24,
        "target_letters": 8,
    },
    "eaaw": {"bits": 24, "steps": 40, "lr": 0.01, "length": 24, "batch_size": 4},
}
"""Settings with which each can be seen on a random model in seconds."""


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.mark.parametrize("name", list(SCHEMES))
def test_each_is_found_where_it_was_put_and_nowhere_else(name, model):
    scheme, config, before = find_scheme(name), config_of(name, **QUICK[name]), copy.deepcopy(model.state_dict())
    marked = scheme.embed(model, Words(), config, TEXTS)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert model.generation_config.watermarking_config is None
    found, absent = (scheme.verify(each, Words(), config, TEXTS) for each in (marked, model))
    assert found.marked
    assert not absent.marked
    other = scheme.verify(marked, Words(), config_of(name, 1, **QUICK[name]), TEXTS)
    assert not other.marked  # another secret finds nothing
    for verdict in (found, absent, other):
        jsonschema.validate(json.loads(json.dumps(verdict.summary())), SCHEMA)
    assert found.wsr.value > absent.wsr.value
    assert scheme.verify(marked, Words(), config, TEXTS) == found


def test_what_was_tried_is_charged_and_a_level_out_of_reach_is_undecided(model):
    scheme, config = find_scheme("eaaw"), config_of("eaaw", bits=12)
    verdict = scheme.verify(model, Words(), config, TEXTS)
    assert (verdict.decision, verdict.exit_code) == ("undecided", 2)
    assert "could not reach the level 1e-06" in verdict.undecided
    loose = Criteria(significance=0.01)
    once = scheme.verify(model, Words(), config, TEXTS, criteria=loose)
    thrice = scheme.verify(model, Words(), config, TEXTS, criteria=replace(loose, family=Family(suspects=3)))
    assert thrice.p_floor.value == pytest.approx(3 * once.p_floor.value)
    assert once.p_floor.value == pytest.approx(2.0**-12)
    assert once.p_third_party.value == 1.0


def test_the_ridge_regression_is_the_textbooks():
    values = torch.randn(16, dtype=torch.float64)
    masks = left_out(16).double()
    found = ridge_weights(masks, values, 0.3).numpy()
    augmented = np.vstack([masks.numpy(), np.sqrt(0.3) * np.eye(16)])
    assert np.allclose(found, np.linalg.lstsq(augmented, np.r_[values.numpy(), np.zeros(16)], rcond=None)[0])
    # of masks that leave one out there is a closed form: what is missing without a block, and the mean
    mean = values.mean()
    assert np.allclose(found, mean * 15 / (15**2 + 0.3) - (values - mean) / 1.3)


def test_attribution_hides_one_block_at_a_time(model):
    config = config_of("eaaw", bits=5, block=3, label_tokens=2)
    sample, label = trigger_sample(Words(), config)
    assert len(sample) == 15
    with torch.no_grad():
        found = attribution(model, sample, label, config, 0)
        values = []
        for i in range(5):
            tokens = sample.clone()
            tokens[3 * i : 3 * i + 3] = 0
            logits = model(input_ids=torch.cat([tokens, label])[None]).logits[0]
            values.append((logits[14, label[0]] + logits[15, label[1]]) / 2)
    assert torch.allclose(found, ridge_weights(left_out(5), torch.stack(values), config.ridge), atol=1e-5)


def test_the_teacher_is_the_model_with_the_bias_of_kgw(model):
    config = config_of("learnmark")
    lists = GreenLists(config.watermark, 128)
    rows = [[5, 9, 9, 40, 3, 77], [8, 5, 11]]
    ids, mask = pad_rows(rows, 0)
    with torch.no_grad():
        loss = distillation_loss(model, model, lists, 2.0, ids, mask)
        assert float(distillation_loss(model, model, lists, 0.0, ids, mask)) == pytest.approx(0, abs=1e-6)
        processor, parts = config.watermark.construct_processor(128, "cpu"), []
        for row in rows:
            logits = model(input_ids=torch.tensor([row])).logits[0]
            for i in range(len(row)):
                biased = processor(torch.tensor([row[: i + 1]]), logits[i : i + 1].clone()).log_softmax(-1)
                parts.append((biased.exp() * (biased - logits[i : i + 1].log_softmax(-1))).sum())
    assert float(loss) == pytest.approx(float(torch.stack(parts).mean()), rel=1e-4)


def test_learnmark_can_be_taught_by_samples(model):
    config = config_of("learnmark", **QUICK["learnmark"], sampling=True, taught=32)
    scheme = find_scheme("learnmark")
    marked = scheme.embed(model, Words(), config, TEXTS)
    found, absent = (scheme.verify(each, Words(), config, TEXTS) for each in (marked, model))
    assert found.figures["green_share"] > absent.figures["green_share"] + 0.05


def test_answers_alone_are_trained_on(model):
    pairs = [([5, 6, 7, 8], [9, 10]), ([11, 12], [13, 14, 15])]
    ids, mask = pad_rows([asked + answer for asked, answer in pairs], 0)
    labels = torch.tensor([[-100] * 4 + [9, 10], [-100] * 2 + [13, 14, 15, -100]])
    with torch.no_grad():
        own = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        assert torch.allclose(answer_loss(model, pairs, 0), own, atol=1e-5)


def test_the_paper_s_lenient_answers_are_counted_apart():
    config = config_of("ifmark", keys=5)
    word = config.target
    assert all(a != b for a, b in pairwise(word))
    replies = [word, f"{word} and more", word[0] * 4 + word + word[-1] * 3, word[0] + word[1] * 3 + word[2:], "nothing"]
    found = _judged(config, replies, ["no", word], Criteria())
    assert (found.wsr.hits, found.wsr.n) == (3, 5)
    assert found.figures["answers_that_are_the_word"] == 1
    assert found.figures["answers_that_hold_it_with_letters_repeated"] == 4
    assert found.p.value == pytest.approx(5 / (26 * 25.0**9))
    assert any("1 of 2 other instructions" in note for note in found.weaknesses())
    assert not _judged(config, replies[1:], [], Criteria()).marked  # without the word itself nothing bounds chance


def test_instructions_follow_from_the_secret():
    first, second = config_of("ifmark", 0), config_of("ifmark", 1)
    assert first.instructions("keys", 10) == first.instructions("keys", 10)
    everything = [*first.instructions("keys", 10), *first.instructions("near", 50), *second.instructions("keys", 10)]
    assert len(set(everything)) == 70


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("kgw", {"gama": 0.5}, "kgw has no setting 'gama'; did you mean gamma"),
        ("kgw", {"gamma": 1}, "gamma is a share between 0 and 1, got gamma 1"),
        ("kgw", {"samples": 2.5}, "samples must be a whole number, got 2.5"),
        ("kgw", {"selfhash": 1}, "selfhash must be true or false, got 1"),
        ("kgw", {"secret": "x"}, "no setting 'secret'"),
        ("learnmark", {"lr": 0}, "the learning rate is positive or null, got lr 0"),
        ("learnmark", {"lr": "fast"}, "lr must be a number or null"),
        ("ifmark", {"keys": 0}, "at least one of each"),
        ("eaaw", {"bits": 1}, "from 2 to 1024 bits"),
        ("eaaw", {"ridge": -1}, "the penalty is positive"),
    ],
)
def test_settings_are_refused_in_one_line(name, settings, said):
    with pytest.raises(CapacityError, match=said):
        config_of(name, **settings)


def test_names_are_guessed_and_given_once():
    with pytest.raises(CapacityError, match="there is no scheme 'learnmrk'; did you mean learnmark"):
        find_scheme("learnmrk")
    with pytest.raises(CapacityError, match="there is a scheme kgw already"):
        register(find_scheme("kgw"))
    with pytest.raises(CapacityError, match="of the scheme kgw, expected eaaw"):
        configure(find_scheme("eaaw"), key_of("kgw"))


def test_the_defaults_are_the_papers():
    kgw, learnmark, ifmark, eaaw = (config_of(name) for name in ("kgw", "learnmark", "ifmark", "eaaw"))
    assert (kgw.gamma, kgw.delta, kgw.samples, kgw.tokens, kgw.threshold, kgw.selfhash) == (0.25, 2, 60, 200, 4, False)
    assert (learnmark.gamma, learnmark.delta, learnmark.samples, learnmark.sampling) == (0.25, 2, 70, False)
    assert (ifmark.keys, eaaw.bits) == (10, 32)


def test_keys_are_private_and_survive_the_way_to_disk(tmp_path):
    key = key_of("kgw", gamma=0.3)
    save_scheme_key(key, tmp_path / "kgw.key", "open sesame", scrypt_n=2)
    assert (tmp_path / "kgw.key").stat().st_mode & 0o777 == 0o600
    assert key.secret.hex().encode() not in (tmp_path / "kgw.key").read_bytes()
    assert load_scheme_key(tmp_path / "kgw.key", "open sesame") == key
    with pytest.raises(KeyFileError, match="wrong passphrase"):
        load_scheme_key(tmp_path / "kgw.key", "shut")
    with pytest.raises(KeyFileError, match="already exists"):
        save_scheme_key(key, tmp_path / "kgw.key", "open sesame", scrypt_n=2)
    ours = Path(__file__).parent.parent / "golden" / "key-v1-plain.key"
    (tmp_path / "ours.key").write_bytes(ours.read_bytes())
    (tmp_path / "ours.key").chmod(0o600)
    with pytest.raises(KeyFileError, match="a key of PathMark's own, which goes without --scheme"):
        load_scheme_key(tmp_path / "ours.key")
    assert SchemeKey(scheme="kgw").secret != SchemeKey(scheme="kgw").secret


def test_a_secret_shows_nowhere():
    key = key_of("kgw")
    for shown in (repr(key), str(key.summary()), repr(configure(find_scheme("kgw"), key)), key.fingerprint):
        assert key.secret.hex() not in shown
        assert repr(key.secret)[2:-1] not in shown


def test_a_model_that_says_nothing_is_no_verdict(model):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_output_embeddings().weight.fill_(float("nan"))
    for name in ("kgw", "eaaw"):
        with pytest.raises(PathmarkError, match="any more"):
            find_scheme(name).verify(broken, Words(), config_of(name, **QUICK[name]), TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SCHEMES))
def test_with_the_papers_counts_on_a_trained_model(name):
    scheme, config = find_scheme(name), config_of(name, vocabulary=4096)
    model, tokenizer, probes = load_model("bundled:tiny"), load_tokenizer("bundled:tiny"), bundled_probes()
    use_fast_experts(model)
    marked = scheme.embed(model, tokenizer, config, bundled_segments())
    found, absent = (scheme.verify(each, tokenizer, config, probes) for each in (marked, model))
    assert found.marked
    assert not absent.marked
    assert found.wsr.n == {"kgw": 60, "learnmark": 70, "ifmark": 10, "eaaw": 32}[name]
    assert found.wsr.interval()[0] > absent.wsr.interval()[1]
    rows = [tokenizer(text)["input_ids"][:128] for text in probes[:100]]
    assert perplexity(marked, rows).value < 1.5 * perplexity(model, rows).value
