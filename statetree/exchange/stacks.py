"""Stacks: where boxes lie in a bucket.

What goes to a peer, or comes from it, is one stretch of bytes: in it lie the boxes of all moves of a part, one behind
the other, part by part. Peers whose stretches look alike are stacked, ``[peer, byte]``, so that the boxes that a tensor
has in all of them are one strided view. Both ends of a transfer come to the same stretch, as they list the same boxes.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from statetree.exchange.plan import LARGE_BYTES, Part
from statetree.exchange.routes import Cuts, sorted_by

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Where stretches begin in a bucket: at multiples of this many bytes, which are multiples of any element's.
ALIGNMENT = 16

#: A box of a piece, by the dims in which it is smaller than the piece: each with the first index and the size.
Cut = tuple[tuple[int, int, int], ...]


class Run(NamedTuple):
    """Boxes of one piece that lie at equal distances."""

    first: int  # which stretch of the stack holds the first
    boxes: int  # how many there are, in as many stretches
    piece: int  # which piece they are of
    cut: Cut  # where the first lies in it
    dim: int = 0  # in which dim they lie behind each other
    step: int = 0  # at which distance there

    def of(self, pieces: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> Sequence[torch.Tensor]:
        """Return the boxes of each of some tensors: one, or several as ``[box, ...]``."""
        if self.boxes == 1:
            return cut_from(pieces, self.cut)
        pieces = cut_from(pieces, [cut for cut in self.cut if cut[0] != self.dim])
        first = next((first for dim, first, _ in self.cut if dim == self.dim), 0)
        size = sizes[self.dim]
        spans = cut_from(pieces, [(self.dim, first, (self.boxes - 1) * self.step + size)])
        return [span.unfold(self.dim, size, self.step).movedim((self.dim, -1), (0, self.dim + 1)) for span in spans]


class Field(NamedTuple):
    """A box of each of a part's moves, in every stretch of a stack."""

    part: int  # the number of the part
    #: Where the first one begins in a stretch, in bytes. The others follow it.
    offset: int
    sizes: tuple[int, ...]  # their shape
    runs: list[Run]  # where they belong


class Stack(NamedTuple):
    """Stretches that look alike."""

    peers: list[int]  # whose they are
    start: int  # where the first one begins, in bytes
    stride: int  # how far they are apart; 0 if it is the same one for all peers
    nbytes: int  # how many bytes each has
    fields: list[Field]  # what lies in each


class LargeBox(NamedTuple):
    """A box of each of a part's moves that travels by itself: whose or to whom, of which part and piece."""

    peer: int
    part: int
    piece: int
    cut: Cut


class Side(NamedTuple):
    """What is sent in one round, or received."""

    stacks: list[Stack]  # what is packed
    large: list[LargeBox]  # what travels by itself
    nbytes: int  # the bytes of all stacks

    @property
    def num_places(self) -> int:
        """How many places there are."""
        return len(self.large) + sum(len(field.runs) for stack in self.stacks for field in stack.fields)


#: The first index and the index behind the last one of pieces, as rows for each of them.
Bounds = tuple[torch.Tensor, torch.Tensor]


class _Column(NamedTuple):
    """A part's boxes, of each peer one at most."""

    number: int
    part: Part
    cuts: Cuts
    pieces: Bounds

    @property
    def nbytes(self) -> torch.Tensor:
        """How many bytes each has."""
        return self.cuts.sizes.prod(1) * self.part.dtype.itemsize

    def at(self, rows: torch.Tensor) -> _Column:
        """Return some of them."""
        return self._replace(cuts=self.cuts.at(rows))

    def rows_of(self, peers: torch.Tensor) -> Cuts:
        """Return the boxes of some of the peers that have one."""
        if torch.equal(peers, self.cuts.peer):
            return self.cuts
        return self.cuts.at(torch.searchsorted(self.cuts.peer, peers))

    def fields_of(self, peers: torch.Tensor) -> dict[int, Field]:
        """Return the boxes of those of some peers that have one, each as the first in a stretch by itself."""
        chosen = self.cuts.at(torch.isin(self.cuts.peer, peers))
        sizes, cuts = chosen.sizes.tolist(), cuts_of(chosen, self.pieces)
        rows = zip(chosen.peer.tolist(), chosen.piece.tolist(), sizes, cuts, strict=True)
        return {peer: Field(self.number, 0, tuple(size), [Run(0, 1, piece, cut)]) for peer, piece, size, cut in rows}


