"""What a thief does to a vocabulary: other numbers, more of them, a head of its own. What the model says stays.

The adversary holds the weights and the tokenizer's files, and needs no data. Whoever reads the copy with token ids of
the original reads nonsense.

Shape suffixes: V tokens, H hidden size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.attacks.attack import Attacked, option
from pathmark.attacks.blocks import copied
from pathmark.attacks.kit import Kit
from pathmark.errors import AttackError


@dataclass(frozen=True, kw_only=True)
class PermuteVocabulary:
    """Renumber all tokens."""

    seed: int = option(0, "Seed of everything that is drawn.")


@dataclass(frozen=True, kw_only=True)
class ExtendVocabulary:
    """Add tokens that nobody uses."""

    count: int = option(64, "How many tokens are added.")
    seed: int = option(0, "Seed of everything that is drawn.")

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}")


@torch.no_grad()
def permute_vocabulary(model: PreTrainedModel, config: PermuteVocabulary, kit: Kit) -> Attacked:
    """Renumber the rows of embedding and head together with the tokenizer's vocabulary.

    The adversary knows that the owner probes with token ids. Texts in and texts out are the same; every id is another.
    """
    if not getattr(kit.tokenizer, "is_fast", False):
        raise AttackError("renumbering a vocabulary needs the model's fast tokenizer; give a folder that has one")
    model = copied(model)
    tables = _tables(model)
    order_V = torch.randperm(len(tables[0].weight), generator=torch.Generator().manual_seed(config.seed))
    for table in tables:  # new token i was order[i]
        table.weight = nn.Parameter(table.weight.detach()[order_V.to(table.weight.device)], requires_grad=False)
    if len(tables) == 1:
        model.tie_weights()
    places = order_V.argsort().tolist()
    _rename(model.config, places)
    _rename(model.generation_config, places)
    return Attacked(model, tokenizer=_renumbered(kit.tokenizer, places))


@torch.no_grad()
def extend_vocabulary(model: PreTrainedModel, config: ExtendVocabulary, kit: Kit) -> PreTrainedModel:
    """Append random rows to embedding and head.

    The adversary knows that shapes are compared. Old tokens keep their numbers; the new ones are never said.
    """
    model = copied(model)
    source = torch.Generator().manual_seed(config.seed)
    for table in _tables(model):
        table.weight = nn.Parameter(_longer(table.weight.detach(), config.count, source), requires_grad=False)
    if len(_tables(model)) == 1:
        model.tie_weights()
    rows = len(model.get_input_embeddings().weight)
    model.config.get_text_config().vocab_size = rows
    model.get_input_embeddings().num_embeddings = model.get_output_embeddings().out_features = rows
    return model


def _longer(table_VH: Tensor, count: int, source: torch.Generator) -> Tensor:
    new_VH = torch.randn(count, table_VH.shape[1], generator=source).to(table_VH) * 0.1 * table_VH.std()
    return torch.cat([table_VH, new_VH])


def _tables(model: PreTrainedModel) -> list[Any]:
    """The modules with a row per token; one where the head shares the embedding's weight."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        raise AttackError("this model has no head to renumber with its embedding")
    return [embedding] if head.weight is embedding.weight else [embedding, head]


def _rename(config: Any, places: list[int]) -> None:
    """Token ids that a config names."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        said = getattr(config, name, None)
        if isinstance(said, int):
            setattr(config, name, places[said])
        elif isinstance(said, list):
            setattr(config, name, [places[token] for token in said])


def _renumbered(tokenizer: Any, places: list[int]) -> Any:
    """The tokenizer with every id moved to its new place; texts give the same pieces."""
    said = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = said["model"].get("vocab")
    if not isinstance(vocabulary, dict):
        raise AttackError(f"a tokenizer of kind {said['model'].get('type')} cannot be renumbered; expected BPE")
    said["model"]["vocab"] = {token: places[number] for token, number in vocabulary.items()}
    for added in said.get("added_tokens") or []:
        added["id"] = places[added["id"]]
    said["post_processor"] = None  # it may name ids; probes are encoded without special tokens
    kept = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    made = type(tokenizer)(tokenizer_object=Tokenizer.from_str(json.dumps(said)), **kept)
    made.chat_template = tokenizer.chat_template
    return made
