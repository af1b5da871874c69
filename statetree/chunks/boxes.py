"""Boxes of elements in the shape of a tensor: cut into slabs, and put together again."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from operator import add, lt, sub
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: A stretch of one dim of a tensor, from its first index to behind its last one.
Interval = tuple[int, int]

#: How many cells of a grid are looked at: pieces that cut a tensor into a grid have as many as there are pieces.
_MAX_CELLS: Final = 1 << 26


@lru_cache(maxsize=1024)
def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie in row-major order, one behind the other."""
    return tuple([prod(shape[dim + 1 :]) for dim in range(len(shape))])


class Box(NamedTuple):
    """A box: its first index in each dim, and the one behind its last."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def at(cls, start: Sequence[int], sizes: Sequence[int]) -> Box:
        """Return the box of some sizes that begins somewhere."""
        return cls((*start,), (*map(add, start, sizes),))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape."""
        return (*map(sub, self.stop, self.start),)

    @classmethod
    def between(cls, bounds: Sequence[Interval]) -> Box:
        """Return the box of an interval in each dim."""
        return cls(tuple([low for low, _ in bounds]), tuple([high for _, high in bounds]))

    @property
    def volume(self) -> int:
        """How many elements it has."""
        return prod(self.sizes)


def whole_box(shape: Iterable[int]) -> Box:
    """Return the box of a whole tensor."""
    stop = tuple(shape)
    return Box((0,) * len(stop), stop)


def common(box: Box, other: Box) -> Box | None:
    """Return what two boxes have in common; ``None`` if that is no element."""
    start, stop = (*map(max, box.start, other.start),), (*map(min, box.stop, other.stop),)
    return Box(start, stop) if all(map(lt, start, stop)) else None


def cut_out(tensor: torch.Tensor, start: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a view of the elements of a tensor that lie in a box."""
    for dim, (first, size) in enumerate(zip(start, sizes, strict=True)):
        tensor = tensor.narrow(dim, first, size)
    return tensor


def slab_grids(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Return into how many parts to cut each dim of boxes (rows of sizes) to get ``count`` slabs, or elements."""
    left = torch.full(sizes.shape[:1], count)
    grid = torch.ones_like(sizes)
    for dim in range(sizes.shape[1]):
        size = sizes[:, dim]
        grid[:, dim] = torch.where(left == 1, 1, torch.where(size >= 8 * left, left, size))
        left = (left + grid[:, dim] - 1).div(grid[:, dim], rounding_mode="floor")
    return grid


def slabs_within(
    starts: torch.Tensor, stops: torch.Tensor, count: int, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where slab ``number`` of each of some boxes begins and ends: without elements where there are fewer."""
    sizes = stops - starts
    grid = slab_grids(sizes, count)
    begins, ends = starts.clone(), stops.clone()
    left = torch.full(sizes.shape[:1], number)
    for dim in reversed(range(sizes.shape[1])):
        part = left % grid[:, dim]
        left = left.div(grid[:, dim], rounding_mode="floor")
        begins[:, dim] += (sizes[:, dim] * part).div(grid[:, dim], rounding_mode="floor")
        ends[:, dim] = starts[:, dim] + (sizes[:, dim] * (part + 1)).div(grid[:, dim], rounding_mode="floor")
    return begins, torch.where((left > 0)[:, None], begins, ends)


def in_slabs(box: Box, count: int) -> list[Box]:
    """Cut a box into at least ``count`` slabs of about the same size (or single elements), in row-major order."""
    grid = slab_grids(torch.tensor([box.sizes], dtype=torch.int64), count)[0].tolist()
    parts = [
        [(start + size * number // parts, start + size * (number + 1) // parts) for number in range(parts)]
        for start, size, parts in zip(box.start, box.sizes, grid, strict=True)
    ]
    return list(map(Box.between, product(*parts)))


def is_covered(whole: Box, boxes: list[Box]) -> bool:
    """Whether boxes in a whole one, which may overlap, cover it between them. If that is too hard to say, they do not.

    The edges of all boxes cut the whole into a grid, in which each box marks its cells.
    """
    if whole in boxes:
        return True
    dims = list(enumerate(zip(*whole, strict=True)))
    edges = [sorted({*bounds, *(corner[dim] for box in boxes for corner in box)}) for dim, bounds in dims]
    cells_of = [{edge: cell for cell, edge in enumerate(known)} for known in edges]
    marks = [[slice(cell[a], cell[b]) for cell, a, b in zip(cells_of, *box, strict=True)] for box in boxes]
    grid = [len(known) - 1 for known in edges]
    if prod(grid) + sum(prod(mark.stop - mark.start for mark in cells) for cells in marks) > _MAX_CELLS:
        return False
    marked = torch.zeros(grid, dtype=torch.bool, device="cpu")
    for cells in marks:
        marked[tuple(cells)] = True
    return bool(marked.all())
