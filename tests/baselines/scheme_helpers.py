"""A small random model with a tokenizer of its size, and keys that are the same in every run."""

from __future__ import annotations

import hashlib

from attack_helpers import Letters, family

from pathmark.baselines import configure, find_scheme
from pathmark.keys.schemekey import SchemeKey


class Words(Letters):
    """Letters with what writing needs besides."""

    all_special_ids = (0, 1, 2)
    eos_token_id = 2
    chat_template = None

    def __len__(self):
        return 123

    def decode(self, tokens):
        return "".join(chr(token - 3) for token in tokens)


TEXTS = [f"{i} and the words of text number {i} are not those of text {i * i}, but of {i % 7}" for i in range(80)]


def small_model():
    return family("mixtral")


def key_of(scheme, number=0, vocabulary=128, **settings):
    secret = hashlib.sha256(f"{scheme} {number}".encode()).digest()
    return SchemeKey(scheme=scheme, settings={"vocabulary": vocabulary, **settings}, secret=secret)


def config_of(scheme, number=0, **settings):
    return configure(find_scheme(scheme), key_of(scheme, number, **settings))
