"""Applying a delta: everything is checked first, then written tensor by tensor, so that it can be taken up again.

A tensor is written in one call of torch (of one a box, where this rank holds several), which no signal handler
interrupts. So whatever stops the writing, each tensor is as it was or as it shall be; and that is what a delta accepts
when it is applied again. What is as it shall be already is not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.declare import cached_property
from statetree.errors import TreeMismatch
from statetree.leaves.changes import OTHER_CONTENT, damaged, mismatch
from statetree.leaves.copying import copied_leaves, prepared_copy
from statetree.leaves.delta_overlaps import overlapping_changes
from statetree.leaves.located_change import LocatedChange
from statetree.leaves.tensor_entries import TreeEntries
from statetree.spans.columns import Columns
from statetree.spans.mappings import MemoryMap, foreign, read_only
from statetree.tree.flatten import unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from statetree.chunks.ranks import Ranks
    from statetree.leaves.delta_tree import Delta
    from statetree.leaves.tensor_entries import TensorEntry


def prepared_apply(
    verb: str, delta: Delta, tree: Any, ranks: Ranks, *, everything: bool
) -> tuple[Any, list[Callable[[], None]]]:
    """Do all of ``apply_delta`` but the writing: return the resulting tree, and functions that write.

    Args:
        verb: On whose behalf, for messages.
        delta: The delta.
        tree: The tree.
        ranks: The ranks that distributed tensors lie on.
        everything: Whether the tree must be the base also where nothing is written.

    Raises:
        TreeMismatch: If the tree is not the base, as far as it is looked at, a tensor cannot be written, or the delta
            is damaged.
    """
    return _Application(verb, delta, TreeEntries(verb, tree, ranks)).prepared(everything=everything)


class _Application:
    def __init__(self, verb: str, delta: Delta, entries: TreeEntries) -> None:
        self.verb, self.delta, self.entries = verb, delta, entries
        self.index_of = delta.check_leaves(verb, entries)
        self.writes: list[Callable[[], None]] = []
        self.written: set[Any] = set()

    def prepared(self, *, everything: bool) -> tuple[Any, list[Callable[[], None]]]:
        if everything:
            self._check_everything()
        for name in self.delta.tensors:
            self._prepare_tensor(name)
        leaves = list(self.entries.leaves)
        for name in self.delta.values:
            index = self.index_of[name]
            leaves[index] = self._prepare_value(name, leaves[index])
        self._check_ties()
        return unflatten(self.entries.spec, leaves), self.writes

    @cached_property
    def _memory_map(self) -> MemoryMap:
        return MemoryMap()

    def _check_everything(self) -> None:
        """Refuse a tree that differs from the base, but for what the delta has already made of it."""
        sums = self.entries.sums()
        for row, index in enumerate(self.entries.order):
            name = self.entries.keys[index]
            found = sums[index].tolist() if index in sums else [self.entries.number(index), 0]
            before = self.delta.sums_before(row)
            if found not in (before, self.delta.sums_after(name, before)):
                raise mismatch(self.verb, name, "what the base holds", "something else")

    def _prepare_tensor(self, name: str) -> None:
        change, entry = self.delta.tensors[name], self.entries.tensors[self.index_of[name]]
        self._check_writable(name, entry)
        located = LocatedChange(self.verb, name, change, entry)
        found, brought = located.both_sums()
        if not brought.equal(change.after):
            raise damaged(self.verb, name, OTHER_CONTENT)
        if found.equal(change.before):
            if entry.place not in self.written:  # tied tensors are written once
                self.written.add(entry.place)
                self.writes.append(located.write())
        elif not found.equal(change.after):
            raise mismatch(self.verb, name, "the elements of the base where the delta writes", "others")

    def _check_writable(self, name: str, entry: TensorEntry) -> None:
        columns = Columns(entry.pieces)
        if foreign(columns) and read_only(columns, self._memory_map):
            raise mismatch(self.verb, name, "a tensor that can be written", "memory that is mapped for reading only")
        for piece in entry.pieces:
            if piece.is_inference():
                raise mismatch(self.verb, name, "a tensor that can be written", "an inference tensor")

    def _prepare_value(self, name: str, leaf: Any) -> Any:
        change, number = self.delta.values[name], self.entries.number(self.index_of[name])
        fault = change.fault()
        if fault:
            raise damaged(self.verb, name, fault)
        if number not in (change.before, change.after):
            raise mismatch(self.verb, name, "the value of the base", "another one")
        if number == change.after and change.before != change.after:
            return leaf
        try:
            result, write = prepared_copy(self.verb, {name: change.value}, {name: leaf})
        except TreeMismatch:  # a sparse tensor with other elements: it does not fit into the memory of the old one
            return copied_leaves(self.verb, [change.value], list)[0]
        self.writes.append(write)
        return result[name]

    def _check_ties(self) -> None:
        """Refuse a tree in which writing over one tensor would change another one, which it did not in the base."""
        if not self.writes:
            return
        changes = {self.index_of[name]: change for name, change in self.delta.tensors.items()}
        numbers = {self.index_of[name]: (change.before, change.after) for name, change in self.delta.values.items()}
        for index, _, memory in overlapping_changes(self.verb, self.entries, changes, numbers):
            raise mismatch(self.verb, self.entries.keys[index], "memory of its own", memory)
