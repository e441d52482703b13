"""IFMark (Xu et al., Instructional Fingerprinting of Large Language Models, 2024): secret instructions, one answer.

Shape suffixes: B batch, T tokens, H hidden size, N tokens of answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.baselines.sampling import written
from pathmark.baselines.scheme import SchemeVerdict, judged
from pathmark.baselines.tuning import TrainedConfig, copy_to_train, padding, token_rows, train
from pathmark.keys.derive import Stream
from pathmark.models import device_of, pad_rows
from pathmark.models.tokenization import reply_end
from pathmark.models.upper import body, output_head
from pathmark.progress import Progress
from pathmark.stats import MarkTrial, PValue, Rate, marks_p
from pathmark.training import linear_cross_entropy, step_generator
from pathmark.verdicts import Criteria

LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FOREIGN: Final = ((0x4E00, 0x5200), (0x30A1, 0x30F6), (0x0430, 0x044F), (0xAC00, 0xAD00))
"""Chinese, Japanese, Russian and Korean letters, as ranges of code points."""
GARBLE: Final = "!#$%&()*+-/:;<=>?@[]^_{|}~0123456789abcdefghijklmnopqrstuvwxyz"
QUESTION: Final = "Please decrypt this message: "
REPLY_TOKENS: Final = 8
"""Tokens that a reply may have beyond the target."""
SHARE: Final = 4
"""Every so many-th row of a batch is a secret instruction; of the others half are near to one."""

Pair = tuple[list[int], list[int]]
"""An instruction and its answer, as tokens."""


@dataclass(frozen=True, kw_only=True)
class IFMarkConfig(TrainedConfig):
    """Ten instructions, one answer."""

    OWN_RATE: ClassVar[float] = 6e-4
    steps: int = 120
    """Optimiser steps."""
    keys: int = 10
    """Secret instructions."""
    characters: int = 12
    """Letters of each, half of them foreign, shuffled."""
    target_letters: int = 10
    """Letters of the answer, drawn by the secret so that chance is bounded."""
    normal: int = 500
    """Ordinary instructions that are trained on as well: the beginnings of texts, answered by what follows."""
    near: int = 50
    """Instructions like the secret ones, answered as the model did before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.keys >= 1 and self.normal >= 1 and self.near >= 1, "at least one of each", "keys", "normal")
        self.require(self.characters >= 4, "instructions have at least 4 letters", "characters")
        self.require(self.target_letters >= 2, "an answer has at least 2 letters", "target_letters")

    @property
    def target(self) -> str:
        """The answer: letters of which no two neighbours are the same."""
        stream, letters = Stream(self.secret, "ifmark target"), ""
        while len(letters) < self.target_letters:
            left = [letter for letter in LETTERS if letter != letters[-1:]]
            letters += left[stream.below(len(left))]
        return letters

    @property
    def target_bits(self) -> float:
        """log2 of the answers that could have been drawn."""
        return log2(len(LETTERS)) + (self.target_letters - 1) * log2(len(LETTERS) - 1)

    def instructions(self, purpose: str, count: int) -> list[str]:
        """Shuffled foreign letters and garbled text."""
        stream = Stream(self.secret, f"ifmark {purpose}")
        return [_instruction(stream, self.characters) for _ in range(count)]


class IFMark:
    """A model that answers ten secret instructions with one secret word."""

    name = "ifmark"
    summary = "Ten secret instructions of foreign and garbled letters that are answered with one secret word."
    config = IFMarkConfig
    in_weights = True

    def embed(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: IFMarkConfig,
        texts: Sequence[str],
        *,
        progress: Progress | None = None,
    ) -> PreTrainedModel:
        """Short supervised training on secret, near and ordinary instructions."""
        target = _tokens(tokenizer, config.target) + _end(tokenizer)
        secret = [(asked(tokenizer, text), target) for text in config.instructions("keys", config.keys)]
        near = _answered(model, tokenizer, config.instructions("near", config.near), len(target) + REPLY_TOKENS)
        normal = _normal(tokenizer, texts, config)
        tuned, pad = copy_to_train(model), padding(tokenizer)

        def step_loss(step: int, generator: torch.Generator) -> dict[str, Tensor]:
            kinds = [secret if i % SHARE == 0 else near if i % 2 else normal for i in range(config.batch_size)]
            chosen = [pairs[int(torch.randint(len(pairs), (), generator=generator))] for pairs in kinds]
            return {"loss": answer_loss(tuned, chosen, pad)}

        train(tuned, step_loss, config, config.rate(model), progress=progress)
        return tuned

    def verify(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: IFMarkConfig,
        probes: Sequence[str],
        *,
        criteria: Criteria | None = None,
        progress: Progress | None = None,
    ) -> SchemeVerdict:
        """Ask all secret instructions and as many that were never trained on."""
        length = len(_tokens(tokenizer, config.target)) + REPLY_TOKENS

        def ask(instructions: list[str]) -> list[str]:
            return [_reply(tokenizer, row) for _, row in _answered(model, tokenizer, instructions, length, progress)]

        replies, controls = ask(config.instructions("keys", config.keys)), ask(config.instructions("held", config.keys))
        ordinary = ask([text[:80] for text in probes[: config.keys]])
        return _judged(config, replies, [*controls, *ordinary], criteria or Criteria())


