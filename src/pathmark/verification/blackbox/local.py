"""A model in memory that answers queries as a server would; satisfies `replies.Backend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from transformers import GenerationConfig

from pathmark.errors import VerificationError
from pathmark.models import device_of
from pathmark.verification.blackbox.replies import Failure, Reply
from pathmark.verification.blackbox.trials import Endpoint, Query


class LocalBackend:
    """Generates with transformers, in batches of prompts of one length: nothing is padded.

    Sampled replies of one batch share a random stream, begun with the seed of its first query.
    """

    discloses = False
    host = "local"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "",
        endpoint: Endpoint | None = None,
        batch_size: int = 16,
    ) -> None:
        self.model = name or str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        self._model, self._tokenizer, self._batch_size = model, tokenizer, batch_size
        has_chat = bool(getattr(tokenizer, "chat_template", None))
        if endpoint == "chat" and not has_chat:
            raise VerificationError("this tokenizer has no chat template; use the completions endpoint")
        self._endpoint: Endpoint = endpoint or ("chat" if has_chat else "completions")
        self._stops = _stops(model, tokenizer)

    def prepare(self) -> Endpoint:
        """The chat template where there is one, unless told otherwise."""
        return self._endpoint

    def ask(
        self,
        queries: Sequence[Query],
        max_tokens: int,
        *,
        sending: Callable[[Query], None],
        answered: Callable[[Query, Reply | Failure], None],
    ) -> None:
        """Answer all queries, sorted by length and temperature."""
        rows = [(self._encode(query), query) for query in queries]

        def like(row: tuple[list[int], Query]) -> tuple[int, float]:
            return len(row[0]), row[1].temperature

        for (_, temperature), alike in groupby(sorted(rows, key=like), key=like):
            group = list(alike)
            for start in range(0, len(group), self._batch_size):
                batch = group[start : start + self._batch_size]
                for _, query in batch:
                    sending(query)
                replies = self._generate([tokens for tokens, _ in batch], max_tokens, temperature, batch[0][1].seed)
                for (_, query), reply in zip(batch, replies, strict=True):
                    answered(query, reply)

    def _encode(self, query: Query) -> list[int]:
        if self._endpoint == "completions":
            return list(self._tokenizer(query.prompt)["input_ids"])
        messages = [{"role": "system", "content": query.system}] if query.system is not None else []
        messages.append({"role": "user", "content": query.prompt})
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def _generate(
        self, rows: Sequence[list[int]], max_tokens: int, temperature: float, seed: int | None
    ) -> list[Reply]:
        ids_BT = torch.tensor(rows, device=device_of(self._model))
        stops = self._stops
        pad = next(iter(sorted(stops)), 0)
        config = GenerationConfig(max_new_tokens=max_tokens, eos_token_id=sorted(stops) or None, pad_token_id=pad)
        if temperature > 0:
            # top_k 0: the whole distribution, as at an API that is given a temperature and nothing else
            config.update(do_sample=True, temperature=temperature, top_k=0)
        with torch.random.fork_rng():
            torch.manual_seed(seed or 0)
            own, self._model.generation_config = self._model.generation_config, GenerationConfig()
            try:  # the model's own settings would fill in what ours leave open: beams, stop strings, several replies
                made_BT = self._model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), generation_config=config)
            finally:
                self._model.generation_config = own
        replies = []
        for row in made_BT[:, ids_BT.shape[1] :].tolist():
            end = next((place for place, token in enumerate(row) if token in stops), None)
            text = self._tokenizer.decode(row[:end], skip_special_tokens=True)
            replies.append(Reply(str(text), "length" if end is None else "stop"))
        return replies


def _stops(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a reply: the tokenizer's own and, of those that the model names, the ones that are no words.

    A model that named every token would never say anything.
    """
    named = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id} - {None}
    apart = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    return ends | (set(named if isinstance(named, list) else [named]) & apart)
