"""Plans: which tensors move in which round, so that no round takes more memory than a bucket has.

Moves from one layout to another, of one dtype, are planned once: their bytes differ in where they lie in memory only.
Every rank works out its own part, from the layouts alone; how many rounds there are, and which moves each of them
serves, comes out the same on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from statetree.exchange.routes import Route, Slab
from statetree.exchange.senders import turns_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from statetree.chunks.layouts import ChunkLayout

#: From this size on elements are not packed with others.
LARGE_BYTES: Final = 1 << 20
#: From so many ranks on, what goes from all to all takes one collective instead of a message for each pair. (With gloo,
#: between few ranks messages took a third of an all-gather's time.)
MANY_RANKS: Final = 32

_WHOLE: Final = Slab(0, 1)


class Move(NamedTuple):
    """One global tensor on its way from one layout to another of the same shape."""

    source: ChunkLayout
    target: ChunkLayout
    dtype: torch.dtype


class Chunked(NamedTuple):
    """Where the elements of a tensor are: the layout, and this rank's pieces in the order of its rows."""

    layout: ChunkLayout
    pieces: Sequence[torch.Tensor]


class Transfer(NamedTuple):
    """A tensor to move: where its elements come from, where they go, and the dtype in which they travel.

    That is the dtype of the pieces, unless they are converted: where they are packed or where they are unpacked.
    """

    source: Chunked
    target: Chunked
    dtype: torch.dtype


class Transport(Enum):
    """How the bytes of a round travel."""

    MESSAGES = "from rank to rank"
    ALL_GATHER = "from each rank to all"
    BROADCAST = "from one rank to all"


class Part(NamedTuple):
    """What a round does of alike moves: all of them, or one slab of one."""

    route: Route  # the way that they go
    dtype: torch.dtype  # their dtype
    moves: Sequence[int]  # their numbers
    slab: Slab = _WHOLE  # which slab


class Round(NamedTuple):
    """What moves at a time."""

    transport: Transport  # how
    root: int  # which rank has what is broadcast
    #: What. Larger elements come first: then each is aligned if the first one is.
    parts: list[Part]


class _Kind(NamedTuple):
    """What moves that may share a part have in common: the way, the dtype, and how they travel."""

    route: Route
    dtype: torch.dtype
    transport: Transport
    root: int
    nbytes: int


class ExchangePlan:
    """This rank's part of the exchange that takes all moves to their targets.

    The moves are the same on every rank, in the same order. A rank sends and receives ``bucket_bytes`` in one round, or
    one element if that has more.
    """

    def __init__(self, moves: Sequence[Move], rank: int, size: int, bucket_bytes: int) -> None:
        self._rank = rank
        self._size = size
        self._kinds: dict[tuple[int, int, torch.dtype, int | None], _Kind] = {}
        self._bucket_bytes = bucket_bytes
        self.rounds = list(self._rounds(self._kinds_of(moves)))

    def _kinds_of(self, moves: Sequence[Move]) -> list[_Kind]:
        order = sorted(range(len(moves)), key=lambda number: -moves[number].source.numel * moves[number].dtype.itemsize)
        turns = dict(zip(order, turns_of([moves[number][:2] for number in order]), strict=True))
        return [self._kind(move, turns[number]) for number, move in enumerate(moves)]

    def _kind(self, move: Move, turn: int | None) -> _Kind:
        key = (id(move.source), id(move.target), move.dtype, turn)
        if key not in self._kinds:
            route = Route(move.source, move.target, turn, self._rank)
            transport, root = self._transport(route, move.dtype.itemsize)
            elements = route.source.numel if transport is not Transport.MESSAGES else route.most_sent + route.most_held
            self._kinds[key] = _Kind(route, move.dtype, transport, root, elements * move.dtype.itemsize)
        return self._kinds[key]

    def _transport(self, route: Route, itemsize: int) -> tuple[Transport, int]:
        if self._size > 1 and route.is_to_all and len(route.target.ranks) == self._size:
            holders = route.source.ranks
            if len(holders) and bool((holders == holders[0]).all()):
                return Transport.BROADCAST, int(holders[0])
            box = route.even_box
            if self._size >= MANY_RANKS and len(holders) == self._size and box and prod(box) * itemsize < LARGE_BYTES:
                return Transport.ALL_GATHER, 0
        return Transport.MESSAGES, 0

    def _rounds(self, kinds: list[_Kind]) -> Iterator[Round]:
        """Fill rounds, one after the other."""
        place = {id(kind): place for place, kind in enumerate(self._kinds.values())}
        by_transport: defaultdict[tuple[Transport, int], list[int]] = defaultdict(list)
        for number in sorted(range(len(kinds)), key=lambda number: place[id(kinds[number])]):
            by_transport[kinds[number].transport, kinds[number].root].append(number)  # alike rounds are laid out once
        for travels, numbers in by_transport.items():
            room = self._bucket_bytes
            filled: list[int] = []
            for number in numbers:
                kind = kinds[number]
                if kind.nbytes > room and filled:
                    yield Round(*travels, _parts(filled, kinds))
                    filled, room = [], self._bucket_bytes
                if kind.nbytes > self._bucket_bytes:
                    for slab in self._slabs(kind):
                        yield Round(*travels, [Part(kind.route, kind.dtype, [number], slab)])
                else:
                    filled.append(number)
                    room -= kind.nbytes
            if filled:
                yield Round(*travels, _parts(filled, kinds))

    def _slabs(self, kind: _Kind) -> list[Slab]:
        """Cut what is larger than a bucket."""
        route = kind.route
        needed = kind.nbytes
        if kind.transport is Transport.MESSAGES:
            needed = (route.most_sent + route.most_received) * kind.dtype.itemsize
        count = -(-needed // self._bucket_bytes)
        return [Slab(number, count) for number in range(route.slabs(count))]


def _parts(numbers: Sequence[int], kinds: Sequence[_Kind]) -> list[Part]:
    """Put alike moves together."""
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for number in numbers:
        alike[id(kinds[number])].append(number)
    parts = [Part(kinds[listed[0]].route, kinds[listed[0]].dtype, listed) for listed in alike.values()]
    return sorted(parts, key=lambda part: (-part.dtype.itemsize, str(part.dtype)))
