"""What the latency channel sends: pairs of one text behind two prefixes, fixed before the first request."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256

from pathmark.errors import VerificationError
from pathmark.keys import OwnerKey, TextCodec, TriggerRef
from pathmark.verification.decoys import decoy_triggers

DECOYS = 17
"""One plays the trigger in calibration, the others stand in front of clean texts in turn."""
WARMUP = 4
"""Requests before the first pair of a stage."""


@dataclass(frozen=True)
class Pair:
    """One text behind two prefixes of as many tokens. Its repr hides the prompts."""

    number: int
    triggered: str
    clean: str
    triggered_first: bool

    def __repr__(self) -> str:
        return f"Pair({self.number}, hidden)"

    @property
    def prompts(self) -> tuple[str, str]:
        """In the order of sending."""
        return (self.triggered, self.clean) if self.triggered_first else (self.clean, self.triggered)


@dataclass(frozen=True)
class LatencyPlan:
    """Everything that will be sent, fixed before the first request."""

    trigger: TriggerRef
    warmup: tuple[str, ...]
    calibration: tuple[Pair, ...]
    pairs: tuple[Pair, ...]
    prompt_tokens: int
    """Of every prompt, prefix included; a chat template adds the same to all."""
    max_tokens: int

    @property
    def digest(self) -> str:
        """Names the plan in the log without telling its texts."""
        return sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class LatencyConfig:
    """How much is sent, and of what."""

    trigger: TriggerRef = TriggerRef(0, 0)  # noqa: RUF009  an immutable tuple
    pairs: int = 100
    calibration: int = 40
    """Pairs without the trigger that come first."""
    text_tokens: int = 256
    max_tokens: int = 1
    """Of a reply."""
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.pairs, self.calibration, self.text_tokens, self.max_tokens)
        if min(counts) < 1:
            raise VerificationError(f"pairs, calibration, text_tokens and max_tokens are at least 1, got {counts}")


def plan_latency(
    key: OwnerKey, codec: TextCodec, texts: Sequence[str], config: LatencyConfig | None = None
) -> LatencyPlan:
    """Pairs from the key and a seed. No text is used twice, so that no server has it in its cache."""
    config = config or LatencyConfig()
    if codec.digest != key.model.tokenizer_digest:
        raise VerificationError("this is not the tokenizer that the key was made for; give the original model's")
    coins = random.Random(f"{key.derive_seed('latency')} {config.seed}")
    placebo, *decoys = [codec.decode(tokens) for tokens in decoy_triggers(key, codec, DECOYS)]
    pieces = _pieces(codec, texts, config.text_tokens)
    lengths: set[int] = set()

    def draw(number: int, first: str) -> Pair:
        for text in pieces:
            made = Pair(number, f"{first} {text}", f"{coins.choice(decoys)} {text}", coins.random() < 0.5)
            tokens = {len(codec.encode(prompt)) for prompt in made.prompts}
            if len(tokens) == 1 and tokens <= (lengths or tokens):
                lengths.update(tokens)
                return made
        raise VerificationError(
            f"the texts are not enough for {config.calibration} + {config.pairs} pairs of {config.text_tokens} "
            "tokens; give more texts"
        )

    prefix = config.trigger.of(key).text
    calibrating = tuple(draw(i, placebo) for i in range(config.calibration))
    warm = tuple(draw(i, placebo).clean for i in range(WARMUP))
    testing = tuple(draw(i, prefix) for i in range(config.pairs))
    return LatencyPlan(config.trigger, warm, calibrating, testing, max(lengths), config.max_tokens)


def _pieces(codec: TextCodec, texts: Sequence[str], size: int) -> Iterator[str]:
    """The texts in one row, cut to pieces of about `size` tokens."""
    held: list[int] = []
    for text in texts:
        held += codec.encode(text)
        while len(held) >= size:
            yield codec.decode(held[:size]).strip()
            held = held[size:]