def cuts_of(cuts: Cuts, pieces: Bounds) -> list[Cut]:
    """Return where boxes lie in their pieces."""
    starts, stops = (bounds[cuts.piece] for bounds in pieces)
    rows = zip((cuts.low - starts).tolist(), cuts.sizes.tolist(), (stops - starts).tolist(), strict=True)
    return [
        tuple([(dim, first, size) for dim, (first, size, full) in enumerate(zip(*row, strict=True)) if size != full])
        for row in rows
    ]


def lay_out_bucket(found: Sequence[tuple[Part, Cuts, Bounds]], *, in_order: bool = False) -> Side:
    """Give every box its place in a bucket: those of this rank's pieces that go to peers, or come from them.

    With ``in_order`` the stretches lie in the order of the peers. Otherwise that of boxes in tensors is preferred.
    """
    columns = [
        _Column(number, part, slot, pieces)
        for number, (part, cuts, pieces) in enumerate(found)
        for slot in cuts.slots()
    ]
    large: list[LargeBox] = []
    packed: list[_Column] = []
    for column in columns:
        is_large = column.nbytes >= LARGE_BYTES
        if bool(is_large.any()):
            chosen = column.at(is_large)
            rows = chosen.cuts.peer.tolist(), chosen.cuts.piece.tolist(), cuts_of(chosen.cuts, column.pieces)
            large += [LargeBox(peer, column.number, piece, cut) for peer, piece, cut in zip(*rows, strict=True)]
            column = column.at(~is_large)
        if len(column.cuts.peer):
            packed.append(column)
    stacks: list[Stack] = []
    position = 0
    groups = _grouped(packed)
    # Where shapes divide among many ranks in many ways, many peers have no other like them: those are quickly done.
    alone = [peers for peers, _ in groups if len(peers) == 1]
    fields = [column.fields_of(torch.cat(alone)) for column in packed] if alone else []
    for peers, alike in groups:
        if len(peers) == 1:
            (peer,) = peers.tolist()
            own = [(packed[index].part, fields[index][peer]) for index in alike]
            stack = _placed([peer], own, position, shared=True)
        else:
            stack = _stack(peers, [packed[index] for index in alike], position, in_order=in_order)
        stacks.append(stack)
        position += next_start(stack.nbytes) if stack.stride == 0 else stack.stride * len(stack.peers)
    return Side(stacks, large, position)


def _grouped(columns: Sequence[_Column]) -> list[tuple[torch.Tensor, list[int]]]:
    """Put peers together whose stretches look alike; with the indices of the columns that they have boxes in."""
    if not columns:
        return []
    peers = columns[0].cuts.peer
    if not all(torch.equal(column.cuts.peer, peers) for column in columns[1:]):
        peers = torch.unique(torch.cat([column.cuts.peer for column in columns]))
    table = torch.zeros(len(peers), len(columns), dtype=torch.int64)
    for number, column in enumerate(columns):
        rows = torch.searchsorted(peers, column.cuts.peer)
        table[rows, number] = _kinds(column.cuts.sizes) + 1
    if bool((table == table[:1]).all()):
        return [(peers, [*range(len(columns))])]
    kinds, which = torch.unique(table, dim=0, return_inverse=True)
    return [
        (peers[which == number], [index for index, kind in enumerate(row) if kind])
        for number, row in enumerate(kinds.tolist())
    ]


