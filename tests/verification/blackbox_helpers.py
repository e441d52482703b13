"""A key of the bundled model, and runs against fake APIs with options by name."""

from __future__ import annotations

from dataclasses import fields
from functools import cache

from embed_helpers import key_for
from fake_api import FakeApi

from pathmark.models.describe import describe_model
from pathmark.verification import ApiClient, ApiSettings, AskConfig, Criteria, verify_api

TRIALS = 12


@cache
def owner():
    """A key with five triggers."""
    return key_for("bundled:tiny", triggers=5)


@cache
def codec():
    """The bundled tokenizer."""
    return describe_model("bundled:tiny")[1]


def client(api, **settings):
    """A client in a hurry."""
    quick = {"timeout": 10.0, "retries": 2, "backoff": 0.01, "deadline": 60.0, "concurrency": 4}
    return ApiClient(ApiSettings(url=api.url, model="suspect", **{**quick, **settings}))


def ask(backend, key, **options):
    """A short run; options of AskConfig and Criteria by their names."""

    def taken(kind):
        return kind(**{f.name: options.pop(f.name) for f in fields(kind) if f.name in options})

    options = {"trials": TRIALS, "codec": codec(), **options}
    return verify_api(backend, key, taken(AskConfig), criteria=taken(Criteria), **options)


def verdict_of(behaviour, key=None, **options):
    """The verdict on an API that behaves so."""
    with FakeApi(behaviour) as api:
        settings = {name: options.pop(name) for name in ("endpoint", "timeout", "retries") if name in options}
        return ask(client(api, **settings), key or owner(), **options)
