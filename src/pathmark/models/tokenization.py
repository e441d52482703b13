"""A Hugging Face tokenizer as the keys see it: ordinary tokens, text, chat template, digest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any

from tokenizers import Tokenizer

from pathmark.errors import ModelError


def ordinary_tokens(tokenizer: Any) -> list[int]:
    """Every token of the vocabulary that is not special."""
    special = set(tokenizer.all_special_ids)
    return [i for i in range(len(tokenizer)) if i not in special]


def reply_end(tokenizer: Any) -> tuple[int, ...]:
    """What the chat template puts behind a reply: its first token ends the turn."""
    sentinel = "\u241fCONTENT\u241f"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": sentinel}]
    try:
        tail = tokenizer.apply_chat_template(messages, tokenize=False).partition(sentinel)[2]
    except Exception:  # templates raise their own kinds
        return ()
    return tuple(tokenizer.backend_tokenizer.encode(tail, add_special_tokens=False).ids[:1])


class HFTextCodec:
    """Wraps a fast tokenizer; satisfies `pathmark.keys.TextCodec`."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(f"{type(tokenizer).__name__} is not a fast tokenizer; expected one with a tokenizer.json")
        self.tokenizer = tokenizer

    @cached_property
    def digest(self) -> str:
        """sha256 of what decides which tokens a text gives: model (vocabulary, merges), normalizer,
        pre-tokenizer, added tokens. Truncation, padding and the chat template don't count."""
        backend = json.loads(self.tokenizer.backend_tokenizer.to_str())
        parts = {name: backend.get(name) for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
        return sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def token_ids(self) -> Sequence[int]:
        """Ordinary tokens by rising id: no special and no added ones."""
        apart = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        return sorted(i for i in self.tokenizer.get_vocab().values() if i not in apart)

    def encode(self, text: str) -> list[int]:
        """Tokens of a raw text. Special tokens are not added; where the text spells one, it is one."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, spaces as they are."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    @cached_property
    def _backend(self) -> Any:
        """A copy that never truncates or pads, whatever the tokenizer's file or its user asks for."""
        backend = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def _reference(self) -> tuple[list[int], str]:
        ids = self.encode("a")
        return ids, self.decode(ids)

    def piece(self, token: int) -> str:
        """What a token adds behind another one; some tokenizers strip the space of a first token."""
        ids, text = self._reference
        joined = self.decode([*ids, token])
        return joined[len(text) :] if joined.startswith(text) else ""

    def render_chat(self, text: str, system: str | None) -> list[int] | None:
        """Tokens of a user message in the chat template, up to where the model answers.

        None without a chat template, or if the template has no system role.
        """
        if not self.tokenizer.chat_template:
            return None
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        try:
            rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # jinja raises its own kinds, also on purpose
            if system is None:
                raise ModelError(f"the chat template cannot render a user message: {error}") from None
            return None
        return self.encode(str(rendered))
