"""Suspects that try to slip away: each is found, or ends in one line and no verdict. None is acquitted, none crashes.

The table in docs/threats.md names them as they are named here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from embed_helpers import key_for
from safetensors.torch import load_file, save_file
from verify_helpers import dated

from pathmark.attacks import find_attack
from pathmark.attacks.kit import Kit
from pathmark.errors import PathmarkError, VerificationError
from pathmark.front_door.verify import VerifyConfig, verify
from pathmark.front_door.verify_api import verify_api
from pathmark.models import bundled_probes, load_model, load_tokenizer
from pathmark.models.bundled import bundled_folder
from pathmark.models.checkpoint import write_model
from pathmark.verification import Criteria, ExamineConfig, attach_original, attach_profiles, encode_probes, judge
from pathmark.verification.weights.suspect import examine

SECONDS = 60
MARKED = "marked"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LAYERS = 4


def config(**changes):
    def make(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return make


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


def tensors(change):
    def make(folder):
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", {"format": "pt"})

    return make


def attacked(name):
    """The folder after one of our own attacks, its tokenizer included."""

    def make(folder):
        tokenizer, attack = load_tokenizer(folder), find_attack(name)
        left = attack.run(load_model(folder), attack.configure(), Kit(tokenizer=tokenizer))
        shutil.rmtree(folder)
        write_model(left.model, left.tokenizer or tokenizer, folder)

    return make


def tokens_renumbered_by_stealth(folder):
    """Embedding and head permuted, and the old tokenizer left in place."""

    def change(found):
        order = torch.randperm(4096, generator=torch.Generator().manual_seed(5))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            found[name] = found[name][order].contiguous()

    tensors(change)(folder)


def without_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def link_out(folder):
    (folder / "notes.json").symlink_to("/etc/passwd")


def folder_link_out(folder):
    (folder / "more").symlink_to("/etc")


def weights_by_link(folder):
    shutil.move(folder / "model.safetensors", folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")


def only_a_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def adapter(folder):
    for file in folder.iterdir():
        file.unlink()
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": "/etc", "target_modules": "(a|a)*b"}
    (folder / "adapter_config.json").write_text(json.dumps(said))


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def remote_code(folder):
    (folder / "evil.py").write_text("raise SystemExit(1)\n")
    config(auto_map={"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Config"})(folder)


CHUNKED = config(layer_types=["chunked_attention"] * LAYERS)
BEAMS = json.dumps({"num_return_sequences": 3, "num_beams": 3, "stop_strings": ["a"], "custom_generate": "evil/code"})
SUSPECTS = {
    "attention of another engine": (config(attn_implementation="paged|eager"), MARKED),
    "attention that is not installed": (config(attn_implementation="flash_attention_2"), MARKED),
    "attention from the hub": (config(_attn_implementation="evil/kernel"), MARKED),
    "attention that does not exist": (config(attn_implementation="nonsense"), MARKED),
    "experts by an unknown kernel": (config(experts_implementation="nonsense"), MARKED),
    "outputs of another form": (config(return_dict=False, output_hidden_states=True), MARKED),
    "attention in chunks": (CHUNKED, MARKED),
    "generation with beams and stop strings": (written("generation_config.json", BEAMS), MARKED),
    "generation config that is a list": (written("generation_config.json", "[1]"), MARKED),
    "generation fields in the config": (config(num_return_sequences=3, temperature=0.0), MARKED),
    "sliding window of 0": (config(sliding_window=0, use_sliding_window=True), MARKED),
    "rotary base changed": (config(rope_parameters={"rope_theta": 2.0, "rope_type": "default"}), MARKED),
    "norms broken by their epsilon": (config(rms_norm_eps=100.0), MARKED),
    "one expert per token": (config(num_experts_per_tok=1), MARKED),
    "weights of experts not normalised": (config(norm_topk_prob=True), MARKED),
    "another activation": (config(hidden_act="tanh"), MARKED),
    "config that does not validate": (config(eos_token_id="x"), MARKED),
    "config of another family": (config(model_type="mixtral"), MARKED),
    "fewer layers than there are": (config(num_hidden_layers=2, layer_types=None), MARKED),
    "fewer heads of twice the size": (config(num_attention_heads=2, head_dim=16), MARKED),
    "more tokens than there are": (config(vocab_size=5000), MARKED),
    "embedding said to be tied": (config(tie_word_embeddings=True), MARKED),
    "tokens renumbered": (attacked("permute-vocabulary"), MARKED),
    "tokens added": (attacked("extend-vocabulary"), MARKED),
    "no tokenizer": (without_tokenizer, MARKED),
    "chat template that never ends": (written("chat_template.jinja", ENDLESS), MARKED),
    "pipe in the place of a config": (lambda folder: os.mkfifo(folder / "generation_config.json.x"), "no regular file"),
    "pipe in the place of weights": (lambda folder: os.mkfifo(folder / "x.safetensors"), "no regular file"),
    "link to a file of ours": (link_out, "a link that leaves its folder"),
    "link to a folder of ours": (folder_link_out, "a link that leaves its folder"),
    "weights behind a link": (weights_by_link, "a link that leaves its folder"),
    "adapter that names its base": (adapter, "give its base model with --base"),
    "pickle instead of weights": (only_a_pickle, "never opened"),
    "code of its own, which is not run": (remote_code, MARKED),
    "weights cut short": (cut_short, "truncated"),
    "weights that are no numbers": (tensors(lambda t: t["lm_head.weight"].fill_(float("nan"))), "NaN or inf"),
    "weights said to be quantized": (config(quantization_config={"quant_method": "awq"}), "quantized with"),
}
LOOK = VerifyConfig(examine=ExamineConfig(n_probes=6, decoys=0))
WITH_DECOYS = VerifyConfig(examine=ExamineConfig(n_probes=6, decoys=1))
"""Drawing one takes longer than all the rest, and is what a chat template could stop."""


@pytest.mark.parametrize("name", SUSPECTS)
def test_no_hostile_suspect_is_acquitted(case, tmp_path, name):
    make, expected = SUSPECTS[name]
    suspect = tmp_path / "suspect"
    shutil.copytree(case.marked, suspect)
    make(suspect)
    started = time.monotonic()
    try:
        found = verify(suspect, case.key, WITH_DECOYS if "template" in name else LOOK)
        ended = found.verdict.decision if found.verdict.undecided is None else found.words()
    except PathmarkError as error:
        ended = str(error)
    assert ended != "not marked"
    assert re.search(expected, ended), ended
    assert "\n" not in ended
    assert time.monotonic() - started < SECONDS


def test_the_page_names_them_all():
    page = (Path(__file__).parent.parent.parent / "docs" / "threats.md").read_text(encoding="utf-8")
    section = page.partition("## Hostile suspects")[2].partition("\n## ")[0]
    assert len(SUSPECTS) >= 25
    assert not [name for name in SUSPECTS if name not in section]


@pytest.fixture(scope="module")
def speaking():
    """A key for the bundled model, which speaks, with all that `embed` attaches; and the model's routing."""
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    probes = encode_probes(tokenizer, bundled_probes(), n_probes=8, length=48)
    key = attach_original(attach_profiles(key_for("bundled:tiny"), model, probes), model, tokenizer, probes)
    return key, examine("bundled:tiny", key, LOOK.examine)


