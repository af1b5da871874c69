"""``Delta``: what has to be written into one state to make it another one, as a tree of plain tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from statetree.chunks.ranks import own_ranks
from statetree.leaves.changes import TensorChange, ValueChange, damaged, has_elements, merged_changes, mismatch
from statetree.leaves.copying import copied_leaves
from statetree.leaves.located_change import LocatedChange
from statetree.leaves.parts import unpack
from statetree.leaves.tensor_entries import HOLDERS, TreeEntries
from statetree.torch_internals import quietly, storage_key
from statetree.tree.html_fragments import cell, html_escaped, table


@dataclass(frozen=True, eq=False)
class Delta:
    """What has to be written into one state (the base) to make it another one, bit for bit.

    It is a tree of plain tensors and of those plain values that changed: it can be offloaded, staged, saved and sent.
    In ``to_flat(delta)``, whose names others may rely on, a tensor ``model.w`` of which some elements changed has

    - ``tensors.model.w.values``: these elements, in its dtype,
    - ``tensors.model.w.gaps`` and ``tensors.model.w.head``: their positions in the global shape, in row-major order,
      are ``head[0] + gaps.cumsum()``. Where ``head[0]`` is -1, there are no gaps: the tensor is replaced as a whole.

    On a rank of several, the delta of a distributed tensor holds what changed of this rank's part.

    Attributes:
        tensors: For each tensor that changed, by its name in ``to_flat`` of the base, what is written over it.
        values: For each other leaf that changed, what takes its place.
        table: For every leaf of the base, in the order of the paths, three ``int64`` by which it is recognised, and one
            that says who holds what this rank holds: each rank its own, this rank before others, or others before it.
    """

    tensors: dict[str, TensorChange]
    values: dict[str, ValueChange]
    table: torch.Tensor

    def __bool__(self) -> bool:
        return bool(self.tensors or self.values)

    def __repr__(self) -> str:
        written = sum(change.values.numel() for change in self.tensors.values())
        return f"<Delta of {len(self.table)} leaves: {written} elements and {len(self.values)} values differ>"

    def _repr_html_(self) -> str:
        rows = [(name, f"{count:,}") for name, count in self.changed.items()]
        return cell(
            [f"<b>{html_escaped(repr(self))}, {self.nbytes:,} bytes</b>", *table(("path", "elements written"), rows)]
        )

    @property
    def changed(self) -> dict[str, int]:
        """How many elements are written, for each leaf that changes (1 for one that is no strided tensor)."""
        counts = {name: change.values.numel() for name, change in self.tensors.items()}
        return {**counts, **dict.fromkeys(self.values, 1)}

    @property
    def nbytes(self) -> int:
        """The bytes of positions, values and new leaves, without the few by which the base is recognised."""
        tensors = [tensor for change in self.tensors.values() for tensor in (change.gaps, change.values)]
        tensors += unpack("delta", [change.value for change in self.values.values()], list, memory=False).parts
        by_storage = {storage_key(tensor.untyped_storage()): tensor.nbytes for tensor in tensors}
        return sum(by_storage.values())

    @quietly
    def then(self, other: Delta) -> Delta:
        """Return the delta with the effect of this one followed by another one.

        Args:
            other: A delta whose base is what this one makes.

        Aliasing:
            What only one of them changes is shared with it.

        Raises:
            TreeMismatch: If the other's base has another structure, or is known not to be what this one makes.
        """
        names = [*other.tensors, *other.values]
        if self.table.shape != other.table.shape or not self.table[:, 0].equal(other.table[:, 0]):
            got = "trees of other structures, dtypes, shapes or layouts"
            raise mismatch("then", names[0] if names else "", "deltas of one tree", got, "Pass deltas in a row.")
        tensors = dict(self.tensors)
        for name, second in other.tensors.items():
            first = tensors.get(name)
            tensors[name] = second if first is None else merged_changes(name, first, second)
        values = dict(self.values)
        for name, later in other.values.items():
            earlier = values.get(name, later)
            if name in values and earlier.after != later.before:
                raise mismatch("then", name, "what the first delta makes", "another base", "Pass deltas in a row.")
            values[name] = ValueChange.between(later.value, earlier.before, later.after)
        return Delta(tensors, values, self.table)

    @quietly
    def inverse(self, base: Any) -> Delta:
        """Return the delta that undoes this one.

        Args:
            base: The tree that this delta is to be applied to, as it is before.

        Returns:
            A delta that shares no memory with this one's values or with ``base``.

        Raises:
            TreeMismatch: If ``base`` differs from the base in what this delta writes over, or this delta is damaged.
        """
        entries = TreeEntries("inverse", base, own_ranks())
        index_of = self.check_leaves("inverse", entries)
        tensors: dict[str, TensorChange] = {}
        for name, change in self.tensors.items():
            located = LocatedChange("inverse", name, change, entries.tensors[index_of[name]])
            if not located.found_sums().equal(change.before):
                raise mismatch("inverse", name, "the elements of the base", "others", "Pass the base.")
            tensors[name] = change.undone(located.read())
        chosen = [index_of[name] for name in self.values]
        for name, change_of in self.values.items():
            if entries.number(index_of[name]) != change_of.before:
                raise mismatch("inverse", name, "the value of the base", "another one", "Pass the base.")
        copies = copied_leaves("inverse", [entries.leaves[index] for index in chosen], entries.paths)
        values = {name: self.values[name].undone(copy) for name, copy in zip(self.values, copies, strict=True)}
        table = self.table.clone()
        for row, index in enumerate(entries.order):
            table[row, 1:3] = torch.tensor(self.sums_after(entries.keys[index], self.sums_before(row)), device="cpu")
        return Delta(tensors, values, table)

    def check_leaves(self, verb: str, entries: TreeEntries) -> dict[str, int]:
        """Return the indices of a tree's leaves by their names.

        Raises:
            TreeMismatch: If they are others than the base's: of other names, dtypes, shapes or layouts.
        """
        self.check_table(verb)
        index_of = {name: index for index, name in enumerate(entries.keys)}
        unknown = next((name for name in (*self.tensors, *self.values) if name not in index_of), None)
        found = [entries.fingerprint(index) for index in entries.order]
        expected = self.table[:, 0].tolist()
        if found != expected:
            known = set(expected)
            strange = [index for index, number in zip(entries.order, found, strict=True) if number not in known]
            if strange:
                raise mismatch(verb, entries.keys[strange[0]], "a leaf of the base", entries.text(strange[0]))
            raise mismatch(verb, unknown or "", f"{len(expected)} leaves", f"{len(found)}")
        if unknown is not None:
            raise mismatch(verb, unknown, "a leaf", "nothing")
        for names, are_tensors in ((self.tensors, True), (self.values, False)):
            for name in names:
                if (index_of[name] in entries.tensors) is not are_tensors:
                    raise mismatch(verb, name, "a leaf of another kind", "this one")
        return index_of

    def check_table(self, verb: str) -> None:
        """Raise ``TreeMismatch`` unless the table can be one."""
        table = self.table
        if not has_elements(table) or table.dtype != torch.int64 or table.dim() != 2 or table.shape[1] != 4:
            raise damaged(verb, "table", "expected four int64 for each leaf")
        holders = torch.tensor(HOLDERS, dtype=torch.int64, device=table.device)
        if not torch.isin(table[:, 3], holders).all():
            raise damaged(verb, "table", "expected to be told who holds each leaf, got something else")

    def sums_before(self, row: int) -> list[int]:
        """Return the sums (or the number, and a zero) of a leaf of the base, by its row in the table."""
        return self.table[row, 1:3].tolist()

    def sums_after(self, name: str, sums: list[int]) -> list[int]:
        """Return what the sums of a leaf become."""
        if name in self.values:
            return [self.values[name].after, *sums[1:]]
        if name not in self.tensors:
            return sums
        change = self.tensors[name]
        return (torch.tensor(sums, device="cpu") - change.before + change.after).tolist()
