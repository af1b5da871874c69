"""Leaves in one memory: which of them would not become what a delta says, because it writes over another one, too."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from statetree.leaves.builtin import taken_over
from statetree.leaves.copying import copies_of
from statetree.leaves.located_change import LocatedChange, plain_copies
from statetree.spans.bits import safely_equal, same_bytes
from statetree.spans.columns import Columns
from statetree.spans.overlaps import shared_elements

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from statetree.leaves.changes import TensorChange
    from statetree.leaves.tensor_entries import TreeEntries


def overlapping_changes(
    verb: str, entries: TreeEntries, changes: Mapping[int, TensorChange], values: Mapping[int, tuple[int, int]]
) -> list[tuple[int, str, str]]:
    """Return the leaves of a tree that would not become what they shall, in the order of their indices.

    With each come the kind of difference, and the memory in which it lies, for messages.

    The changes are written to copies that lie in one memory as the leaves do, and each to a copy of its own: both must
    be the same. Where that cannot be tried, what lies in one memory is refused: another value (sparse, quantized) that
    is written, and several storages that stand for one memory (NumPy's).

    Args:
        verb: On whose behalf, for messages.
        entries: The tree that is to be written to.
        changes: The changes of its tensors, by their indices.
        values: The numbers, before and after, of its other leaves that change.
    """
    if not changes and not values:
        return []
    held = _held(entries, changes, values)
    rows = [(index, piece) for index, pieces in held.items() for piece in pieces if not piece.is_meta and piece.numel()]
    columns = Columns([piece for _, piece in rows])
    keys = columns.storage_keys
    over_itself = {index for index in changes if index in held and entries.tensors[index].overlaps_itself}
    refused = {
        index: ("overlap", "memory in which it overlaps itself") for index in over_itself if len(held[index]) > 1
    }
    shared = set(over_itself)
    for first, second in shared_elements(columns):
        a, b = rows[first][0], rows[second][0]
        if changes.keys().isdisjoint((a, b)) and values.keys().isdisjoint((a, b)):
            continue
        if keys[first] == keys[second] and values.keys().isdisjoint((a, b)):
            shared |= {a, b}
        elif entries.leaves[a] is not entries.leaves[b] or values.get(a) != values.get(b):
            refused[a] = ("ties", f"memory that it shares with {entries.paths()[b]}")
    shared -= refused.keys()
    together = iter(copies_of(Columns([piece for index in shared for piece in held[index]])))
    copies = {index: list(islice(together, len(held[index]))) for index in shared}
    for index in shared & changes.keys():
        _write(verb, entries, index, changes[index], copies[index])
    for index in shared:
        wanted = held[index]
        if index in changes:
            wanted = plain_copies(wanted)
            _write(verb, entries, index, changes[index], wanted)
        if not all(map(same_bytes, copies[index], wanted)):
            is_one = index in over_itself
            memory = "in which it overlaps itself" if is_one else "that it shares with another leaf, which changes"
            refused[index] = ("overlap" if is_one else "ties", f"memory {memory}")
    return [(index, *refused[index]) for index in sorted(refused)]


def _held(
    entries: TreeEntries, changes: Mapping[int, TensorChange], values: Mapping[int, tuple[int, int]]
) -> dict[int, Sequence[torch.Tensor]]:
    """Return the plain tensors of every leaf that may be written, or that what is written may change."""
    held: dict[int, Sequence[torch.Tensor]] = {}
    first_at: dict[Any, int] = {}
    for index, entry in entries.tensors.items():
        first = first_at.setdefault(entry.place, index)
        if first == index or not _same_change(changes.get(first), changes.get(index)):  # tied tensors are written once
            held[index] = entry.pieces
    others = [  # but for objects that change: in their place come new ones, and nothing is written
        index
        for index, leaf in enumerate(entries.leaves)
        if index not in entries.tensors and entries.holds_tensors(index) and not (index in values and taken_over(leaf))
    ]
    held.update(zip(others, entries.parts_inside(others), strict=True))
    return held


def _same_change(a: TensorChange | None, b: TensorChange | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or all(map(safely_equal, (a.head, a.gaps, a.values), (b.head, b.gaps, b.values)))


def _write(verb: str, entries: TreeEntries, index: int, change: TensorChange, pieces: Sequence[torch.Tensor]) -> None:
    """Write the change of a tensor into copies of its pieces."""
    LocatedChange(verb, entries.keys[index], change, entries.tensors[index]._replace(pieces=pieces)).write()()
