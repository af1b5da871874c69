"""Regions: where the elements of a block lie in a tensor, whose axes may share dims and step over elements.

A region takes indices in the axes of a block to indices of a tensor. A pattern says of each block where it lies in a
tensor of either side; a box of either tensor (the rows that a rank or a file holds) is a few boxes in the axes, so that
whoever holds them finds out what they have in common.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from operator import mul, sub
from typing import TYPE_CHECKING, NamedTuple

import torch

from statetree.chunks.boxes import Box
from statetree.chunks.layouts import ChunkLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statetree.chunks.boxes import Interval


class AxisRegion(NamedTuple):
    """Where a block lies in a tensor.

    Of axes that share a dim, a step is no shorter than what those of shorter steps reach over.
    """

    start: tuple[int, ...]  # where its first element lies, in each dim
    dims: tuple[int, ...]  # for each axis of the block the dim that it runs along
    steps: tuple[int, ...]  # for each axis how many indices further its next element lies

    @classmethod
    def box(cls, start: Sequence[int]) -> AxisRegion:
        """Return where a box lies: each axis is a dim."""
        return cls(tuple(start), tuple(range(len(start))), (1,) * len(start))

    def at(self, index: Sequence[int]) -> tuple[int, ...]:
        """Return where an element of the block lies in the tensor."""
        found = list(self.start)
        for dim, step, place in zip(self.dims, self.steps, index, strict=True):
            found[dim] += step * place
        return tuple(found)

    def moved(self, index: Sequence[int]) -> AxisRegion:
        """Return where the block lies that begins at an element of this one."""
        return self._replace(start=self.at(index))

    def hull(self, sizes: Sequence[int]) -> Box:
        """Return the smallest box of the tensor that the block lies in."""
        last = self.at([size - 1 for size in sizes])
        return Box(self.start, tuple([place + 1 for place in last]))

    def strides(self, stride: Sequence[int]) -> tuple[int, ...]:
        """Return the strides of the block's axes, from those of the tensor's dims."""
        return tuple([stride[dim] * step for dim, step in zip(self.dims, self.steps, strict=True)])

    def offset(self, stride: Sequence[int]) -> int:
        """Return how far behind the tensor's first element the block's first one lies in memory."""
        return sum(map(mul, self.start, stride))

    def view(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the elements of the block, as a view of a tensor with a dim for each axis."""
        stride = tensor.stride()
        return tensor.as_strided(sizes, self.strides(stride), tensor.storage_offset() + self.offset(stride))

    def axes_along(self, dim: int) -> list[int]:
        """Return the axes that run along a dim, those of the longest steps first."""
        return sorted([axis for axis, its in enumerate(self.dims) if its == dim], key=lambda axis: -self.steps[axis])

    def intervals(self, sizes: Sequence[int]) -> tuple[tuple[Interval, ...], ...]:
        """Return where the block's elements lie along each dim of the tensor."""
        found = []
        for dim, first in enumerate(self.start):
            starts, length = torch.tensor([first]), 1
            for axis in reversed(self.axes_along(dim)):
                if self.steps[axis] == length and len(starts) == 1:  # without gaps
                    length *= sizes[axis]
                else:
                    starts = (torch.arange(sizes[axis]) * self.steps[axis]).view(-1, 1).add(starts).view(-1)
            found.append(tuple([(start, start + length) for start in starts.tolist()]))
        return tuple(found)

    def parts_within(self, box: Box, sizes: Sequence[int]) -> list[tuple[Box, AxisRegion]]:
        """Return the elements of the block that lie in a box of the tensor: boxes in its axes, and their places in it.

        The places are those in a tensor that has this box alone.
        """
        return _parts_within(self, box, tuple(sizes))


@lru_cache(maxsize=4096)
def _parts_within(region: AxisRegion, box: Box, sizes: tuple[int, ...]) -> list[tuple[Box, AxisRegion]]:
    starts, stops = (torch.tensor([bounds], dtype=torch.int64) for bounds in box)
    inside = region._replace(start=(*map(sub, region.start, box.start),))
    cuts = [cut.bounds[0].tolist() for cut in _blocks_within(region, sizes, starts, stops) if bool(cut.there)]
    return [(part, inside.moved(part.start)) for part in map(Box.between, cuts)]


def block_layout(layout: ChunkLayout, region: AxisRegion, sizes: tuple[int, ...]) -> ChunkLayout:
    """Return which boxes of a block ranks hold, from those that they hold of the tensor that it lies in."""
    known = layout.blocks.get((region, sizes))
    if known is None:
        found = list(_blocks_within(region, sizes, layout.starts, layout.stops))
        ranks = torch.cat([layout.ranks[cut.there] for cut in found])
        bounds = torch.cat([cut.bounds[cut.there] for cut in found])
        known = ChunkLayout(sizes, ranks, bounds[:, :, 0], bounds[:, :, 1], disjoint=layout.disjoint)
        layout.blocks[region, sizes] = known
    return known


class _Cut(NamedTuple):
    """For each of many stretches, or boxes of a tensor, a box of indices in the axes of a block, if it has one."""

    bounds: torch.Tensor
    there: torch.Tensor


def _blocks_within(
    region: AxisRegion, sizes: Sequence[int], starts: torch.Tensor, stops: torch.Tensor
) -> Iterator[_Cut]:
    """Yield the elements of a block that lie in each of many boxes of a tensor."""
    columns: list[list[_Cut]] = []
    order: list[int] = []
    for dim, first in enumerate(region.start):
        along = region.axes_along(dim)
        steps = tuple([(region.steps[axis], sizes[axis]) for axis in along])
        columns.append(_cut_all(steps, starts[:, dim] - first, stops[:, dim] - first))
        order += along
    back = sorted(range(len(order)), key=order.__getitem__)
    nothing = starts.new_zeros(len(starts), 0, 2)
    for chosen in product(*columns):
        there = torch.ones(len(starts), dtype=torch.bool)
        for cut in chosen:
            there &= cut.there
        yield _Cut(torch.cat([cut.bounds for cut in chosen] or [nothing], 1)[:, back], there)


