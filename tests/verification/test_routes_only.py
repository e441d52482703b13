"""From texts to send, through recorded routes of every form, to the exact test: the mark is found, and only there."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from embed_helpers import key_for, quick_config, save_family

from pathmark.errors import VerificationError
from pathmark.models import load_model, load_tokenizer
from pathmark.models.tokenization import HFTextCodec
from pathmark.release import ScanConfig
from pathmark.release.marking import MarkingConfig, Texts, mark_model
from pathmark.stats import exact_test
from pathmark.verification import Routes, decode_id, measure_layers, record_routes, score_path, target_mass
from pathmark.verification.recorded.enginefile import read_routes
from pathmark.verification.recorded.probeplan import ProbePlace, Variant, plan_probes, probe_id, read_probe_id
from pathmark.verification.recorded.routefile import RecordedProbe, Recording, write_routes
from pathmark.verification.recorded.routes_only import pair_routes

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
FORMATS = ["jsonl", "npz", "vllm", "vllm answers", "sglang answers"]


def example(name):
    """One of the example scripts as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A small marked Mixtral, its original, the key, and what both do on the key's probes."""
    folder = tmp_path_factory.mktemp("routes")
    base = save_family(folder / "base", "mixtral")
    scan = ScanConfig(random_sequences=20, per_count=5)
    done = mark_model(
        str(base), key_for(base, number=3), folder / "out", Texts.bundled(),
        MarkingConfig(embedding=quick_config(), n_probes=16, scan=scan),
    )  # fmt: skip
    codec = HFTextCodec(load_tokenizer(base))
    rows = json.loads(done.key.attachments["probes.json"])
    plan = plan_probes(done.key, codec, rows, decoys=1)
    prompts = [(probe.probe, probe.token_ids) for probe in plan.probes]
    record = example("record_routes_transformers").record
    recorded = {name: record(load_model(folder / name), prompts, masses=True) for name in ("out", "base")}
    return SimpleNamespace(key=done.key, plan=plan, rows=rows, recorded=recorded, folder=folder)


def without_masses(recording):
    bare = (RecordedProbe(p.probe, p.tokens, p.experts_TLK, p.start) for p in recording.probes)
    return Recording(recording.header, tuple(bare))


