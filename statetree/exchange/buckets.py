"""BucketedPlan: moves the chunks of tensors between ranks, in rounds of bounded size.

What is small travels packed: for each peer one stretch of bytes, in which the elements of each dtype lie together, and
among these the boxes of each shape.
What is large travels by itself, straight from one tensor to the other where both are contiguous. While one round is
under way, the next is packed.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import groupby, islice
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.exchange.plan import BoxTransfer, Cut, ExchangePlan, Move

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from statetree.exchange.executor import Executor
    from statetree.exchange.group import Group

#: How many bytes a rank sends and receives at a time, unless the caller says otherwise.
BUCKET_BYTES: Final = 64 << 20
#: From this size on elements are not packed with others.
LARGE_BYTES: Final = 1 << 20
#: Where the elements of each dtype begin in a bucket: at multiples of this many bytes.
_ALIGNMENT: Final = 16
#: Rounds of up to so many transfers are kept for the next run.
_MAX_KEPT: Final = 100_000
#: For so many rounds memory is taken in advance. Later ones are much alike.
_MAX_SIZED: Final = 1000


class Pieces(NamedTuple):
    """This rank's tensors for one move: those that elements are taken from, and those that they are put into."""

    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]


#: The number of a move, and a transfer of its elements.
Moved = tuple[int, BoxTransfer]


#: A box: the number of a move, which of its pieces, and where in that.
Place = tuple[int, int, Cut]


class _Run(NamedTuple):
    """Boxes of one shape that lie one behind the other in a bucket."""

    sizes: tuple[int, ...]
    boxes: list[Place]


class _Section(NamedTuple):
    """Elements of one dtype in a bucket: where they begin and end in bytes, how many each run has, and the runs."""

    dtype: torch.dtype
    start: int
    stop: int
    counts: list[int]
    runs: list[_Run]


class _Side(NamedTuple):
    """What is sent in one round, or received.

    Attributes:
        sections: What is packed.
        stretches: Which bytes of the bucket go to a peer, or come from it.
        large: What travels by itself.
        nbytes: The size of the bucket.
    """

    sections: list[_Section]
    stretches: list[tuple[int, int, int]]
    large: list[Moved]
    nbytes: int


class _Step(NamedTuple):
    """A round, laid out in buckets."""

    sent: _Side
    received: _Side
    copied: list[Place]
    written: list[Place]


class _Size(NamedTuple):
    """What a round takes of a bucket: bytes, and places for those large boxes that cannot travel as they lie."""

    nbytes: int
    sent: list[Moved]
    received: list[Moved]


#: Memory that rounds are packed into in turn.
Buckets = tuple[torch.Tensor, torch.Tensor]


def take_buckets(sizes: Sequence[tuple[int, int]], device: torch.device) -> Buckets:
    """Take the memory for running exchanges one after the other.

    Args:
        sizes: The ``bucket_sizes`` of each.
        device: Where it is taken.
    """
    first, second = (max((pair[number] for pair in sizes), default=0) for number in range(2))
    return tuple(torch.empty(size, dtype=torch.uint8, device=device) for size in (first, second))  # type: ignore[return-value]  # two


