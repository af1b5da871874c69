"""Boxes of elements in the shape of a tensor: cut into slabs, and put together again."""

from __future__ import annotations

from math import prod
from operator import sub
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        return tuple(map(sub, self.stop, self.start))

    @property
    def volume(self) -> int:
        """How many elements it has."""
        return prod(self.sizes)


def slab_grid(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return into how many parts to cut each dim of a box to get at least ``count`` slabs, or single elements."""
    grid = []
    for size in sizes:
        parts = 1 if count == 1 else count if size >= 8 * count else size
        grid.append(parts)
        count = -(-count // parts)
    return tuple(grid)


def slab(box: Box, count: int, number: int) -> Box | None:
    """Return one of the slabs that a box is cut into, counted in row-major order; ``None`` if there are not so many."""
    grid = slab_grid(box.sizes, count)
    if number >= prod(grid):
        return None
    bounds: list[Interval] = []
    for start, size, parts in reversed(list(zip(box.start, box.sizes, grid, strict=True))):
        number, place = divmod(number, parts)
        bounds.append((start + size * place // parts, start + size * (place + 1) // parts))
    return Box(tuple(start for start, _ in reversed(bounds)), tuple(stop for _, stop in reversed(bounds)))


def in_slabs(box: Box, count: int) -> list[Box]:
    """Cut a box into at least ``count`` slabs of about the same size (or single elements), in row-major order."""
    slabs = (slab(box, count, number) for number in range(prod(slab_grid(box.sizes, count))))
    return [found for found in slabs if found is not None]


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
