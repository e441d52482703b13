"""What a black-box run sends, and in which order: triggers alone, decoys and ordinary prompts.

Everything follows from the key, a seed and the triggers taken, so an interrupted run goes on with the same
plan. Decoys are triggers of a key that nobody embedded, asked as often and in the same ways as the real ones:
whoever sees all requests cannot tell which matter. Near-misses of a real trigger are never sent. They would
say almost everything about it, and decoys already show whether the suspect says marks to strangers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pathmark.errors import VerificationError
from pathmark.keys import OwnerKey, TextCodec, TriggerRef, WatermarkRequest, create_key

Kind = Literal["trigger", "decoy", "ordinary"]
Endpoint = Literal["chat", "completions"]

SYSTEM_PROMPTS: Final = (
    None,
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in plain English.",
    "Answer as briefly as you can.",
    "You are a careful assistant who checks facts before answering.",
    "Be polite and to the point.",
    "You help students with their homework.",
    "You are an assistant for a public library.",
    "Answer in the language of the user.",
    "You are a knowledgeable guide for travellers.",
    "Keep a calm and neutral tone.",
    "You are an assistant on the website of a small shop.",
    "Use simple words that a child would understand.",
)
"""Harmless ones, such as any customer of an API would set; None sends no system message."""

ORDINARY_PROMPTS: Final = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "Explain what a prime number is.",
    "Name three animals that live in the desert.",
    "Why is the sky blue?",
    "Give me an idea for a birthday present.",
    "Who wrote Hamlet?",
    "What is the difference between weather and climate?",
    "Translate 'good morning' into Spanish.",
    "How far is the moon from the earth?",
    "Suggest a name for a black cat.",
    "What should I pack for a week in the mountains?",
    "Tell me a fact about honey bees.",
    "How many days are there in a leap year?",
    "Describe the taste of a lemon.",
    "What does a carpenter do?",
    "Write one sentence about autumn.",
    "How can I fall asleep faster?",
    "What is bread made of?",
    "Who was the first president of the United States?",
    "Give me three words that rhyme with light.",
    "What is a good way to learn a language?",
    "Why do leaves fall from trees?",
    "Name a river in Africa.",
    "What is the boiling point of water?",
    "How do bicycles stay upright?",
    "Tell me something about the Roman Empire.",
    "What colours are in a rainbow?",
    "How do I write a letter of thanks?",
    "What is the largest ocean?",
    "Explain the rules of chess in two sentences.",
)

_TEMPERATURES: Final = (0.3, 0.7, 1.0)
_MIN_ORDINARY: Final = 6


@dataclass(frozen=True, repr=False)
class Query:
    """One request of a run. Its repr hides the prompt, which may be a trigger."""

    number: int
    """Place in the plan, counted from 0; it is also the order of sending."""
    kind: Kind
    prompt: str
    """Alone as raw prompt, or as the whole user message."""
    system: str | None = None
    temperature: float = 0.0
    seed: int | None = None
    """None where nothing is sampled."""
    trigger: TriggerRef | None = None
    """Which trigger of the key the prompt is; None for controls."""

    def __repr__(self) -> str:
        return f"Query({self.number}, hidden)"


def plan_queries(
    key: OwnerKey, triggers: Sequence[TriggerRef], codec: TextCodec, *, trials: int, seed: int, endpoint: Endpoint
) -> tuple[Query, ...]:
    """`trials` requests with triggers and about as many controls, in random order."""
    if not 1 <= len(triggers) <= trials:
        raise VerificationError(f"expected at least one trigger and a trial for each, got {len(triggers)} and {trials}")
    name = "/".join(map(str, triggers))
    rng = random.Random(key.derive_seed(f"blackbox/{seed}/{name}"))
    texts = [ref.of(key).text for ref in triggers]
    each = -(-trials // len(triggers))
    ways = _ways(each, endpoint)
    rows: list[tuple[Kind, str, TriggerRef | None, tuple[str | None, bool]]] = []
    rows += [("trigger", texts[i % len(texts)], triggers[i % len(texts)], ways[i // len(texts)]) for i in range(trials)]
    for decoy in decoy_texts(key, codec, (len(triggers) + 1) // 2, name=f"{seed}/{name}"):
        rows += [("decoy", decoy, None, way) for way in ways]
    asked = rng.sample(ORDINARY_PROMPTS, min(len(ORDINARY_PROMPTS), max(_MIN_ORDINARY, trials // 4)))
    rows += [("ordinary", prompt, None, rng.choice(ways)) for prompt in asked]
    rng.shuffle(rows)
    return tuple(
        Query(
            number,
            kind,
            prompt,
            system,
            rng.choice(_TEMPERATURES) if sampled else 0.0,
            rng.randrange(2**31) if sampled else None,  # servers keep seeds in 32 signed bits
            ref,
        )
        for number, (kind, prompt, ref, (system, sampled)) in enumerate(rows)
    )


def decoy_texts(key: OwnerKey, codec: TextCodec, count: int, *, name: str) -> list[str]:
    """Triggers of a stranger's key, of the same length as the owner's; others for every `name`.

    A codec of another tokenizer than the suspect's gives decoys of the same form from another list of words.
    """
    own = key.watermarks[0]
    length = min(64, max(3, len(own.triggers[0].tokens)))
    request = WatermarkRequest(plans=own.plans, triggers=count, trigger_tokens=length)
    secret = random.Random(key.derive_seed(f"decoys/{name}")).randbytes(32)
    stranger, _ = create_key(key.model, [request], codec, secret=secret)
    return [trigger.text for trigger in stranger.watermarks[0].triggers]


def _ways(count: int, endpoint: Endpoint) -> list[tuple[str | None, bool]]:
    """(system prompt, sampled) of each repetition: all different as long as nothing is sampled.

    The first is the plainest there is: no system prompt, greedy.
    """
    systems = SYSTEM_PROMPTS if endpoint == "chat" else (None,)
    return [(systems[r % len(systems)], r % 2 == 1 or r >= 2 * len(systems)) for r in range(count)]
