"""What changes: some elements of a part, all that this rank holds of it, or a leaf that is taken whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.chunks.boxes import Box, dense_strides, whole_box
from statetree.errors import TreeMismatch
from statetree.leaves.builtin import leaf_type_of
from statetree.leaves.leaf_numbers import value_number
from statetree.spans.bits import as_bits, from_bits
from statetree.spans.sums import FEW, sums_at

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What gaps are stored as, by what they are less than. (Dtypes that safetensors and NumPy know.)
_GAP_DTYPES: Final = {torch.uint8: 1 << 8, torch.uint16: 1 << 16, torch.int32: 1 << 31, torch.int64: 1 << 63}
#: What is worked out at a time on a processor: it stays in the cache, and torch starts no threads for it.
_BLOCK: Final = 1 << 15
#: Who holds what this rank holds of a part: every rank by itself, this rank before others, or others before this one.
#: No few flipped bits make one of another one.
HOLDERS: Final = (0x3A5C_96E1_0F27_D84B, 0x6C93_5A0E_E1D8_27B4, 0x563F_A5D2_B48E_7109)
EVERYBODYS, OWN, OTHERS = HOLDERS
#: What is wrong where sums or numbers do not fit.
OTHER_CONTENT: Final = "its values or positions are not those that it was made with"
IN_A_ROW: Final = "Pass deltas in a row."


def as_gaps(positions: torch.Tensor) -> torch.Tensor:
    """Return by how much each of some ascending positions is above the one before; a zero for the first."""
    step = _BLOCK if positions.is_cpu else max(1, positions.numel())
    pairs = zip(positions[1:].split(step), positions[:-1].split(step), strict=True)
    blocks = [torch.zeros_like(positions[:1]), *(after - before for after, before in pairs)]
    largest = max(int(block.max()) if block.numel() else 0 for block in blocks)
    dtype = next(dtype for dtype, limit in _GAP_DTYPES.items() if largest < limit)
    return torch.cat([block.to(dtype) for block in blocks])


def from_gaps(start: int, gaps: torch.Tensor) -> torch.Tensor:
    """Return the positions that gaps stand for. If the gaps are damaged, they may be any numbers."""
    found = torch.empty(gaps.shape, dtype=torch.int64, device=gaps.device)
    step = _BLOCK if gaps.is_cpu else max(1, gaps.numel())
    for block, part in zip(found.split(step), gaps.split(step), strict=True):
        torch.cumsum(part.to(torch.int64), 0, out=block)
        start = int(block.add_(start)[-1]) if block.numel() else start
    return found


def places_of(positions: torch.Tensor, sizes: Sequence[int], steps: Sequence[int], begin: int = 0) -> torch.Tensor:
    """Return where elements lie that are so many steps apart along each dim, by their positions in row-major order."""
    places = torch.full_like(positions, begin)
    for index, step in zip(torch.unravel_index(positions, tuple(sizes)), steps, strict=True):
        places += index * step
    return places


def out_of_box(positions: torch.Tensor, box: Box, shape: Sequence[int]) -> torch.Tensor:
    """Return the positions in a shape of elements of a box, by their positions in the box."""
    steps = dense_strides(tuple(shape))
    begin = sum(first * step for first, step in zip(box.start, steps, strict=True))
    one_stretch = box.sizes[1:] == tuple(shape[1:])
    return positions + begin if one_stretch else places_of(positions, box.sizes, steps, begin)


def in_box(positions: torch.Tensor, box: Box, shape: Sequence[int]) -> tuple[torch.Tensor | slice, torch.Tensor]:
    """Return which positions in a shape lie in a box, and the positions of these in the box."""
    if box.sizes == tuple(shape):
        return slice(None), positions
    inside, local = torch.ones_like(positions, dtype=torch.bool), torch.zeros_like(positions)
    indices = torch.unravel_index(positions, tuple(shape))
    for index, start, size in zip(indices, box.start, box.sizes, strict=True):
        inside &= (index >= start) & (index < start + size)
        local = local * size + (index - start)
    return inside, local[inside]


@dataclass(frozen=True, eq=False)
class TensorChange:
    """What is written over one part: a tensor, or one of those that a leaf is made of.

    Positions count the elements of the global shape in row-major order.
    """

    #: By how much each position is above the one before it, the first being `head[0]`; unsigned bytes or wider
    #: integers. Where everything that this rank holds is replaced, nothing; of a distributed part two rows of
    #: `int64`: the first index of this rank's box, and the index behind its last.
    gaps: torch.Tensor
    values: torch.Tensor  # the elements for these positions; of a part that is replaced, all that this rank holds
    #: `int64`: the first position (-1: everything is replaced), how many elements there are, who holds them (a number),
    #: and the global shape.
    head: torch.Tensor
    sums: torch.Tensor  # two rows of two `int64`: sums of the elements there before and after

    @property
    def is_whole(self) -> bool:
        """Whether all elements are replaced."""
        return int(self.head[0]) == -1

    def written(self) -> list[int]:
        """Return what two changes of one memory have in common that write alike, whoever holds it beside this rank."""
        first, _, _, *shape = self.head.tolist()
        return [first, *shape]

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.head[3:].tolist())

    def positions(self) -> torch.Tensor:
        """Return the positions in the order of the values."""
        if not self.is_whole:
            return from_gaps(int(self.head[0]), self.gaps)
        box = self._box()
        return out_of_box(torch.arange(box.volume, device=self.values.device), box, self.shape)

    def _box(self) -> Box:
        """Return what this rank holds of a part that is replaced."""
        if not self.gaps.numel():
            return whole_box(self.shape)
        start, stop = self.gaps.view(2, -1).tolist()
        return Box((*start,), (*stop,))

    def check(self, verb: str, name: str) -> None:
        """Raise ``TreeMismatch`` unless it can be a change. Only its sums tell whether it is the one that was made."""
        fits = all(map(has_elements, (self.gaps, self.values, self.head, self.sums)))
        fits = fits and self.head.dim() == self.gaps.dim() == 1 and self.sums.shape == (2, FEW)
        fits = fits and len(self.head) >= 3 and self.head.dtype == self.sums.dtype == torch.int64
        fits = fits and int(self.head[2]) in HOLDERS and prod(self.shape) == int(self.head[1])
        if fits and self.is_whole and self.gaps.numel() in (0, 2 * len(self.shape)):
            box = self._box()
            fits = all(0 <= start <= stop <= size for start, stop, size in zip(*box, self.shape, strict=True))
            fits = fits and box.volume == self.values.numel()
        elif fits:
            fits = self.gaps.dtype in _GAP_DTYPES and self.gaps.numel() == self.values.numel() and not self.is_whole
        if not fits:
            raise damaged(verb, name, "expected gaps, values, a head and sums that fit each other")


def merged_changes(name: str, first: TensorChange, second: TensorChange) -> TensorChange:
    """Return two changes of a part in a row as one.

    Sums are added: what was there before both is what was there before each, without what the first wrote for the
    second to write over.
    """
    for change in (first, second):
        change.check("then", name)
    device, dtype = first.values.device, first.values.dtype
    early, late = first.positions(), second.positions().to(device)  # both ascend, within one box too
    bits, new = as_bits(first.values.reshape(-1)), as_bits(second.values.reshape(-1)).to(device)
    at = torch.searchsorted(early, late).clamp_(max=max(0, early.numel() - 1))
    twice = early[at] == late if early.numel() else torch.zeros_like(late, dtype=torch.bool)
    at = at[twice]  # where the first change has what the second one writes over
    fits = first.head[1:].equal(second.head[1:]) and dtype == second.values.dtype
    if not fits or (first.is_whole and not twice.all()):
        raise mismatch("then", name, "positions in what the first delta writes to", "others", IN_A_ROW)
    sums = first.sums + second.sums - sums_at(late[twice], bits[at])[0].to(first.sums.device)
    if second.is_whole:
        return replace(second, sums=sums)
    alone = torch.ones_like(early, dtype=torch.bool)
    alone[at] = False
    positions, places = torch.cat([early[alone], late]).sort()
    values = from_bits(torch.cat([bits[alone], new])[places], dtype)
    if first.is_whole:
        return replace(first, values=values.view(first.values.shape), sums=sums)
    head = torch.cat([positions[:1].to(first.head.device), first.head[1:]])
    return TensorChange(as_gaps(positions), values, head, sums)


@dataclass(frozen=True, eq=False)
class ValueChange:
    """What takes the place of a leaf: a plain value, an opaque object, a tensor made of parts of other sizes."""

    value: Any
    numbers: torch.Tensor  # two `int64`: the numbers of the leaf before and after

    def known(self, verb: str, name: str) -> tuple[int, int]:
        """Return the numbers; raise ``TreeMismatch`` if they cannot be those of the value."""
        if not has_elements(self.numbers) or self.numbers.dtype != torch.int64 or self.numbers.shape != (2,):
            raise damaged(verb, name, "expected two int64 as its numbers")
        before, after = self.numbers.tolist()
        leaf_type = leaf_type_of(type(self.value))
        opaque = leaf_type is not None and leaf_type.opaque  # copies of sets inside may have other numbers
        if not opaque and value_number(self.value) != after:
            raise damaged(verb, name, OTHER_CONTENT)
        return before, after


def stem(name: str) -> str:
    """Return the name of the leaf of one of several parts; of any other leaf, its own."""
    leaf, mark, _ = name.rstrip("#").rpartition("#")
    return leaf if mark else name


def has_elements(tensor: Any) -> bool:
    """Whether something is a tensor, and not on meta."""
    return isinstance(tensor, torch.Tensor) and not tensor.is_meta


def mismatch(
    verb: str, name: str, expected: str, got: str, remedy: str = "Nothing was written. Apply it to its base."
) -> TreeMismatch:
    """Return the error for a leaf that a delta does not fit."""
    where = f"the delta was made for another tree at {name or '<root>'}"
    return TreeMismatch(f"{verb}: {where}: expected {expected}, got {got}. {remedy}")


def damaged(verb: str, name: str, fault: str) -> TreeMismatch:
    """Return the error for a delta that cannot be one."""
    where = f"the delta is damaged at {name or '<root>'}"
    return TreeMismatch(f"{verb}: {where}: {fault}. Nothing was written. Make or load it again.")
