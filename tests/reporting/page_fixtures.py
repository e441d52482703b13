"""Results as commands leave them, small enough to read."""

from __future__ import annotations

from pathmark.results.header import Header
from pathmark.results.robustness import FORMAT, VERSION, Forged, Measured, RobustnessResult, Step, Unmeasured
from pathmark.results.schema import to_json
from pathmark.stats import Rate

RATE = {"hits": 100, "n": 100, "interval": [0.96, 1.0]}
BOUND = {"figure": "WSR", "found": "100/100", "bound": "always", "held": True, "try": "more --steps"}
CHECK = {
    "output": "marked <b>", "fit": True, "problems": [], "n_probes": 100, "n_tokens": 12_800,
    "clean_ppl": [50.0, 50.5], "triggered_ppl": [51.0, 52.0], "topk_agreement": 0.9,
    "target_mass_clean": [0.03, 0.04], "target_mass_triggered": 0.5,
    "bounds": [BOUND, BOUND | {"figure": "KL of clean routing", "found": "0.01", "bound": "at most 0.05"}],
    "scan": {"kinds": {"single token": {"hits": 0, "n": 4000}}},
    "trigger": {
        "tokens": 4, "accepted_wrong": 1, "silent_right": 2,
        "curve": [{"hits": h, "n": 9, "interval": [h / 9, h / 9]} for h in (0, 0, 1, 9, 9)],
    },
    "clean_routing": [{"layer": 4, "before": [0.5, 0.3, 0.2], "after": [0.4, 0.35, 0.25]}],
}  # fmt: skip
UNFIT = CHECK | {
    "fit": False, "problems": ["WSR: 99/100, expected always"],
    "bounds": [CHECK["bounds"][1], BOUND | {"found": "99/100", "held": False}],
}  # fmt: skip
WATERMARK = {
    "watermark": 0, "id": 7, "reading": "as it is", "masses_known": True,
    "layers": [
        {
            "layer": layer, "pool": [0, 1, 2, 3, 4, 5], "targets": [layer % 6],
            "triggered": [0.8 if e == layer % 6 else 0.04 for e in range(6)], "clean": [1 / 6] * 6,
            "difference": [0.1] * 6, "matched": [True] * 6,
        }
        for layer in (4, 5, 6)
    ],
    "exact": {"statistic": 1.9, "log10_p": -2.3, "log10_floor": -2.33, "n_paths": "216", "erased_layers": []},
    "null": {"statistics": [0.0, 1.0, 1.9], "log10_p": [0.0, -1.2, -2.33]},
    "probe": [
        {"token": 5, "text": "<people>", "triggered": [[4], [5], [0]], "clean": [[1], [2], [-1]]},
        {"token": 9, "text": None, "triggered": [[4], [5], [3]], "clean": [[1], [5], [2]]},
    ],
    "barcodes": {"expected": [4, 5, 0], "recovered": [4, 5, 0]},
    "decoys": [-0.2, -0.5],
}  # fmt: skip
VERDICT = {
    "suspect": "./suspect", "access": "weights", "verdict": "marked", "marked": True, "undecided": None,
    "p_value": 5e-3, "log10_p": -2.3, "p_floor": 4.6e-3, "p_third_party": 1.0, "significance": 1e-2, "id": 7,
    "wsr": 1.0, "accuracy": 0.98, "n_probes": 20, "n_tokens": 2560, "words": "Found.\nOne in 200.\n\nFigures\n  - p",
    "weaknesses": ["the key is not dated"], "decoys": {"p_values": [0.6, 0.3], "n_probes": 20},
    "layers": [
        {"watermark": 0, "layer": 4, "accuracy": 0.9, "accuracy_own_topk": 0.9, "mass_triggered": 0.8,
         "mass_clean": 0.17}
    ],
}  # fmt: skip
DEMO = {
    "model": "bundled:<tiny>", "architecture": "Qwen3MoeForCausalLM", "id": 7, "layers": [4, 5, 6], "id_capacity": 20,
    "words": {"stolen, disguised": "Found. One in 200.", "original": "Not found."},
    "verify": {"stolen, disguised": VERDICT, "original": VERDICT | {"verdict": "not marked", "marked": False}},
    "trace": {"words": "Beta & Co."}, "embed": CHECK, "stolen": WATERMARK,
}  # fmt: skip


def bundle_files():
    """Name -> JSON of the parts of an evidence bundle that a page shows."""
    return {
        "verdict.json": VERDICT,
        "run.json": {
            "version": 1, "created": "2026-11-18T10:00:00Z", "command": ["pathmark", "verify", "./suspect"],
            "versions": {"pathmark": "0.1.0"}, "platform": {"system": "Linux"}, "seeds": {}, "settings": {},
            "fingerprint": "ab12", "revealed": [0], "watermarks": 2,
        },
        "suspect.json": {
            "name": "./suspect", "kind": "model", "root": "ff" * 32, "serialization": {},
            "files": [{"path": "model.safetensors", "size": 1000, "sha256": "00" * 32}],
            "custody": [{"who": "<i>Ada</i>", "when": "2026-11-17", "how": "downloaded", "root": None}],
        },
        "measured.json": {
            "probes": {"tokens": [[5, 9]], "texts": ["<people>"], "decoys": [], "decoy_probes": 0},
            "watermarks": [WATERMARK],
        },
    }  # fmt: skip


def attacked(case, log10_p, rise):
    """A row: what an attack left, and what it cost."""
    return Measured(
        wsr=Rate(9 if log10_p < -6 else 1, 10), accuracy=0.9, p_value=10**log10_p, log10_p=log10_p, erased_layers=(),
        alignment=None, case=case, group=case.split()[0],
        steps=(Step(attack=case.split()[0], settings={}),), ppl_before=40.0, ppl=40.0 * (1 + rise),
        ppl_thief_before=None, ppl_thief=None, p_floor=1e-10, grafted=None, marked=log10_p < -6, id=7, id_right=True,
        n_probes=10, n_tokens=1280, black_box=None, thief_wsr=None, dispute=None, attack_seconds=1.0, seconds=2.0,
    )  # fmt: skip


ROBUSTNESS = to_json(
    RobustnessResult(
        header=Header(
            format=FORMAT, version=VERSION, package="0.1.0", torch=None, model_sha256="ab" * 32, original_sha256=None,
            texts_sha256={}, key=None, seed=0, n_probes=10, settings={},
        ),
        corpus="thief's <texts>",
        n_texts=100,
        layers=(4, 5),
        rows=(
            attacked("gptq 4 bit", -9.5, 0.01),
            attacked("fine-tune hard", -2.0, 0.2),
            attacked("prune 90 %", -0.5, 9.0),
            Unmeasured(case="reap", group="reap", steps=(), status="refused", reason="too few experts"),
        ),
        forgery=(
            Forged(name="ground", tried=1000, log10_p=-7.0, log10_p_third_party=-0.0, charge_bits=80, accepted=False,
                   reason="not dated"),
        ),
    )
)  # fmt: skip
