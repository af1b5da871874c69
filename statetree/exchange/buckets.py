"""BucketedPlan: moves the chunks of tensors between ranks, in rounds of bounded size.

What is small travels packed, as ``stacks`` lays it out. What is large travels by itself, straight from one tensor to
the other where both are contiguous. While one round is under way, the next is packed.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch

from statetree.chunks.boxes import dense_strides
from statetree.chunks.local import location_of
from statetree.exchange.plan import ExchangePlan, Move, Round, Transfer, Transport
from statetree.exchange.stacks import (
    ALIGNMENT,
    Cut,
    Field,
    LargeBox,
    Run,
    Side,
    Stack,
    cut_from,
    cuts_of,
    lay_out_bucket,
    next_start,
)
from statetree.spans.bits import flat_bytes, is_flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from statetree.chunks.layouts import ChunkLayout
    from statetree.exchange.executor import Executor
    from statetree.exchange.group import Group, Message

#: How many bytes a rank sends and receives at a time, unless the caller says otherwise.
BUCKET_BYTES: Final = 64 << 20
#: Rounds with up to so many places are kept for the next run.
_MAX_KEPT: Final = 100_000
#: For so many rounds memory is taken in advance. Later ones are much alike.
_MAX_SIZED: Final = 1000


#: The ends of a ``Transfer``.
_End = Literal[0, 1]
_SOURCE: Final = 0
_TARGET: Final = 1


class _Copy(NamedTuple):
    """A box of each of a part's moves that stays on this rank: it goes from one piece to another."""

    part: int
    source: int
    source_cut: Cut
    target: int
    target_cut: Cut


class _Layout(NamedTuple):
    """What this rank does in a round, laid out in buckets: the same for rounds of as many alike moves."""

    sent: Side
    received: Side
    copies: list[_Copy]


class _Step(NamedTuple):
    """A round, laid out."""

    round: Round
    layout: _Layout

    def moves(self, placed: Field | LargeBox | _Copy) -> Sequence[int]:
        """Return the moves of which something has a box each."""
        return self.round.parts[placed.part].moves

    def dtype(self, placed: LargeBox) -> torch.dtype:
        """Return the dtype in which elements travel."""
        return self.round.parts[placed.part].dtype


#: Memory that rounds are packed into in turn.
Buckets = tuple[torch.Tensor, torch.Tensor]


def take_buckets(sizes: Sequence[tuple[int, int]], device: torch.device) -> Buckets:
    """Take the memory for running exchanges one after the other, from the ``bucket_sizes`` of each."""
    first, second = (max((pair[number] for pair in sizes), default=0) for number in range(2))
    return tuple([torch.empty(size, dtype=torch.uint8, device=device) for size in (first, second)])  # type: ignore[return-value]  # two


