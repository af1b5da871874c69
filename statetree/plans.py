"""Plans: which elements go from which rank to which, in rounds of bounded size.

A *move* takes one global tensor from one layout to another. Its transfers are intersections of the source's boxes with
the target's. Every rank computes only its own transfers, from the layouts alone; how many rounds there are, and which
moves each of them serves, comes out the same on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from statetree.chunks import Box, Layout, in_slabs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Move(NamedTuple):
    """One global tensor on its way from one layout to another of the same shape."""

    source: Layout
    target: Layout
    dtype: torch.dtype


class Transfer(NamedTuple):
    """Elements that go to a peer, or come from one: the box from ``start`` on of one of this rank's pieces.

    ``start`` is ``None`` where it is the whole piece.
    """

    peer: int
    move: int
    piece: int
    start: tuple[int, ...] | None
    sizes: tuple[int, ...]
    numel: int


class Copy(NamedTuple):
    """Elements that stay on this rank: they go from one of its pieces to another."""

    move: int
    source: int
    target: int
    source_start: tuple[int, ...] | None
    target_start: tuple[int, ...] | None
    sizes: tuple[int, ...]


class Round(NamedTuple):
    """What this rank sends and receives in one collective, and copies meanwhile.

    The transfers with one peer are listed in the same order by both ranks.
    """

    sends: list[Transfer]
    receives: list[Transfer]
    copies: list[Copy]


class Part(NamedTuple):
    """What a round does of one move: all of it, or one of several slabs."""

    move: int
    slab: int
    num_slabs: int


class Plan:
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

    def rounds(self) -> Iterator[Round]:
        """Yield the rounds. All ranks have equally many."""
        for batch in self.batches:
            found = Round([], [], [])
            for part in batch:
                self._table(part.move).add_to(found, part)
            yield found

    def _table(self, index: int) -> _Table:
        source, target, _ = self._moves[index]
        owners = self._owners[index]
        key = (id(source), id(target), owners)
        if key not in self._tables:
            self._tables[key] = _Table(source, target, owners, self._rank, self._source)
        return self._tables[key]

    def _batch(self, bucket_bytes: int) -> list[list[Part]]:
        batches: list[list[Part]] = []
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
                count = max((len(in_slabs(box, slabs)) for box in _distinct_boxes(source)), default=1)
                batches += [[Part(index, slab, slabs)] for slab in range(count)]
                room = 0
                continue
            if need > room or not batches:
                batches.append([])
                room = bucket_bytes
            batches[-1].append(Part(index, 0, 1))
            room -= need
        return batches


def choose_owners(
    held: Sequence[tuple[Layout, int]], size: int, source: int | None = None
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


def owners_of(layout: Layout, owners: tuple[int, ...] | None) -> torch.Tensor:
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


def _most_sent(source: Layout, target: Layout, owners: tuple[int, ...] | None) -> int:
    """Return how many elements a rank sends at most: what it owns, to as many ranks as want each element."""
    boxes = source.distinct
    owned = _per_rank(owners_of(source, owners), (boxes.stops - boxes.starts).prod(1))
    copies = -(-int(target.volumes.sum()) // max(target.numel, 1))
    return owned * copies


def _most_held(target: Layout) -> int:
    """Return how many elements a rank receives at most."""
    return _per_rank(target.ranks, target.volumes)


def _most_received(source: Layout, target: Layout) -> int:
    """Return how many elements a rank receives at most if every box of the source were as large as the largest."""
    boxes = source.distinct
    lows, highs = _intersections(target.starts, target.stops, boxes.starts, boxes.stops)
    senders = (highs > lows).all(2).sum(1)
    largest = int((boxes.stops - boxes.starts).prod(1).max()) if len(boxes.starts) else 0
    return _per_rank(target.ranks, senders) * largest


def _distinct_boxes(layout: Layout) -> list[Box]:
    boxes = layout.distinct
    return [
        Box(tuple(start), tuple(stop)) for start, stop in zip(boxes.starts.tolist(), boxes.stops.tolist(), strict=True)
    ]


def _intersections(
    starts: torch.Tensor, stops: torch.Tensor, other_starts: torch.Tensor, other_stops: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Intersect every box with every other one: ``[box, other, dim]``."""
    return torch.maximum(starts[:, None], other_starts[None]), torch.minimum(stops[:, None], other_stops[None])


class _Row(NamedTuple):
    """A transfer in global coordinates: ``box`` numbers the source's distinct boxes."""

    peer: int
    box: int
    piece: int
    low: tuple[int, ...]
    high: tuple[int, ...]


