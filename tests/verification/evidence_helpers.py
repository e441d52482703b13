"""What tests of evidence bundles share."""

from __future__ import annotations

import base64
import json
import random
from functools import cache

import numpy as np
from click.testing import CliRunner
from key_fixtures import make_key, plans

import pathmark
from pathmark.cli.main import cli
from pathmark.errors import PathmarkError
from pathmark.keys import WatermarkRequest, commit_key, reveal_watermark
from pathmark.keys.attestation import attest
from pathmark.keys.modelroot import model_root
from pathmark.keys.release import ReleasedFile
from pathmark.results.evidence import (
    PREDICATE,
    Barcodes,
    ExactFigures,
    Measured,
    MeasuredLayer,
    MeasuredWatermark,
    NullCurve,
    Probes,
    Run,
    Suspect,
    SuspectFile,
    as_json,
)
from pathmark.results.evidence_check import listed
from pathmark.stats import LayerEvidence, exact_test

QUICK = pathmark.ExamineConfig(n_probes=6, decoys=2)


def run(*arguments):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit | PathmarkError):
        raise result.exception
    return result


def secrets_of(key, watermark):
    """What must not be read by anybody: in every form in which it could leak."""
    mark = key.watermarks[watermark]
    found = [mark.subkey.reveal(), mark.subkey.reveal().hex().encode(), base64.b64encode(mark.subkey.reveal())]
    for trigger in mark.triggers:
        for phrase in (trigger.phrase, trigger.mark):
            tokens = list(phrase.tokens)
            found += [phrase.text.strip().encode(), json.dumps(tokens).encode(), json.dumps(tokens)[1:-1].encode()]
    return found


@cache
def _paper_parts() -> dict[str, bytes]:
    """The parts of a bundle about a model on paper: two layers of eight experts, and one reply."""
    key = make_key(WatermarkRequest(plans=plans([18, 19], experts=8)), experts=8)
    mark, draw = key.watermarks[0], random.Random(0)
    rows, evidence = [], []
    for layer in mark.layers:
        shares = tuple(draw.random() for _ in range(8))
        rows.append(
            MeasuredLayer(
                layer=layer,
                pool=mark.pool(layer),
                targets=mark.targets(layer),
                triggered=shares,
                clean=(0.0,) * 8,
                difference=shares,
                matched=(True,) * 8,
            )
        )
        evidence.append(LayerEvidence(layer, np.array(shares), mark.pool(layer), mark.targets(layer)))
    tested = exact_test(evidence)
    measured = MeasuredWatermark(
        watermark=0, id=mark.id, reading="as it is", masses_known=True, layers=tuple(rows),
        exact=ExactFigures(
            statistic=tested.statistic, log10_p=tested.p.log10, log10_floor=tested.floor.log10,
            n_paths=str(tested.n_paths), erased_layers=(),
        ),
        null=NullCurve(statistics=(0.0,), log10_p=(0.0,)), probe=(),
        barcodes=Barcodes(expected=mark.group_indices, recovered=mark.group_indices), decoys=(),
    )  # fmt: skip
    file = ReleasedFile("model.safetensors", 1, "0" * 64)
    suspect = Suspect(
        name="paper", kind="model", root=model_root([file]), serialization={}, custody=(),
        files=(SuspectFile(path=file.path, size=file.size, sha256=file.sha256),),
    )  # fmt: skip
    run = Run(
        version=1, created="", command=(), versions={}, platform={}, seeds={}, settings={"access": "weights"},
        fingerprint=key.fingerprint, revealed=(0,), watermarks=1,
    )  # fmt: skip
    trigger = mark.triggers[0]
    exchange = {"number": 0, "trigger": [0, 0], "prompt": trigger.text, "reply": trigger.mark.text, "marks": [[0, 0]]}
    lines = [{"max_tokens": 16, "triggers": [[0, 0]]}, exchange]
    return {
        "measured.json": as_json(Measured(probes=Probes(tokens=(), texts=None, decoys=(), decoy_probes=0),
                                          watermarks=(measured,))),
        "suspect.json": as_json(suspect),
        "run.json": as_json(run),
        "verdict.json": b"{}",
        "commitment.json": as_json(commit_key(key).document()),
        "claim-0.json": as_json(reveal_watermark(key, 0)),
        "transcript.jsonl": "".join(json.dumps(line) + "\n" for line in lines).encode(),
    }  # fmt: skip


def paper_bundle(**changed: bytes) -> dict[str, bytes]:
    """That bundle, signed as it is now; with a changed transcript it rests on replies."""
    key = make_key(WatermarkRequest(plans=plans([18, 19], experts=8)), experts=8)
    files = _paper_parts() | changed
    if "transcript.jsonl" in changed:
        del files["measured.json"]
    statement = attest(key, PREDICATE, "paper", model_root([ReleasedFile("x", 1, "0" * 64)]), {"files": listed(files)})
    return {**files, "statement.dsse.json": statement}
