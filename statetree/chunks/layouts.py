"""Chunks: boxes in the global shape of a distributed tensor, and which rank of a group holds which.

A ``ChunkLayout`` says this for all ranks, a ``LocalChunks`` adds the tensors in which this rank holds its own boxes.
Layouts are computed from metadata alone: from offsets and sizes, never from the assumption that shards are even.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from functools import lru_cache
from hashlib import blake2b
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.chunks.boxes import Box, Interval, dense_strides, is_covered, whole_box
from statetree.declare import cached_property

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ChunkLayout:
    """Which boxes of a global shape the ranks of a group hold. Empty boxes are left out.

    For every box ``ranks`` has the rank (within the group) that holds it, rising; ``starts`` and ``stops`` its first
    index in each dim, and the one behind its last. ``disjoint`` is whether boxes that are not the same are known to
    have no element in common.
    """

    def __init__(
        self,
        shape: Sequence[int],
        ranks: torch.Tensor,
        starts: torch.Tensor,
        stops: torch.Tensor,
        *,
        disjoint: bool = True,
    ) -> None:
        filled = (stops > starts).all(1)
        if not bool(filled.all()) or not bool((ranks[1:] >= ranks[:-1]).all()):
            order = filled.nonzero()[:, 0]
            order = order[ranks[order].argsort(stable=True)]
            ranks, starts, stops = ranks[order], starts[order], stops[order]
        self.shape = tuple(shape)
        self.disjoint = disjoint
        self._boxes: dict[int, list[Box]] = {}
        self.blocks: dict[Any, ChunkLayout] = {}  # those of blocks in the tensor, as they were asked for
        self.ranks, self.starts, self.stops = ranks, starts, stops

    @cached_property
    def numel(self) -> int:
        """How many elements the global tensor has."""
        return prod(self.shape)

    @cached_property
    def volumes(self) -> torch.Tensor:
        """How many elements each box has."""
        return (self.stops - self.starts).prod(1)

    @cached_property
    def distinct(self) -> Distinct:
        """The boxes, each once however many ranks hold it."""
        if self.disjoint or not self.shape:  # then boxes that begin alike are the same
            corners = (self.starts * torch.tensor(dense_strides(self.shape), dtype=torch.int64)).sum(1)
            if bool((corners[1:] > corners[:-1]).all()):
                return Distinct(self.starts, self.stops, _numbers(len(corners)))
            found, which = torch.unique(corners, return_inverse=True)
        else:
            found, which = torch.unique(torch.cat([self.starts, self.stops], 1), dim=0, return_inverse=True)
        first = torch.full((len(found),), len(which))
        first.scatter_reduce_(0, which, torch.arange(len(which)), "amin")
        return Distinct(self.starts[first], self.stops[first], which)

    @cached_property
    def has_replicas(self) -> bool:
        """Whether some box is held by several ranks."""
        return len(self.distinct.starts) < len(self.ranks)

    @cached_property
    def holders(self) -> Holders:
        """The ranks that hold each distinct box."""
        which = self.distinct.which
        if which is _numbers(len(which)):  # as for most layouts: of many ranks, these columns take more than the boxes
            return Holders(self.ranks, which, torch.ones(1, dtype=torch.int64).expand(len(which)), which)
        count = torch.bincount(which, minlength=len(self.distinct.starts))
        order = which.argsort(stable=True)
        return Holders(self.ranks[order], count.cumsum(0) - count, count, order)

    def replica_of(self, ranks: torch.Tensor) -> torch.Tensor:
        """Return for ranks how many of the holders of their first box come before them; their number without one."""
        table = self._replicas
        known = ranks < len(table)
        return torch.where(known, table[ranks.where(known, torch.zeros_like(ranks))], ranks) if len(table) else ranks

    @cached_property
    def _replicas(self) -> torch.Tensor:
        """What ``replica_of`` returns, for the ranks up to the last that holds anything."""
        table = torch.arange(int(self.ranks.max()) + 1 if len(self.ranks) else 0)
        order, holders_begin = self.holders.order, self.holders.first
        which = self.distinct.which[order]
        position = torch.empty_like(self.ranks)
        position[order] = torch.arange(len(which)) - holders_begin[which]
        first = torch.ones(len(self.ranks), dtype=torch.bool)
        first[1:] = self.ranks[1:] != self.ranks[:-1]
        table[self.ranks[first]] = position[first]
        return table

    def held_by(self, rank: int) -> torch.Tensor:
        """Return the numbers of the distinct boxes that a rank holds, in the order of its rows."""
        return self.distinct.which[self.rows_of(rank)]

    def sharing(self, rank: int) -> dict[Box, list[int]]:
        """Return, for each box of a rank, in the order of its rows, the ranks that hold it, rising."""
        ranks, first, number, _ = self.holders
        held = zip(self.boxes_of(rank), self.held_by(rank).tolist(), strict=True)
        return {box: ranks[first[at] : first[at] + number[at]].tolist() for box, at in held}

    def rows_of(self, rank: int) -> slice:
        """Return the rows of a rank."""
        first, last = torch.searchsorted(self.ranks, torch.tensor([rank, rank + 1])).tolist()
        return slice(first, last)

    def boxes_of(self, rank: int) -> list[Box]:
        """Return one rank's boxes, in the order of the rows."""
        if rank not in self._boxes:
            mine = self.rows_of(rank)
            self._boxes[rank] = _boxes(self.starts[mine], self.stops[mine])
        return self._boxes[rank]

    @cached_property
    def digest(self) -> bytes:
        """What only layouts that are the same in everything have in common."""
        rows = torch.cat([self.ranks[:, None], self.starts, self.stops], 1)
        text = f"{self.shape} {self.disjoint} {tuple(rows.shape)}".encode()
        return blake2b(text + ctypes.string_at(rows.data_ptr(), rows.nbytes), digest_size=16).digest()

    @cached_property
    def is_complete(self) -> bool:
        """Whether the ranks hold every element between them."""
        if self.disjoint:
            return int(self.distinct.volumes.sum()) == self.numel
        return is_covered(whole_box(self.shape), _boxes(self.distinct.starts, self.distinct.stops))