class _Table:
    """What one rank sends, receives and copies when one layout becomes another, whatever tensor it is for."""

    def __init__(
        self, source: Layout, target: Layout, owners: tuple[int, ...] | None, rank: int, preferred: int | None
    ) -> None:
        boxes = source.distinct
        owner = owners_of(source, owners)
        self._boxes = _distinct_boxes(source)
        self._sources = source.boxes_of(rank)
        self._targets = target.boxes_of(rank)
        count = len(owner)
        held = source.ranks * count + boxes.which  # which rank has which box
        #: For every distinct box that this rank has, the piece that holds it.
        self._piece_of = {
            box: piece for piece, box in reversed(list(enumerate(boxes.which[source.ranks == rank].tolist())))
        }

        mine = (target.ranks == rank).nonzero()[:, 0]
        lows, highs = _intersections(target.starts[mine], target.stops[mine], boxes.starts, boxes.stops)
        piece, box = (highs > lows).all(2).nonzero(as_tuple=True)
        here = torch.isin(rank * count + box, held) & _may_stay(owner[box], rank, preferred)
        peer = torch.where(here, rank, owner[box])
        order = box.argsort(stable=True)  # by box, then by the target's row
        self._incoming = _rows(peer, box, piece, lows[piece, box], highs[piece, box], order)

        own = (owner == rank).nonzero()[:, 0]
        lows, highs = _intersections(boxes.starts[own], boxes.stops[own], target.starts, target.stops)
        found, row = (highs > lows).all(2).nonzero(as_tuple=True)
        peer, box = target.ranks[row], own[found]
        stays = torch.isin(peer * count + box, held) & _may_stay(owner[box], peer, preferred)
        keep = (~stays).nonzero()[:, 0]
        self._outgoing = _rows(peer, box, box, lows[found, row], highs[found, row], keep)
        self._rank = rank
        self._whole: Round | None = None

    def add_to(self, found: Round, part: Part) -> None:
        """Add a move's transfers to a round's."""
        if part.num_slabs > 1:
            fresh = self._round(part)
        else:
            if self._whole is None:
                self._whole = self._round(part)
            fresh = self._whole
        move = part.move
        found.sends.extend([transfer._replace(move=move) for transfer in fresh.sends])
        found.receives.extend([transfer._replace(move=move) for transfer in fresh.receives])
        found.copies.extend([copy._replace(move=move) for copy in fresh.copies])

    def _round(self, part: Part) -> Round:
        sends, receives, copies = [], [], []
        slabs: dict[int, list[Box]] = {}
        for outgoing, rows in ((True, self._outgoing), (False, self._incoming)):
            for row in rows:
                low, high = row.low, row.high
                if part.num_slabs > 1:
                    if row.box not in slabs:
                        slabs[row.box] = in_slabs(self._boxes[row.box], part.num_slabs)
                    if part.slab >= len(slabs[row.box]):
                        continue
                    slab = slabs[row.box][part.slab]
                    low, high = tuple(map(max, low, slab.start)), tuple(map(min, high, slab.stop))
                    if not all(map(int.__lt__, low, high)):
                        continue
                cut = Box(low, high)
                if outgoing:
                    piece = self._piece_of[row.box]
                    sends.append(_transfer(row.peer, piece, self._sources[piece], cut))
                elif row.peer != self._rank:
                    receives.append(_transfer(row.peer, row.piece, self._targets[row.piece], cut))
                else:
                    piece = self._piece_of[row.box]
                    starts = _within(self._sources[piece], cut), _within(self._targets[row.piece], cut)
                    copies.append(Copy(0, piece, row.piece, *starts, cut.sizes))
        return Round(sends, receives, copies)


def _may_stay(owner: torch.Tensor, rank: torch.Tensor | int, preferred: int | None) -> torch.Tensor:
    """Whether a rank that has a box may use its own instead of the owner's."""
    if preferred is None:
        return torch.ones_like(owner, dtype=torch.bool)
    return (owner != preferred) | (owner == rank)


def _rows(
    peer: torch.Tensor,
    box: torch.Tensor,
    piece: torch.Tensor,
    lows: torch.Tensor,
    highs: torch.Tensor,
    order: torch.Tensor,
) -> list[_Row]:
    columns = (peer[order], box[order], piece[order], lows[order], highs[order])
    return [
        _Row(to, number, own, tuple(low), tuple(high))
        for to, number, own, low, high in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _within(piece: Box, cut: Box) -> tuple[int, ...] | None:
    """Return where a box begins in a piece; ``None`` if it is all of it."""
    if cut == piece:
        return None
    return tuple(low - start for low, start in zip(cut.start, piece.start, strict=True))


def _transfer(peer: int, piece: int, whole: Box, cut: Box) -> Transfer:
    sizes = cut.sizes
    numel = 1
    for size in sizes:
        numel *= size
    return Transfer(peer, 0, piece, _within(whole, cut), sizes, numel)