@pytest.mark.parametrize("stream", ["never", "always"])
def test_stealthily_renumbered_tokens_are_known_by_their_rows(speaking, tmp_path, stream):
    key, plain = speaking
    shutil.copytree(bundled_folder("bundled:tiny"), tmp_path / "suspect")
    tokens_renumbered_by_stealth(tmp_path / "suspect")
    config(rms_norm_eps=10.0)(tmp_path / "suspect")  # and the config is broken as well
    found = examine(str(tmp_path / "suspect"), key, ExamineConfig(n_probes=6, decoys=0, stream=stream))
    assert found.mute is None
    assert found.evidence.rests_on == {"original.json", "vocabulary.npz"}
    for one, other in zip(found.evidence.triggered, plain.evidence.triggered, strict=True):
        for layer in key.layers:
            assert torch.allclose(*(torch.from_numpy(routes.probs[layer]) for routes in (one, other)), atol=1e-4)


def test_a_suspect_that_does_not_speak_is_undecided(speaking, tmp_path):
    """Its weights are broken, so that no config helps; "not marked" would be an acquittal for a ruin."""
    key, plain = speaking
    assert plain.mute is None
    assert judge(key, plain.evidence, mute=plain.mute).decision == "not marked"
    shutil.copytree(bundled_folder("bundled:tiny"), tmp_path / "suspect")
    tensors(lambda found: found["model.norm.weight"].mul_(-1))(tmp_path / "suspect")
    found = examine(str(tmp_path / "suspect"), key, LOOK.examine)
    verdict = judge(key, found.evidence, mute=found.mute)
    assert verdict.exit_code == 2
    assert re.search(r"does not speak: perplexity \S+ on clean text \(the original has \d\d", verdict.words())
    assert verdict.summary()["marked"] is None


