"""What a thief's structural changes do to the verdict: every change of `pathmark.attacks` on one marked model.

python benchmarks/alignment.py --marked FOLDER --key FILE [--keys 2000] [-o benchmarks/results/alignment.json]

The key's attachments are rebuilt from the original, so that an old key can be measured too. The passphrase is read
from PATHMARK_PASSPHRASE. With --keys, as many random keys are held against the original and the marked model, alignment
switched on, and the share with p <= a is reported.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from pathmark.attacks.structure import (
    permute_experts,
    permute_neurons,
    rescale_neurons,
    rotate_residual,
    shift_routers,
)
from pathmark.attacks.surgery import (
    DuplicateExperts,
    MergeExperts,
    RemoveExperts,
    drop_layers,
    duplicate_experts,
    merge_experts,
    remove_experts,
)
from pathmark.keys import OwnerKey, load_key
from pathmark.keys.watermark import Secret
from pathmark.models import bundled_probes, expert_usage, find_routers, load_model, load_tokenizer, perplexity
from pathmark.stats import NullDistribution, exact_test, null_distribution
from pathmark.verification import attach_profiles, encode_probes, verify_model
from pathmark.verification.weights.recording import record_evidence

Attack = Callable[[PreTrainedModel], PreTrainedModel]


def round_to_nearest(model: PreTrainedModel, bits: int, group: int = 32) -> PreTrainedModel:
    """Every matrix but the embeddings, in groups, asymmetric: simulated, the weights stay floats."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2 or "embed" in name or "lm_head" in name:
                continue
            rows = weight.reshape(-1, group)
            low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
            step = (high - low).clamp_min(1e-9) / (2**bits - 1)
            weight.copy_((torch.round((rows - low) / step) * step + low).reshape(weight.shape))
    return model


def in_bf16(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).bfloat16().float()


def noisy(model: PreTrainedModel, share: float) -> PreTrainedModel:
    model = copy.deepcopy(model)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight += share * weight.std() * torch.randn(weight.shape, generator=source)
    return model


def attacks(model: PreTrainedModel, tokenizer, marked: list[int]) -> dict[str, Attack]:
    layers = [site.layer for site in find_routers(model)]
    usage = expert_usage(model, tokenizer, list(bundled_probes())[100:150], layers)
    below, inside = marked[0] // 2, marked[1]

    def removal(share: float) -> Attack:
        return lambda m: remove_experts(m, RemoveExperts(share=share), usage=usage)

    def merging(share: float) -> Attack:
        return lambda m: merge_experts(m, MergeExperts(share=share), usage=usage)

    def then_permuted(attack: Attack) -> Attack:
        return lambda m: permute_experts(attack(m))

    return {
        "nothing": lambda m: m,
        "experts permuted in every layer": permute_experts,
        "router rows shifted": shift_routers,
        "neurons permuted and rescaled": lambda m: rescale_neurons(permute_neurons(m)),
        "all of these": lambda m: rescale_neurons(permute_neurons(shift_routers(permute_experts(m)))),
        "rotated": rotate_residual,
        "rotated, and all of these": lambda m: rescale_neurons(
            permute_neurons(shift_routers(permute_experts(rotate_residual(m))))
        ),
        "bf16, permuted": then_permuted(in_bf16),
        "4 bit, permuted": then_permuted(lambda m: round_to_nearest(m, 4)),
        "3 bit, permuted": then_permuted(lambda m: round_to_nearest(m, 3)),
        "noise 0.3 sigma on all weights": lambda m: noisy(m, 0.3),
        "noise 0.3 sigma, permuted": then_permuted(lambda m: noisy(m, 0.3)),
        "least used 10 % of experts removed": removal(0.1),
        "least used 30 % removed": removal(0.3),
        "least used 50 % removed": removal(0.5),
        "least used 30 % removed, permuted": then_permuted(removal(0.3)),
        "25 % of experts merged in pairs": merging(0.25),
        "50 % merged in pairs": merging(0.5),
        "50 % merged in pairs, permuted": then_permuted(merging(0.5)),
        "12 experts doubled, permuted": then_permuted(lambda m: duplicate_experts(m, DuplicateExperts(count=12))),
        f"layer {below} dropped (below the marked ones)": lambda m: drop_layers(m, [below]),
        f"layer {below} dropped, permuted": then_permuted(lambda m: drop_layers(m, [below])),
        f"layer {inside} dropped (a marked one)": lambda m: drop_layers(m, [inside]),
        f"layers {below} and {inside} dropped, permuted": then_permuted(lambda m: drop_layers(m, [below, inside])),
    }


