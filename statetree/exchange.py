"""Exchange: moves the chunks of tensors between ranks, in buckets of bounded size.

Whatever the dtypes, a bucket is bytes: for each peer one stretch, in which the elements of each dtype lie together.
While one bucket is under way, the next is packed.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.plans import Copy, Move, Plan, Transfer
from statetree.torch_internals import copy_each

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.groups import Group

#: How many bytes a rank sends and receives at a time, unless the caller says otherwise.
BUCKET_BYTES: Final = 64 << 20
#: Where the elements of each dtype begin in a bucket: at multiples of this many bytes.
_ALIGNMENT: Final = 16


class Pieces(NamedTuple):
    """This rank's tensors for one move: those that elements are taken from, and those that they are put into."""

    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]


class _Section(NamedTuple):
    """A stretch of a bucket with elements of one dtype: where it begins and ends in bytes, and what lies in it."""

    dtype: torch.dtype
    start: int
    stop: int
    transfers: list[Transfer]
    counts: list[int]


class _Side(NamedTuple):
    """What is sent in one round, or received."""

    sections: list[_Section]
    splits: list[int]  # bytes for each rank
    nbytes: int


class _Step(NamedTuple):
    """A round, laid out in buckets."""

    sent: _Side
    received: _Side
    copies: list[Copy]


class Exchange:
    """A plan laid out in buckets, which can be run with any tensors of the moves' layouts.

    Args:
        moves: What goes where.
        group: The ranks.
        bucket_bytes: How many bytes a rank sends and receives in one round.
        source: As for ``Plan``.
        silent: Whether every rank is known to have all that it needs, so that there is nothing to communicate.

    Attributes:
        bytes_sent: How many bytes this rank sends to others.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        group: Group,
        bucket_bytes: int,
        *,
        source: int | None = None,
        silent: bool = False,
    ) -> None:
        plan = Plan(moves, group.rank, group.size, bucket_bytes, source=source)
        dtypes = [move.dtype for move in moves]
        self._silent = silent or group.size == 1
        self._steps = [
            _Step(_lay_out(sends, dtypes, group.size), _lay_out(receives, dtypes, group.size), copies)
            for sends, receives, copies in plan.rounds()
        ]
        self.bytes_sent = sum(step.sent.nbytes for step in self._steps)
        self._capacity = max((step.sent.nbytes + step.received.nbytes for step in self._steps), default=0)

    def run(self, pieces: Sequence[Pieces], group: Group, device: torch.device) -> None:
        """Move everything. Nothing that is checked can fail any more: the ranks have agreed.

        Args:
            pieces: This rank's tensors, for each move.
            group: The ranks.
            device: The memory that is sent from and received into.
        """
        buckets = [torch.empty(0, dtype=torch.uint8, device=device)] * 2
        if not self._silent:
            buckets = [
                torch.empty(self._capacity, dtype=torch.uint8, device=device) for _ in range(min(2, len(self._steps)))
            ] * 2
        under_way: tuple[Callable[[], None], _Step, torch.Tensor] | None = None
        for number, step in enumerate(self._steps):
            if self._silent:
                _copy_here(step.copies, pieces)
                continue
            bucket = buckets[number % 2]
            sent = bucket[: step.sent.nbytes]
            received = bucket[step.sent.nbytes : step.sent.nbytes + step.received.nbytes]
            _pack(step.sent, sent, pieces)
            if under_way is not None:
                under_way[0]()
            pending = group.all_to_all(received, sent, step.received.splits, step.sent.splits)
            if under_way is not None:
                _unpack(under_way[1].received, under_way[2], pieces)
            _copy_here(step.copies, pieces)
            under_way = pending, step, received
        if under_way is not None:
            under_way[0]()
            _unpack(under_way[1].received, under_way[2], pieces)


def _lay_out(transfers: list[Transfer], dtypes: Sequence[torch.dtype], size: int) -> _Side:
    """Give every transfer its place in a bucket. Both ends of a transfer come to the same result."""
    sections: list[_Section] = []
    splits = [0] * size
    position = 0

    def place(transfer: Transfer) -> tuple[int, int, str]:
        dtype = dtypes[transfer.move]
        return (transfer.peer, -dtype.itemsize, str(dtype))

    for (peer, _, _), run in groupby(sorted(transfers, key=place), place):
        listed = list(run)
        counts = [transfer.numel for transfer in listed]
        dtype = dtypes[listed[0].move]
        nbytes = sum(counts) * dtype.itemsize
        sections.append(_Section(dtype, position, position + nbytes, listed, counts))
        padded = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        splits[peer] += padded
        position += padded
    return _Side(sections, splits, position)


def _cut(piece: torch.Tensor, start: tuple[int, ...] | None, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return a box of a piece."""
    if start is None:
        return piece
    for dim, (first, size) in enumerate(zip(start, sizes, strict=True)):
        if size != piece.shape[dim]:
            piece = piece.narrow(dim, first, size)
    return piece


def _pairs(side: _Side, bucket: torch.Tensor, tensors: list[Sequence[torch.Tensor]]) -> tuple[list[Any], list[Any]]:
    """Return the places in a bucket, shaped like what they hold, and the boxes of the pieces that belong there."""
    places: list[torch.Tensor] = []
    boxes: list[torch.Tensor] = []
    for section in side.sections:
        slots = bucket[section.start : section.stop].view(section.dtype).split(section.counts)
        for slot, transfer in zip(slots, section.transfers, strict=True):
            places.append(slot.view(transfer.sizes))
            boxes.append(_cut(tensors[transfer.move][transfer.piece], transfer.start, transfer.sizes))
    return places, boxes


def _pack(side: _Side, bucket: torch.Tensor, pieces: Sequence[Pieces]) -> None:
    places, boxes = _pairs(side, bucket, [piece.sources for piece in pieces])
    copy_each(places, boxes)


def _unpack(side: _Side, bucket: torch.Tensor, pieces: Sequence[Pieces]) -> None:
    places, boxes = _pairs(side, bucket, [piece.targets for piece in pieces])
    copy_each(boxes, places)


def _copy_here(copies: Sequence[Copy], pieces: Sequence[Pieces]) -> None:
    sources = [_cut(pieces[copy.move].sources[copy.source], copy.source_start, copy.sizes) for copy in copies]
    targets = [_cut(pieces[copy.move].targets[copy.target], copy.target_start, copy.sizes) for copy in copies]
    copy_each(targets, sources)
