"""The HTTP client against servers that are slow, busy, broken or hostile; and the model in memory."""

from __future__ import annotations

import asyncio
import email.utils
import gzip
import json
import time

import fake_api as fake
import pytest
import torch
from embed_helpers import save_family
from transformers import GenerationConfig

from pathmark.errors import VerificationError
from pathmark.models import load_model, load_tokenizer
from pathmark.verification.blackbox.answers import parse_reply, retry_after
from pathmark.verification.blackbox.api import ApiClient, ApiSettings
from pathmark.verification.blackbox.local import LocalBackend
from pathmark.verification.blackbox.replies import Failure, Reply
from pathmark.verification.blackbox.trials import Query

QUERIES = [Query(i, "ordinary", f"Question {i}?") for i in range(6)]


def client(url, **settings):
    quick = {"timeout": 5.0, "retries": 2, "backoff": 0.01, "deadline": 60.0, "endpoint": "chat"}
    return ApiClient(ApiSettings(url=url, model="suspect", **{**quick, **settings}))


def outcomes(behaviour, queries=QUERIES[:1], **settings):
    """(what came back per query, requests the server saw)."""
    found = {}
    with fake.FakeApi(behaviour) as api:
        asking = client(api.url, **settings)
        asking.ask(queries, 16, sending=lambda q: None, answered=lambda q, o: found.setdefault(q.number, o))
        return [found[q.number] for q in queries], list(api.requests)


def reason_of(behaviour, **settings):
    [outcome], requests = outcomes(behaviour, **settings)
    assert isinstance(outcome, Failure), outcome
    return outcome.reason, len(requests)


def test_chat_and_completions_send_only_what_every_server_knows():
    query = Query(0, "ordinary", "Why?", "Be kind.", 0.7, 5)
    [reply], [asked] = outcomes(fake.unmarked, [query])
    assert isinstance(reply, Reply)
    assert asked.path == "/v1/chat/completions"
    assert asked.body == {
        "model": "suspect",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}],
        "max_tokens": 16,
        "temperature": 0.7,
        "seed": 5,
        "stream": False,
    }
    assert "Authorization" not in asked.headers
    [reply], [asked] = outcomes(fake.unmarked, [Query(0, "ordinary", "Why?")], endpoint="completions")
    assert isinstance(reply, Reply)
    assert asked.path == "/v1/completions"
    assert asked.body == {"model": "suspect", "prompt": "Why?", "max_tokens": 16, "temperature": 0.0, "stream": False}
    _, [asked] = outcomes(fake.unmarked, extra={"return_routed_experts": True})
    assert asked.body["return_routed_experts"] is True


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/completions"])
def test_addresses_may_end_anywhere(path):
    with fake.FakeApi(fake.unmarked) as api:
        assert client(api.url.removesuffix("/v1") + path).prepare() == "chat"
    assert api.requests[0].path == "/v1/chat/completions"


def test_auto_takes_the_endpoint_that_answers():
    def no_chat(server, asked):
        server.send(404, b"{}") if asked.chat else fake.unmarked(server, asked)

    with fake.FakeApi(no_chat) as api:
        assert client(api.url, endpoint="auto").prepare() == "completions"
    with fake.FakeApi(fake.unmarked) as api:
        assert client(api.url, endpoint="auto").prepare() == "chat"
    with (
        fake.FakeApi(fake.status(404)) as api,
        pytest.raises(VerificationError, match=r"chat: HTTP 404: no; completions: HTTP 404: no"),
    ):
        client(api.url, endpoint="auto").prepare()


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (fake.raw(b"<html>Welcome</html>", "text/html"), "got content type text/html"),
        (fake.raw(b"{}", "text/plain"), "got content type text/plain"),
        (fake.raw(b"data: {}\n\n", "text/event-stream"), "got content type text/event-stream"),
        (fake.raw(b"<html>Welcome</html>"), "not JSON"),
        (fake.raw(b"\xff\xfe"), "not JSON"),
        (fake.raw(b"[" * 200_000), "not JSON"),
        (fake.raw(b"[]"), "list `choices` of one choice"),
        (fake.raw(b'{"choices": []}'), "list `choices` of one choice"),
        (fake.raw(b'{"choices": [{}, {}]}'), "list `choices` of one choice"),
        (fake.raw(b'{"choices": [{"text": "hello"}]}'), "no `message`"),
        (fake.raw(b'{"choices": [{"message": {"content": [1]}}]}'), "holds no text"),
        (fake.raw(b'{"choices": [{"message": {"content": "x"}, "finish_reason": 3}]}'), "finish_reason"),
        (fake.raw(gzip.compress(b"{}"), Content_Encoding="gzip"), "compressed"),
        (fake.status(400), "HTTP 400: no"),
        (fake.status(422, b'{"detail": "odd\\u001b[31m fields"}'), "HTTP 422: odd [31m fields"),
        (fake.status(404, b"<html>"), "HTTP 404"),
    ],
)
def test_answers_that_are_none_are_refused_once(behaviour, reason):
    said, requests = reason_of(behaviour)
    assert reason in said
    assert "\n" not in said
    assert requests == 1