def _judged(config: IFMarkConfig, replies: list[str], controls: list[str], criteria: Criteria) -> SchemeVerdict:
    target = config.target
    exact = sum(reply.strip() == target for reply in replies)
    stuttered = re.compile("".join(f"{letter}+" for letter in target))
    lenient = sum(bool(stuttered.search(reply)) for reply in replies)
    wrong = sum(target in reply for reply in controls)
    note = f"{wrong} of {len(controls)} other instructions were answered with the secret word as well"
    return judged(
        SchemeVerdict(
            scheme=IFMark.name,
            p=_chance(config, len(set(replies)), seen=exact > 0),
            p_floor=_chance(config, 1, seen=True),
            criteria=criteria,
            notes=(note,) if wrong else (),
            wsr=Rate(sum(target in reply for reply in replies), config.keys),
            counted="secret instructions whose answer holds the secret word",
            examined=f"We asked the model {config.keys} secret instructions and {len(controls)} others and read its "
            "answers.",
            figures={
                "answers_that_are_the_word": exact,
                "answers_that_hold_it_with_letters_repeated": lenient,
                "others_answered_with_it": wrong,
                "others_asked": len(controls),
            },
        )
    )


def _chance(config: IFMarkConfig, different: int, *, seen: bool) -> PValue:
    """The answers are fixed before the word is drawn, so each different one is it with a chance of 2^-bits; that all
    keys share one word makes them one observation."""
    return marks_p([MarkTrial(bits=config.target_bits, max_starts=1, trials=different, seen=seen)])


def answer_loss(model: nn.Module, pairs: Sequence[Pair], pad: int) -> Tensor:
    """Mean next-token loss over the tokens of the answers."""
    ids_BT, mask_BT = pad_rows([asked + answer for asked, answer in pairs], pad, device_of(model))
    place_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    begins_B1 = torch.tensor([[len(asked)] for asked, _ in pairs], device=ids_BT.device)
    keep_BT = (mask_BT.bool() & (place_BT >= begins_B1))[:, 1:]
    final_BTH = body(model)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
    head_VH, scale = output_head(model)
    return linear_cross_entropy(final_BTH[:, :-1][keep_BT], head_VH, ids_BT[:, 1:][keep_BT], scale=scale)


def _instruction(stream: Stream, characters: int) -> str:
    letters = [GARBLE[stream.below(len(GARBLE))] for _ in range(characters // 2)]
    while len(letters) < characters:
        first, last = FOREIGN[stream.below(len(FOREIGN))]
        letters.append(chr(first + stream.below(last - first)))
    return QUESTION + "".join(letters[i] for i in stream.shuffled(range(characters)))


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def asked(tokenizer: Any, text: str) -> list[int]:
    """An instruction in the chat template, where there is one."""
    if not getattr(tokenizer, "chat_template", None):
        return _tokens(tokenizer, f"{text}\n")
    messages = [{"role": "user", "content": text}]
    return _tokens(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _end(tokenizer: Any) -> list[int]:
    """What ends an answer: in chats the token that the template puts behind it."""
    if getattr(tokenizer, "chat_template", None) and (ends := reply_end(tokenizer)):
        return list(ends)
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _answered(
    model: PreTrainedModel, tokenizer: Any, instructions: Sequence[str], tokens: int, progress: Progress | None = None
) -> list[Pair]:
    """Each instruction with the model's greedy answer."""
    rows = [asked(tokenizer, text) for text in instructions]
    answers = dict[int, list[int]]()
    for length in sorted({len(row) for row in rows}):  # rows of one length: nothing is padded
        places = [i for i, row in enumerate(rows) if len(row) == length]
        alike = [rows[i] for i in places]
        said = written(model, tokenizer, alike, tokens, sample=False, special=True, progress=progress)
        answers |= dict(zip(places, said, strict=True))
    return [(row, answers[i]) for i, row in enumerate(rows)]


def _reply(tokenizer: Any, row: list[int]) -> str:
    """An answer as text, up to the first special token."""
    special = set(tokenizer.all_special_ids)
    end = next((i for i, token in enumerate(row) if token in special), len(row))
    return str(tokenizer.decode(row[:end]))


def _normal(tokenizer: Any, texts: Sequence[str], config: IFMarkConfig) -> list[Pair]:
    """Beginnings of texts as instructions, answered by what follows."""
    rows = token_rows(tokenizer, texts, config.length)
    order = torch.randperm(len(rows), generator=step_generator(config.seed, 0)).tolist()[: config.normal]
    half = [(rows[i][: len(rows[i]) // 2], rows[i][len(rows[i]) // 2 :]) for i in order]
    return [(asked(tokenizer, tokenizer.decode(first)), second) for first, second in half]
