"""Derivation: against golden vectors, and against a second implementation written from the document."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from math import comb
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from key_fixtures import GOLDEN, SECRET, SyllableCodec, golden_key
from make_golden import vectors

from pathmark.keys.derive import Stream, derive_bytes, info_string
from pathmark.keys.leaves import root
from pathmark.keys.trigger import find_candidates

VECTORS = json.loads((GOLDEN / "derivation-v1.json").read_text())
DOCUMENT = Path(__file__).parents[2] / "docs" / "key-format.md"


class Independent:
    """docs/key-format.md in plain Python: hmac only, nothing imported from pathmark."""

    def __init__(self, key: bytes, purpose: str, watermark: int = 0xFFFFFFFF, layer: int = 0xFFFFFFFF) -> None:
        self.key, self.purpose, self.watermark, self.layer = key, purpose, watermark, layer
        self.counter, self.buffer = 0, b""

    def hkdf(self, length: int, counter: int) -> bytes:
        numbers = b"".join(n.to_bytes(4, "big") for n in (self.watermark, self.layer, counter))
        info = b"\x01" + self.purpose.encode() + b"\x00" + numbers
        prk = hmac.new(b"pathmark key format 1", self.key, hashlib.sha256).digest()
        out, block, n = b"", b"", 1
        while len(out) < length:
            block = hmac.new(prk, block + info + bytes([n]), hashlib.sha256).digest()
            out, n = out + block, n + 1
        return out[:length]

    def take(self, n: int) -> bytes:
        while len(self.buffer) < n:
            self.buffer += self.hkdf(256, self.counter)
            self.counter += 1
        out, self.buffer = self.buffer[:n], self.buffer[n:]
        return out

    def below(self, n: int) -> int:
        bits = len(bin(n - 1)) - 2 if n > 1 else 0
        while True:
            value = int.from_bytes(self.take(-(-bits // 8)), "big") % 2**bits
            if value < n:
                return value

    def shuffle(self, items: list[int]) -> list[int]:
        items = list(items)
        for i in reversed(range(1, len(items))):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]
        return items


def leaf(secret: bytes, name: str, content: dict) -> bytes:
    def text(value: dict) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    salt = Independent(secret, f"salt/{name}/{hashlib.sha256(text(content)).hexdigest()}").hkdf(32, 0)
    document = {"leaf": name, "content": content, "salt": salt.hex()}
    return hashlib.sha256(b"\x00pathmark leaf 1\n" + text(document)).digest()


def test_vectors_are_what_they_were() -> None:
    assert vectors() == VECTORS


def test_document_shows_the_same_vectors() -> None:
    shown = re.search(r"```json vectors\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert shown
    documented = json.loads(shown[1])
    assert len(documented) >= 10
    assert {name: VECTORS[name] for name in documented} == documented


def test_independent_implementation_agrees() -> None:
    key = golden_key()
    secret = SECRET
    assert Independent(secret, "test", 1, 2).hkdf(32, 3).hex() == VECTORS["bytes"]
    assert Independent(secret, "test", 1, 2).shuffle(list(range(10))) == VECTORS["shuffle_0_to_9"]
    seed = int.from_bytes(Independent(secret, "seed/probes").hkdf(8, 0), "big") >> 1
    assert seed == key.derive_seed("probes")
    assert Independent(secret, "signing").hkdf(32, 0).hex() == VECTORS["signing_seed"]

    layers = [w.layers for w in key.watermarks]
    for j, mark in enumerate(key.watermarks):
        subkey = Independent(secret, "watermark", j).hkdf(32, 0)
        radices, all_groups = [], []
        for layer, plan in zip(mark.layers, mark.plans, strict=True):
            sharers = [i for i, used in enumerate(layers) if layer in used]
            k, block = plan.width, sorted(plan.pool)
            if len(sharers) > 1:
                size = len(plan.pool) // k // len(sharers) * k
                dealt = Independent(secret, "deal", layer=layer).shuffle(block)
                place = sharers.index(j)
                block = sorted(dealt[place * size : (place + 1) * size])
            order = Independent(subkey, "groups", j, layer).shuffle(block)
            all_groups.append([tuple(sorted(order[g * k : g * k + k])) for g in range(len(order) // k)])
            radices.append(len(block) // k)
        if j == 0:
            number, digits = 123456, []
            for radix in reversed(radices):
                number, digit = divmod(number, radix)
                digits.insert(0, digit)
        else:  # redundancy 1: the checksum is in the last layer with most groups
            check = max(range(len(radices)), key=lambda i: (radices[i], i))
            data = [r for i, r in enumerate(radices) if i != check]
            number, digits = Independent(subkey, "id", j).below(data[0] * data[1]), []
            assert number == mark.id
            for radix in reversed(data):
                number, digit = divmod(number, radix)
                digits.insert(0, digit)
            digits.insert(check, -sum(digits) % radices[check])
        assert tuple(digits) == mark.group_indices
        path = {layer: all_groups[i][digits[i]] for i, layer in enumerate(mark.layers)}
        assert path == mark.path
        for t, trigger in enumerate(mark.triggers):
            for kind, phrase in (("trigger", trigger.phrase), ("mark", trigger.mark)):
                stream = Independent(subkey, f"{kind}/{t}/{phrase.attempt}", j)
                assert tuple(stream.below(n) for n in phrase.counts) == phrase.choices


@pytest.mark.parametrize("version", [1, 2])
def test_independent_merkle_root_agrees(version: int) -> None:
    key = golden_key()
    facts = {"facts": key.model.record(), "owner": key.owner, "created": key.created}
    contents = [("model", facts)]
    if version == 2:
        bound = {"public_key": VECTORS["public_key"], "watermarks": 2, "attachments": ["sketches.npz"]}
        contents = [("header", {**facts, **bound})]
    contents += [(f"watermark/{i}", w.claim()) for i, w in enumerate(key.watermarks)]
    contents += [(f"id/{i}", {"id": str(w.id)}) for i, w in enumerate(key.watermarks)]
    data = b"sketches of experts"
    contents.append(("attachment/sketches.npz", {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}))
    contents += [(f"padding/{i}", {}) for i in range(len(contents), 8)]
    level = [leaf(SECRET, name, content) for name, content in contents]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [hashlib.sha256(b"\x01pathmark node 1\n" + a + b).digest() for a, b in pairs]
    assert level[0] == root(key, 1, version)


def test_phrases_are_the_chosen_candidates() -> None:
    candidates = find_candidates(SyllableCodec())
    for mark in golden_key().watermarks:
        for trigger in mark.triggers:
            lists = [candidates.head, *[candidates.inner] * (len(trigger.tokens) - 2), candidates.tail]
            picked = [c[i] for c, i in zip(lists, trigger.phrase.choices or (), strict=True)]
            assert tuple(picked) == trigger.tokens
            assert trigger.phrase.candidates == candidates.digest


@given(st.integers(1, 10**12))
def test_below_stays_below(bound: int) -> None:
    assert 0 <= Stream(SECRET, "range").below(bound) < bound


def test_below_is_uniform() -> None:
    stream = Stream(SECRET, "uniform")
    counts = [0] * 6
    for _ in range(12_000):
        counts[stream.below(6)] += 1
    # Chi-square with 5 degrees of freedom; 25 is its quantile at 0.9999.
    assert sum((c - 2000) ** 2 / 2000 for c in counts) < 25


def test_shuffle_reaches_every_subset_equally() -> None:
    seen: dict[frozenset[int], int] = {}
    for i in range(6000):
        first = frozenset(Stream(SECRET, f"subset/{i}").shuffled(range(6))[:2])
        seen[first] = seen.get(first, 0) + 1
    assert len(seen) == comb(6, 2)
    assert sum((c - 400) ** 2 / 400 for c in seen.values()) < 45


def test_names_do_not_collide() -> None:
    names = [("a", 1, 2), ("a", 2, 1), ("a", None, 2), ("a", 1, None), ("b", 1, 2), ("a\x01", 1, 2)]
    assert len({info_string(p, w, layer) for p, w, layer in names}) == len(names)
    assert derive_bytes(SECRET, "a", watermark=1) != derive_bytes(SECRET, "a", layer=1)


@pytest.mark.parametrize("purpose", ["", "a\0b", "é"])
def test_bad_purposes_are_refused(purpose: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - UnicodeEncodeError is one
        info_string(purpose)