class BucketedPlan:
    """A plan laid out in buckets, which can be run with any tensors of the moves' layouts."""

    def __init__(self, moves: Sequence[Move], group: Group, bucket_bytes: int) -> None:
        self._rounds = ExchangePlan(moves, group.rank, group.size, bucket_bytes).rounds
        self._rank = group.rank
        self._layouts: dict[Any, _Layout] = {}
        self._num_places = 0

    def bucket_sizes(self, transfers: Sequence[Transfer], device: torch.device) -> tuple[int, int]:
        """Return how many bytes two buckets take in which rounds are packed in turn by ``run``."""
        most = [0, 0]
        for number, step in enumerate(islice(self._steps(), _MAX_SIZED)):
            most[number % 2] = max(most[number % 2], _bytes_of(step, transfers, device))
        return most[0], most[1]

    def run(self, transfers: Sequence[Transfer], group: Group, executor: Executor, buckets: Buckets) -> None:
        """Move what the plan was made for. The ranks have agreed: nothing is checked, hardly any memory taken.

        ``buckets`` are what ``take_buckets`` returned for the ``bucket_sizes`` of these transfers.
        """
        taken = list(buckets)
        finish: Callable[[], None] | None = None
        for number, step in enumerate(self._steps()):
            if number >= _MAX_SIZED:
                need = _bytes_of(step, transfers, taken[number % 2].device)  # not known in advance
                if need > taken[number % 2].numel():
                    taken[number % 2] = taken[number % 2].new_empty(need)
            under_way = _start(step, taken[number % 2], transfers, group, executor)
            if finish is not None:
                finish()
            _copy_here(step, transfers, executor)
            finish = under_way
        if finish is not None:
            finish()

    def _steps(self) -> Iterator[_Step]:
        """Yield the rounds, laid out. Later runs find them so, unless there are very many places."""
        for round_ in self._rounds:
            parts = [(id(part.route), part.dtype, part.slab, len(part.moves)) for part in round_.parts]
            alike = (round_.transport, round_.root, *parts)
            layout = self._layouts.get(alike)
            if layout is None:
                layout = self._lay_out(round_)
                self._num_places += layout.sent.num_places + layout.received.num_places + len(layout.copies)
                if self._num_places <= _MAX_KEPT:
                    self._layouts[alike] = layout
            yield _Step(round_, layout)

    def _lay_out(self, round_: Round) -> _Layout:
        """Lay out what this rank sends and receives in a round."""
        transport, root, parts = round_
        rank = self._rank
        messages, gathered = transport is Transport.MESSAGES, transport is Transport.ALL_GATHER
        sent, received, copies = [], [], []
        for number, part in enumerate(parts):
            route, slab = part.route, part.slab
            sources, targets = _bounds(route.source, rank), _bounds(route.target, rank)
            if messages or gathered or root == rank:
                sent.append((part, (route.outgoing if messages else route.held)(slab), sources))
            if messages or gathered or root != rank:
                received.append((part, (route.incoming if messages else route.arriving)(slab), targets))
            if not gathered:
                cuts, pieces = route.staying(slab)
                own = cuts_of(cuts._replace(piece=pieces), sources)
                rows = zip(pieces.tolist(), own, cuts.piece.tolist(), cuts_of(cuts, targets), strict=True)
                copies += [_Copy(number, *row) for row in rows]
        return _Layout(lay_out_bucket(sent), lay_out_bucket(received, in_order=gathered), copies)