class BucketedPlan:
    """A plan laid out in buckets, which can be run with any tensors of the moves' layouts.

    Args:
        moves: What goes where.
        group: The ranks.
        bucket_bytes: How many bytes a rank sends and receives in one round.
        source: As for ``ExchangePlan``.
    """

    def __init__(self, moves: Sequence[Move], group: Group, bucket_bytes: int, *, source: int | None = None) -> None:
        self._plan = ExchangePlan(moves, group.rank, group.size, bucket_bytes, source=source)
        self._dtypes = [move.dtype for move in moves]
        self._kept: list[_Step] | None = None
        self._sizes: list[_Size] | None = None

    def bytes_sent(self) -> int:
        """Return how many bytes of elements this rank sends to others."""
        return sum(
            transfer.numel * self._dtypes[share.move].itemsize * len(transfer.peers)
            for shares in self._plan.rounds()
            for share in shares
            for transfer in share.sends
        )

    def bucket_sizes(self, pieces: Sequence[Pieces], device: torch.device) -> tuple[int, int]:
        """Return how many bytes the two buckets take in which rounds are packed in turn.

        Args:
            pieces: As for ``run``.
            device: The memory that is sent from and received into.
        """
        if self._sizes is None:
            self._sizes = list(map(_size, islice(self._steps(), _MAX_SIZED)))
        most = [0, 0]
        for number, size in enumerate(self._sizes):
            need = size.nbytes + _extra_bytes(size, pieces, device)
            most[number % 2] = max(most[number % 2], need)
        return most[0], most[1]

    def run(self, pieces: Sequence[Pieces], group: Group, executor: Executor, buckets: Buckets) -> None:
        """Move everything. Nothing is checked and (but for very many rounds) no memory taken: the ranks have agreed.

        Args:
            pieces: This rank's tensors, for each move.
            group: The ranks.
            executor: Copies, sends and waits.
            buckets: What ``take_buckets`` returned for the ``bucket_sizes`` of these pieces.
        """
        taken = list(buckets)
        finish: Callable[[], None] | None = None
        for number, step in enumerate(self._steps()):
            if number >= _MAX_SIZED:
                taken[number % 2] = _large_enough(taken[number % 2], step, pieces)
            under_way = _start(step, taken[number % 2], pieces, group, executor)
            if finish is not None:
                finish()
            _copy_here(step, pieces, executor)
            finish = under_way
        if finish is not None:
            finish()

    def _steps(self) -> Iterator[_Step]:
        if self._kept is not None:
            yield from self._kept
            return
        made: list[_Step] = []
        count = 0
        for shares in self._plan.rounds():
            sends = [(share.move, transfer) for share in shares for transfer in share.sends]
            receives = [(share.move, transfer) for share in shares for transfer in share.receives]
            copies = [(share.move, copy) for share in shares for copy in share.copies]
            step = _Step(
                _lay_out(sends, self._dtypes),
                _lay_out(receives, self._dtypes),
                [(move, copy.source, copy.source_cut) for move, copy in copies],
                [(move, copy.target, copy.target_cut) for move, copy in copies],
            )
            count += len(sends) + len(receives) + len(copies)
            if count <= _MAX_KEPT:
                made.append(step)
            yield step
        if count <= _MAX_KEPT:
            self._kept = made


def _lay_out(transfers: list[Moved], dtypes: Sequence[torch.dtype]) -> _Side:
    """Give every transfer its place in a bucket.

    Both ends of a transfer come to the same order: they list what goes from one to the other alike, and it is sorted,
    stably, by what both know of it.
    """
    large: list[Moved] = []
    by_peer: defaultdict[int, list[Moved]] = defaultdict(list)
    for moved in transfers:
        move, transfer = moved
        if transfer.numel * dtypes[move].itemsize >= LARGE_BYTES:
            large.append(moved)
        else:
            for peer in transfer.peers:
                by_peer[peer].append(moved)
    sections: list[_Section] = []
    stretches: list[tuple[int, int, int]] = []
    placed: dict[tuple[int, ...], tuple[int, int]] = {}  # peers that get the same share a stretch
    position = 0
    kinds = {dtype: (-dtype.itemsize, str(dtype)) for dtype in dtypes}
    for peer, own in sorted(by_peer.items()):
        key = tuple(map(id, own))
        if key not in placed:
            start = position
            own = sorted(own, key=lambda moved: (kinds[dtypes[moved[0]]], moved[1].sizes))
            for dtype, listed in groupby(own, key=lambda moved: dtypes[moved[0]]):
                runs = [
                    _Run(sizes, [(move, transfer.piece, transfer.cut) for move, transfer in alike])
                    for sizes, alike in groupby(listed, key=lambda moved: moved[1].sizes)
                ]
                counts = [prod(run.sizes) * len(run.boxes) for run in runs]
                stop = position + sum(counts) * dtype.itemsize
                sections.append(_Section(dtype, position, stop, counts, runs))
                position = _aligned(stop)
            placed[key] = (start, position)
        stretches.append((peer, *placed[key]))
    return _Side(sections, stretches, large, position)


def _size(step: _Step) -> _Size:
    return _Size(step.sent.nbytes + step.received.nbytes, step.sent.large, step.received.large)


def _large_enough(bucket: torch.Tensor, step: _Step, pieces: Sequence[Pieces]) -> torch.Tensor:
    """Return a bucket for a round whose size was not known in advance."""
    size = _size(step)
    need = size.nbytes + _extra_bytes(size, pieces, bucket.device)
    return bucket if need <= bucket.numel() else bucket.new_empty(need)


