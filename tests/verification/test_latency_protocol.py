"""The latency protocol with servers of known behaviour: slow on the trigger, indifferent, noisy, caching, broken."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner
from embed_helpers import key_for
from fake_api import FakeApi

from pathmark.cli.main import cli
from pathmark.errors import VerificationError
from pathmark.keys import Ledger, TriggerRef, save_key
from pathmark.models import bundled_probes
from pathmark.models.describe import describe_model
from pathmark.verification.blackbox.api import ApiClient, ApiSettings
from pathmark.verification.blackbox.latency import verify_latency
from pathmark.verification.blackbox.latency_plan import LatencyConfig, plan_latency
from pathmark.verification.blackbox.latency_timing import LatencyLog, Timed, through_api

SIXTY = LatencyConfig(pairs=60, text_tokens=64)


def one_by_one(send):
    """From a function that sends one prompt and returns its seconds; a VerificationError drops the pair."""

    def ask(prompts, max_tokens, answered):
        for place, prompt in enumerate(prompts):
            try:
                answered(place, Timed(send(prompt, max_tokens)))
            except VerificationError as error:
                answered(place, Timed(trouble=str(error)))

    return ask


@pytest.fixture(scope="module")
def material():
    """A key of the bundled model, its tokenizer, and a plan of 60 pairs."""
    key = key_for("bundled:tiny", triggers=2)
    _, codec, _ = describe_model("bundled:tiny")
    return key, codec, plan_latency(key, codec, bundled_probes()[:60], SIXTY)


class Server:
    """Answers after a made-up time: a slow walk with heavy tails, times a factor for some prompts."""

    def __init__(self, factor, *, noise=0.02, seed=0):
        self.factor, self.noise, self.coins, self.level = factor, noise, random.Random(seed), 0.1
        self.seen = []

    def __call__(self, prompt, max_tokens):
        self.seen.append(prompt)
        self.level *= 1 + self.coins.gauss(0, 0.002)
        tail = self.noise * min(20.0, self.coins.expovariate(1) ** 2)
        return self.level * self.factor(prompt) * (1 + tail)


def slow_on(text, factor=1.15):
    return lambda prompt: factor if prompt.startswith(text) else 1.0


def test_a_pair_differs_in_its_prefix_only(material):
    key, codec, plan = material
    trigger = key.watermarks[0].triggers[0]
    pairs = [*plan.calibration, *plan.pairs]
    assert {len(codec.encode(prompt)) for pair in pairs for prompt in pair.prompts} == {plan.prompt_tokens}
    for pair in plan.pairs:
        tokens = codec.encode(pair.triggered), codec.encode(pair.clean)
        assert tuple(tokens[0][: len(trigger.tokens)]) == trigger.tokens
        assert tokens[0][len(trigger.tokens) :] == tokens[1][len(trigger.tokens) :]
        assert tokens[0][: len(trigger.tokens)] != tokens[1][: len(trigger.tokens)]
    texts = [pair.triggered.removeprefix(trigger.text) for pair in plan.pairs]
    assert len(set(texts)) == len(texts)
    assert all(trigger.text not in prompt for pair in plan.calibration for prompt in pair.prompts)
    assert len({pair.clean.split()[0] for pair in plan.pairs}) > 5  # many decoys, not one
    assert 15 < sum(pair.triggered_first for pair in plan.pairs) < 45


def test_a_plan_is_repeatable_and_hides_its_prompts(material):
    key, codec, plan = material
    again = plan_latency(key, codec, bundled_probes()[:60], SIXTY)
    assert again == plan
    assert again.digest == plan.digest
    other = plan_latency(key, codec, bundled_probes()[:60], replace(SIXTY, seed=1))
    assert [p.triggered_first for p in other.pairs] != [p.triggered_first for p in plan.pairs]
    assert key.watermarks[0].triggers[0].text not in repr(plan.pairs[0])
    with pytest.raises(VerificationError, match="not enough for 40 \\+ 60 pairs"):
        plan_latency(key, codec, bundled_probes()[:2], LatencyConfig(pairs=60))


def test_a_server_that_is_slow_on_the_trigger_is_found(material):
    key, _, plan = material
    told = []
    server = Server(slow_on(key.watermarks[0].triggers[0].text))
    verdict = verify_latency(one_by_one(server), plan, disclose=told.append)
    assert verdict.exit_code == 0
    assert verdict.effect.low < 0.15 < verdict.effect.high
    assert len(told) == 1
    assert 0 < told[0] < 0.08
    assert "proves no ownership" in verdict.words()
    assert verdict.words().startswith("Triggered requests are slower")
    summary = json.loads(json.dumps(verdict.summary()))
    assert summary["slower"] is True
    assert summary["pairs"] == 60
    assert summary["proves_ownership"] is False


def test_an_indifferent_server_is_not(material):
    _, _, plan = material
    verdict = verify_latency(one_by_one(Server(lambda prompt: 1.0)), plan)
    assert verdict.exit_code == 1
    assert verdict.words().startswith("Triggered requests are not slower")
    assert verdict.effect.low < 0 < verdict.effect.high


def test_a_noisy_server_never_sees_the_trigger(material):
    key, _, plan = material
    trigger = key.watermarks[0].triggers[0].text
    server = Server(slow_on(trigger), noise=3.0)
    verdict = verify_latency(one_by_one(server), plan, disclose=lambda _: pytest.fail("disclosed"))
    assert verdict.exit_code == 2
    assert verdict.p is None
    assert verdict.needed > 60
    assert "the trigger was not sent" in verdict.words()
    assert not [prompt for prompt in server.seen if prompt.startswith(trigger)]
    assert json.loads(json.dumps(verdict.summary()))["slower"] is None


def test_a_server_that_reacts_to_any_repeated_prefix_decides_nothing(material):
    """Such as one with a prefix cache, turned round: what it has seen often is slow."""
    _, _, plan = material
    often = {}

    def factor(prompt):
        start = prompt[:12]
        often[start] = often.get(start, 0) + 1
        return 1.3 if often[start] > 8 else 1.0

    verdict = verify_latency(one_by_one(Server(factor)), plan)
    assert verdict.exit_code == 2
    assert "repeated prefixes" in verdict.words()


def test_failures_drop_their_pair_and_too_many_end_the_run(material):
    _, _, plan = material
    healthy = Server(lambda prompt: 1.0)

    def flaky(every):
        count = iter(range(10**6))

        def send(prompt, max_tokens):
            if next(count) % every == 0:
                raise VerificationError("HTTP 500")
            return healthy(prompt, max_tokens)

        return send

    assert verify_latency(one_by_one(flaky(20)), plan).dropped > 0
    with pytest.raises(VerificationError, match=r"only \d+ of 40 pairs could be timed \(HTTP 500\)"):
        verify_latency(one_by_one(flaky(2)), plan)


def test_an_interrupted_run_goes_on_without_asking_again(material, tmp_path):
    key, codec, plan = material
    path = tmp_path / "run.jsonl"
    server = Server(slow_on(key.watermarks[0].triggers[0].text))

    def stops(prompt, max_tokens):
        if len(server.seen) > 150:
            raise KeyboardInterrupt
        return server(prompt, max_tokens)

    with pytest.raises(KeyboardInterrupt):
        verify_latency(one_by_one(stops), plan, log=LatencyLog(path))
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("a") as stream:
        stream.write('{"stage": "pai')  # the power went in the middle of a line
    log = LatencyLog(path)
    assert log.trigger == TriggerRef(0, 0)
    before = len(server.seen)
    verdict = verify_latency(one_by_one(server), plan, log=log)
    assert verdict.exit_code == 0
    assert verdict.effect.n == 60
    done = 40 + (before - 2 * 4 - 80) // 2
    assert len(server.seen) - before == 2 * (40 + 60 - done) + len(plan.warmup)
    assert not any(word in path.read_text() for word in (plan.pairs[0].clean[:20], plan.pairs[0].triggered[:20]))
    other = plan_latency(key, codec, bundled_probes()[:60], replace(SIXTY, seed=9))
    with pytest.raises(VerificationError, match="other settings"):
        verify_latency(one_by_one(server), other, log=LatencyLog(path))


def test_wrong_questions(material):
    _, _, plan = material
    few = replace(plan, pairs=plan.pairs[:17])
    with pytest.raises(VerificationError, match="at least 18 pairs"):
        verify_latency(one_by_one(Server(lambda prompt: 1.0)), few, significance=0.001)
    with pytest.raises(VerificationError, match="at least 1"):
        LatencyConfig(calibration=0)
    with pytest.raises(VerificationError, match="concurrency=1, retries=0"):
        through_api(ApiClient(ApiSettings(url="http://127.0.0.1:9", model="m")))


def sleeping(trigger, seconds=0.004, more=0.05):
    """A real server on the loopback that takes longer for the trigger."""

    def behave(server, asked):
        time.sleep(seconds + (more if asked.prompt.startswith(trigger) else 0.0))
        server.say("word", finish="length", asked=asked)

    return behave


def test_the_command_times_a_real_server(material, tmp_path, monkeypatch):
    key, _, _ = material
    monkeypatch.setenv("PATHMARK_PASSPHRASE", "phrase")
    path = tmp_path / "owner.key"
    save_key(key, path, "phrase")
    words = ["latency", "--model", "m", "--key", str(path), "--pairs", "40", "--calibration", "20"]
    with FakeApi(sleeping(key.watermarks[0].triggers[0].text)) as api:
        sizes = ["--tokens", "32", "--effect", "3", "--json"]
        result = CliRunner().invoke(cli, [*words, *sizes, api.url])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.output)
    assert summary["slower"] is True
    assert summary["pairs"] == 40
    assert [(use.trigger, use.times) for use in Ledger.beside(path).uses()] == [(TriggerRef(0, 0), 40)]
    result = CliRunner().invoke(cli, [*words, "bundled:tiny"])
    assert isinstance(result.exception, VerificationError)
    assert "expected the address of an API" in str(result.exception)


def test_the_command_simulates(material, tmp_path, monkeypatch):
    key, _, _ = material
    monkeypatch.setenv("PATHMARK_PASSPHRASE", "phrase")
    save_key(key, tmp_path / "owner.key", "phrase")
    words = ["simulate-latency", "bundled:tiny", "--key", str(tmp_path / "owner.key"), "--devices", "4"]
    result = CliRunner().invoke(cli, [*words, "--n-texts", "8", "--tokens", "32", "--costs", "qwen1.5-moe", "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.output)
    assert len(summary["overhead_per_layer"]) == 8
    assert abs(summary["overhead"]) < 0.1  # the bundled model carries no mark
    assert summary["assumptions"]["devices"] == 4
    assert set(summary["paper_margin"].values()) == {2 / 4 * 4 - 1 / 2}