def _cut_all(axes: tuple[tuple[int, int], ...], low: torch.Tensor, high: torch.Tensor) -> list[_Cut]:
    """Return the indices, in axes of some (falling) steps and sizes, that lead from ``low`` to before ``high``."""
    # A stretch of a dim of several axes is seldom a box in them: like a stretch of days in weeks, it is the end of a
    # first week, whole weeks, and the beginning of a last one. So a stretch becomes at most three cuts an axis,
    # whatever its length, and those of all ranks are cut at once. With falling steps each index has one place in it.
    if not axes:
        return [_Cut(low.new_zeros(len(low), 0, 2), (low <= 0) & (high > 0))]
    (step, size), inner = axes[0], axes[1:]
    reach = 1 + sum((count - 1) * width for width, count in inner)
    first, last = (-((reach - 1 - low) // step)).clamp(min=0), (-(-high // step)).clamp(max=size)
    begin, end = first.maximum(-(-low // step)), last.minimum((high - reach) // step + 1)
    begin, end = begin.where(begin < end, last), end.where(begin < end, last)
    found: list[_Cut] = []
    for index, stop in ((first, begin), (first + 1, begin), (end, last)):  # in part: at most two indices, its ends
        bound = torch.stack([index, index + 1], 1).unsqueeze(1)
        for bounds, there in _cut_all(inner, low - index * step, high - index * step):
            found.append(_Cut(torch.cat([bound, bounds], 1), there & (index < stop)))
    whole = torch.tensor([[0, count] for _, count in inner], dtype=torch.int64).view(1, -1, 2)
    bound = torch.stack([begin, end], 1).unsqueeze(1)
    found.append(_Cut(torch.cat([bound, whole.expand(len(low), -1, -1)], 1), begin < end))
    return found


class AxisBlock(NamedTuple):
    """Elements that go from one tensor to another."""

    sizes: tuple[int, ...]  # those of its axes
    source: AxisRegion  # where it lies in the tensor that it comes from
    target: AxisRegion  # and in the other

    def simplified(self) -> AxisBlock:
        """Return the block with as few axes as there can be: without those of one element, neighbours in one.

        A block without elements has one axis at the start of both tensors: its own steps may be 0, and tell nothing.
        """
        if 0 in self.sizes:
            regions = [AxisRegion((0,) * len(region.start), (0,), (1,)) for region in (self.source, self.target)]
            return AxisBlock((0,), *regions)
        axes: list[tuple[int, int, int, int, int]] = []
        source, target = self.source, self.target
        rows = zip(self.sizes, source.dims, source.steps, target.dims, target.steps, strict=True)
        for size, dim, step, other_dim, other_step in rows:
            if size == 1:
                continue
            goes_on = bool(axes) and axes[-1][1:] == (dim, step * size, other_dim, other_step * size)
            wide = axes.pop()[0] if goes_on else 1
            axes.append((wide * size, dim, step, other_dim, other_step))
        sizes, dims, steps, other_dims, other_steps = zip(*axes, strict=True) if axes else ((),) * 5
        return AxisBlock(
            sizes, AxisRegion(source.start, dims, steps), AxisRegion(target.start, other_dims, other_steps)
        )

    @property
    def is_whole(self) -> bool:
        """Whether every element of the source goes to the same index of the target, if this is its only block."""
        return self.source == self.target and not any(self.source.start) and set(self.source.steps) <= {1}


def view_over(
    shape: Sequence[int], blocks: Sequence[tuple[AxisBlock, int, Sequence[int]]]
) -> tuple[tuple[int, ...], int] | None:
    """Return the strides and the offset of a tensor over the memory that its blocks lie in, if it is a view of that.

    Each block comes with where the tensor that it is taken from begins in that memory, and the strides of this.
    """
    starts = [offset + block.source.offset(stride) for block, offset, stride in blocks]
    found: dict[int, int] = {}
    for block, _, stride in blocks:
        rows = zip(block.sizes, block.source.strides(stride), block.target.dims, block.target.steps, strict=True)
        for size, distance, dim, step in rows:
            if size > 1 and (distance % step or found.setdefault(dim, distance // step) != distance // step):
                return None
    first = blocks[0][0].target.start
    for (block, _, _), start in zip(blocks, starts, strict=True):  # dims along which no block has a second element
        gaps = {dim: place - first[dim] for dim, place in enumerate(block.target.start) if place != first[dim]}
        unknown = gaps.keys() - found.keys()
        if len(unknown) == 1:
            (dim,) = unknown
            distance = start - starts[0] - sum(gap * found[other] for other, gap in gaps.items() if other != dim)
            if distance % gaps[dim] or distance // gaps[dim] <= 0:
                return None
            found[dim] = distance // gaps[dim]
    if any(size > 1 and dim not in found for dim, size in enumerate(shape)):
        return None
    strides = [found.get(dim, 0) for dim in range(len(shape))]
    for dim in reversed(range(len(shape))):  # of one index: as if it were dense
        if dim not in found:
            strides[dim] = strides[dim + 1] * shape[dim + 1] if dim + 1 < len(shape) else 1
    begin = starts[0] - sum(map(mul, first, strides))
    if any(
        start != begin + sum(map(mul, block.target.start, strides))
        for (block, *_), start in zip(blocks, starts, strict=True)
    ):
        return None
    return tuple(strides), begin