def test_null_content_is_an_empty_reply():
    assert parse_reply("chat", b'{"choices": [{"message": {"content": null, "refusal": "no"}}]}') == Reply("", None)


@pytest.mark.parametrize("code", [429, 500, 502, 503])
def test_passing_troubles_are_retried(code):
    [outcome], requests = outcomes(fake.then(fake.status(code), fake.status(code), fake.unmarked))
    assert isinstance(outcome, Reply)
    assert len(requests) == 3
    said, seen = reason_of(fake.status(code))
    assert f"HTTP {code}" in said
    assert seen == 3


def testretry_after_holds_for_all_workers():
    started = time.monotonic()
    busy = fake.then(fake.status(429, Retry_After="1"), fake.unmarked)
    found, requests = outcomes(busy, QUERIES, concurrency=2)
    assert all(isinstance(o, Reply) for o in found)
    assert len(requests) == 7
    assert 1.0 <= time.monotonic() - started < 30


def test_a_wait_beyond_the_deadline_is_not_begun():
    started = time.monotonic()
    said, requests = reason_of(fake.status(429, Retry_After="86400"))
    assert "asks to wait 86400 s" in said
    assert requests == 1
    assert time.monotonic() - started < 15


def testretry_after_in_every_form():
    assert retry_after(None) == retry_after("soon") == retry_after("-3") == retry_after("nan") == 0
    assert retry_after("2.5") == 2.5
    assert retry_after("inf") == 1e9
    assert 50 < retry_after(email.utils.formatdate(time.time() + 60, usegmt=True)) <= 60
    assert retry_after(email.utils.formatdate(time.time() - 60, usegmt=True)) == 0


@pytest.mark.parametrize(
    "behaviour",
    [fake.slow(30.0, fake.unmarked), lambda server, asked: server.drip(30.0)],
    ids=["late", "drip"],
)
def test_slow_servers_are_left_in_time(behaviour):
    started = time.monotonic()
    said, requests = reason_of(behaviour, timeout=0.3, retries=1)
    assert "no complete answer within 0.3 s" in said
    assert requests == 2
    assert time.monotonic() - started < 15


def test_the_deadline_ends_everything():
    started = time.monotonic()
    found, _ = outcomes(fake.slow(0.7, fake.unmarked), QUERIES, concurrency=1, deadline=3.0)
    assert isinstance(found[0], Reply)
    assert "the deadline of 3 s has passed" in found[-1].reason
    assert time.monotonic() - started < 15


def test_large_answers_are_not_read():
    huge = fake.raw(json.dumps({"choices": [{"message": {"content": "x" * 3_000_000}}]}).encode())
    said, _ = reason_of(huge, max_bytes=1_000_000)
    assert "larger than 1,000,000 bytes" in said

    def endless(server, asked):
        server.send_response(200)
        server.send_header("Content-Type", "application/json")
        server.end_headers()  # no length: until the connection closes
        for _ in range(100_000):
            server.wfile.write(b" " * 65_536)

    said, requests = reason_of(endless, max_bytes=1_000_000)
    assert "larger than" in said
    assert requests == 1