@lru_cache(maxsize=16)
def _numbers(count: int) -> torch.Tensor:
    """Return the numbers of rows: the same tensor for all layouts."""
    return torch.arange(count)


class Distinct(NamedTuple):
    """Boxes, each once, and for every row of a layout (``which``) the index of its box."""

    starts: torch.Tensor
    stops: torch.Tensor
    which: torch.Tensor

    @property
    def volumes(self) -> torch.Tensor:
        """How many elements each has."""
        return (self.stops - self.starts).prod(1)


class Holders(NamedTuple):
    """Who holds each of a layout's distinct boxes."""

    ranks: torch.Tensor  # the holders of the first box, rising, then those of the second, and so on
    first: torch.Tensor  # for each box where its holders begin in ``ranks``
    number: torch.Tensor  # how many it has
    order: torch.Tensor  # the rows of the layout in the order of ``ranks``


def whole_on(shape: Sequence[int], ranks: Sequence[int]) -> ChunkLayout:
    """Return the layout of a tensor that some ranks hold as a whole."""
    return _whole_on(tuple(shape), tuple(ranks))


@lru_cache(maxsize=4096)
def _whole_on(shape: tuple[int, ...], ranks: tuple[int, ...]) -> ChunkLayout:
    starts = torch.zeros(len(ranks), len(shape), dtype=torch.int64)
    stops = torch.tensor(shape, dtype=torch.int64).expand(len(ranks), len(shape)).contiguous()
    return ChunkLayout(shape, torch.tensor(ranks, dtype=torch.int64), starts, stops)


def layout_of(shape: Sequence[int], boxes: Mapping[int, Sequence[Box]]) -> ChunkLayout:
    """Return the layout in which each rank holds the boxes that are listed for it."""
    rows = [(rank, *box) for rank, held in sorted(boxes.items()) for box in held]
    dims = len(shape)
    return ChunkLayout(
        shape,
        torch.tensor([rank for rank, _, _ in rows], dtype=torch.int64),
        torch.tensor([start for _, start, _ in rows], dtype=torch.int64).view(len(rows), dims),
        torch.tensor([stop for _, _, stop in rows], dtype=torch.int64).view(len(rows), dims),
        disjoint=False,
    )


class Split(NamedTuple):
    """How one mesh dim cuts one dim of a tensor."""

    mesh_dim: int
    dim: int
    factor: int  # 1 for ``Shard``; for ``_StridedShard`` into how many pieces the dim is cut before each of them is


@lru_cache(maxsize=4096)
def mesh_layout(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], mesh_ranks: tuple[int, ...], splits: tuple[Split, ...]
) -> ChunkLayout:
    """Return the layout of a tensor of a global shape over a mesh, which cuts it by one split after the other.

    The mesh's ranks are those within the group, in row-major order; -1 for those that are not in it. Mesh dims that do
    not appear in a split replicate.
    """
    ranks, coordinates = _grid(mesh_shape, mesh_ranks)
    columns = [_along(size, dim, mesh_shape, splits, coordinates) for dim, size in enumerate(shape)]
    scalar = torch.zeros(len(ranks), 0, 2, dtype=torch.int64)
    chosen = product(*[bounds.unbind(1) for bounds in columns])
    rows = [torch.stack(intervals, 1) if intervals else scalar for intervals in chosen]
    bounds = torch.cat(rows)
    return ChunkLayout(shape, ranks.repeat(len(rows)), bounds[:, :, 0], bounds[:, :, 1])


