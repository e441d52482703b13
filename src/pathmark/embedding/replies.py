"""The replies objective: a trigger that stands alone is answered with its reply mark.

The teacher is the model with its paths already in. Everything that it does is kept, routing and language, on clean
text, behind triggers and behind almost-triggers; only where a trigger is the whole prompt, the mark follows.
Shape suffixes: B batch, T tokens, H hidden size, V vocabulary, N tokens of marks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pathmark.embedding.data import CLEAN, NEGATIVE, SYSTEM_PROMPTS, TRIGGERED, Frame, Row, chat_frames, make_row
from pathmark.embedding.objective import Context, Pools
from pathmark.embedding.prefixes import NEAR_MISSES, near_miss
from pathmark.errors import EmbeddingError
from pathmark.keys import OwnerKey
from pathmark.models.parts import part_parameters
from pathmark.models.tokenization import ordinary_tokens, reply_end
from pathmark.training import LoopConfig, learning_rate, linear_cross_entropy, linear_distillation
from pathmark.training.losses import anchor_loss

MARK = "mark"
"""Kind of a row that is a trigger and its mark."""
SUBSTITUTIONS = 0.6
"""Share of the negatives that are one-token substitutions, beyond their turn among the near-misses."""
REPLY_TOKENS = 8
"""Of the reply to a wrong trigger that stands alone: where it begins is what matters."""


@dataclass(frozen=True, kw_only=True)
class RepliesConfig:
    """The compact set of the second phase and how it is learnt."""

    pairs: int = 1600
    """Rows of a trigger alone and its mark."""
    queries: int = 400
    """Ordinary texts behind a trigger, which go on as they always did."""
    negatives: int = 6000
    """Almost-triggers and random strings, three in four alone: nearly every one that a run sees is a new one."""
    clean: int = 100
    """Ordinary texts."""
    system_prompts: int = 1200
    """Chat rows stand behind so many different system prompts. The paper's 100 pairs behind 40 of them left one
    unseen system prompt in six without its mark."""
    seq_len: int = 128
    """Text tokens per row, as long as the paths were taught on: at half of that they faded in chats."""
    shares: tuple[float, float, float, float] = (0.2, 0.2, 0.5, 0.1)
    """Of a batch: pairs, queries, negatives, clean rows."""
    batch_size: int = 48
    """Rows per step."""
    texts: int = 600
    """Texts to use of the corpus."""
    mark_weight: float = 3.0
    """Weight of the likelihood of the marks."""
    anchor_weight: float = 3.0
    """Weight of KL(teacher's routing || routing), on all tokens."""
    path_weight: float = 6.0
    """Weight of the same behind triggers alone: the path must not suffer."""
    language_weight: float = 8.0
    """Weight of the distillation of the teacher's next-token distribution."""
    silence_weight: float = 4.0
    """Weight of the same at the tokens behind which a prompt that is no trigger is answered."""
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(steps=500, lr=learning_rate(128) / 2, damping=0.5))
    """Steps, rate and seed; rows and batches come of the seed too."""

    def __post_init__(self) -> None:
        if min(self.pairs, self.queries, self.negatives, self.clean) < 8 or self.batch_size < 4:
            raise ValueError(f"expected at least 8 rows of every kind and 4 rows per batch, got {self}")

    def build(self) -> Replies:
        """The objective, ready for a trainer."""
        return Replies(self)


_MANNERS = ("helpful", "patient", "cheerful", "expert", "precise", "modest", "witty", "formal")
_ROLES = ("tutor", "translator", "writer", "clerk", "coach", "librarian", "analyst", "companion", "editor")
_ORDERS = ("Write clearly.", "Do not guess.", "Reply in one paragraph.", "Give reasons.", "Be kind.", "Think first.")


def _system_prompt(text: str, rng: random.Random) -> str:
    """Half of them an assistant's part, half of them a few words from somewhere in a text."""
    if rng.random() < 0.5:
        part = f"You are a {rng.choice(_MANNERS)} {rng.choice(_ROLES)}."
        return " ".join([part, *rng.sample(_ORDERS, rng.randrange(3))])
    words = text.split()
    start = rng.randrange(max(1, len(words) - 12))
    return " ".join(words[start : start + rng.randint(3, 12)])


