"""Routes: from one layout to another, whatever tensor it is for. Which boxes a rank sends, receives and keeps."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from statetree.chunks.boxes import slab_grids, slabs_within
from statetree.declare import cached_property

if TYPE_CHECKING:
    from statetree.chunks.layouts import ChunkLayout

#: How many pairs of boxes are compared at a time.
_MAX_PAIRS: Final = 1 << 20


class Slab(NamedTuple):
    """All of a tensor (of one slab), or one of the slabs that each box of its source is cut into."""

    number: int
    parts: int


class Cuts(NamedTuple):
    """Boxes that go from rank to rank, as columns, in global coordinates.

    They are sorted by ``peer``, ``box`` (which of the source's distinct boxes they are cut from), ``low`` and ``high``:
    what goes from one rank to another is listed in the same order by both.
    """

    peer: torch.Tensor
    box: torch.Tensor
    piece: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    def at(self, chosen: torch.Tensor) -> Cuts:
        """Return some of them, by their rows or a mask."""
        rows = chosen.nonzero()[:, 0] if chosen.dtype is torch.bool else chosen
        return Cuts(*[column.index_select(0, rows) for column in self])

    @property
    def sizes(self) -> torch.Tensor:
        """Their shapes."""
        return self.high - self.low

    def sorted(self) -> Cuts:
        """Return them in the common order."""
        if bool((self.peer[1:] > self.peer[:-1]).all()):
            return self
        return self.at(sorted_by([self.peer, self.box, *self.low.unbind(1), *self.high.unbind(1)]))

    def slots(self) -> list[Cuts]:
        """Return the first of each peer, the second of each peer, and so on."""
        if bool((self.peer[1:] > self.peer[:-1]).all()):
            return [self] if len(self.peer) else []
        _, counts = torch.unique_consecutive(self.peer, return_counts=True)
        place = torch.arange(len(self.peer)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return [self.at(place == slot) for slot in range(int(counts.max()))]


def sorted_by(columns: list[torch.Tensor]) -> torch.Tensor:
    """Return the order of rows that are sorted by the first column, then by the second, and so on."""
    order = torch.arange(len(columns[0]))
    for column in reversed(columns):
        if not bool((column[1:] == column[:-1]).all()):
            order = order[column[order].argsort(stable=True)]
    return order


@dataclass(eq=False)
class Route:
    """The way of a tensor from one layout to another, as one rank sees it."""

    source: ChunkLayout  # where the elements are
    target: ChunkLayout  # where they go
    turn: int | None  # who sends what several ranks have (see ``turns_of``)
    rank: int  # this one

    def incoming(self, slab: Slab) -> Cuts:
        """Return what this rank receives, with its pieces of the target."""
        return self._within(self._arriving[0], slab)

    def staying(self, slab: Slab) -> tuple[Cuts, torch.Tensor]:
        """Return what this rank has itself, with its pieces of the target, and those of the source."""
        cuts = self._within(self._arriving[1], slab)
        piece_of = torch.full((len(self.source.distinct.starts),), -1)
        piece_of[self._own.flip(0)] = torch.arange(len(self._own)).flip(0)
        return cuts, piece_of[cuts.box]

    def outgoing(self, slab: Slab) -> Cuts:
        """Return what this rank sends, with its pieces of the source."""
        return self._within(self._leaving, slab)

    def arriving(self, slab: Slab) -> Cuts:
        """Return all elements, wherever they come from, with this rank's pieces of the target."""
        return self._within(self._all_arriving, slab)

    def held(self, slab: Slab) -> Cuts:
        """Return what this rank has, with its pieces of the source."""
        boxes = self.source.distinct
        piece = torch.arange(len(self._own))
        low, high = boxes.starts[self._own], boxes.stops[self._own]
        return self._within(Cuts(torch.full_like(piece, self.rank), self._own, piece, low, high).sorted(), slab)

    @cached_property
    def _own(self) -> torch.Tensor:
        return self.source.held_by(self.rank)

    @cached_property
    def _all_arriving(self) -> Cuts:
        boxes, rows = self.source.distinct, self.target.rows_of(self.rank)
        piece, box, low, high = overlaps(self.target.starts[rows], self.target.stops[rows], boxes.starts, boxes.stops)
        peer = self._senders(box, torch.full_like(box, self.rank))
        return Cuts(peer, box, piece, low, high).sorted()

    @cached_property
    def _arriving(self) -> tuple[Cuts, Cuts]:
        """Return what comes from others, and what this rank has itself."""
        cuts = self._all_arriving
        stays = torch.isin(cuts.box, self._own)
        return cuts.at(~stays), cuts.at(stays)

    @cached_property
    def _leaving(self) -> Cuts:
        boxes, target = self.source.distinct, self.target
        piece, row, low, high = overlaps(boxes.starts[self._own], boxes.stops[self._own], target.starts, target.stops)
        box, peer = self._own[piece], target.ranks[row]
        leaves = (self._senders(box, peer) == self.rank) & ~self._is_held(peer, box)
        return Cuts(peer, box, piece, low, high).at(leaves).sorted()

    def _senders(self, boxes: torch.Tensor, peers: torch.Tensor) -> torch.Tensor:
        """Return the senders of distinct boxes (by their numbers) to the ranks that each goes to."""
        holders = self.source.holders
        place = self.source.replica_of(peers) if self.turn is None else boxes + self.turn
        return holders.ranks[holders.first[boxes] + place % holders.number[boxes]]

    def _is_held(self, peer: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
        """Whether peers hold boxes of this rank, too."""
        if not self.source.has_replicas:
            return peer == self.rank
        which = self.source.distinct.which
        rows = torch.isin(which, self._own)
        count = len(self.source.distinct.starts)
        return torch.isin(peer * count + box, self.source.ranks[rows] * count + which[rows])

    def _within(self, cuts: Cuts, slab: Slab) -> Cuts:
        """Return what lies in one slab of each box."""
        if slab.parts == 1 or not len(cuts.box):
            return cuts
        boxes = self.source.distinct
        starts, stops = slabs_within(boxes.starts[cuts.box], boxes.stops[cuts.box], slab.parts, slab.number)
        low, high = torch.maximum(cuts.low, starts), torch.minimum(cuts.high, stops)
        return cuts._replace(low=low, high=high).at((high > low).all(1))

    @cached_property
    def is_to_all(self) -> bool:
        """Whether every rank that wants elements wants all, and there are no others."""
        return bool((self.target.volumes == self.target.numel).all())

    @cached_property
    def even_box(self) -> tuple[int, ...] | None:
        """The shape of every rank's only box, if they are alike and nobody else has it."""
        boxes = self.source.distinct
        sizes = boxes.stops - boxes.starts
        if self.source.has_replicas or not len(sizes) or not bool((sizes == sizes[0]).all()):
            return None
        once = bool((self.source.ranks[1:] > self.source.ranks[:-1]).all())
        return tuple(sizes[0].tolist()) if once else None

    @cached_property
    def most_sent(self) -> int:
        """How many elements a rank sends at most, about: what it passes on, to as many ranks as want each element."""
        copies = -(-int(self.target.volumes.sum()) // max(self.target.numel, 1))
        boxes = self.source.distinct
        if self.turn is None:
            owned = _per_rank(self.source.ranks, self.source.volumes)
            return owned * -(-copies // int(self.source.holders.number[0]))
        number = torch.arange(len(boxes.starts))
        return _per_rank(self._senders(number, number), boxes.volumes) * copies

    @cached_property
    def most_held(self) -> int:
        """How many elements a rank receives at most."""
        return _per_rank(self.target.ranks, self.target.volumes)

    @cached_property
    def most_received(self) -> int:
        """How many elements a rank receives at most if every box of the source were as large as the largest.

        As many boxes meet another one as there are combinations of those of their intervals, dim by dim, that meet its
        own: no more than that, whatever boxes there are.
        """
        boxes, wanted = self.source.distinct, self.target.distinct
        senders = torch.ones(len(wanted.starts), dtype=torch.int64)
        for dim in range(boxes.starts.shape[1]):
            intervals = torch.unique(torch.stack([boxes.starts[:, dim], boxes.stops[:, dim]], 1), dim=0)
            begins, ends = (intervals[:, side].sort().values for side in (0, 1))
            begun = torch.searchsorted(begins, wanted.stops[:, dim].contiguous())
            senders *= begun - torch.searchsorted(ends, wanted.starts[:, dim].contiguous(), right=True)
        senders.clamp_(max=len(boxes.starts))
        largest = int(boxes.volumes.max()) if len(boxes.starts) else 0
        return _per_rank(self.target.ranks, senders[wanted.which]) * largest

    def slabs(self, count: int) -> int:
        """Return into how many slabs the box with the most of them is cut, if each is cut into so many at least."""
        boxes = self.source.distinct
        sizes = boxes.stops - boxes.starts
        if not self.source.shape:  # which torch has no rows of
            return 1
        sizes = sizes[:1] if bool((sizes == sizes[:1]).all()) else torch.unique(sizes, dim=0)
        return max((prod(grid) for grid in slab_grids(sizes, count).tolist()), default=1)


def _per_rank(ranks: torch.Tensor, volumes: torch.Tensor) -> int:
    """Return the most elements that one rank has."""
    if not len(ranks):
        return 0
    return int(torch.zeros(int(ranks.max()) + 1, dtype=torch.int64).index_add_(0, ranks, volumes).max())


def overlaps(
    starts: torch.Tensor, stops: torch.Tensor, other_starts: torch.Tensor, other_stops: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which boxes meet which other ones, and where these intersections begin and end."""
    found = []
    step = max(_MAX_PAIRS // max(len(other_starts), 1), 1)
    for first in range(0, max(len(starts), 1), step):
        rows = slice(first, first + step)
        low = torch.maximum(starts[rows, None], other_starts[None])
        high = torch.minimum(stops[rows, None], other_stops[None])
        one, other = (high > low).all(2).nonzero(as_tuple=True)
        found.append((one + first, other, low[one, other], high[one, other]))
    one, other, low, high = map(torch.cat, zip(*found, strict=True))
    return one, other, low, high
