"""Ties: which leaves of a tree must be treated together, since they share memory or are the same object."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.leaves.parts import Unpacked


def tied_leaves(unpacked: Unpacked) -> list[Sequence[int]]:
    """Return for every leaf the indices of those that it is tied to, directly or through others, itself included."""
    leaves, keys = unpacked.leaves, unpacked.columns.storage_keys
    parent = list(range(len(leaves)))
    first_on: dict[int, int] = {}
    for leaf, value in enumerate(leaves):
        _join(parent, leaf, first_on.setdefault(id(value), leaf))
    first_on.clear()
    for leaf in range(len(leaves)):
        for part in unpacked.parts_of(leaf):
            _join(parent, leaf, first_on.setdefault(keys[part], leaf))
    groups: dict[int, list[int]] = {}
    for leaf in range(len(leaves)):
        groups.setdefault(_find(parent, leaf), []).append(leaf)
    return [groups[_find(parent, leaf)] for leaf in range(len(leaves))]


def _find(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]
        index = parent[index]
    return index


def _join(parent: list[int], a: int, b: int) -> None:
    parent[_find(parent, a)] = _find(parent, b)