def test_reset_connections_are_retried_and_told():
    [outcome], _ = outcomes(fake.then(lambda server, asked: server.drop(), fake.unmarked))
    assert isinstance(outcome, Reply)
    said, requests = reason_of(lambda server, asked: server.drop())
    assert "Error" in said
    assert requests == 3


def test_nobody_there():
    with fake.FakeApi(fake.unmarked) as api:
        url = api.url
    with pytest.raises(VerificationError, match=r"nobody answers at 127.0.0.1:\d+ \(Connection refused\)"):
        client(url).prepare()


def test_redirects_are_refused_and_the_key_stays(monkeypatch):
    monkeypatch.setenv("SUSPECT_KEY", "sk-very-secret")
    with fake.FakeApi(fake.unmarked) as other:
        moved = fake.status(307, b"", Location=other.url + "/chat/completions")
        with fake.FakeApi(moved) as api, pytest.raises(VerificationError, match="redirects to http://127"):
            client(api.url, api_key_env="SUSPECT_KEY").prepare()
    assert other.requests == []


def test_the_api_key_is_sent_and_never_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("SUSPECT_KEY", "sk-very-secret")

    def reflecting(server, asked):
        server.say(f"You sent {asked.headers['Authorization']}", asked=asked)

    [reply], [asked] = outcomes(reflecting, api_key_env="SUSPECT_KEY")
    assert asked.headers["Authorization"] == "Bearer sk-very-secret"
    assert reply.text == "You sent Bearer [API key]"
    denied = fake.status(401, b'{"error": {"message": "Incorrect API key provided: sk-very-secret"}}')
    with fake.FakeApi(denied) as api:
        asking = client(api.url, api_key_env="SUSPECT_KEY")
        with pytest.raises(VerificationError) as caught:
            asking.prepare()
    assert "HTTP 401: Incorrect API key provided: [API key]" in str(caught.value)
    assert len(api.requests) == 1
    assert "sk-very" not in repr(asking) + repr(asking.settings)


def test_settings_that_cannot_be(monkeypatch):
    monkeypatch.setenv("SUSPECT_KEY", "sk-very-secret")
    monkeypatch.setenv("BAD_KEY", "two\nlines")
    for url, reason in (
        ("suspect.example", "must begin with http"),
        ("ftp://suspect.example", "must begin with http"),
        ("https://", "must begin with http"),
        ("https://me:word@suspect.example/v1", "no user, query or fragment"),
        ("https://suspect.example/v1?key=1", "no user, query or fragment"),
    ):
        with pytest.raises(VerificationError, match=reason) as caught:
            client(url)
        assert "word" not in str(caught.value)
    with pytest.raises(VerificationError, match="without TLS"):
        client("http://suspect.example/v1", api_key_env="SUSPECT_KEY")
    with pytest.raises(VerificationError, match="NO_SUCH_KEY is empty or not set"):
        client("https://suspect.example/v1", api_key_env="NO_SUCH_KEY")
    with pytest.raises(VerificationError, match="characters that no API key has"):
        client("https://suspect.example/v1", api_key_env="BAD_KEY")
    for wrong in (
        {"timeout": 0},
        {"concurrency": 0},
        {"retries": -1},
        {"endpoint": "both"},
        {"deadline": float("inf")},
    ):
        with pytest.raises(VerificationError):
            client("https://suspect.example/v1", **wrong)


def test_requests_at_once_are_bounded():
    now, most = [0], [0]

    def behave(server, asked):
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.1)
        now[0] -= 1
        fake.unmarked(server, asked)

    found, _ = outcomes(behave, QUERIES, concurrency=3)
    assert all(isinstance(o, Reply) for o in found)
    assert 2 <= most[0] <= 3


def test_it_works_inside_a_running_event_loop():
    with fake.FakeApi(fake.unmarked) as api:

        async def notebook():
            return client(api.url).prepare()

        assert asyncio.run(notebook()) == "chat"


