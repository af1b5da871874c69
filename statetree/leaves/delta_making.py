"""Making a delta: two trees compared wide, and what differs between them taken out in the fewest bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from statetree.errors import Difference, TreeMismatch
from statetree.leaves.builtin import facts
from statetree.leaves.changes import TensorChange, ValueChange, change_at, change_of_all
from statetree.leaves.copying import copied_leaves
from statetree.leaves.delta_overlaps import overlapping_changes
from statetree.leaves.delta_tree import Delta
from statetree.leaves.located_change import plain_copies
from statetree.leaves.pairing import fact_differences
from statetree.leaves.tensor_entries import TensorEntry, TreeEntries
from statetree.spans.bits import as_bits, differ_in_more, differing, from_bits, is_unreadable, same_view
from statetree.spans.positions import places_of, take, within
from statetree.spans.sums import sums_at
from statetree.tree.matching import matched

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.chunks.ranks import Ranks

#: From here on, not even gaps of one byte make positions and values fewer bytes than all values.
_GAP_BYTES = 1


def make_delta(verb: str, new: Any, base: Any, ranks: Ranks) -> Delta:
    """Return what has to be written into a base to make it another tree.

    Raises:
        TreeMismatch: If the trees differ in more than values, or tensors of the base share memory that hold different
            values in the other.
        UnsupportedLeaf: If a leaf cannot be taken apart.
    """
    return _Making(verb, TreeEntries(verb, new, ranks), TreeEntries(verb, base, ranks)).delta()


class _Making:
    def __init__(self, verb: str, new: TreeEntries, base: TreeEntries) -> None:
        self.verb, self.new, self.base = verb, new, base
        partner, found = matched(base.spec, base.leaves, new.spec, new.leaves)
        differences = [Difference(path, kind, left, right) for path, kind, right, left, _ in found]
        self.partner = list(range(len(base.leaves))) if partner is None else partner
        if not differences:
            differences = [difference for index in base.order for difference in self._differences(index)]
        if differences:
            raise TreeMismatch.between(verb, differences, "Pass two states of one structure and layout.")

    def _pair(self, index: int) -> tuple[TensorEntry | None, TensorEntry | None]:
        return self.new.tensors.get(self.partner[index]), self.base.tensors.get(index)

    def _differences(self, index: int) -> Sequence[Difference]:
        a, b = self._pair(index)
        if a is None and b is None:
            return []
        if a is not None and b is not None and a.text == b.text:
            return []
        path = self.base.paths()[index]
        known = [facts(side.leaves[at]) for side, at in ((self.new, self.partner[index]), (self.base, index))]
        found = [Difference(path, *difference) for difference in fact_differences(known[0], known[1])]
        return found or [Difference(path, "layout", self.new.text(self.partner[index]), self.base.text(index))]

    def delta(self) -> Delta:
        all_sums = self.base.sums()
        changes: dict[Any, TensorChange | None] = {}
        tensors: dict[int, TensorChange] = {}
        numbers: dict[int, tuple[int, int]] = {}
        rows: list[list[int]] = []
        for index in self.base.order:
            a, b = self._pair(index)
            if a is None or b is None:
                rows.append(self.base.row(index, None))
                before, after = rows[-1][1], self.new.number(self.partner[index])
                if before != after:
                    numbers[index] = before, after
                continue
            rows.append(self.base.row(index, all_sums[index]))
            place = a.place, b.place  # ties: what lies in one memory on both sides is compared once
            if place not in changes:
                changes[place] = _change(a, b, all_sums[index])
            change = changes[place]
            if change is not None:
                tensors[index] = change
        self._check_ties(tensors, numbers)
        chosen = [self.partner[index] for index in numbers]
        copies = copied_leaves(self.verb, [self.new.leaves[index] for index in chosen], self.new.paths)
        values = {
            self.base.keys[index]: ValueChange.between(copy, *numbers[index])
            for index, copy in zip(numbers, copies, strict=True)
        }
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), 4)
        return Delta({self.base.keys[index]: change for index, change in tensors.items()}, values, table)

    def _check_ties(self, tensors: Mapping[int, TensorChange], numbers: Mapping[int, tuple[int, int]]) -> None:
        """Refuse a base in which leaves share memory for which the other tree has different values."""
        paths = self.base.paths()
        found = [
            Difference(paths[index], kind, "values of its own", memory)
            for index, kind, memory in overlapping_changes(self.verb, self.base, tensors, numbers)
        ]
        if found:
            raise TreeMismatch.between(self.verb, found, "Take them apart in the base, or tie the new state alike.")


def _change(a: TensorEntry, b: TensorEntry, sums: torch.Tensor) -> TensorChange | None:
    """Return what has to be written over a tensor to make it another one, in the fewest bytes; ``None`` for nothing."""
    if b.on_meta:
        return None
    numel, count = torch.Size(b.shape).numel(), b.held
    itemsize = b.dtype.itemsize
    most = count * itemsize // (itemsize + _GAP_BYTES)  # of positions
    pairs = list(zip(a.pieces, b.pieces, strict=True))
    if any(is_unreadable(x, y) or differ_in_more(x, y, most) for x, y in pairs):
        return _all(a, b, sums)
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    number = 0
    for box, (x, y) in zip(b.boxes, pairs, strict=True):
        if same_view(x, y):
            continue
        parts = []
        for positions in differing(x, y):
            parts.append(positions.to(x.device))
            number += positions.numel()
            if number > most:
                return _all(a, b, sums)
        if parts:
            local = torch.cat(parts)
            values, old = take(x, places_of(local, x)), take(y, places_of(local.to(y.device), y)).to(x.device)
            found.append((within(local, box.start, box.sizes, b.shape), values, old))
    if not number:
        return None
    positions, values, old = found[0] if len(found) == 1 else _in_order(found)
    change = change_at(positions, values, numel, *sums_at(positions, old, values))
    return change if change.gaps.nbytes + values.nbytes <= count * itemsize else _all(a, b, sums)


def _in_order(found: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    dtype = found[0][1].dtype
    positions, values, old = (torch.cat(list(map(as_bits, column))) for column in zip(*found, strict=True))
    order = positions.argsort()
    return positions[order], from_bits(values[order], dtype), from_bits(old[order], dtype)


def _all(a: TensorEntry, b: TensorEntry, sums: torch.Tensor) -> TensorChange:
    """Return the change of everything that this rank holds."""
    copies = plain_copies(a.pieces)
    values = copies[0] if len(copies) == 1 else _joined(copies, b.dtype)
    return change_of_all(values, b.shape, b.boxes, sums, a.sums())


def _joined(copies: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    bits = [as_bits(copy.view(-1)) for copy in copies]
    return from_bits(torch.cat(bits), dtype) if bits else torch.empty(0, dtype=dtype, device="cpu")
