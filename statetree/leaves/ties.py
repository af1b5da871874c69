"""Ties: which leaves of a tree must be treated together, since they share memory or are the same object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.errors import StateTreeError
from statetree.leaves.parts import unpack
from statetree.spans.columns import Columns
from statetree.spans.layout import extents, is_dense
from statetree.spans.overlaps import shared_elements

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


def views_on_targets(
    parts: Columns, sources: Columns, targets: Columns
) -> tuple[dict[int, torch.Tensor], list[tuple[int, int]]]:
    """Find the parts that lie in memory which is copied from sources to targets, so that they can be tied there alike.

    An object that is copied may hold a view on a tensor that is written into a destination: in the result it has to
    be a view on that destination, since a copy would be a second memory.

    Returns:
        By the indices of parts the same views on the targets, and the pairs of a part and a source that lie over each
        other and have no such view: where the part reaches beyond the source, or the target has other strides or
        another dtype.
    """
    found: dict[int, torch.Tensor] = {}
    lost: list[tuple[int, int]] = []
    on_storage: dict[int, list[int]] = {}
    for index, key in enumerate(sources.storage_keys):
        on_storage.setdefault(key, []).append(index)
    part_reach, source_reach = extents(parts), extents(sources)
    for part, key in enumerate(parts.storage_keys):
        for source in on_storage.get(key, ()):
            begin = parts.pointers[part] - sources.pointers[source]
            if not parts.pointers[part] or begin >= source_reach[source] or begin + part_reach[part] <= 0:
                continue
            pair = parts.tensors[part], sources.tensors[source]
            is_inside = begin >= 0 and begin + part_reach[part] <= source_reach[source]
            view = _view_on(*pair, targets.tensors[source]) if is_inside else None
            if view is not None:
                found[part] = view
                lost = [pair for pair in lost if pair[0] != part]
                break
            if shared_elements(Columns(pair)):  # and not in the gaps of each other
                lost.append((part, source))
    return found, lost


def _view_on(part: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """Return the view on a target that a part is on its source; ``None`` if there is none."""
    plain = target.detach()
    alike = source.dtype == target.dtype == part.dtype
    bits = [(each.is_conj(), each.is_neg()) for each in (part, source, plain)]
    if not alike or bits[0] != bits[1] or bits[1] != bits[2]:
        return None
    if part.data_ptr() == source.data_ptr() and part.shape == source.shape and part.stride() == source.stride():
        return plain
    if source.stride() != plain.stride() or not is_dense(source.is_contiguous(), source.shape, source.stride()):
        return None  # in a gap of the source there may be anything in the target
    offset = part.storage_offset() - source.storage_offset()
    return plain.as_strided(part.shape, part.stride(), plain.storage_offset() + offset)