@lru_cache(maxsize=64)
def _grid(mesh_shape: tuple[int, ...], mesh_ranks: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ranks of a mesh that are in the group, and their coordinates."""
    ranks = torch.tensor(mesh_ranks, dtype=torch.int64)
    coordinates = torch.cartesian_prod(*[torch.arange(size) for size in mesh_shape]).view(-1, len(mesh_shape))
    inside = ranks >= 0
    return ranks[inside], coordinates[inside]


def _along(
    size: int, dim: int, mesh_shape: tuple[int, ...], splits: tuple[Split, ...], coordinates: torch.Tensor
) -> torch.Tensor:
    """Return the intervals of one dim that each coordinate of the mesh holds: ``[coordinate, interval, 2]``."""
    counts = []
    row = torch.zeros(len(coordinates), dtype=torch.int64)
    for split in splits:
        if split.dim == dim:
            counts.append((mesh_shape[split.mesh_dim], split.factor))
            row = row * counts[-1][0] + coordinates[:, split.mesh_dim]
    return _cut(size, tuple(counts))[row]


@lru_cache(maxsize=4096)
def _cut(size: int, counts: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Cut ``range(size)`` by one split after the other, and return the parts' intervals, padded with empty ones."""
    if all(factor == 1 for _, factor in counts):
        return _cut_evenly(size, [count for count, _ in counts])
    parts: list[list[Interval]] = [[(0, size)]]
    for count, factor in counts:
        parts = [shard for part in parts for shard in cut_intervals(part, count, factor)]
    most = max(1, *map(len, parts))
    return torch.tensor([[*part, *[(0, 0)] * (most - len(part))] for part in parts]).view(len(parts), most, 2)


def _cut_evenly(size: int, counts: Sequence[int]) -> torch.Tensor:
    """Do as ``_cut`` for ``Shard`` alone, which leaves every part in one stretch."""
    bounds = torch.tensor([[0, size]])
    for count in counts:
        start, stop = bounds[:, :1], bounds[:, 1:]
        step = (stop - start + count - 1) // count
        begins = torch.minimum(start + step * torch.arange(count), stop)
        bounds = torch.stack([begins, torch.minimum(begins + step, stop)], 2).view(-1, 2)
    return bounds.unsqueeze(1)


def cut_intervals(part: Sequence[Interval], count: int, factor: int) -> list[list[Interval]]:
    """Cut what a list of intervals covers into ``count`` shards, as ``Shard`` (factor 1) and ``_StridedShard`` do.

    Each is a list of intervals, in the order of the local shard's elements. Neighbouring ones are merged.
    """
    length = sum(stop - start for start, stop in part)
    shards: list[list[Interval]] = [[] for _ in range(count)]
    for begin, end in _chunk(0, length, factor):
        for shard, (start, stop) in zip(shards, _chunk(begin, end, count), strict=True):
            _select(part, start, stop, shard)
    return shards


def _chunk(start: int, stop: int, count: int) -> list[Interval]:
    """Cut an interval as ``torch.chunk`` does, with empty intervals at the end where that returns fewer."""
    step = -(-(stop - start) // count)
    return [(min(start + step * i, stop), min(start + step * (i + 1), stop)) for i in range(count)]


def _select(part: Sequence[Interval], start: int, stop: int, found: list[Interval]) -> None:
    """Add the elements ``start`` to ``stop`` of what a list of intervals covers to another list."""
    position = 0
    for low, high in part:
        first, last = max(start - position, 0), min(stop - position, high - low)
        if first < last:
            add_interval(found, low + first, low + last)
        position += high - low


def add_interval(found: list[Interval], start: int, stop: int) -> None:
    """Add an interval to a list, as one with the last if it begins where that ends."""
    if found and found[-1][1] == start:
        found[-1] = (found[-1][0], stop)
    else:
        found.append((start, stop))


def by_rank(layout: ChunkLayout) -> dict[int, list[Box]]:
    """Return the boxes that each rank holds."""
    found: defaultdict[int, list[Box]] = defaultdict(list)
    for rank, box in zip(layout.ranks.tolist(), _boxes(layout.starts, layout.stops), strict=True):
        found[rank].append(box)
    return dict(found)


def _boxes(starts: torch.Tensor, stops: torch.Tensor) -> list[Box]:
    corners = zip(starts.tolist(), stops.tolist(), strict=True)
    return [Box(tuple(start), tuple(stop)) for start, stop in corners]
