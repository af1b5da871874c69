"""Plans: which elements go from which rank to which, in rounds of bounded size.

A *move* takes one global tensor from one layout to another. Its transfers are intersections of the source's boxes with
the target's. Every rank computes only its own transfers, from the layouts alone; how many rounds there are, and which
moves each of them serves, comes out the same on all ranks.
"""

from __future__ import annotations

from itertools import compress, pairwise, repeat
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from statetree.chunks.boxes import Box, slab, slab_grid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statetree.chunks.layouts import ChunkLayout


class Move(NamedTuple):
    """One global tensor on its way from one layout to another of the same shape."""

    source: ChunkLayout
    target: ChunkLayout
    dtype: torch.dtype


#: A box of a piece, by the dims in which it is smaller than the piece: each with the first index and the size.
Cut = tuple[tuple[int, int, int], ...]


class BoxTransfer(NamedTuple):
    """Elements that go to peers, or come from one: a box of one of this rank's pieces."""

    peers: tuple[int, ...]
    piece: int
    cut: Cut
    sizes: tuple[int, ...]
    numel: int


class LocalCopy(NamedTuple):
    """Elements that stay on this rank: they go from one of its pieces to another."""

    source: int
    source_cut: Cut
    target: int
    target_cut: Cut


class Share(NamedTuple):
    """What a round does for one move on this rank.

    The transfers with one peer are listed in the same order by both ranks.
    """

    move: int
    sends: Sequence[BoxTransfer]
    receives: Sequence[BoxTransfer]
    copies: Sequence[LocalCopy]


class Slab(NamedTuple):
    """What a round does of one move: all of it, or one of several slabs."""

    move: int
    slab: int
    num_slabs: int


