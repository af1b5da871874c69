"""Changes of single leaves: some elements of a tensor, all of them, or another value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.errors import TreeMismatch
from statetree.leaves.builtin import leaf_type_of
from statetree.leaves.leaf_numbers import value_number
from statetree.spans.bits import as_bits, from_bits
from statetree.spans.positions import as_gaps, from_gaps, within
from statetree.spans.sums import FEW, sums_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.chunks.boxes import Box

#: Where ``head`` has what.
_START: Final = 0
_NUMEL: Final = 1
_BEFORE: Final = slice(2, 2 + FEW)
_AFTER: Final = slice(2 + FEW, 2 + 2 * FEW)
_HEAD: Final = 2 + 2 * FEW
#: What is wrong where sums or numbers do not fit.
OTHER_CONTENT: Final = "its values or positions are not those that it was made with"
#: The start of a change that replaces everything.
_WHOLE: Final = -1


@dataclass(frozen=True, eq=False)
class TensorChange:
    """What is written over one tensor.

    Positions count the elements of the global shape in row-major order.

    Attributes:
        gaps: By how much each position is above the one before it, the first being ``head[0]``; unsigned bytes or wider
            integers. Where everything that this rank holds is replaced, nothing; of a part of a distributed tensor the
            global shape and then the corners of this rank's boxes (first index, index behind the last), as ``int64``.
        values: The elements for these positions; of a tensor that is replaced, all that this rank holds, box by box.
        head: Six ``int64``: the first position (-1: everything is replaced), the number of elements of the global
            shape, and two sums each of the elements there before and after.
    """

    gaps: torch.Tensor
    values: torch.Tensor
    head: torch.Tensor

    @property
    def is_whole(self) -> bool:
        """Whether all elements are replaced."""
        return int(self.head[_START]) == _WHOLE

    @property
    def numel(self) -> int:
        """How many elements the global shape has."""
        return int(self.head[_NUMEL])

    @property
    def before(self) -> torch.Tensor:
        """The sums of what is written over."""
        return self.head[_BEFORE].cpu()

    @property
    def after(self) -> torch.Tensor:
        """The sums of what is written."""
        return self.head[_AFTER].cpu()

    def positions(self) -> torch.Tensor | None:
        """Return the positions; ``None`` if they do not ascend."""
        return from_gaps(int(self.head[_START]), self.gaps)

    def all_positions(self) -> torch.Tensor:
        """Return the positions in the order of the values, also where everything is replaced."""
        if not self.is_whole:
            found = self.positions()
            assert found is not None
            return found
        if not self.gaps.numel():
            return torch.arange(self.numel, dtype=torch.int64, device=self.values.device)
        shape, *corners = self._corners()
        boxes = zip(corners[::2], corners[1::2], strict=True)
        sizes = [(start, [b - a for a, b in zip(start, stop, strict=True)]) for start, stop in boxes]
        local = [torch.arange(prod(size), dtype=torch.int64, device=self.values.device) for _, size in sizes]
        return torch.cat([within(each, start, size, shape) for each, (start, size) in zip(local, sizes, strict=True)])

    def _corners(self) -> list[list[int]]:
        """Return the global shape, and the corners of boxes."""
        return self.gaps[1:].view(-1, int(self.gaps[0])).tolist()

    def undone(self, values: torch.Tensor) -> TensorChange:
        """Return the change back, to the values that were there."""
        start, numel, gaps = int(self.head[_START]), self.numel, self.gaps.clone()
        return TensorChange(gaps, values, _head(start, numel, self.after, self.before))

    def checked(self) -> tuple[str, torch.Tensor | None]:
        """Say what is wrong with a change (nothing if it can be one), and return its positions, if it has such."""
        fault = self._fault_of_form()
        if fault or self.is_whole:
            return fault, None
        positions = self.positions()
        if positions is None:
            return "its positions do not ascend", None
        last = int(positions[-1]) if positions.numel() else -1
        return (f"expected positions below {self.numel}, got {last}" if last >= self.numel else ""), positions

    def _fault_of_form(self) -> str:
        """Say what is wrong with the tensors of a change; nothing if they fit each other."""
        if not all(map(has_elements, (self.head, self.gaps, self.values))):
            return "expected tensors with elements as its head, gaps and values"
        if self.head.dtype != torch.int64 or tuple(self.head.shape) != (_HEAD,):
            return f"expected a head of {_HEAD} int64, got {self.head.dtype} {tuple(self.head.shape)}"
        if self.gaps.dim() != 1 or self.gaps.dtype.is_floating_point or self.gaps.dtype.is_complex:
            return f"expected gaps as integers in one dim, got {self.gaps.dtype} {tuple(self.gaps.shape)}"
        if self.is_whole:
            return self._fault_of_boxes()
        count = self.values.numel()
        return "" if self.gaps.numel() == count else f"expected {count} gaps, got {self.gaps.numel()}"

    def _fault_of_boxes(self) -> str:
        """Say what is wrong with the boxes of a change that replaces everything."""
        if not self.gaps.numel():
            return ""
        dims = int(self.gaps[0])
        if self.gaps.dtype != torch.int64 or dims < 1 or (self.gaps.numel() - 1) % dims:
            return "its boxes have no shape"
        shape, *corners = self._corners()
        if len(corners) % 2 or prod(shape) != self.numel:
            return "its boxes lie in another shape"
        boxes = list(zip(corners[::2], corners[1::2], strict=True))
        inside = all(
            0 <= a <= b <= size for start, stop in boxes for a, b, size in zip(start, stop, shape, strict=True)
        )
        volume = sum(prod(b - a for a, b in zip(start, stop, strict=True)) for start, stop in boxes)
        return "" if inside and volume == self.values.numel() else "its boxes do not fit its values"


def _head(start: int, numel: int, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.tensor([start, numel], dtype=torch.int64, device="cpu"), before.cpu(), after.cpu()])


def change_at(
    positions: torch.Tensor, values: torch.Tensor, numel: int, before: torch.Tensor, after: torch.Tensor
) -> TensorChange:
    """Return the change of some ascending positions."""
    start = int(positions[0]) if positions.numel() else 0
    return TensorChange(as_gaps(positions), values, _head(start, numel, before, after))


def change_of_all(
    values: torch.Tensor, shape: Sequence[int], boxes: Sequence[Box], before: torch.Tensor, after: torch.Tensor
) -> TensorChange:
    """Return the change that replaces everything that this rank holds."""
    gaps = torch.empty(0, dtype=torch.uint8, device=values.device)
    if [box.sizes for box in boxes] != [tuple(shape)]:
        corners = [number for box in boxes for corner in box for number in corner]
        gaps = torch.tensor([len(shape), *shape, *corners], dtype=torch.int64, device=values.device)
    return TensorChange(gaps, values, _head(_WHOLE, prod(shape), before, after))


def merged_changes(name: str, first: TensorChange, second: TensorChange) -> TensorChange:
    """Return two changes of a tensor in a row as one.

    Sums are added: what was there before both is what was there before each, without what the first wrote for the
    second to write over.
    """
    if second.is_whole:
        before = second.before - first.after + first.before
        return TensorChange(second.gaps, second.values, _head(_WHOLE, second.numel, before, second.after))
    late = second.positions()
    early = None if first.is_whole else first.positions()
    if late is None or (early is None and not first.is_whole):
        raise damaged("then", name, "its positions do not ascend")
    late = late.to(first.values.device)
    if early is None:
        return _over_whole(name, first, second, late)
    kept = ~torch.isin(early, late, assume_unique=True)
    bits = as_bits(first.values)
    both = sums_at(early[~kept], bits[~kept])[0]
    positions = torch.cat([early[kept], late])
    order = positions.argsort()
    values = torch.cat([bits[kept], as_bits(second.values).to(bits.device)])[order]
    before, after = first.before + second.before - both.cpu(), first.after + second.after - both.cpu()
    return change_at(positions[order], from_bits(values, first.values.dtype), first.numel, before, after)


def _over_whole(name: str, first: TensorChange, second: TensorChange, late: torch.Tensor) -> TensorChange:
    bits = as_bits(first.values.reshape(-1)).clone()
    places = late
    if first.gaps.numel():
        found, order = first.all_positions().sort()
        places = order[torch.searchsorted(found, late).clamp_(max=len(order) - 1)]
        if not first.all_positions()[places].equal(late):
            raise mismatch("then", name, "positions that the first delta knows", "others", "Pass deltas in a row.")
    both = sums_at(late, bits[places])[0].cpu()
    bits[places] = as_bits(second.values).to(bits.device)
    values = from_bits(bits, first.values.dtype).view(first.values.shape)
    before, after = first.before + second.before - both, first.after + second.after - both
    return TensorChange(first.gaps, values, _head(_WHOLE, first.numel, before, after))


@dataclass(frozen=True, eq=False)
class ValueChange:
    """What takes the place of a leaf that is no strided tensor: a plain value, a sparse tensor, an opaque object.

    Attributes:
        value: The new leaf.
        numbers: Two ``int64``: the numbers of the leaf before and after.
    """

    value: Any
    numbers: torch.Tensor

    @classmethod
    def between(cls, value: Any, before: int, after: int) -> ValueChange:
        """Return the change to a value, with the numbers of what was there and of itself."""
        return cls(value, torch.tensor([before, after], dtype=torch.int64, device="cpu"))

    def fault(self) -> str:
        """Say what is wrong with a change; nothing if it can be one.

        Opaque objects are not looked into: copies of sets inside them may have other numbers.
        """
        if not has_elements(self.numbers) or self.numbers.dtype != torch.int64 or self.numbers.shape != (2,):
            return "expected two int64 as its numbers"
        leaf_type = leaf_type_of(type(self.value))
        if leaf_type is not None and leaf_type.opaque:
            return ""
        return "" if value_number(self.value) == self.after else OTHER_CONTENT

    @property
    def before(self) -> int:
        """The number of the leaf that is replaced."""
        return int(self.numbers[0])

    @property
    def after(self) -> int:
        """The number of the new leaf."""
        return int(self.numbers[1])

    def undone(self, value: Any) -> ValueChange:
        """Return the change back, to the value that was there."""
        return replace(self, value=value, numbers=self.numbers.flip(0))


def has_elements(tensor: Any) -> bool:
    """Whether something is a tensor, and not on meta."""
    return isinstance(tensor, torch.Tensor) and not tensor.is_meta


def mismatch(
    verb: str, name: str, expected: str, got: str, remedy: str = "Nothing was written. Apply it to its base."
) -> TreeMismatch:
    """Return the error for a leaf that a delta does not fit."""
    where = name or "<root>"
    return TreeMismatch(
        f"{verb}: the delta was made for another tree at {where}: expected {expected}, got {got}. {remedy}"
    )


def damaged(verb: str, name: str, fault: str) -> TreeMismatch:
    """Return the error for a delta that cannot be one."""
    where = name or "<root>"
    return TreeMismatch(
        f"{verb}: the delta is damaged at {where}: {fault}. Nothing was written. Make or load it again."
    )