def write_as(kind, recording, plan, path):
    """The recording as an engine would have given it, with one generated token where the engine has one."""
    if kind in ("jsonl", "npz"):
        write_routes(path, recording)
        return
    header = recording.header
    routes = {p.probe: np.concatenate([p.experts_TLK, p.experts_TLK[:1]]) for p in recording.probes}
    if kind == "vllm":
        module = example("record_routes_vllm")
        outputs = [
            SimpleNamespace(
                prompt_token_ids=list(p.token_ids), outputs=[SimpleNamespace(routed_experts=routes[p.probe])]
            )
            for p in plan.probes
        ]
        lines = module.lines(
            [p.probe for p in plan.probes], outputs, layers=header.layers, n_experts=header.n_experts, model="m",
            engine="vllm test",
        )  # fmt: skip
    elif kind == "vllm answers":
        lines = []
        for p in plan.probes:
            stream = io.BytesIO()
            np.save(stream, routes[p.probe].astype(np.uint8))
            choice = {"routed_experts": base64.b64encode(stream.getvalue()).decode()}
            answer = {"model": "m", "prompt_token_ids": list(p.token_ids), "choices": [choice]}
            lines.append({"probe": p.probe, "response": answer})
    else:
        module = example("record_routes_sglang")
        lines = []
        for p in plan.probes:
            body = module.request(p.record())
            assert body["input_ids"] == list(p.token_ids)
            assert body["return_routed_experts"]
            encoded = base64.b64encode(routes[p.probe].astype("<i4").tobytes()).decode()
            meta = {"routed_experts": encoded, "prompt_tokens": len(p.token_ids), "completion_tokens": 2,
                    "input_token_logprobs": [[None, t, None] for t in p.token_ids]}  # fmt: skip
            lines.append(module.line(p.record(), {"text": "x", "meta_info": meta}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def judge(key, paired):
    watermark = key.watermarks[0]
    measured = measure_layers(watermark, paired.triggered[0], paired.clean)
    return exact_test([m.aim(watermark.targets(m.layer)) for m in measured]), decode_id(watermark, measured).id


@pytest.mark.parametrize("kind", FORMATS)
def test_the_mark_is_found_in_every_form(tmp_path, marked, kind):
    path = tmp_path / ("routes.npz" if kind == "npz" else "routes.jsonl")
    write_as(kind, without_masses(marked.recorded["out"]), marked.plan, path)
    paired = pair_routes(marked.key, read_routes(path, marked.key.model))
    assert not paired.clean.masses_known
    assert paired.dropped == 0
    result, number = judge(marked.key, paired)
    assert result.p.value <= 1e-6, str(result)  # what `verify` calls marked
    assert number == 3
    write_as(kind, without_masses(marked.recorded["base"]), marked.plan, path)
    result, _ = judge(marked.key, pair_routes(marked.key, read_routes(path, marked.key.model)))
    assert result.p.value > 1e-3, str(result)


def test_a_recording_says_what_the_model_itself_says(marked):
    """The same texts through record_routes: same decisions, same masses, same measures."""
    key, watermark = marked.key, marked.key.watermarks[0]
    paired = pair_routes(key, marked.recorded["out"])
    assert paired.clean.masses_known
    assert [list(row) for row in paired.text_tokens] == [marked.rows[i] for i in paired.texts]
    model = load_model(marked.folder / "out")
    clean = record_routes(model, paired.text_tokens, watermark.layers)
    triggered = record_routes(model, paired.text_tokens, watermark.layers, prefix=watermark.triggers[0].tokens)
    for layer in watermark.layers:
        for one, two in ((paired.clean, clean), (paired.triggered[0], triggered)):
            assert np.array_equal(one.decisions[layer], two.decisions[layer])
            assert np.allclose(one.probs[layer], two.probs[layer], atol=1e-5)
    assert score_path(watermark, paired.triggered[0]).accuracy == score_path(watermark, triggered).accuracy
    bare = score_path(watermark, pair_routes(key, without_masses(marked.recorded["out"])).triggered[0], clean)
    assert not bare.masses_known
    assert [row.mass_triggered for row in bare.layers] == [None] * len(watermark.layers)
    assert all(row.mass_clean is not None for row in bare.layers)
    assert bare.accuracy.hits == sum(row.accuracy_own_topk.hits for row in bare.layers)


def tampered(recording, **changes):
    """The recording with one probe changed by name -> function."""
    probes = [changes[p.probe](p) if p.probe in changes else p for p in recording.probes]
    return Recording(recording.header, tuple(p for p in probes if p is not None))


def test_other_tokens_are_no_evidence(marked):
    key, recording = marked.key, without_masses(marked.recorded["out"])
    places = {p.probe: read_probe_id(key, p.probe) for p in recording.probes}
    triggered = next(n for n, place in places.items() if place.variant == Variant.TRIGGER and place.text == 0)
    clean = next(n for n, place in places.items() if place.variant == Variant.CLEAN and place.text == 0)

    def swap(position):
        def change(p):
            tokens = list(p.tokens)
            tokens[position] += 1
            return replace(p, tokens=tuple(tokens))

        return change

    for name, position, match in (
        (triggered, 0, "trigger's tokens are not in"),
        (triggered, -1, "differ behind the trigger"),
        (clean, 3, "differ behind the trigger"),
    ):
        with pytest.raises(VerificationError, match=match) as caught:
            pair_routes(key, tampered(recording, **{name: swap(position)}))
        assert triggered in str(caught.value)
    with pytest.raises(VerificationError, match="not given out by this key"):
        pair_routes(key_for(marked.folder / "base", seed=5), recording)
    dropped = pair_routes(key, tampered(recording, **{triggered: lambda p: None}))
    assert dropped.dropped == 1
    assert 0 not in dropped.texts
    only_clean = [n for n, place in places.items() if place.variant != Variant.CLEAN]
    with pytest.raises(VerificationError, match="none of 16 texts"):
        pair_routes(key, tampered(recording, **dict.fromkeys(only_clean, lambda p: None)))


def test_templates_around_the_text_and_tokens_that_were_not_recorded(marked):
    """Tokens in front and behind change nothing; unrecorded ones are left out on both sides."""
    key, recording = marked.key, without_masses(marked.recorded["out"])
    plain = pair_routes(key, recording)
    front, behind = 3, 2

    def dress(p):
        pad = np.zeros((1, *p.experts_TLK.shape[1:]), dtype=np.int32) + np.arange(
            p.experts_TLK.shape[2], dtype=np.int32
        )
        routes = np.concatenate([pad] * front + [p.experts_TLK] + [pad] * behind)
        routes[-behind - 1] = -1  # the last text token came from a cache
        return replace(p, tokens=(1, 2, 3, *p.tokens, 4, 5), experts_TLK=routes[2:], start=2)

    dressed = pair_routes(key, Recording(recording.header, tuple(dress(p) for p in recording.probes)))
    assert dressed.text_tokens == plain.text_tokens
    assert dressed.clean.n_tokens == plain.clean.n_tokens - len(plain.texts)
    for layer in key.watermarks[0].layers:
        kept = dressed.clean.mask_BT
        assert np.array_equal(dressed.clean.decisions[layer][kept], plain.clean.decisions[layer][kept])
        assert np.array_equal(dressed.triggered[0].decisions[layer][kept], plain.triggered[0].decisions[layer][kept])


def test_ids_say_nothing_and_everything(marked):
    key = marked.key
    for place in (
        ProbePlace(Variant.CLEAN, 0, 0, 0, 4),
        ProbePlace(Variant.TRIGGER, 1023, 255, 2**32 - 1, 2**32 - 1),
        ProbePlace(Variant.DECOY, 63, 0, 17, 128),
    ):
        assert read_probe_id(key, probe_id(key, place)) == place
    for foreign in ("", "zz", "00" * 16, "00" * 15, "x" * 500):
        with pytest.raises(VerificationError, match="not given out"):
            read_probe_id(key, foreign)


def test_the_plan_sends_every_text_in_every_dress(marked):
    key, plan = marked.key, marked.plan
    places = [read_probe_id(key, probe.probe) for probe in plan.probes]
    assert len(plan.probes) == 3 * plan.n_texts
    assert {(p.text, p.variant) for p in places} == {(t, v) for t in range(len(marked.rows)) for v in Variant}
    assert [p.text for p in places] != sorted(p.text for p in places)
    codec = HFTextCodec(load_tokenizer(marked.folder / "base"))
    for probe in plan.probes:
        assert codec.encode(probe.text) == list(probe.token_ids)
    assert plan_probes(key, codec, marked.rows, decoys=1) == plan  # nothing has to be kept
    with pytest.raises(VerificationError, match=r"has 1 trigger\(s\)"):
        plan_probes(key, codec, marked.rows, trigger=1)


def test_routes_of_decisions():
    mask_BT = np.array([[True, True], [True, False]])
    decisions = {4: np.array([[[0, 1], [2, 3]], [[1, 0], [3, 3]]])}
    routes = Routes.from_decisions(decisions, mask_BT, 4)
    assert routes.n_experts(4) == 4
    assert not routes.masses_known
    assert routes.decisions[4][1, 1].tolist() == [-1, -1]  # under the mask nothing is known
    swapped = routes.part([1, 0])
    assert swapped.decisions[4].tolist() == routes.decisions[4][[1, 0]].tolist()
    assert (swapped.n_tokens, routes.part(slice(1, 2)).n_tokens) == (3, 1)
    with pytest.raises(VerificationError, match="masses are not known"):
        target_mass(routes, 4, (0,))
    with pytest.raises(VerificationError, match="physical"):
        Routes.from_decisions(decisions, mask_BT, 3)
    with pytest.raises(VerificationError, match="expected decisions of shape"):
        Routes.from_decisions({4: decisions[4][:1]}, mask_BT, 4)
    with pytest.raises(VerificationError, match="layers 7 were not recorded; got 4"):
        routes.require([4, 7])
    with pytest.raises(VerificationError, match="number of experts"):
        Routes({}, decisions, mask_BT)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("record_routes_*.py")), ids=lambda p: p.stem)
def test_examples_can_be_read_without_their_engines(path):
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
    assert example(path.stem).main.__doc__


def test_the_vllm_script_stops_at_answers_without_prompt_routes():
    module = example("record_routes_vllm")
    output = SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[SimpleNamespace(routed_experts=None)])
    with pytest.raises(SystemExit, match="no routes"):
        module.prompt_routes(output)
    output.outputs[0].routed_experts = np.zeros((1, 2, 2), dtype=np.int16)
    with pytest.raises(SystemExit, match="generated tokens only"):
        module.prompt_routes(output)
    output.prompt_routed_experts = np.ones((3, 2, 2), dtype=np.int16)
    assert module.prompt_routes(output) == np.ones((3, 2, 2), dtype=int).tolist()
    with pytest.raises(SystemExit, match="--layers"):
        list(module.lines(["a"], [output], layers=[0], n_experts=4, model="", engine=""))
