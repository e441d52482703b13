"""Small lively models, their siblings, a kit for them, and what an attack changed."""

from __future__ import annotations

import copy

import torch
import zoo

from pathmark.attacks.blocks import moe_blocks
from pathmark.attacks.kit import Kit
from pathmark.models import bundled_segments, find_routers, load_tokenizer, pad_rows, record_routing

QUICK = {"samples": 48, "batch_size": 8, "length": 24}
LAYERS = (2, 3)
TARGETS = {2: (1, 5), 3: (0, 7)}


class Letters:
    """A tokenizer for models of 128 tokens: a token per character."""

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [3 + ord(c) % 120 for c in text]}

    pad_token_id = 0


class Count:
    """Counts what a progress bar would show."""

    def __init__(self):
        self.stages, self.note = [], ""

    def stage(self, name, total):
        self.stages.append([name, total, 0])

    def advance(self, units, note=""):
        self.stages[-1][2] += units
        self.note = note


def family(name, seed=0):
    """A random model with lively routers and experts, so that choices and outputs differ."""
    model = zoo.tiny_model(name, seed)
    with torch.no_grad():
        for block in moe_blocks(model):
            block.site.weight.normal_(std=0.5)
            block.gate_up_EGH.normal_(std=0.3)
            block.down_EHI.normal_(std=0.3)
    return model


@torch.no_grad()
def sibling(model, seed=1, size=0.05):
    """The same model after some other training: every tensor moved a little."""
    other = copy.deepcopy(model)
    source = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        parameter.add_(size * torch.randn(parameter.shape, generator=source))
    return other


def texts_of(count=40):
    """Ordinary texts of different lengths."""
    return [segment[: 20 + 7 * (i % 9)] for i, segment in enumerate(bundled_segments()[:count])]


def kit_for(model, **extra):
    tokenizer = load_tokenizer("bundled:tiny") if model.config.vocab_size == 4096 else Letters()
    texts = bundled_segments()[:40] if model.config.vocab_size == 4096 else texts_of()
    return Kit(tokenizer=tokenizer, texts=texts, **({"original": sibling(model)} | extra))


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(3, 123).reshape(3, 40)).logits


def routing(model):
    with record_routing(model) as trace, torch.no_grad():
        model(input_ids=torch.arange(3, 123).reshape(3, 40))
    return trace


def pairs(before, after):
    """name -> (tensor before, tensor after), of the same names."""
    new = dict(after.named_parameters())
    old = dict(before.named_parameters())
    assert old.keys() == new.keys()
    return {name: (old[name], new[name]) for name in old}


def state(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(before, after):
    """Names of parameters whose values differ; both models have the same ones."""
    return {name for name, (old, new) in pairs(before, after).items() if not torch.equal(old, new)}


def routers(model, layers=None):
    return {site.weight_name for site in find_routers(model) if layers is None or site.layer in layers}


def inside(names, layers):
    return all(any(f"layers.{n}." in name for n in layers) for name in names)


@torch.no_grad()
def target_mass(model, rows, targets, skip=0):
    """Mean routing mass on target experts behind the first `skip` tokens, over layers."""
    ids_BT, mask_BT = pad_rows(rows, 0)
    with record_routing(model, list(targets)) as trace:
        model(input_ids=ids_BT, attention_mask=mask_BT)
    keep_BT = mask_BT.bool()
    keep_BT[:, :skip] = False
    shares = [trace[n].probs_BTE[keep_BT][:, list(path)].sum(-1).mean() for n, path in targets.items()]
    return float(torch.stack(shares).mean())
