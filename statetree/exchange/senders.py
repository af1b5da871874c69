"""Senders: which of the ranks that hold a box passes it on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.chunks.layouts import ChunkLayout

#: How often, at most, the holders of a layout's boxes take turns from tensor to tensor.
_MAX_TURNS: Final = 16


def choose_owners(held: Sequence[tuple[ChunkLayout, int]], size: int) -> list[torch.Tensor]:
    """Choose, for every distinct box of every layout, the one of the ranks that hold it which keeps it.

    The largest first, the least loaded rank takes it: all ranks choose alike without talking to each other. With each
    layout come the bytes of an element.
    """
    result = [layout.holders.ranks for layout, _ in held]
    loads = torch.zeros(size, dtype=torch.int64)
    shared = []
    for index, (layout, itemsize) in enumerate(held):
        if layout.has_replicas:
            shared.append(index)
        else:
            loads.index_add_(0, layout.ranks, layout.volumes * itemsize)
    for index in sorted(shared, key=lambda index: (-held[index][0].numel * held[index][1], index)):
        layout, itemsize = held[index]
        boxes = layout.distinct
        keys = loads[layout.ranks] * size + layout.ranks
        best = torch.full((len(boxes.starts),), torch.iinfo(torch.int64).max)
        result[index] = best.scatter_reduce_(0, boxes.which, keys, "amin") % size
        loads.index_add_(0, result[index], boxes.volumes * itemsize)
    return result


class Senders(NamedTuple):
    """A rule that says, for each box and each rank that lacks it, which holder sends it."""

    #: The holders take turns, from box to box: which of them sends the first box. With ``None`` a rank gets what it
    #: lacks from the holders that have the same place among the holders of a box as the rank itself has among those of
    #: its own: in a hybrid mesh these are the ranks of its own replica.
    turn: int | None
    #: The rank whose elements win: boxes that it holds come from it, also for ranks that hold them as well.
    source: int | None

    def of(self, layout: ChunkLayout, boxes: torch.Tensor, peers: torch.Tensor) -> torch.Tensor:
        """Return the senders of distinct boxes (by their numbers) to the ranks that each goes to."""
        holders = layout.holders
        place = boxes + self.turn if self.turn is not None else layout.replica_of(peers)
        found = holders.ranks[holders.first[boxes] + place % holders.number[boxes]]
        if self.source is not None:
            found[torch.isin(boxes, layout.held_by(self.source))] = self.source
        return found


def senders_of(moves: Sequence[tuple[ChunkLayout, ChunkLayout]], source: int | None) -> list[Senders]:
    """Return who sends what, for tensors that go from one layout to another, balanced over the ranks.

    The nearest replica sends wherever that is balanced: if each of them serves ranks that want equally much.
    """
    nearest: dict[tuple[int, int], bool] = {}
    turns: dict[int, int] = {}
    found = []
    for origin, target in moves:
        turn: int | None = 0
        if origin.has_replicas:
            key = (id(origin), id(target))
            if key not in nearest:
                nearest[key] = _is_balanced_by_replica(origin, target)
            if nearest[key]:
                turn = None
            else:
                count = int(origin.holders.number.max())
                turn = turns.get(count, 0)
                step = -(-count // _MAX_TURNS)  # each turn is a route of its own, which has to be planned
                turns[count] = (turn + step) % (count // step * step)
        found.append(Senders(turn, source))
    return found


def _is_balanced_by_replica(source: ChunkLayout, target: ChunkLayout) -> bool:
    """Whether ranks of each replica want equally many elements between them."""
    count = int(source.holders.number.max())
    if int(source.holders.number.min()) < count:
        return False
    wanted = torch.zeros(count, dtype=torch.int64)
    wanted.index_add_(0, source.replica_of(target.ranks) % count, target.volumes)
    return bool((wanted == wanted[0]).all())
