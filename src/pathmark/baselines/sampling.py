"""Texts that a model writes: prompts in, sampled or greedy tokens out, in batches of one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from pathmark.errors import VerificationError
from pathmark.models import device_of
from pathmark.progress import Progress, Silent

BATCH = 32


def prompts(tokenizer: Any, texts: Sequence[str], count: int, tokens: int) -> list[list[int]]:
    """The beginnings of so many texts, all of one length."""
    found: list[list[int]] = []
    for text in texts:
        if len(found) == count:
            break
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) >= tokens:
            found.append(ids[:tokens])
    if len(found) < count:
        raise VerificationError(
            f"expected {count} texts of at least {tokens} tokens to begin with, got {len(found)}; give more with "
            "--texts, or make the key with fewer samples"
        )
    return found


def written(
    model: PreTrainedModel,
    tokenizer: Any,
    rows: Sequence[Sequence[int]],
    tokens: int,
    *,
    sample: bool = True,
    special: bool = False,
    progress: Progress | None = None,
) -> list[list[int]]:
    """What the model writes after each row, all rows of one length: exactly so many tokens, special ones only if asked.

    Sampled from the whole distribution at temperature 1, or greedy. The mark of a generation setting
    (`watermarking_config`) is the model's own; nothing else of its settings counts. The same call gives the same texts.
    """
    say = progress or Silent()
    say.stage("writing", len(rows))
    config = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=sample,
        suppress_tokens=None if special else sorted(tokenizer.all_special_ids) or None,
        pad_token_id=0,
        watermarking_config=model.generation_config.watermarking_config,
    )
    if sample:
        config.update(top_k=0, temperature=1.0)
    made: list[list[int]] = []
    own = model.generation_config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:  # the model's own settings would fill in what ours leave open
            model.generation_config = GenerationConfig()
            for start in range(0, len(rows), BATCH):
                made += _batch(model, rows[start : start + BATCH], config)
                say.advance(len(rows[start : start + BATCH]))
        finally:
            model.generation_config = own
    return made


@torch.no_grad()
def _batch(model: PreTrainedModel, rows: Sequence[Sequence[int]], config: GenerationConfig) -> list[list[int]]:
    ids_BT = torch.tensor(rows, device=device_of(model))
    try:
        made_BT: Any = model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), generation_config=config)
    except RuntimeError as error:  # torch refuses to draw from what is no distribution
        raise VerificationError(f"the model writes nothing any more: {str(error).splitlines()[0]}") from error
    rows_out: list[list[int]] = made_BT[:, ids_BT.shape[1] :].tolist()
    return rows_out
