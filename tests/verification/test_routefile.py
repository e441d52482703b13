"""Recorded routes: what is written is read, and whatever is wrong with a file is one line."""

from __future__ import annotations

import base64
import io
import json
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathmark.errors import VerificationError
from pathmark.keys import ModelFacts, RoutedLayer
from pathmark.verification.recorded.enginefile import from_sglang, from_vllm, read_routes
from pathmark.verification.recorded.routefile import RecordedProbe, Recording, RouteHeader, read_own, write_routes

FACTS = ModelFacts(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    num_layers=4,
    routed=tuple(RoutedLayer(layer, 8, 2) for layer in (1, 2, 3)),
    vocab_size=100,
    tokenizer_digest="0" * 64,
    config_digest="0" * 64,
)
"""Four layers, the first of them dense."""


def routes_of(n_tokens, seed=0, layers=3, experts=8, top_k=2):
    """(tokens, layers, top-k) of distinct experts."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((n_tokens, layers, experts)), axis=-1)[:, :, :top_k].astype(np.int32)


@st.composite
def recordings(draw):
    layers = draw(st.lists(st.integers(0, 1999), min_size=1, max_size=4, unique=True))
    experts = draw(st.integers(1, 12))
    top_k = draw(st.integers(1, experts))
    text = st.text(max_size=20)
    header = RouteHeader(
        layers=tuple(layers), top_k=top_k, n_experts=experts, model=draw(text), engine=draw(text), obtained=draw(text)
    )
    masses = draw(st.booleans())
    probes = []
    for name in draw(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=4, unique=True)):
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12))
        start = draw(st.integers(0, len(tokens) - 1))
        rows = draw(st.integers(1, len(tokens) - start))
        seed = draw(st.integers(0, 2**32 - 1))
        routed = routes_of(rows, seed, len(layers), experts, top_k)
        for lost in draw(st.sets(st.integers(0, rows - 1))):
            routed[lost] = -1
        probs = None
        if masses:
            probs = np.random.default_rng(seed).random((rows, len(layers), experts)).astype(np.float32)
            probs /= probs.sum(-1, keepdims=True)
        probes.append(RecordedProbe(name, tuple(tokens), routed, start, probs))
    return Recording(header, tuple(probes))


@given(recordings(), st.sampled_from([".jsonl", ".npz"]))
@settings(deadline=None, max_examples=60)
def test_what_is_written_is_read(tmp_path_factory, recording, suffix):
    path = tmp_path_factory.mktemp("routes") / f"routes{suffix}"
    write_routes(path, recording)
    again = read_own(path)
    assert again.header == recording.header
    for one, two in zip(recording.probes, again.probes, strict=True):
        assert (one.probe, one.tokens, one.start) == (two.probe, two.tokens, two.start)
        assert np.array_equal(one.experts_TLK, two.experts_TLK)
        assert (one.probs_TLE is None) == (two.probs_TLE is None)
        assert one.probs_TLE is None or np.array_equal(one.probs_TLE, two.probs_TLE)


HEADER = RouteHeader(layers=(1, 2, 3), top_k=2, n_experts=8).record()
LINE = {"probe": "a", "tokens": [5, 6, 7], "experts": routes_of(3).tolist()}
END = {"records": 1}


def refuse(tmp_path, content, match):
    path = tmp_path / "routes.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else "".join(x + "\n" for x in content).encode())
    with pytest.raises(VerificationError, match=match) as caught:
        read_routes(path, FACTS)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def jsonl(*lines):
    return [json.dumps(line) for line in lines]


def changed(**changes):
    return LINE | changes


TWICE = np.array(LINE["experts"])
TWICE[1, 2] = [3, 3]
PARTLY = np.array(LINE["experts"])
PARTLY[0, 0, 0] = -1


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ([HEADER, LINE], "cut off"),
        ([HEADER, END], "tells of 1 probes, 0 came"),
        ([HEADER, LINE, END, LINE], "more follow"),
        ([HEADER | {"version": 2}, LINE, END], "version 2"),
        ([HEADER | {"format": "x"}, LINE, END], "no recording"),
        ([LINE, END], "no recording"),
        ([HEADER | {"layers": [1, 1, 2]}, LINE, END], "distinct layers"),
        ([HEADER | {"layers": [1, 2, 10**9]}, LINE, END], "from 0 to"),
        ([HEADER | {"layers": "123"}, LINE, END], "must be integers"),
        ([HEADER | {"layers": [True, 2, 3]}, LINE, END], "must be integers"),
        ([HEADER | {"n_experts": 10**12}, LINE, END], "n_experts <="),
        ([HEADER | {"top_k": 0}, LINE, END], "top_k"),
        ([HEADER | {"model": 7}, LINE, END], "short texts"),
        ([HEADER, changed(experts=[[[1, 2]], [[1]]]), END], "3 levels of lists"),
        ([HEADER, changed(experts=[[1, 2]]), END], "3 levels of lists"),
        ([HEADER, changed(experts=[[[0.5, 1]] * 3]), END], "whole numbers"),
        ([HEADER, changed(experts=[[["1", "2"]] * 3]), END], "whole numbers"),
        ([HEADER, changed(experts=[[[10**30, 1]] * 3]), END], "whole numbers"),
        ([HEADER, changed(experts=[[[2**40, 1]] * 3]), END], "beyond all bounds"),
        ([HEADER, changed(experts=routes_of(3, layers=2).tolist()), END], "expected experts of shape"),
        ([HEADER, changed(experts=routes_of(4).tolist()), END], "routes of 4 tokens from 0 on"),
        ([HEADER, changed(start=1), END], "routes of 3 tokens from 1 on"),
        ([HEADER, changed(start=-1), END], "from -1 on"),
        ([HEADER, changed(experts=[[[8, 1]] * 3] * 3), END], "names expert 8 of 8: physical"),
        ([HEADER, changed(experts=PARTLY.tolist()), END], "only -1"),
        ([HEADER, changed(experts=(-5 + 0 * PARTLY).tolist()), END], "only -1"),
        ([HEADER, changed(experts=TWICE.tolist()), END], "layer 3 twice"),
        ([HEADER, changed(tokens=[5, -6, 7]), END], "none negative"),
        ([HEADER, changed(tokens=[]), END], "whole numbers|token ids"),
        ([HEADER, changed(tokens=None), END], "whole numbers"),
        ([HEADER, changed(probe=""), END], "1 to 200 characters"),
        ([HEADER, changed(probe=7), END], "expected `probe`"),
        ([HEADER, changed(probs=[[[1.0]]]), END], "masses of shape"),
        ([HEADER, changed(probs=np.full((3, 3, 8), 0.5).tolist()), END], "do not sum to one"),
        ([HEADER, changed(probs=(-np.ones((3, 3, 8))).tolist()), END], "negative"),
        ([HEADER, LINE, LINE, {"records": 2}], "recorded twice"),
        ([HEADER, [1], END], "JSON object"),
    ],
)
def test_wrong_lines_are_one_clear_line(tmp_path, lines, match):
    refuse(tmp_path, jsonl(*lines), match)


def test_broken_bytes_are_one_clear_line(tmp_path):
    good = "".join(x + "\n" for x in jsonl(HEADER, LINE, END)).encode()
    refuse(tmp_path, good[: len(good) // 2], "cut off")
    refuse(tmp_path, b"", "0 bytes")
    refuse(tmp_path, b"\x80garbage", "no JSON")
    refuse(tmp_path, [*jsonl(HEADER), '{"probe": "a", "tokens": [NaN]}'], "NaN is no JSON number")
    refuse(tmp_path, [*jsonl(HEADER), "[" * 100_000], "nested too deeply|no JSON")
    with pytest.raises(VerificationError, match="does not exist"):
        read_routes(tmp_path / "nowhere", FACTS)


def test_broken_arrays_are_one_clear_line(tmp_path, monkeypatch):
    path = tmp_path / "routes.npz"
    recording = Recording(
        RouteHeader(layers=(1, 2, 3), top_k=2, n_experts=8), (RecordedProbe("a", (5, 6, 7), routes_of(3)),)
    )
    write_routes(path, recording)
    whole = path.read_bytes()

    def refuse_npz(match):
        with pytest.raises(VerificationError, match=match) as caught:
            read_routes(path, FACTS)
        assert "\n" not in str(caught.value)

    path.write_bytes(whole[:-40])
    refuse_npz("damaged")
    with np.load(io.BytesIO(whole)) as arrays:
        kept = dict(arrays)
    for change, match in (
        ({"experts": kept["experts"].astype(float)}, "3-dimensional whole numbers"),
        ({"experts": kept["experts"][:-1]}, "do not add up"),
        ({"n_rows": np.array([-3])}, "one sensible number"),
        ({"n_tokens": np.array([3, 3])}, "one sensible number"),
        ({"header": np.array([1.0])}, "JSON as bytes"),
        ({"probs": np.full((3, 3, 8), np.nan, dtype=np.float32)}, "nan"),
        ({"experts": kept["experts"] + 8}, "physical"),
    ):
        np.savez(path, **(kept | change))
        refuse_npz(match)
    np.savez(path, **{name: array for name, array in kept.items() if name != "tokens"})
    refuse_npz("lacks tokens")
    np.savez(path, **(kept | {"tokens": np.array([{}], dtype=object)}))
    refuse_npz("refused|damaged")
    # a header that promises 16 TB
    lie = io.BytesIO()
    np.lib.format.write_array_header_1_0(lie, {"descr": "<i4", "fortran_order": False, "shape": (1 << 42,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tokens.npy", lie.getvalue())
    refuse_npz("does not agree with its size")
    monkeypatch.setattr("pathmark.verification.recorded.routefile.MAX_BYTES", 100)
    path.write_bytes(whole)
    refuse_npz("a recording has 1 to 100")


TOKENS = (5, 6, 7, 8)
ALL_LAYERS = np.concatenate([np.zeros((5, 1, 2), dtype=np.int32), routes_of(5)], axis=1)
"""Prompt and one generated token, the dense layer as zeros."""


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


def int32(array):
    return base64.b64encode(np.ascontiguousarray(array, dtype="<i4").tobytes()).decode()


RESPONSES = {
    "vllm, prompt apart": {
        "prompt_token_ids": list(TOKENS),
        "prompt_routed_experts": ALL_LAYERS[:4, 1:].tolist(),
        "choices": [{"routed_experts": ALL_LAYERS[4:, 1:].tolist()}],
    },
    "vllm, all tokens": {
        "choices": [{"prompt_token_ids": list(TOKENS), "routed_experts": npy(ALL_LAYERS.astype(np.uint8))}]
    },
    "sglang, generate": {
        "meta_info": {
            "routed_experts": int32(ALL_LAYERS),
            "completion_tokens": 2,
            "input_token_logprobs": [[None, t, None] for t in TOKENS],
        }
    },
    "sglang, choice": {
        "choices": [{"sgl_ext": {"routed_experts": int32(ALL_LAYERS)}}],
        "usage": {"completion_tokens": 2},
    },
    "sglang, response": {
        "choices": [{}],
        "sglext": {"routed_experts": int32(ALL_LAYERS[:4])},
        "usage": {"completion_tokens": 1},
    },
}


@pytest.mark.parametrize("kind", RESPONSES)
def test_answers_of_engines_are_read_as_they_come(tmp_path, kind):
    path = tmp_path / "routes.jsonl"
    line = {"probe": "a", "response": RESPONSES[kind] | {"model": "served"}}
    if "choice" in kind or kind == "sglang, response":
        line["tokens"] = list(TOKENS)
    path.write_text(json.dumps(line) + "\n")
    recording = read_routes(path, FACTS)
    assert recording.header.layers == (1, 2, 3)
    assert recording.header.n_experts == 8
    assert recording.header.model == "served"
    assert recording.header.engine == kind.split(",")[0]
    assert recording.probes[0].tokens == TOKENS
    assert np.array_equal(recording.probes[0].experts_TLK, ALL_LAYERS[:4, 1:])


def test_a_start_later_in_the_prompt():
    probe = from_sglang("a", TOKENS, int32(ALL_LAYERS[2:]), num_layers=4, top_k=2, start=2, generated=2)
    assert probe.start == 2
    assert np.array_equal(probe.experts_TLK, ALL_LAYERS[2:4])
    # prompt and generated tokens, without the very last one
    assert len(from_vllm("a", TOKENS, ALL_LAYERS[:3]).experts_TLK) == 3


@pytest.mark.parametrize(
    ("response", "match"),
    [
        ({"choices": [{"routed_experts": None}]}, "no routes"),
        ({"choices": [{"routed_experts": ALL_LAYERS[:2].tolist()}]}, "generated tokens only"),
        ({"choices": [{"routed_experts": "AAAA"}]}, "no base64 of an .npy"),
        ({"choices": [{"routed_experts": npy(ALL_LAYERS)[:200]}]}, "damaged|agree|base64"),
        ({"choices": [{"routed_experts": ALL_LAYERS.tolist(), "prompt_token_ids": [5, 6, 7, 9]}]}, "other tokens"),
        ({"choices": [{"routed_experts": np.zeros((5, 7, 2), int).tolist()}]}, "recorded 7 layers"),
        ({"choices": [{"routed_experts": (ALL_LAYERS + 9).tolist()}]}, "physical"),
        ({"meta_info": {"routed_experts": None}}, "SGLang returned no routes"),
        ({"meta_info": {"routed_experts": "%%%"}}, "no sound base64"),
        ({"meta_info": {"routed_experts": int32(ALL_LAYERS)[:-8]}}, "are no routes"),
        ({"meta_info": {"routed_experts": int32(ALL_LAYERS), "completion_tokens": 9}}, "are no routes of 12 tokens"),
        ({"meta_info": {"routed_experts": int32(ALL_LAYERS), "completion_tokens": "x"}}, "must be counts"),
    ],
)
def test_answers_that_cannot_be_read_are_one_line(tmp_path, response, match):
    refuse(tmp_path, jsonl({"probe": "a", "tokens": list(TOKENS), "response": response}), match)


def test_an_answer_without_the_prompts_tokens(tmp_path):
    refuse(tmp_path, jsonl({"probe": "a", "response": {"choices": [{"routed_experts": []}]}}), "tokens are not told")