def _extra_bytes(size: _Size, pieces: Sequence[Pieces], device: torch.device) -> int:
    """Return how many bytes a bucket needs for large boxes that cannot travel as they lie."""
    boxes = [
        *(_cut(pieces[move].sources[transfer.piece], transfer.cut) for move, transfer in size.sent),
        *(_cut(pieces[move].targets[transfer.piece], transfer.cut) for move, transfer in size.received),
    ]
    return sum(_aligned(box.numel() * box.itemsize) for box in boxes if not _can_travel(box, device))


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


class _Room:
    """What is left of a bucket beside that which is packed."""

    def __init__(self, bucket: torch.Tensor, start: int) -> None:
        self._bucket = bucket
        self._start = start

    def like(self, box: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor of a box's shape and dtype, with undefined elements."""
        stop = self._start + box.numel() * box.itemsize
        fresh = self._bucket[self._start : stop].view(box.dtype).view(box.shape)
        self._start = _aligned(stop)
        return fresh


def _start(
    step: _Step, bucket: torch.Tensor, pieces: Sequence[Pieces], group: Group, executor: Executor
) -> Callable[[], None]:
    """Start a round, and return the function that waits for it and puts what came in where it belongs."""
    outgoing = bucket[: step.sent.nbytes]
    incoming = bucket[step.sent.nbytes :]
    room = _Room(bucket, step.sent.nbytes + step.received.nbytes)
    sources = [piece.sources for piece in pieces]
    targets = [piece.targets for piece in pieces]
    received = [(peer, incoming[start:stop]) for peer, start, stop in step.received.stretches]
    unpacked: list[tuple[torch.Tensor, torch.Tensor]] = []  # large boxes that do not lie in one stretch of memory
    written: list[torch.Tensor] = []
    for move, transfer in step.received.large:
        box = whole = _cut(targets[move][transfer.piece], transfer.cut)
        if _can_travel(box, bucket.device):
            written.append(box)  # by the backend, which tells nobody
        else:
            whole = room.like(box)
            unpacked.append((box, whole))
        received.append((transfer.peers[0], _as_bytes(whole)))
    places, boxes = _pairs(step.sent, outgoing, sources)
    executor.copy(places, boxes)
    sent = [(peer, outgoing[start:stop]) for peer, start, stop in step.sent.stretches]
    for move, transfer in step.sent.large:
        box = _cut(sources[move][transfer.piece], transfer.cut)
        if not _can_travel(box, bucket.device):
            whole = room.like(box)
            executor.copy([whole], [box])
            box = whole
        sent += [(peer, _as_bytes(box)) for peer in transfer.peers]
    wait = executor.start(partial(group.exchange, sent, received))

    def finish() -> None:
        wait()
        executor.call(partial(torch.autograd.graph.increment_version, written))
        places, boxes = _pairs(step.received, incoming, targets)
        executor.copy([*boxes, *(box for box, _ in unpacked)], [*places, *(whole for _, whole in unpacked)])

    return finish


def _can_travel(box: torch.Tensor, device: torch.device) -> bool:
    """Whether the elements of a box can be sent as they lie, or received there."""
    return box.is_contiguous() and box.device == device and not box.is_conj() and not box.is_neg()


def _as_bytes(box: torch.Tensor) -> torch.Tensor:
    return box.view(-1).view(torch.uint8)


def _cut(piece: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Return a box of a piece."""
    for dim, first, size in cut:
        piece = piece.narrow(dim, first, size)
    return piece


def _pairs(side: _Side, bucket: torch.Tensor, tensors: list[Sequence[torch.Tensor]]) -> tuple[list[Any], list[Any]]:
    """Return the places in a bucket, shaped like what they hold, and the boxes of the pieces that belong there."""
    places: list[torch.Tensor] = []
    boxes: list[torch.Tensor] = []
    for section in side.sections:
        stretches = bucket[section.start : section.stop].view(section.dtype).split(section.counts)
        for stretch, (sizes, run) in zip(stretches, section.runs, strict=True):
            places += stretch.view(len(run), *sizes).unbind()
            boxes += [_cut(tensors[move][piece], cut) for move, piece, cut in run]
    return places, boxes


def _copy_here(step: _Step, pieces: Sequence[Pieces], executor: Executor) -> None:
    sources = [_cut(pieces[move].sources[piece], cut) for move, piece, cut in step.copied]
    targets = [_cut(pieces[move].targets[piece], cut) for move, piece, cut in step.written]
    executor.copy(targets, sources)