def _bounds(layout: ChunkLayout, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where a rank's boxes begin and end."""
    rows = layout.rows_of(rank)
    return layout.starts[rows], layout.stops[rows]


def _bytes_of(step: _Step, transfers: Sequence[Transfer], device: torch.device) -> int:
    """Return how many bytes a round takes of a bucket, with those of large boxes that cannot travel as they lie."""
    sent, received, _ = step.layout
    boxes = [(box, _cut(step, box, transfers, _SOURCE)) for box in sent.large]
    boxes += [(box, _cut(step, box, transfers, _TARGET)) for box in received.large]
    typed = [(held, step.dtype(box)) for box, cut in boxes for held in cut]
    beside = sum(
        next_start(held.numel() * dtype.itemsize) for held, dtype in typed if not _can_travel(held, dtype, device)
    )
    return sent.nbytes + received.nbytes + beside


def _cut(step: _Step, box: LargeBox, transfers: Sequence[Transfer], end: _End) -> Sequence[torch.Tensor]:
    """Return a box of each of the moves of which it is one."""
    return cut_from([transfers[move][end].pieces[box.piece] for move in step.moves(box)], box.cut)


class _Beside:
    """Large boxes as bytes: as they lie, or in a bucket beside what is packed, if they cannot travel as they lie.

    Its room in the bucket begins at ``start``; what is left of it begins at ``stop``. ``travelling`` are the boxes that
    travel as they lie, ``boxes`` the others, ``places`` where these are in the bucket.
    """

    def __init__(self, bucket: torch.Tensor, start: int) -> None:
        self._bucket = bucket
        self.stop = start
        self.travelling: list[torch.Tensor] = []
        self.boxes: list[torch.Tensor] = []
        self.places: list[torch.Tensor] = []

    def bytes_of(self, box: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes in which a box is sent, or received, whose elements travel as some dtype."""
        if _can_travel(box, dtype, self._bucket.device):
            self.travelling.append(box)
            return flat_bytes(box)
        stop = self.stop + box.numel() * dtype.itemsize
        place = self._bucket[self.stop : stop]
        self.stop = next_start(stop)
        self.boxes.append(box)
        self.places.append(place.view(dtype).view(box.shape))
        return place


def _start(
    step: _Step, bucket: torch.Tensor, transfers: Sequence[Transfer], group: Group, executor: Executor
) -> Callable[[], None]:
    """Start a round, and return the function that waits for it and puts what came in where it belongs."""
    (transport, root, _), (sending, receiving, _) = step
    outgoing, incoming = bucket[: sending.nbytes], bucket[sending.nbytes :]
    arriving = _Beside(bucket, sending.nbytes + receiving.nbytes)
    received = [] if transport is Transport.ALL_GATHER else [*_stretches(receiving, incoming)]
    for box in receiving.large:
        held = _cut(step, box, transfers, _TARGET)
        received += [(box.peer, arriving.bytes_of(piece, step.dtype(box))) for piece in held]
    leaving = _Beside(bucket, arriving.stop)
    sent = [*_stretches(sending, outgoing)]
    for box in sending.large:
        held = _cut(step, box, transfers, _SOURCE)
        sent += [(box.peer, leaving.bytes_of(piece, step.dtype(box))) for piece in held]
    executor.copy(*_fields(step, sending, outgoing, transfers, _SOURCE))
    executor.copy(leaving.places, leaving.boxes)
    if transport is Transport.ALL_GATHER:
        stride = receiving.stacks[0].stride
        start = partial(group.all_gather_into, incoming[: stride * group.size], outgoing[:stride])
    elif transport is Transport.BROADCAST:
        start = partial(group.broadcast, [data for _, data in sent or received], root)
    else:
        start = partial(group.exchange, sent, received)
    wait = executor.start(start)

    def finish() -> None:
        wait()
        places, boxes = _fields(step, receiving, incoming, transfers, _TARGET)
        # By the backend, which tells nobody, are those written that travel as they lie.
        executor.call(partial(torch.autograd.graph.increment_version, arriving.travelling))
        executor.copy([*boxes, *arriving.boxes], [*places, *arriving.places])

    return finish


def _stretches(side: Side, bucket: torch.Tensor) -> Iterator[Message]:
    """Yield what goes to peers, or comes from them, packed."""
    for stack in side.stacks:
        for number, peer in enumerate(stack.peers):
            start = stack.start + number * stack.stride
            yield peer, bucket[start : start + stack.nbytes]


def _can_travel(box: torch.Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the elements of a box can be sent as they lie, or received there, if they travel as some dtype."""
    return is_flat(box) and box.dtype == dtype and box.device == device


def _fields(
    step: _Step, side: Side, bucket: torch.Tensor, transfers: Sequence[Transfer], end: _End
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the places in a bucket, shaped like what they hold, and the boxes of the pieces that belong there."""
    places: list[torch.Tensor] = []
    boxes: list[torch.Tensor] = []
    parts = step.round.parts
    whole = bucket[: bucket.numel() // ALIGNMENT * ALIGNMENT]
    typed = {dtype: whole.view(dtype) for dtype in {part.dtype for part in parts}}
    for stack in side.stacks:
        for field in stack.fields:
            part = parts[field.part]
            for run in field.runs:
                places += _places(typed[part.dtype], stack, field, run, len(part.moves))
                boxes += run.of([transfers[move][end].pieces[run.piece] for move in part.moves], field.sizes)
    return places, boxes


def _places(typed: torch.Tensor, stack: Stack, field: Field, run: Run, moves: int) -> Sequence[torch.Tensor]:
    """Return the elements of a run in a bucket, for each move: one box, or several as ``[box, ...]``."""
    itemsize = typed.itemsize
    shape, stride = field.sizes, dense_strides(field.sizes)
    first = (stack.start + run.first * stack.stride + field.offset) // itemsize + typed.storage_offset()
    if run.boxes > 1:
        shape, stride = (run.boxes, *shape), (stack.stride // itemsize, *stride)
    if moves == 1:
        return [typed.as_strided(shape, stride, first)]
    return typed.as_strided((moves, *shape), (prod(field.sizes), *stride), first).unbind()


def _copy_here(step: _Step, transfers: Sequence[Transfer], executor: Executor) -> None:
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for copy in step.layout.copies:
        moved = [transfers[move] for move in step.moves(copy)]
        targets += cut_from([transfer.target.pieces[copy.target] for transfer in moved], copy.target_cut)
        sources += cut_from([transfer.source.pieces[copy.source] for transfer in moved], copy.source_cut)
    pairs = enumerate(zip(targets, sources, strict=True))
    apart = [number for number, (target, source) in pairs if not _is_same(target, source)]
    executor.copy([targets[number] for number in apart], [sources[number] for number in apart])


def _is_same(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a rank that sends its own tensors into themselves has nothing to copy."""
    return target.data_ptr() == source.data_ptr() and location_of(target) == location_of(source)