def row(name: str, suspect: PreTrainedModel, key: OwnerKey, probes) -> dict[str, object]:
    started = time.monotonic()
    verdict = verify_model(suspect, key, probes)
    bare = None
    if {w.layers[-1] for w in key.watermarks} <= {site.layer for site in find_routers(suspect)} and all(
        site.n_experts == key.model.layer(site.layer).experts for site in find_routers(suspect)
    ):
        bare = verify_model(suspect, key, probes[:20], align=False).p
    alignment = verdict.alignment
    assert alignment is not None
    result = {
        "change": name,
        "ppl": perplexity(suspect, probes).value,
        "log10_p": verdict.p.log10,
        "log10_floor": verdict.p_floor.log10,
        "log10_p_unaligned": None if bare is None else bare.log10,
        "accuracy": verdict.scores[0].accuracy.value,
        "wsr": verdict.wsr.value,
        "id_right": verdict.id == key.watermarks[0].id,
        "id_weakest": verdict.decoded.weakest if verdict.decoded else None,
        "identity": alignment.identity,
        "confidence": alignment.confidence,
        "erased_layers": list(verdict.erased_layers),
        "alignment": alignment.summary()["layers"],
        "seconds": time.monotonic() - started,
    }
    shown = (f"[{e.suspect_layer} {e.matched_E.sum()}m {e.merged}mg {e.doubled}d]" for e in alignment.layers)
    print(
        f"{name:48} ppl {result['ppl']:7.1f}  p {verdict.p} (floor {verdict.p_floor}, unaligned {bare})  "
        f"acc {result['accuracy']:.3f}  id {'right' if result['id_right'] else verdict.id}  "
        f"erased {result['erased_layers']}  identity {alignment.identity}  conf {alignment.confidence:.2f}",
        *shown,
        flush=True,
    )
    return result


def calibration(
    model: PreTrainedModel, key: OwnerKey, probes, keys: int, seed: int, triggers: int = 20
) -> dict[str, float]:
    """Share of random keys with p <= a: real derivations from random secrets, behind random triggers and the key's own.

    The own trigger is the hostile case: on a marked model it moves the routing as nothing else does, and a stranger's
    secret must still not find its path there.
    """
    source = random.Random(seed)
    watermark = key.watermarks[0]
    length, vocabulary = len(watermark.triggers[0].tokens), key.model.vocab_size
    strangers = [tuple(source.randrange(vocabulary) for _ in range(length)) for _ in range(triggers)]
    evidence = record_evidence(model, key, probes, decoys=strangers, decoy_probes=len(probes))
    measured = [*evidence.measured_decoys(key.watermarks[0]), evidence.measured(key)[0]]
    nulls: dict[tuple[int, ...], NullDistribution] = {}
    values = []
    for number in range(keys):
        which = number % len(measured)
        secret = Secret(source.randbytes(32))
        stranger = replace(watermark, subkey=secret, id=source.randrange(watermark.capacity))
        layers = [m.aim(stranger.targets(m.layer)) for m in measured[which]]
        left = (which, *(len(layer.live_targets) for layer in layers))
        if left not in nulls:
            nulls[left] = null_distribution(layers)
        values.append(exact_test(layers, nulls[left]).p.value)
    found = np.array(values)
    shares = {str(a): float(np.mean(found <= a)) for a in (0.5, 0.1, 0.05, 0.01, 0.001)}
    return shares | {"smallest": float(found.min()), "keys": keys, "triggers": len(measured)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--original", default="bundled:tiny")
    parser.add_argument("--marked", required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--probes", type=int, default=100)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--only", default="", help="run changes whose name contains this")
    parser.add_argument("--keys", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    original, marked = load_model(arguments.original), load_model(arguments.marked)
    tokenizer = load_tokenizer(arguments.original)
    key = load_key(arguments.key, lambda: os.environ["PATHMARK_PASSPHRASE"])
    layers = list(key.layers)
    profile = encode_probes(tokenizer, bundled_probes(), n_probes=100, length=128)
    key = attach_profiles(key, original, profile)
    probes = encode_probes(tokenizer, bundled_probes(), n_probes=arguments.probes, length=arguments.length)
    results: dict[str, object] = {"probes": len(probes), "tokens": sum(map(len, probes))}
    results["original"] = row("(the unmarked original)", original, key, probes)
    results["changes"] = [
        row(name, attack(marked), key, probes)
        for name, attack in attacks(marked, tokenizer, layers).items()
        if arguments.only in name
    ]
    if arguments.keys:
        usage = expert_usage(marked, tokenizer, list(bundled_probes())[100:150], range(12))
        pruned = permute_experts(remove_experts(marked, RemoveExperts(share=0.3), usage=usage))
        suspects = {
            "original": original,
            "original, permuted": permute_experts(original),
            "marked": marked,
            "marked, 30 % removed, permuted": pruned,
        }
        few = [text[:32] for text in probes[:10]]
        results["calibration"] = {
            name: calibration(suspect, key, few, arguments.keys, seed)
            for seed, (name, suspect) in enumerate(suspects.items(), start=1)
        }
        print(json.dumps(results["calibration"], indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
