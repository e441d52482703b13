"""A Merkle tree over salted leaves: one root to publish, any leaf can be opened alone.

Leaves and nodes are hashed with different prefixes, so a node can't pass for a leaf. The number of
leaves is padded to a power of two, at least 8: a root, or one opening, does not tell how many
watermarks a key has.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from pathmark.keys.canonical import Document, canonical

_LEAF = b"\x00pathmark leaf 1\n"
_NODE = b"\x01pathmark node 1\n"
MIN_LEAVES = 8
_MAX_DEPTH = 32


def leaf_hash(leaf: Document) -> bytes:
    """Hash of a leaf document, which holds its own name and salt."""
    return sha256(_LEAF + canonical(leaf)).digest()


def padded_size(count: int) -> int:
    """The next power of two, at least 8."""
    return max(MIN_LEAVES, 1 << (count - 1).bit_length())


def merkle_root(hashes: Sequence[bytes]) -> bytes:
    """Root over a power of two of leaf hashes."""
    level = list(hashes)
    assert len(level) == padded_size(len(level))
    while len(level) > 1:
        level = [_node(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def merkle_proof(hashes: Sequence[bytes], index: int) -> Document:
    """The siblings on the way from a leaf to the root, lowest first."""
    level, place, siblings = list(hashes), index, []
    while len(level) > 1:
        siblings.append(level[place ^ 1].hex())
        level = [_node(level[i], level[i + 1]) for i in range(0, len(level), 2)]
        place >>= 1
    return {"index": index, "siblings": siblings}


def check_proof(leaf: Document, proof: Document, root: bytes) -> bool:
    """Whether the leaf is in the tree with this root. ValueError, KeyError or TypeError if malformed."""
    place, siblings = int(proof["index"]), [bytes.fromhex(s) for s in proof["siblings"]]
    if len(siblings) > _MAX_DEPTH or not 0 <= place < 1 << len(siblings) or any(len(s) != 32 for s in siblings):
        return False
    node = leaf_hash(leaf)
    for sibling in siblings:
        node = _node(sibling, node) if place & 1 else _node(node, sibling)
        place >>= 1
    return node == root


def _node(left: bytes, right: bytes) -> bytes:
    return sha256(_NODE + left + right).digest()