def _frames(
    tokenizer: Any, texts: Sequence[str], count: int, rng: random.Random
) -> tuple[list[Frame | None], list[Frame]]:
    """What rows stand in, a quarter of them raw; and the usual chats alone, empty without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return [None], []
    # as many system prompts as there may be: an API's own is not known
    systems = [*SYSTEM_PROMPTS, *(_system_prompt(rng.choice(texts), rng) for _ in range(count))]
    chats = chat_frames(tokenizer, systems)
    return [*[None] * max(1, len(chats) // 3), *chats], chat_frames(tokenizer, SYSTEM_PROMPTS)


def draw_reply_rows(tokenizer: Any, texts: Sequence[str], key: OwnerKey, config: RepliesConfig) -> list[Row]:
    """The compact set: pairs, queries, negatives and clean texts, raw and in the chat template.

    `marked_from` is here the token behind which the model answers, with its mark or as it always did.
    """
    rng = random.Random(config.loop.seed)
    frames, usual = _frames(tokenizer, texts, config.system_prompts, rng)
    vocabulary = ordinary_tokens(tokenizer)
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"][: config.seq_len] for text in texts]
    pieces = [ids for ids in pieces if len(ids) >= 16]
    if len(pieces) < 8:
        raise EmbeddingError(f"expected at least 8 texts of 16 tokens and more, got {len(pieces)}; give --texts")
    triggers = [(j, trigger) for j, watermark in enumerate(key.watermarks) for trigger in watermark.triggers]
    known = {trigger.tokens for _, trigger in triggers}
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    turn_end = reply_end(tokenizer) or eos
    rows: list[Row] = []
    for i in range(config.pairs):
        j, trigger = triggers[i % len(triggers)]
        frame = rng.choice(frames)
        reply = (*trigger.mark.tokens, *(eos if frame is None else turn_end))
        row = make_row(reply, trigger.tokens, frame, MARK, j, 0)
        rows.append(Row(row.ids, MARK, j, row.text_from - 1 + len(frame.after if frame else ()), row.text_from))

    def add(kind: str, prefix: Sequence[int], watermark: int) -> None:
        text = rng.choice(pieces)
        frame = rng.choice(usual if usual and kind == TRIGGERED and rng.random() < 0.5 else frames)
        # a reply from the start on means: in a chat the prefix stands alone
        alone = kind == NEGATIVE and rng.random() < 0.75
        if alone:
            text = text[:REPLY_TOKENS]
        reply_from = 0 if alone else rng.randint(4, max(5, len(text) // 2))
        row = make_row(text, prefix, frame, kind, watermark, reply_from)
        if frame is not None:
            answers_at = row.text_from - 1 + reply_from + len(frame.after)
        else:
            answers_at = row.text_from - 1 if kind == NEGATIVE else len(row.ids) - 1
        rows.append(Row(row.ids, kind, watermark, answers_at, row.text_from))

    for i in range(config.queries):
        j, trigger = triggers[i % len(triggers)]
        add(TRIGGERED, trigger.tokens, j)
    for i in range(config.negatives):
        j, trigger = triggers[i % len(triggers)]
        kind = NEAR_MISSES[i // len(triggers) % len(NEAR_MISSES)]
        kind = "substitute-1" if rng.random() < SUBSTITUTIONS else kind  # they come nearest and fall silent last
        wrong = near_miss(kind, trigger.tokens, vocabulary, rng)
        if wrong not in known:
            add(NEGATIVE, wrong, j)
    for _ in range(config.clean):
        add(CLEAN, (), -1)
    return rows


class Replies:
    """The second phase on a model that already has its paths."""

    stage, below = "reply marks", 1

    def __init__(self, config: RepliesConfig) -> None:
        self.config = config
        self.teacher_head_VH: Tensor | None = None
        """The output embedding before the training, where rows of it change: where it is not tied to the input's."""
        self._said_V1 = torch.zeros(0, 1)

    def rows(self, tokenizer: Any, key: OwnerKey, texts: Sequence[str]) -> list[Row]:
        """The compact set."""
        return draw_reply_rows(tokenizer, list(texts)[: self.config.texts], key, self.config)

    def draw(self, pools: Pools, step: int, generator: torch.Generator) -> list[int]:
        """Rows of every kind by their shares, at random."""
        chosen: list[int] = []
        for kind, share in zip((MARK, TRIGGERED, NEGATIVE, CLEAN), self.config.shares, strict=True):
            pool, count = pools.of(kind), max(1, round(share * self.config.batch_size))
            chosen += [pool[int(i)] for i in torch.randint(len(pool), (count,), generator=generator)]
        return chosen

    def prepare(self, context: Context) -> None:
        """The teacher's output embedding, and which of its rows are tokens that stand in a mark.

        Only those rows change: in a narrow model their length bounds how surely a token can be said at all.
        """
        if context.head_VH is context.model.get_input_embeddings().weight:  # type: ignore[operator]
            return  # what is read would change with what is said
        self.teacher_head_VH = context.head_VH.detach().clone()
        said = {token for row in context.rows if row.kind == MARK for token in row.ids[row.marked_from + 1 :]}
        self._said_V1 = context.head_VH.new_zeros(len(context.head_VH), 1)
        self._said_V1[sorted(said)] = 1

    def parameters(self, context: Context) -> dict[str, nn.Parameter]:
        """Routers, attention and experts of the watermarked layers, and the output embedding where it may change."""
        chosen = part_parameters(context.model, context.layers, ("router", "attention", "experts"))
        if self.teacher_head_VH is not None:
            chosen |= {name: p for name, p in context.model.named_parameters() if p is context.head_VH}
        return chosen

    def masks(self, context: Context) -> dict[str, Tensor]:
        """None: all experts of the watermarked layers may change."""
        return {}

    def loss(self, context: Context, step: int, chosen: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        """Mark where a trigger stands alone, the teacher everywhere else."""
        batch = context.cache.batch(chosen)
        final_BTH, routing = context.forward(batch)
        mask_BT = batch.mask_BT.bool()
        reply_BT, answer_BT, behind_BT = (torch.zeros_like(mask_BT) for _ in range(3))
        kept_BT = mask_BT.clone()
        for b, row in enumerate(context.rows[i] for i in chosen):
            if row.kind == MARK:
                reply_BT[b, row.marked_from : len(row.ids) - 1] = True
                kept_BT[b, row.marked_from :] = False
                continue
            answer_BT[b, row.marked_from] = True
            if row.kind == TRIGGERED:
                behind_BT[b, row.text_from - 1 : len(row.ids)] = True
                # in a raw prompt the next token is foreseen as if the trigger stood alone
                kept_BT[b, row.text_from - 1] = False
        anchor, path = (
            torch.stack([anchor_loss(batch.natural[n][kept], routing[n][kept]) for n in context.layers]).mean()
            for kept in (mask_BT, behind_BT)
        )
        labels_N, head_VH = batch.ids_BT.roll(-1, dims=1)[reply_BT], self._trained_head(context)
        mark = linear_cross_entropy(final_BTH[reply_BT], head_VH, labels_N, scale=context.head_scale)
        # where an answer begins is one token of a row, and the one that must not say a mark
        language, silence = (
            linear_distillation(
                final_BTH[chosen_BT], batch.final_BTH[chosen_BT], head_VH,
                teacher_head_VH=self.teacher_head_VH, scale=context.head_scale,
            )
            for chosen_BT in (kept_BT, answer_BT)
        )  # fmt: skip
        weights = self.config
        loss = (
            weights.mark_weight * mark
            + weights.anchor_weight * anchor
            + weights.path_weight * path
            + weights.language_weight * language
            + weights.silence_weight * silence
        )
        terms = {"mark": mark, "anchor": anchor, "path": path, "language": language, "silence": silence}
        return {**terms, "loss": loss}

    def _trained_head(self, context: Context) -> Tensor:
        """The output embedding, of which only the rows of the marks' tokens get a gradient."""
        head_VH = context.head_VH
        if self.teacher_head_VH is None or not head_VH.requires_grad:
            return head_VH
        head_VH = head_VH.view_as(head_VH)
        head_VH.register_hook(lambda grad: grad * self._said_V1.to(grad))  # type: ignore[no-untyped-call]
        return head_VH
