"""What a key keeps of the original beside its experts: its config, its vocabulary, and how well it speaks.

A thief may ship the same weights with a config that breaks them, or with tokens in another order. With this the owner
can put both right, without looking at a trigger or a target.

Shape suffixes: V tokens of the vocabulary, P projections.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, PreTrainedModel

from pathmark.errors import ModelError
from pathmark.models.perplexity import perplexity
from pathmark.models.sketches import pack_arrays, unpack_arrays
from pathmark.models.vocabulary import embedding_sketch

FACTS, VOCABULARY = "original.json", "vocabulary.npz"
"""Names of the attachments."""
SPOKEN = 8
"""Texts on which it is measured whether a model speaks."""
STORED = frozenset({"architectures", "dtype", "torch_dtype", "quantization_config", "transformers_version"})
"""How a copy is stored: always the suspect's own."""
_IDLE = frozenset({"_name_or_path", "use_cache", "initializer_range", "id2label", "label2id", "problem_type"})
_IDLE_ENDS = ("_token_id", "_dropout", "_loss_coef")
"""Entries that change nothing of what a model computes for a text."""
_SHAPES = ("_size", "_dim", "_heads", "_rank")


@dataclass(frozen=True, eq=False)
class Original:
    """The owner's model as the key, or the original itself, tells it; whatever is not known is None."""

    config: Mapping[str, Any] | None = None
    tokens: Sequence[str] | None = None
    """The tokens' strings, by id."""
    sketch_VP: NDArray[np.floating] | None = None
    loss: float | None = None
    """Mean negative log-likelihood of a token of the key's first clean texts."""
    attached: tuple[str, ...] = ()
    """Attachments that this was read from."""


def attachments_of(model: PreTrainedModel, tokenizer: Any, rows: Sequence[Sequence[int]]) -> dict[str, bytes]:
    """What a key keeps of the original."""
    loss = clean_loss(model, rows)
    facts = {"config": behaviour(model.config), "loss": loss if math.isfinite(loss) else None}
    spelt = json.dumps([str(token) for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))])
    arrays: dict[str, NDArray[Any]] = {
        "tokens": np.frombuffer(spelt.encode(), dtype=np.uint8),
        "sketch": embedding_sketch(model.get_input_embeddings().weight).astype(np.float16),
    }
    return {FACTS: json.dumps(facts, sort_keys=True).encode(), VOCABULARY: pack_arrays(arrays)}


def read_original(attachments: Mapping[str, bytes]) -> Original:
    """Inverse of attachments_of; keys of earlier versions have none of it."""
    try:
        facts = json.loads(attachments.get(FACTS, b"{}"))
        arrays = unpack_arrays(attachments[VOCABULARY]) if VOCABULARY in attachments else {}
        return Original(
            config=facts.get("config"),
            tokens=json.loads(arrays["tokens"].tobytes()) if "tokens" in arrays else None,
            sketch_VP=arrays.get("sketch"),
            loss=facts.get("loss"),
            attached=tuple(name for name in (FACTS, VOCABULARY) if name in attachments),
        )
    except (ValueError, AttributeError) as error:
        raise ModelError(f"the key's record of its original is damaged: {error}; restore the key") from error


def clean_loss(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> float:
    """Mean loss per token on the first clean texts; infinite where there are no numbers or no running at all."""
    try:
        return math.log(perplexity(model, rows[:SPOKEN]).value)
    except (ModelError, RuntimeError, ValueError, TypeError, IndexError, AttributeError, OverflowError):
        return math.inf  # whatever a config or weights make a forward pass raise: such a reading is worth nothing


def behaviour(config: Any) -> dict[str, Any]:
    """What a config says about the computation, as JSON."""
    said = json.loads(json.dumps(config.to_dict(), default=str))
    return {k: v for k, v in said.items() if k not in STORED | _IDLE and not k.endswith(_IDLE_ENDS)}


def owners_configs(original: Original, own: Any | None) -> list[Any]:
    """How the owner would read these weights: under the original's config, and by its rules in the suspect's shapes.

    Empty where the suspect's own says the same, or nothing is known of the original's.
    """
    if original.config is None:
        return []
    whole = _made(dict(original.config))
    mine = dict(original.config) if whole is None else behaviour(whole)  # with defaults that came since
    theirs = {} if own is None else behaviour(own)
    if theirs == mine:
        return []
    stored = {} if own is None else {k: v for k, v in own.to_dict().items() if k in STORED and v is not None}
    found = [_made(mine | stored)]
    if own is not None and theirs.get("model_type") == mine.get("model_type"):
        fitted = theirs | {name: value for name, value in mine.items() if not _is_shape(name, value)}
        if fitted not in (mine, theirs):
            found.append(_made(fitted | stored))
    return [config for config in found if config is not None]


def _is_shape(name: str, value: Any) -> bool:
    """Whether an entry says how large something is, or one thing per layer, and not what is done."""
    counts = ("layers" in name or "experts" in name) and not name.endswith("per_tok")
    return counts or name.endswith(_SHAPES) or isinstance(value, list)


def _made(fields: dict[str, Any]) -> Any | None:
    try:
        return AutoConfig.for_model(**fields)
    except Exception:  # of a suspect's shapes, or of a type that the installed transformers does not know
        return None
