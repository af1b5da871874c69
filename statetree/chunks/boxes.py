"""Boxes of elements in the shape of a tensor: cut into slabs, and put together again."""

from __future__ import annotations

from itertools import product
from math import prod
from operator import lt, sub
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

#: A stretch of one dim of a tensor, from its first index to behind its last one.
Interval = tuple[int, int]

#: How often each box may be looked at: pieces that cut a tensor into a grid take the logarithm of their number.
_MAX_VISITS: Final = 100


class Box(NamedTuple):
    """A box: its first index in each dim, and the one behind its last."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape."""
        return (*map(sub, self.stop, self.start),)

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


def slab_grids(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Return into how many parts to cut each dim of boxes to get at least so many slabs of each, or single elements.

    Args:
        sizes: The shapes of the boxes, as rows.
        count: How many slabs.
    """
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
    """Return one of the slabs that each of some boxes is cut into, counted in row-major order.

    Returns:
        Where the slabs begin and end: with no elements where a box is not cut into so many.
    """
    sizes = stops - starts
    grid = slab_grids(sizes, count)
    begins, ends = starts.clone(), stops.clone()
    left = torch.full(sizes.shape[:1], number)
    for dim in reversed(range(sizes.shape[1])):
        place = left % grid[:, dim]
        left = left.div(grid[:, dim], rounding_mode="floor")
        begins[:, dim] += (sizes[:, dim] * place).div(grid[:, dim], rounding_mode="floor")
        ends[:, dim] = starts[:, dim] + (sizes[:, dim] * (place + 1)).div(grid[:, dim], rounding_mode="floor")
    return begins, torch.where((left > 0)[:, None], begins, ends)


def in_slabs(box: Box, count: int) -> list[Box]:
    """Cut a box into at least ``count`` slabs of about the same size (or single elements), in row-major order."""
    sizes = torch.tensor([box.sizes], dtype=torch.int64)
    parts = [
        [(start + size * place // parts, start + size * (place + 1) // parts) for place in range(parts)]
        for start, size, parts in zip(box.start, box.sizes, slab_grids(sizes, count)[0].tolist(), strict=True)
    ]
    return [Box(tuple([low for low, _ in bounds]), tuple([high for _, high in bounds])) for bounds in product(*parts)]


def is_covered(whole: Box, boxes: list[Box]) -> bool:
    """Whether boxes in a whole one, which may overlap, cover it between them. If that is too hard to say, they do not.

    The whole is halved, and the boxes with it, until one box covers a part, or there are too few elements for one.
    """
    effort = 10_000 + _MAX_VISITS * len(boxes)
    pending = [(whole, boxes)]
    while pending:
        part, inside = pending.pop()
        if part in inside or not part.volume:
            continue
        effort -= len(inside)
        if sum(box.volume for box in inside) < part.volume or effort < 0:
            return False
        pending += _halves(part, inside)
    return True


def _halves(part: Box, boxes: list[Box]) -> list[tuple[Box, list[Box]]]:
    """Cut a part, and what lies in it, at an edge in the middle, in the dim that has most edges."""
    edges = [
        {edge for box in boxes for edge in (box.start[dim], box.stop[dim]) if start < edge < stop}
        for dim, (start, stop) in enumerate(zip(*part, strict=True))
    ]
    dim = max(range(len(edges)), key=lambda dim: len(edges[dim]))
    cut = sorted(edges[dim])[len(edges[dim]) // 2]
    below = [box if box.stop[dim] <= cut else _below(box, dim, cut) for box in boxes if box.start[dim] < cut]
    above = [box if box.start[dim] >= cut else _above(box, dim, cut) for box in boxes if box.stop[dim] > cut]
    return [(_below(part, dim, cut), below), (_above(part, dim, cut), above)]


def _below(box: Box, dim: int, cut: int) -> Box:
    return Box(box.start, (*box.stop[:dim], cut, *box.stop[dim + 1 :]))


def _above(box: Box, dim: int, cut: int) -> Box:
    return Box((*box.start[:dim], cut, *box.start[dim + 1 :]), box.stop)