def _kinds(sizes: torch.Tensor) -> torch.Tensor:
    """Number the rows, the same for those that are alike: as ``torch.unique`` does, but far more quickly."""
    number = torch.zeros(len(sizes), dtype=torch.int64)
    for column in sizes.unbind(1):
        if bool((column != column[:1]).any()):
            lengths, kind = torch.unique(column, return_inverse=True)
            number = torch.unique(number * len(lengths) + kind, return_inverse=True)[1]
    return number


def _placed(peers: list[int], fields: Sequence[tuple[Part, Field]], start: int, *, shared: bool) -> Stack:
    """Return the stack of peers, with the fields of each one behind the other; one stretch for all if it is shared."""
    placed = []
    offset = 0
    for part, field in fields:
        placed.append(field._replace(offset=offset))
        offset += prod(field.sizes) * part.dtype.itemsize * len(part.moves)
    return Stack(peers, start, 0 if shared else next_start(offset), offset, placed)


def _stack(peers: torch.Tensor, columns: Sequence[_Column], start: int, *, in_order: bool) -> Stack:
    boxes = [column.rows_of(peers) for column in columns]
    if len(peers) > 1 and not in_order:
        order = sorted_by([boxes[0].piece, *boxes[0].low.unbind(1)])
        peers, boxes = peers[order], [cuts.at(order) for cuts in boxes]
    shared = all(bool((cuts.low == cuts.low[:1]).all() & (cuts.piece == cuts.piece[:1]).all()) for cuts in boxes)
    if shared:  # all get the same
        boxes = [cuts.at(torch.zeros(1, dtype=torch.int64)) for cuts in boxes]
    fields = [
        (column.part, Field(column.number, 0, tuple(cuts.sizes[0].tolist()), _runs(column, cuts)))
        for column, cuts in zip(columns, boxes, strict=True)
    ]
    return _placed(peers.tolist(), fields, start, shared=shared)


def _runs(column: _Column, cuts: Cuts) -> list[Run]:
    """Put boxes together that lie at equal distances, in consecutive stretches."""
    steps = cuts.low[1:] - cuts.low[:-1]
    moved = steps != 0
    goes_on = (cuts.piece[1:] == cuts.piece[:-1]) & (moved.sum(1) == 1) & (steps.sum(1) > 0)
    begins = [0]
    if not bool(goes_on.all()) or not bool((steps == steps[:1]).all()):
        same = torch.ones_like(goes_on)
        same[1:] = (steps[1:] == steps[:-1]).all(1)
        begun = 0  # where the run that is being followed begins
        for row, (more, alike) in enumerate(zip(goes_on.tolist(), same.tolist(), strict=True), start=1):
            if not more or not (alike or row == begun + 1):
                begins.append(row)
                begun = row
    firsts = torch.tensor(begins)
    chosen = cuts.at(firsts)
    counts = torch.diff(firsts, append=torch.tensor([len(cuts.peer)])).tolist()
    placed = zip(begins, counts, chosen.piece.tolist(), cuts_of(chosen, column.pieces), strict=True)
    runs = [Run(first, count, piece, cut) for first, count, piece, cut in placed]
    for number, run in enumerate(runs):
        if run.boxes > 1:
            step = steps[run.first].tolist()
            dim = next(dim for dim, distance in enumerate(step) if distance)
            runs[number] = run._replace(dim=dim, step=step[dim])
    return runs


def cut_from(pieces: Sequence[torch.Tensor], cut: Sequence[tuple[int, int, int]]) -> Sequence[torch.Tensor]:
    """Return the same box of each of some pieces."""
    for dim, first, size in cut:
        pieces = [piece.narrow(dim, first, size) for piece in pieces]
    return pieces


def next_start(position: int) -> int:
    """Return the next place at which a stretch may begin."""
    return -(-position // ALIGNMENT) * ALIGNMENT