class ExchangePlan:
    """This rank's part of the exchange that takes all moves to their targets.

    Args:
        moves: The same on every rank, in the same order.
        rank: This rank.
        size: How many ranks there are.
        bucket_bytes: How many bytes a rank sends and receives in one round, unless a single element has more.
        source: The rank whose elements win: boxes that it holds come from it, also for ranks that hold them as well.
    """

    def __init__(
        self, moves: Sequence[Move], rank: int, size: int, bucket_bytes: int, *, source: int | None = None
    ) -> None:
        self._moves = moves
        self._rank = rank
        self._source = source
        self._tables: dict[tuple[int, int, tuple[int, ...] | None], _Table] = {}
        replicas = [(move.source, move.dtype.itemsize) for move in moves]
        self._owners = choose_owners(replicas, size, source)
        self.batches = self._batch(bucket_bytes)

    def rounds(self) -> Iterator[list[Share]]:
        """Yield what is sent, received and copied at a time. All ranks have equally many rounds."""
        for batch in self.batches:
            yield [Share(part.move, *self._table(part.move).share(part)) for part in batch]

    def _table(self, index: int) -> _Table:
        source, target, _ = self._moves[index]
        owners = self._owners[index]
        key = (id(source), id(target), owners)
        if key not in self._tables:
            self._tables[key] = _Table(source, target, owners, self._rank, self._source)
        return self._tables[key]

    def _batch(self, bucket_bytes: int) -> list[list[Slab]]:
        batches: list[list[Slab]] = []
        room = 0
        loads: dict[tuple[int, int, tuple[int, ...] | None], int] = {}
        for index, (source, target, dtype) in enumerate(self._moves):
            owners = self._owners[index]
            key = (id(source), id(target), owners)
            if key not in loads:
                loads[key] = _most_sent(source, target, owners) + _most_held(target)
            need = loads[key] * dtype.itemsize
            if need > bucket_bytes:
                finest = _most_sent(source, target, owners) + _most_received(source, target)
                slabs = -(-finest * dtype.itemsize // bucket_bytes)
                count = max((prod(slab_grid(box.sizes, slabs)) for box in _distinct_boxes(source)), default=1)
                batches += [[Slab(index, number, slabs)] for number in range(count)]
                room = 0
                continue
            if need > room or not batches:
                batches.append([])
                room = bucket_bytes
            batches[-1].append(Slab(index, 0, 1))
            room -= need
        return batches


def choose_owners(
    held: Sequence[tuple[ChunkLayout, int]], size: int, source: int | None = None
) -> list[tuple[int, ...] | None]:
    """Choose, for every box of every layout, the one of the ranks that hold it which passes it on.

    The largest first, the least loaded rank takes it: all ranks choose alike without talking to each other.

    Args:
        held: Layouts, and the bytes of an element.
        size: How many ranks there are.
        source: A rank that takes all boxes that it holds.

    Returns:
        For each layout the ranks of its distinct boxes; ``None`` where each box is held by one rank only.
    """
    result: list[tuple[int, ...] | None] = [None] * len(held)
    loads = torch.zeros(size, dtype=torch.int64)
    shared = []
    for index, (layout, itemsize) in enumerate(held):
        if len(layout.distinct.starts) < len(layout.ranks):
            shared.append(index)
        else:
            loads.index_add_(0, layout.ranks, layout.volumes * itemsize)
    for index in sorted(shared, key=lambda index: (-held[index][0].numel * held[index][1], index)):
        layout, itemsize = held[index]
        boxes = layout.distinct
        keys = loads[layout.ranks] * size + layout.ranks
        if source is not None:
            keys[layout.ranks == source] = source - size  # less than any other
        best = torch.full((len(boxes.starts),), torch.iinfo(torch.int64).max)
        best.scatter_reduce_(0, boxes.which, keys, "amin")
        owners = best % size
        loads.index_add_(0, owners, (boxes.stops - boxes.starts).prod(1) * itemsize)
        result[index] = tuple(owners.tolist())
    return result


def owners_of(layout: ChunkLayout, owners: tuple[int, ...] | None) -> torch.Tensor:
    """Return, for every distinct box of a layout, the rank that ``choose_owners`` chose."""
    if owners is not None:
        return torch.tensor(owners, dtype=torch.int64)
    ranks = torch.empty(len(layout.distinct.starts), dtype=torch.int64)
    ranks[layout.distinct.which] = layout.ranks
    return ranks


def _per_rank(ranks: torch.Tensor, volumes: torch.Tensor) -> int:
    """Return the most elements that one rank has."""
    if not len(ranks):
        return 0
    return int(torch.zeros(int(ranks.max()) + 1, dtype=torch.int64).index_add_(0, ranks, volumes).max())


def _most_sent(source: ChunkLayout, target: ChunkLayout, owners: tuple[int, ...] | None) -> int:
    """Return how many elements a rank sends at most: what it owns, to as many ranks as want each element."""
    boxes = source.distinct
    owned = _per_rank(owners_of(source, owners), (boxes.stops - boxes.starts).prod(1))
    copies = -(-int(target.volumes.sum()) // max(target.numel, 1))
    return owned * copies


def _most_held(target: ChunkLayout) -> int:
    """Return how many elements a rank receives at most."""
    return _per_rank(target.ranks, target.volumes)


def _most_received(source: ChunkLayout, target: ChunkLayout) -> int:
    """Return how many elements a rank receives at most if every box of the source were as large as the largest."""
    boxes = source.distinct
    lows, highs = _intersections(target.starts, target.stops, boxes.starts, boxes.stops)
    senders = (highs > lows).all(2).sum(1)
    largest = int((boxes.stops - boxes.starts).prod(1).max()) if len(boxes.starts) else 0
    return _per_rank(target.ranks, senders) * largest


def _distinct_boxes(layout: ChunkLayout) -> list[Box]:
    boxes = layout.distinct
    return [
        Box(tuple(start), tuple(stop)) for start, stop in zip(boxes.starts.tolist(), boxes.stops.tolist(), strict=True)
    ]


def _intersections(
    starts: torch.Tensor, stops: torch.Tensor, other_starts: torch.Tensor, other_stops: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Intersect every box with every other one: ``[box, other, dim]``."""
    return torch.maximum(starts[:, None], other_starts[None]), torch.minimum(stops[:, None], other_stops[None])


class _Cuts(NamedTuple):
    """Boxes that go from rank to rank, as columns, in global coordinates.

    They are sorted by ``box`` (which of the source's distinct boxes they are cut from), ``low`` and ``high``: in the
    same way on both ranks.
    """

    box: torch.Tensor
    piece: torch.Tensor
    peer: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    def at(self, chosen: torch.Tensor) -> _Cuts:
        """Return some of them."""
        return _Cuts(*(column[chosen] for column in self))

    def sorted(self) -> _Cuts:
        """Return them in the common order."""
        columns = [self.box, *self.low.unbind(1), *self.high.unbind(1)]
        if bool((self.box[1:] > self.box[:-1]).all()):
            return self
        order = torch.arange(len(self.box))
        for column in reversed(columns):
            if not torch.equal(column[1:], column[:-1]):
                order = order[column[order].argsort(stable=True)]
        return self.at(order)


class _Table:
    """What one rank sends, receives and copies when one layout becomes another, whatever tensor it is for."""

    def __init__(
        self, source: ChunkLayout, target: ChunkLayout, owners: tuple[int, ...] | None, rank: int, preferred: int | None
    ) -> None:
        boxes = source.distinct
        owner = owners_of(source, owners)
        self._source = source
        mine, here = source.ranks == rank, target.ranks == rank
        self._sources = (source.starts[mine], source.stops[mine])
        self._targets = (target.starts[here], target.stops[here])
        count = len(owner)
        #: For every distinct box that this rank has, the piece that holds it.
        self._piece_of = torch.full((count,), -1)
        own_boxes = boxes.which[mine]
        self._piece_of[own_boxes.flip(0)] = torch.arange(len(own_boxes)).flip(0)

        lows, highs = _intersections(*self._targets, boxes.starts, boxes.stops)
        piece, box = (highs > lows).all(2).nonzero(as_tuple=True)
        stays = (self._piece_of[box] >= 0) & _may_stay(owner[box], rank, preferred)
        incoming = _Cuts(box, piece, owner[box], lows[piece, box], highs[piece, box])
        self._staying = incoming.at(stays)
        self._incoming = incoming.at(~stays).sorted()

        own = (owner == rank).nonzero()[:, 0]
        lows, highs = _intersections(boxes.starts[own], boxes.stops[own], target.starts, target.stops)
        found, row = (highs > lows).all(2).nonzero(as_tuple=True)
        peer, box = target.ranks[row], own[found]
        held = source.ranks * count + boxes.which  # which rank has which box
        stays = peer == rank if owners is None else torch.isin(peer * count + box, held)
        stays &= _may_stay(owner[box], peer, preferred)
        outgoing = _Cuts(box, self._piece_of[box], peer, lows[found, row], highs[found, row])
        self._outgoing = outgoing.at(~stays).sorted()
        self._whole: tuple[list[BoxTransfer], list[BoxTransfer], list[LocalCopy]] | None = None

    def share(self, part: Slab) -> tuple[list[BoxTransfer], list[BoxTransfer], list[LocalCopy]]:
        """Return what this rank sends, receives and copies for a part of a move."""
        if part.num_slabs > 1:
            return self._share(part)
        if self._whole is None:
            self._whole = self._share(part)
        return self._whole

    def _share(self, part: Slab) -> tuple[list[BoxTransfer], list[BoxTransfer], list[LocalCopy]]:
        outgoing, incoming, staying = (
            self._clipped(cuts, part) for cuts in (self._outgoing, self._incoming, self._staying)
        )
        receives = list(map(BoxTransfer, zip(incoming.peer.tolist(), strict=True), *_within(incoming, self._targets)))
        sources, source_cuts, *_ = _within(staying._replace(piece=self._piece_of[staying.box]), self._sources)
        targets, target_cuts, *_ = _within(staying, self._targets)
        return self._sends(outgoing), receives, list(map(LocalCopy, sources, source_cuts, targets, target_cuts))

    def _sends(self, cuts: _Cuts) -> list[BoxTransfer]:
        """Return transfers in which peers that get the same are named together."""
        if not len(cuts.box):
            return []
        rows = torch.cat([cuts.box[:, None], cuts.low, cuts.high], 1)
        first = torch.ones(len(rows), dtype=torch.bool)
        first[1:] = (rows[1:] != rows[:-1]).any(1)
        begins = first.nonzero()[:, 0]
        peers = cuts.peer.tolist()
        bounds = [*begins.tolist(), len(rows)]
        together = [tuple(peers[begin:end]) for begin, end in pairwise(bounds)]
        return list(map(BoxTransfer, together, *_within(cuts.at(begins), self._sources)))

    def _clipped(self, cuts: _Cuts, part: Slab) -> _Cuts:
        """Return what lies in one slab of each box."""
        if part.num_slabs == 1 or not len(cuts.box):
            return cuts
        numbers, which = torch.unique(cuts.box, return_inverse=True)
        boxes = self._source.distinct
        starts, stops = boxes.starts[numbers].tolist(), boxes.stops[numbers].tolist()
        boxed = [Box(tuple(a), tuple(b)) for a, b in zip(starts, stops, strict=True)]
        slabs = [slab(box, part.num_slabs, part.slab) or Box(box.start, box.start) for box in boxed]
        bounds = torch.tensor([[box.start, box.stop] for box in slabs], dtype=torch.int64)[which]
        low, high = torch.maximum(cuts.low, bounds[:, 0]), torch.minimum(cuts.high, bounds[:, 1])
        return cuts._replace(low=low, high=high).at((high > low).all(1))


def _may_stay(owner: torch.Tensor, rank: torch.Tensor | int, preferred: int | None) -> torch.Tensor:
    """Whether a rank that has a box may use its own instead of the owner's."""
    if preferred is None:
        return torch.ones_like(owner, dtype=torch.bool)
    return (owner != preferred) | (owner == rank)


def _within(
    cuts: _Cuts, pieces: tuple[torch.Tensor, torch.Tensor]
) -> tuple[list[int], list[Cut], list[tuple[int, ...]], list[int]]:
    """Return, for each box that moves: its piece, where it lies in that, its shape and volume."""
    starts, stops = pieces[0][cuts.piece], pieces[1][cuts.piece]
    sizes = cuts.high - cuts.low
    shapes = list(map(tuple, sizes.tolist()))
    bounds = _bounds(cuts.low - starts, sizes, sizes != stops - starts)
    return cuts.piece.tolist(), bounds, shapes, sizes.prod(1).tolist()


def _bounds(firsts: torch.Tensor, sizes: torch.Tensor, cut: torch.Tensor) -> list[Cut]:
    """Return, for each box, in which dims it is cut, and how."""
    somewhere = cut.any(0)
    dims = somewhere.nonzero()[:, 0].tolist()
    columns = [zip(repeat(dim), firsts[:, dim].tolist(), sizes[:, dim].tolist(), strict=False) for dim in dims]
    if torch.equal(somewhere, cut.all(0)):  # all boxes in the same dims
        return list(zip(*columns, strict=True)) if dims else [()] * len(cut)
    chosen = zip(*columns, strict=True), cut[:, dims].tolist()
    return [tuple(compress(row, kept)) for row, kept in zip(*chosen, strict=True)]
