"""Ties: which leaves of a tree must be treated together, since they share memory or are the same object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.errors import StateTreeError
from statetree.leaves.parts import unpack

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

    from statetree.leaves.parts import Unpacked


def view_key(tensor: torch.Tensor) -> Hashable:
    """Return what is equal for tensors that are the same view on the same memory, as long as they are alive.

    Two entries of a ``state_dict()`` that are tied are two objects, so their identity does not tell.
    """
    try:
        parts = unpack("update", [tensor], list).parts
    except StateTreeError:  # it cannot be taken apart: nothing is known but the object
        return id(tensor)
    if not parts or any(part.is_meta or not part.data_ptr() for part in parts):
        return id(tensor)
    views: list[Any] = [
        (part.data_ptr(), part.device, part.dtype, part.shape, part.stride(), part.is_conj(), part.is_neg())
        for part in parts
    ]
    return (tuple(tensor.shape), *views)


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