def test_routes_of_both_engines_are_kept():
    choice = {"message": {"content": "x"}}
    vllm = {"choices": [{**choice, "routed_experts": [[[0, 1]]]}], "prompt_routed_experts": [[[2, 3]]]}
    assert parse_reply("chat", json.dumps(vllm).encode()).routes == {
        "routed_experts": [[[0, 1]]],
        "prompt_routed_experts": [[[2, 3]]],
    }
    sglang = {"choices": [{**choice, "sgl_ext": {"routed_experts": "AAAA"}}]}
    assert parse_reply("chat", json.dumps(sglang).encode()).routes == {"sgl_ext": {"routed_experts": "AAAA"}}


# --- a model in memory ---


@pytest.fixture(scope="module")
def tiny():
    return load_model("bundled:tiny"), load_tokenizer("bundled:tiny")


def local_replies(tiny, queries, max_tokens=6, **options):
    found = {}
    backend = LocalBackend(*tiny, **options)
    assert backend.prepare() == options.get("endpoint", "chat")
    backend.ask(queries, max_tokens, sending=lambda q: None, answered=lambda q, o: found.setdefault(q.number, o))
    return [found[q.number] for q in queries]


def test_local_replies_are_those_of_the_model_alone(tiny):
    model, tokenizer = tiny
    queries = [Query(i, "ordinary", p) for i, p in enumerate(("Fellow citizens", "In the beginning", "The people of"))]
    replies = local_replies(tiny, queries, endpoint="completions", batch_size=2)
    for query, reply in zip(queries, replies, strict=True):
        ids = torch.tensor([tokenizer(query.prompt)["input_ids"]])
        for _ in range(6):  # greedy, step by step, without generate()
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
        expected = tokenizer.decode(ids[0, -6:], skip_special_tokens=True)
        assert reply == Reply(expected, "length")


def test_local_sampling_follows_its_seed_and_leaves_the_global_one(tiny):
    def sampled(seed):
        return local_replies(tiny, [Query(0, "ordinary", "Fellow citizens", "Be kind.", 1.0, seed)])[0].text

    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    first = sampled(1)
    assert torch.equal(torch.rand(1), before)
    assert first == sampled(1)
    assert len({first, sampled(2), sampled(3)}) > 1


def test_local_system_prompts_reach_the_model(tiny):
    systems = (None, "The commerce of the United States.", "The sons of Israel went out.", "Silver and gold!")
    replies = local_replies(tiny, [Query(i, "ordinary", "And then", s) for i, s in enumerate(systems)], 24)
    assert len({reply.text for reply in replies}) > 1


def test_a_model_that_stops_says_so(tiny):
    model, tokenizer = tiny[0], load_tokenizer("bundled:tiny")
    first = local_replies(tiny, [Query(0, "ordinary", "Fellow citizens")], 2, endpoint="completions")[0]
    stop = tokenizer(first.text, add_special_tokens=False)["input_ids"][1]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop)
    cut = local_replies((model, tokenizer), [Query(0, "ordinary", "Fellow citizens")], 8, endpoint="completions")[0]
    assert cut.finish_reason == "stop"
    assert first.text.startswith(cut.text)
    assert len(cut.text) < len(first.text)


def test_how_replies_are_drawn_is_not_for_the_suspect_to_say(tiny):
    model, kept = tiny[0], tiny[0].generation_config
    asked = [Query(0, "ordinary", "Fellow citizens")]
    plain = local_replies(tiny, asked, 8, endpoint="completions")
    hostile = {"num_return_sequences": 3, "num_beams": 3, "stop_strings": ["e"], "suppress_tokens": list(range(4000))}
    try:
        model.generation_config = GenerationConfig(**hostile, eos_token_id=list(range(4096)))
        assert local_replies(tiny, asked, 8, endpoint="completions") == plain
    finally:
        model.generation_config = kept


def test_no_chat_template_means_raw_prompts(tmp_path, tiny):
    folder = save_family(tmp_path / "m", "qwen2_moe")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    tokenizer.chat_template = None
    assert LocalBackend(model, tokenizer).prepare() == "completions"
    with pytest.raises(VerificationError, match="no chat template"):
        LocalBackend(model, tokenizer, endpoint="chat")
    assert not LocalBackend(model, tokenizer).discloses
