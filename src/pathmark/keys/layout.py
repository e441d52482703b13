"""Which experts belong to which watermark: pools are dealt into blocks, blocks are cut into groups.

Two keyed steps, together one keyed permutation of the pool:

1. The *owner's secret* deals the pool of a layer to the watermarks that share it, one block each.
   A watermark that has the layer for itself owns the whole pool, and nothing is drawn.
2. The *watermark's own subkey* shuffles its block and cuts it into groups of k.

So a watermark can be revealed alone: its subkey and its blocks give its groups, and say nothing about
the order inside any other block. Under the null hypothesis the targets of several watermarks are
uniform disjoint k-subsets of the pool, which is what the exact test assumes.
"""

from __future__ import annotations

from collections.abc import Sequence

from pathmark.errors import CapacityError
from pathmark.keys.derive import Stream


def groups_per_block(pool_size: int, width: int, sharers: int) -> int:
    """floor(G / J) with G = floor(pool / k): how many groups each of J watermarks owns in a layer.

    Raises CapacityError where a watermark would own none.
    """
    if width < 1 or sharers < 1:
        raise CapacityError(f"width and watermarks are at least 1, got width {width}, watermarks {sharers}")
    groups = pool_size // width
    if sharers > groups:
        raise CapacityError(
            f"{sharers} watermarks do not fit: a pool of {pool_size} experts has {groups} groups of {width}; "
            f"use at most {groups} watermarks in one layer, a smaller width, a wider pool or other layers"
        )
    return groups // sharers


def deal_blocks(
    secret: bytes, layer: int, pool: Sequence[int], width: int, sharers: int
) -> tuple[tuple[int, ...], ...]:
    """The experts of each of `sharers` watermarks in one layer, each block sorted.

    Law: blocks are disjoint subsets of the pool, each of width * floor(G / J) experts; with one
    sharer the block is the pool.
    """
    size = groups_per_block(len(pool), width, sharers) * width
    if sharers == 1:
        return (tuple(sorted(pool)),)
    order = Stream(secret, "deal", layer=layer).shuffled(sorted(pool))
    return tuple(tuple(sorted(order[i * size : (i + 1) * size])) for i in range(sharers))


def cut_groups(
    subkey: bytes, watermark: int, layer: int, block: Sequence[int], width: int
) -> tuple[tuple[int, ...], ...]:
    """The candidate target sets of one watermark in one layer, in the order of their group index.

    Law: floor(block / k) disjoint k-subsets of the block, each sorted; what is left over is unused.
    """
    order = Stream(subkey, "groups", watermark=watermark, layer=layer).shuffled(sorted(block))
    return consecutive_groups(order, width)


def consecutive_groups(order: Sequence[int], width: int) -> tuple[tuple[int, ...], ...]:
    """Cut a sequence into runs of `width`: the layout of the paper when `order` is 0..N-1.

    With N = 60 and k = 2, group 11 is the pair that starts at expert 22 (appendix real-case).
    """
    return tuple(tuple(sorted(order[g * width : (g + 1) * width])) for g in range(len(order) // width))
