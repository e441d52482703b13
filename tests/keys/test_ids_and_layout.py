"""Ids, blocks and groups: laws over all shapes that models have, and the paper's example."""

from __future__ import annotations

from math import comb, log2, prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from key_fixtures import SECRET, make_key, plans

from pathmark.errors import CapacityError
from pathmark.keys import IdCode, WatermarkRequest, consecutive_groups
from pathmark.keys.evidence import bits, path_counts, paths_after_erasures, smallest_p_value
from pathmark.keys.layout import cut_groups, deal_blocks, groups_per_block

shapes = st.tuples(st.integers(4, 256), st.integers(1, 8), st.integers(1, 16)).filter(lambda s: s[0] // s[1] >= s[2])


def test_papers_example() -> None:
    groups = consecutive_groups(range(60), 2)
    assert len(groups) == 30
    sequence = [11, 24, 5, 18, 3, 26]
    assert [groups[g][0] for g in sequence] == [22, 48, 10, 36, 6, 52]
    assert [groups[g][0] for g in (8, 2, 14, 0, 27, 6)] == [16, 4, 28, 0, 54, 12]
    code = IdCode((30,) * 6)
    number = code.decode(sequence)
    assert number is not None
    assert code.encode(number) == tuple(sequence)
    assert code.capacity == 30**6 > 5e8
    assert round(bits(code.capacity), 1) == 29.4
    assert round(bits(prod(path_counts([60] * 6, [2] * 6))), 1) == 64.7


@settings(max_examples=80, deadline=None)
@given(shapes, st.integers(0, 47), st.data())
def test_blocks_and_groups_are_disjoint_subsets(shape: tuple[int, int, int], layer: int, data: st.DataObject) -> None:
    size, k, J = shape
    pool = sorted(data.draw(st.permutations(range(size + 9)))[:size])
    blocks = deal_blocks(SECRET, layer, pool, k, J)
    per_block = groups_per_block(size, k, J)
    assert len(blocks) == J
    every = [e for block in blocks for e in block]
    assert len(every) == len(set(every))
    assert set(every) <= set(pool)
    for j, block in enumerate(blocks):
        groups = cut_groups(SECRET, j, layer, block, k)
        assert len(groups) == per_block if J > 1 else len(groups) == size // k
        flat = [e for group in groups for e in group]
        assert all(len(g) == k for g in groups)
        assert len(set(flat)) == len(flat)
        assert set(flat) <= set(block)


def test_more_watermarks_than_groups_are_refused() -> None:
    with pytest.raises(CapacityError, match="4 watermarks do not fit"):
        deal_blocks(SECRET, 0, range(7), 2, 4)


codes = st.builds(
    lambda radices, r: (tuple(radices), min(r, len(radices) - 1)),
    st.lists(st.integers(1, 256), min_size=1, max_size=48),
    st.integers(0, 1),
)


@settings(max_examples=200, deadline=None)
@given(codes, st.data())
def test_id_round_trip_with_mixed_radices(made: tuple[tuple[int, ...], int], data: st.DataObject) -> None:
    radices, r = made
    code = IdCode(radices, r)
    assert code.capacity == prod(sorted(radices)[: len(radices) - r])
    n = data.draw(st.integers(0, code.capacity - 1))
    digits = code.encode(n)
    assert all(0 <= d < b for d, b in zip(digits, radices, strict=True))
    assert code.decode(digits) == n
    if r:
        lost = data.draw(st.integers(0, len(radices) - 1))
        assert code.decode([None if i == lost else d for i, d in enumerate(digits)]) == n


@settings(max_examples=200, deadline=None)
@given(st.integers(3, 23), st.integers(23, 128), st.integers(2, 6), st.data())
def test_reed_solomon_survives_lost_layers(L: int, smallest: int, r: int, data: st.DataObject) -> None:
    assume(r < L)
    radices = tuple(smallest + data.draw(st.integers(0, 9)) for _ in range(L))
    code = IdCode(radices, r)
    assert code.capacity == code.prime ** (L - r)
    n = data.draw(st.integers(0, code.capacity - 1))
    digits = list(code.encode(n))
    lost = set(data.draw(st.lists(st.integers(0, L - 1), max_size=r)))
    damaged = [None if i in lost else d for i, d in enumerate(digits)]
    assert code.decode(damaged) == n
    # One wrong digit on top of fewer losses than the code covers is noticed, never decoded to another id.
    if len(lost) < r:
        place = next(i for i in range(L) if i not in lost)
        damaged[place] = (digits[place] + 1) % code.prime
        assert code.decode(damaged) is None


@pytest.mark.parametrize(("radices", "r"), [((3, 4, 5), 0), ((3, 4, 5), 1), ((5, 5, 5, 6), 2), ((2, 2, 2), 1)])
def test_codes_are_exhaustively_distinct_and_apart(radices: tuple[int, ...], r: int) -> None:
    code = IdCode(radices, r)
    words = [code.encode(n) for n in range(code.capacity)]
    for i, a in enumerate(words):
        for b in words[:i]:
            assert sum(x != y for x, y in zip(a, b, strict=True)) >= r + 1


def test_decode_refuses_what_is_no_id() -> None:
    code = IdCode((4, 4, 4), 1)
    word = list(code.encode(7))
    assert code.decode([*word[:2], (word[2] + 1) % 4]) is None
    assert code.decode([None, None, word[2]]) is None
    assert code.decode([9, *word[1:]]) is None
    with pytest.raises(ValueError, match="expected 3"):
        code.decode([1, 2])


def test_impossible_codes_are_refused() -> None:
    with pytest.raises(CapacityError, match="does not fit"):
        IdCode((4, 4)).encode(16)
    with pytest.raises(CapacityError, match="needs at least 6"):
        IdCode((4,) * 6, 2)
    with pytest.raises(CapacityError, match="between 0 and 1"):
        IdCode((4, 4), 2)


def test_evidence_counts() -> None:
    counts = path_counts([60, 60, 40], [2, 2, 3])
    assert counts == (comb(60, 2), comb(60, 2), comb(40, 3))
    assert paths_after_erasures(counts, 0) == prod(counts)
    assert paths_after_erasures(counts, 1) == comb(60, 2) ** 2
    assert paths_after_erasures(counts, 2) == comb(60, 2)
    assert paths_after_erasures(counts, 5) == 1
    assert float(smallest_p_value(prod(counts))) == pytest.approx(1 / prod(counts))
    assert bits(2**5000) == 5000.0
    assert bits(1000) == pytest.approx(log2(1000))


@settings(max_examples=15, deadline=None)
@given(st.integers(4, 64), st.integers(1, 4), st.integers(1, 6), st.integers(1, 12))
def test_watermarks_of_one_key_never_meet(experts: int, k: int, J: int, L: int) -> None:
    assume(experts // k >= J)
    layers = range(24 - L, 24)
    wanted = [WatermarkRequest(plans=plans(layers, experts=experts, width=k), id=0, trigger_tokens=4)] * J
    key = make_key(*wanted, experts=experts)
    for layer in layers:
        groups = [g for mark in key.watermarks for g in mark.groups(layer)]
        flat = [e for g in groups for e in g]
        assert len(flat) == len(set(flat))
        for mark in key.watermarks:
            assert mark.targets(layer) in mark.groups(layer)
            assert mark.capacity == (experts // k // J) ** L
            last = mark.capacity - 1
            assert mark.decode_id(mark.encode_id(last)) == last
            assert set(mark.targets_for(last)) == set(layers)


def test_targets_are_uniform_over_the_pool() -> None:
    """The null of the exact test: over keys, every k-subset of the pool is equally likely."""
    seen: dict[tuple[int, ...], int] = {}
    for i in range(3000):
        secret = i.to_bytes(32, "big")
        block = deal_blocks(secret, 3, range(6), 2, 2)[1]
        group = cut_groups(secret, 1, 3, block, 2)[0]
        seen[group] = seen.get(group, 0) + 1
    assert len(seen) == 15
    assert sum((c - 200) ** 2 / 200 for c in seen.values()) < 45
