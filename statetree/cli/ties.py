"""Which tensors of a checkpoint share bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from statetree.cli.checkpoint import tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.dcp.outline import Entry


class Ties(NamedTuple):
    """How the entries of a checkpoint share bytes.

    Attributes:
        groups: Entries (their indices, in order) that share bytes, directly or over others: two or more each.
        group_of: The group that an entry is in.
        own_bytes: For each entry, the bytes that it adds to those of the entries before it in its group.
    """

    groups: list[list[int]]
    group_of: dict[int, int]
    own_bytes: list[int]


def find_ties(entries: Sequence[Entry]) -> Ties:
    """Return which entries share bytes."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    own_bytes = [0] * len(entries)
    for index, entry in enumerate(entries):
        for part in tensors_in(entry.value):
            own_bytes[index] += min(part.nbytes, part.span)
            if part.numel:
                begin = part.offset * part.dtype.itemsize
                spans.setdefault(id(part.storage), []).append((begin, begin + part.span, index))
    leader: dict[int, int] = {}
    for found in spans.values():
        end, first = -1, -1
        for begin, stop, index in sorted(found):
            if begin < end and index != first:
                _join(leader, first, index)
            elif begin >= end:
                first = index
            end = max(end, stop)
    members: dict[int, list[int]] = {}
    for index in sorted(leader):
        members.setdefault(_lead(leader, index), []).append(index)
    groups = [members[lead] for lead in sorted(members)]
    for group in groups:
        union = _union_bytes(entries, group)
        for index in group:
            own_bytes[index] = 0
        own_bytes[group[0]] = union
    return Ties(groups, {index: number for number, group in enumerate(groups) for index in group}, own_bytes)


def _lead(leader: dict[int, int], index: int) -> int:
    while leader.setdefault(index, index) != index:
        leader[index] = leader[leader[index]]
        index = leader[index]
    return index


def _join(leader: dict[int, int], a: int, b: int) -> None:
    low, high = sorted((_lead(leader, a), _lead(leader, b)))
    leader[high] = low


def _union_bytes(entries: Sequence[Entry], group: Sequence[int]) -> int:
    spans = sorted(
        (id(part.storage), part.offset * part.dtype.itemsize, part.offset * part.dtype.itemsize + part.span)
        for index in group
        for part in tensors_in(entries[index].value)
    )
    total, storage, end = 0, -1, 0
    for owner, begin, stop in spans:
        if owner != storage:
            storage, end = owner, 0
        total += max(0, stop - max(begin, end))
        end = max(end, stop)
    return total
