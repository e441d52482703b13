"""Under which config and with whose numbers of tokens a suspect is read: by how well it then speaks clean text.

The same weights with another config, or with tokens renumbered, say the same to whoever has the thief's files, and
nothing to the owner. So the owner's config and token strings are tried beside the suspect's own. Clean text decides,
which has seen no trigger and no target, so the choice costs no significance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from pathmark.errors import ModelError
from pathmark.models.original import FACTS, VOCABULARY, Original, clean_loss, owners_configs
from pathmark.models.vocabulary import by_embedding, by_strings, is_identity, renumbered

CLEAR = 0.1
"""Nats per token by which the suspect's own config and numbers must be better to be believed against the owner's."""
EQUAL = 1e-4
"""Losses that differ by less come from the same computation."""
WORSE = 0.5
"""Nats above the original's loss from which on the rows of the embedding are asked which token is which."""
SPEAKS = 1.0
"""Nats by which an original must beat a uniform guess: one that does not speak tells nothing of a suspect."""

Map = NDArray[np.int64] | None
Opener = Callable[[Any | None], tuple[PreTrainedModel, bool]]
"""Opens the suspect under a config, None for its own; says whether it is streamed."""


@dataclass(frozen=True, eq=False)
class Reading:
    """A suspect that is ready to be read."""

    model: PreTrainedModel
    streamed: bool
    map_V: Map
    """Owner's token -> suspect's; None where they have the same numbers."""
    rests_on: frozenset[str]
    """What the owner brought for this reading: names of attachments, or `--original`."""
    notes: tuple[str, ...]
    mute: str | None
    """Why clean text shows no working language model, if it shows none."""


@dataclass(frozen=True, eq=False)
class _Way:
    config: Any | None
    map_V: Map
    loss: float
    brought: tuple[str, ...]
    """Of FACTS and VOCABULARY, what it takes from the owner."""


def choose_reading(
    open_model: Opener, original: Original, own: Any | None, tokenizer: Any | None, rows: Sequence[Sequence[int]]
) -> Reading:
    """Open a suspect as it speaks best; `own` is its config and `tokenizer` its tokenizer, if they can be read."""
    ways: list[_Way] = []
    refusals: list[ModelError] = []
    held: tuple[Any, PreTrainedModel, bool] | None = None
    for config in [*owners_configs(original, own), None]:
        held = None  # one copy in memory at a time
        try:
            model, streamed = open_model(config)
        except ModelError as error:
            refusals.append(error)
            continue
        held = (config, model, streamed)
        ways += _ways(model, config, original, tokenizer, rows)
    if not ways:
        raise refusals[-1]  # about the suspect's own config
    chosen = _choose(ways)
    if held is None or held[0] is not chosen.config:
        held = None
        held = (chosen.config, *open_model(chosen.config))
    notes = []
    if FACTS in chosen.brought:
        notes.append("the suspect's config was set aside: its weights speak better, or as well, under the original's")
    if VOCABULARY in chosen.brought:
        notes.append("the suspect's tokens are numbered otherwise and were put back into the original's order")
    rests_on = frozenset(name if name in original.attached else "--original" for name in chosen.brought)
    return Reading(held[1], held[2], chosen.map_V, rests_on, tuple(notes), _mute(chosen.loss, original, held[1]))


def token_map(model: PreTrainedModel, original: Original, tokenizer: Any, rows: Sequence[Sequence[int]]) -> Map:
    """Owner's token -> that of a loaded suspect with this tokenizer, as it speaks best; None where nothing moved."""
    return _choose(list(_ways(model, None, original, tokenizer, rows))).map_V


def _ways(
    model: PreTrainedModel, config: Any | None, original: Original, tokenizer: Any | None, rows: Sequence[Sequence[int]]
) -> Iterator[_Way]:
    """The numberings that may be meant, with how well the suspect speaks in each; those of the owner first."""
    ruled = () if config is None else (FACTS,)
    best = math.inf
    spelt = None if original.tokens is None or tokenizer is None else by_strings(original.tokens, tokenizer)
    for map_V in [spelt, None] if spelt is not None and not is_identity(spelt) else [None]:
        with renumbered(model, map_V):
            loss = clean_loss(model, rows)
        best = min(best, loss)
        yield _Way(config, map_V, loss, ruled if map_V is None else (*ruled, VOCABULARY))
    if original.sketch_VP is None or original.loss is None or best <= original.loss + WORSE:
        return
    alike = by_embedding(original.sketch_VP, model.get_input_embeddings().weight)
    if alike is not None and not is_identity(alike):
        with renumbered(model, alike):
            yield _Way(config, alike, clean_loss(model, rows), (*ruled, VOCABULARY))


def _choose(ways: Sequence[_Way]) -> _Way:
    """The owner's way unless another is clearly better; of equal ones the one that takes least from the owner."""
    best = min(way.loss for way in ways)
    trusted = next(way for way in ways if way.loss <= best + CLEAR)
    same = [way for way in ways if way.loss == trusted.loss or abs(way.loss - trusted.loss) <= EQUAL]
    return min(same, key=lambda way: len(way.brought))


def _mute(loss: float, original: Original, model: PreTrainedModel) -> str | None:
    """Half of what the original knows of a text, beyond a uniform guess, must be left; otherwise nothing follows.

    Where the original's own loss is not known, or it speaks as little itself, a suspect must not be worse than a guess.
    """
    guess = math.log(len(original.tokens or ()) or int(model.config.get_text_config().vocab_size))
    limit, known = guess + SPEAKS, ""
    if original.loss is not None and guess - original.loss >= SPEAKS:
        limit = (guess + original.loss) / 2
        known = f" (the original has {math.exp(original.loss):.1f})"
    if loss <= limit or (original.loss is None and math.isinf(loss)):  # it cannot be measured on every architecture
        return None
    shown = f"{math.exp(loss):.3g}" if loss < 100 else "without bound"
    return (
        f"this suspect does not speak: perplexity {shown} on clean text{known}, where a blind guess has "
        f"{math.exp(guess):.0f}; its config, its tokenizer or its weights are broken, and no mark could show"
    )
