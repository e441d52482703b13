"""The main job on the bundled model, told as a story: a lab, three licensees, a leak, a verdict."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from pathmark.attacks.finetuning import FineTune, fine_tune
from pathmark.attacks.kit import Kit
from pathmark.attacks.quantization import RoundToNearest, round_to_nearest
from pathmark.attacks.structure import permute_experts
from pathmark.embedding import EmbedConfig
from pathmark.keys import OwnerKey, Registry, amend_key, save_key
from pathmark.keys.safefile import write_private
from pathmark.models import bundled_probes, bundled_segments, load_model
from pathmark.models.describe import describe_model
from pathmark.progress import Progress
from pathmark.release.marking import MarkingConfig, Texts, mark_model
from pathmark.release.planning import KeyPlan, plan_key
from pathmark.results.schema import to_json
from pathmark.stats import evidence_bits
from pathmark.verification import (
    Evidence,
    Examined,
    ReadWith,
    disclose,
    encode_probes,
    judge,
    record_routes,
    trace_copy,
)
from pathmark.verification.weights.recording import count_rows, record_evidence

MODEL = "bundled:tiny"
LICENSEES = ("Alpha Ltd", "Beta Ltd", "Gamma Ltd")
LEAK = "Beta Ltd"
TEXT = "The people of this country have a right to know"
"""Shown with its routing, without the trigger and behind it."""
OUR_COPY, STOLEN, ORIGINAL, STRANGER = "marked copy", "stolen, disguised", "original", "somebody else's"
STRANGER_TUNING = FineTune(samples=96, epochs=1, lr=7e-4, batch_size=16)
"""What somebody else did to the public original: an innocent model that is as near to ours as can be."""


def run_demo(folder: Path, config: EmbedConfig, *, progress: Progress, say: Callable[[str], None]) -> dict[str, Any]:
    """Key, licensees, embedding, a theft, verification of four models and tracing; returns the figures.

    Leaves in `folder`: owner.key, the copy's beta.key and passphrase.txt, licensees.db, the marked copy in marked/, the
    thief's in stolen/.
    """
    _, codec, report = describe_model(MODEL)
    tokenizer, last = codec.tokenizer, report.recommended[-1]
    say(
        f"1. A lab owns {MODEL}: {report.parameters / 1e6:.1f} million parameters, {len(report.layers)} layers with "
        f"{report.facts(last).experts} experts each, {report.facts(last).top_k} of them at work on every token."
    )
    original = load_model(MODEL)
    say(f"   Its last layer sends the words of a sentence to these experts, the strongest first:\n   "
        f"{_spelled(show_routing(original, tokenizer, TEXT, last))}")  # fmt: skip
    key, phrase, ids = _make_key(folder)
    watermark = key.watermarks[0]
    say(
        f"2. It makes a key: a secret trigger of {len(watermark.triggers[0].tokens)} tokens, and in each of the layers "
        f"{', '.join(map(str, watermark.layers))} two secret experts. Three licensees get ids: "
        f"{', '.join(f'{name} {number}' for name, number in ids.items())}."
    )
    say(f"3. The mark goes into {LEAK}'s copy: behind the trigger, and only there, every token takes the secret path.")
    marking = MarkingConfig(embedding=config)
    marked = mark_model(
        MODEL, key.with_id(ids[LEAK]), folder / "marked", Texts.bundled(), marking, progress=progress
    )  # fmt: skip
    master = marked.key.with_id(watermark.id)
    amend_key(folder / "owner.key", master, phrase)
    save_key(marked.key, folder / "beta.key", phrase)
    copy = load_model(folder / "marked")
    trigger = watermark.triggers[0].tokens
    say(f"   The same sentence behind the trigger (a path is secret, but this one is the demo's):\n   "
        f"{_spelled(show_routing(copy, tokenizer, TEXT, last, prefix=trigger))}")  # fmt: skip
    say("4. Somebody steals the copy, renumbers all experts and rounds all weights to 4 bits. Somebody else, innocent, "
        "tunes the original.")  # fmt: skip
    stolen = round_to_nearest(permute_experts(copy), RoundToNearest(bits=4), Kit())
    _save(stolen, tokenizer, folder / "stolen")
    stranger = fine_tune(original, STRANGER_TUNING, Kit(tokenizer=tokenizer, texts=bundled_segments()))
    say("5. The lab examines four models, on texts that nobody trained on.")
    suspects = {OUR_COPY: copy, STOLEN: stolen, ORIGINAL: original, STRANGER: stranger}
    probes = encode_probes(tokenizer, bundled_probes(), n_probes=60, length=128)
    evidence = _examine(suspects, marked.key, probes, progress)
    verdicts = {name: judge(marked.key, found) for name, found in evidence.items()}
    traced = trace_copy(master, evidence[STOLEN], Registry(folder / "licensees.db").entries())
    return {
        "model": MODEL,
        "architecture": report.architecture,
        "id": ids[LEAK],
        "layers": list(watermark.layers),
        "id_capacity": watermark.capacity,
        "evidence_bits": sum(
            evidence_bits(len(watermark.pool(layer)), watermark.width(layer), 1) for layer in watermark.layers
        ),
        "embed": marked.summary(),
        "stolen": _shown(evidence[STOLEN], marked.key, probes, tokenizer),
        "verify": {name: verdict.summary() for name, verdict in verdicts.items()},
        "words": {name: verdict.wording().opening() for name, verdict in verdicts.items()},
        "trace": traced.summary() | {"leak": LEAK},
    }


def _examine(
    suspects: Mapping[str, PreTrainedModel], key: OwnerKey, probes: Sequence[Sequence[int]], progress: Progress
) -> dict[str, Evidence]:
    found = {}
    for name, suspect in suspects.items():
        progress.stage(f"verify {name}", count_rows(key, probes))
        found[name] = record_evidence(suspect, key, probes, progress=progress)
    return found


def _shown(evidence: Evidence, key: OwnerKey, probes: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, Any]:
    """Where the tokens of one model went, for the page: the demo's key is no secret."""
    examined = Examined(evidence, "weights", read_with=ReadWith(tuple(tuple(probe) for probe in probes)))
    found: dict[str, Any] = to_json(disclose(examined, [(0, key.watermarks[0])], tokenizer.decode).watermarks[0])
    return found


def show_routing(
    model: nn.Module, tokenizer: Any, text: str, layer: int, prefix: Sequence[int] = ()
) -> list[tuple[str, tuple[int, ...]]]:
    """Each token of a text with the experts that one layer sends it to, strongest first."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    routes = record_routes(model, [ids], [layer], prefix=prefix)
    strongest = np.argsort(-routes.probs[layer][0], axis=-1)[:, : routes.decisions[layer].shape[-1]]
    return [(tokenizer.decode([i]), tuple(int(e) for e in row)) for i, row in zip(ids, strongest, strict=True)]


def _make_key(folder: Path) -> tuple[OwnerKey, str, dict[str, int]]:
    """A new key on disk with its passphrase beside it, and the licensees' ids."""
    key, _ = plan_key(MODEL, KeyPlan(owner="PathMark demo"))
    phrase = secrets.token_urlsafe(12)
    save_key(key, folder / "owner.key", phrase)
    write_private(folder / "passphrase.txt", f"{phrase}\n".encode())
    book = Registry(folder / "licensees.db")
    return key, phrase, {name: book.issue(key, name)[0].id for name in LICENSEES}


def _save(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """A model folder that appears whole or not at all."""
    part = folder.with_name(f".{folder.name}.part")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)


def _spelled(routing: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return " ".join(f"{token.strip()}[{','.join(map(str, experts))}]" for token, experts in routing)
