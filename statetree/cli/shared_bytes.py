"""Which entries of a checkpoint share bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.files.checkpoint import tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.files.checkpoint import StoredEntry
    from statetree.files.stored import StoredTensor

_MAX_COMPARISONS: Final = 100_000


class SharedBytes(NamedTuple):
    """How the entries of a checkpoint share bytes.

    Attributes:
        groups: Entries (their indices, in order) that share bytes, directly or over others: two or more each.
        group_of: The group that an entry is in.
        own_bytes: For each entry, the bytes that it adds to those of the entries before it in its group.
    """

    groups: list[list[int]]
    group_of: dict[int, list[int]]
    own_bytes: list[int]


class _Extent(NamedTuple):
    """The bytes of a storage in which a part of an entry lies."""

    begin: int
    stop: int
    entry: int
    view: StoredTensor


def find_ties(entries: Sequence[StoredEntry]) -> SharedBytes:
    """Return which entries share bytes."""
    extents: dict[int, list[_Extent]] = {}
    own_bytes = [0] * len(entries)
    for index, entry in enumerate(entries):
        for part in tensors_in(entry.value):
            own_bytes[index] += min(part.nbytes, part.span)
            if part.numel:
                begin = part.offset * part.dtype.itemsize
                extents.setdefault(id(part.storage), []).append(_Extent(begin, begin + part.span, index, part))
    joined: dict[int, set[int]] = {}
    spare = _MAX_COMPARISONS
    for found in extents.values():
        if len(found) > 1:
            spare = _join_sharing(joined, found, spare)
    group_of: dict[int, list[int]] = {}
    for index in sorted(joined):
        if index not in group_of:
            group_of.update(dict.fromkeys(joined[index], sorted(joined[index])))
    for index, group in group_of.items():
        own_bytes[index] = 0 if index != group[0] else _union_bytes(entries, group)
    return SharedBytes(
        [group_of[index] for index in sorted(group_of) if group_of[index][0] == index], group_of, own_bytes
    )


def _join_sharing(joined: dict[int, set[int]], found: list[_Extent], spare: int) -> int:
    """Join entries that share bytes of one storage. Returns how many more views may be compared, pair by pair.

    If that is none, all whose extents overlap are taken to share bytes.
    """
    alike: dict[Any, int] = {}
    open_: list[_Extent] = []
    for row in sorted(found, key=lambda row: row[:3]):
        shape = (row.begin, row.view.dtype.itemsize, row.view.shape, row.view.stride)
        if alike.setdefault(shape, row.entry) != row.entry:
            _join(joined, alike[shape], row.entry)
            continue
        open_ = [other for other in open_ if other.stop > row.begin]
        spare -= len(open_)
        for other in open_:
            if other.entry != row.entry and (spare < 0 or share_bytes(other.view, row.view)):
                _join(joined, other.entry, row.entry)
        open_.append(row)
        if spare < 0:
            open_ = [max(open_, key=lambda row: row.stop)]
    return spare


def _join(joined: dict[int, set[int]], a: int, b: int) -> None:
    """Put two entries, and all that they are joined to, into one set: the smaller set goes into the larger one."""
    small, large = sorted((joined.setdefault(a, {a}), joined.setdefault(b, {b})), key=len)
    if small is not large:
        large |= small
        joined.update(dict.fromkeys(small, large))


def share_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two views on one storage, whose extents overlap, have bytes in common, as far as that is easy to tell.

    Columns of a matrix have none, though one lies between the elements of the other. This is seen where both views
    consist of runs of bytes at multiples of one distance: the runs lie apart in every such stretch if they do in one.
    """
    shift = b.offset * b.dtype.itemsize - a.offset * a.dtype.itemsize
    steps = (_steps(a), _steps(b))
    for least in {step for each in steps for step, _ in each}:
        distance = math.gcd(*(step for each in steps for step, _ in each if step >= least))
        run, other = (
            view.dtype.itemsize + sum(step * (size - 1) for step, size in each if step < least)
            for view, each in zip((a, b), steps, strict=True)
        )
        if run <= shift % distance <= distance - other:
            return False
    return True


def _steps(view: StoredTensor) -> list[tuple[int, int]]:
    """Return how far apart in bytes a view's elements lie in each dim, and how many there are."""
    size = view.dtype.itemsize
    return [(step * size, count) for step, count in zip(view.stride, view.shape, strict=True) if step and count > 1]


def _union_bytes(entries: Sequence[StoredEntry], group: Sequence[int]) -> int:
    extents = sorted(
        (id(part.storage), part.offset * part.dtype.itemsize, part.offset * part.dtype.itemsize + part.span)
        for index in group
        for part in tensors_in(entries[index].value)
    )
    total, storage, end = 0, -1, 0
    for owner, begin, stop in extents:
        if owner != storage:
            storage, end = owner, 0
        total += max(0, stop - max(begin, end))
        end = max(end, stop)
    return total