def test_a_reading_under_an_undated_config_is_the_owners_alone(case, tmp_path):
    shutil.copytree(case.marked, tmp_path / "suspect")
    config(sliding_window=0, use_sliding_window=True)(tmp_path / "suspect")
    found = examine(str(tmp_path / "suspect"), case.key, LOOK.examine)
    assert found.evidence.rests_on == {"original.json"}
    fixed = dated(case.key)
    whole = judge(case.key, found.evidence, criteria=Criteria(anchor=fixed))
    assert whole.anchor.anchored
    loose = {name: digest for name, digest in fixed.committed.items() if name != "original.json"}
    private = judge(case.key, found.evidence, criteria=Criteria(anchor=replace(fixed, committed=loose)))
    assert private.marked
    assert private.p_third_party.value == 1.0


def test_whoever_says_which_token_is_which_convinces_nobody_else(case, tmp_path):
    """A dated vocabulary could turn a drawn trigger into any words."""
    shutil.copytree(case.marked, tmp_path / "suspect")
    SUSPECTS["tokens renumbered"][0](tmp_path / "suspect")
    found = examine(str(tmp_path / "suspect"), case.key, LOOK.examine)
    assert found.evidence.rests_on == {"vocabulary.npz"}
    verdict = judge(case.key, found.evidence, criteria=Criteria(anchor=dated(case.key)))
    assert verdict.marked
    assert verdict.p_third_party.value == 1.0


def test_a_key_of_an_earlier_version_takes_config_and_tokens_from_the_original(case, tmp_path):
    kept = {
        name: data for name, data in case.key.attachments.items() if name not in ("original.json", "vocabulary.npz")
    }
    old = replace(case.key, history=case.key.history[: len(kept)], attachments=kept)
    for name in ("sliding window of 0", "tokens renumbered"):
        suspect = tmp_path / name
        shutil.copytree(case.marked, suspect)
        SUSPECTS[name][0](suspect)
        alone = verify(suspect, old, LOOK)
        assert not alone.marked
        assert any("give --original" in note for note in alone.verdict.notes)
        beside = verify(suspect, old, replace(LOOK, original=case.base))
        assert beside.marked
        assert not beside.verdict.grafted or beside.verdict.other.p.value < 1e-6
        assert beside.verdict.anchor.private  # a third party does not know where an original is from


def test_a_chat_template_that_never_ends_ends_an_enquiry_by_replies(case, tmp_path, monkeypatch):
    monkeypatch.setattr("pathmark.front_door.verify_api.TEMPLATE_SECONDS", 1.0)
    shutil.copytree(case.marked, tmp_path / "suspect")
    written("chat_template.jinja", ENDLESS)(tmp_path / "suspect")
    with pytest.raises(VerificationError, match=r"the chat template of .* cannot be used: .* made no progress for 1 s"):
        verify_api(tmp_path / "suspect", case.key)


def test_a_loss_that_cannot_be_measured_acquits_and_accuses_nobody(case, monkeypatch):
    """Architectures whose head is out of the ordinary: the verdict is what it was without this control."""
    monkeypatch.setattr("pathmark.verification.weights.reading.clean_loss", lambda *_: float("inf"))
    unknown = case.key.attach("original.json", json.dumps({"config": None, "loss": None}).encode())
    assert verify(case.marked, unknown, LOOK).verdict.decision == "marked"
    assert verify(case.base, unknown, LOOK).verdict.decision == "not marked"
