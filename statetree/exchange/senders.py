"""Senders: which of the ranks that hold a box passes it on."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch

from statetree.chunks.layouts import ChunkLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

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


@lru_cache(maxsize=1024)  # or each tensor is a plan of its own
def held_for_all(layout: ChunkLayout, rank: int) -> ChunkLayout:
    """Return a layout without the other holders of a rank's boxes: its elements are all ranks', whatever they hold."""
    kept = (layout.ranks == rank) | ~torch.isin(layout.distinct.which, layout.held_by(rank))
    return ChunkLayout(
        layout.shape, layout.ranks[kept], layout.starts[kept], layout.stops[kept], disjoint=layout.disjoint
    )


def turns_of(moves: Sequence[tuple[ChunkLayout, ChunkLayout]]) -> list[int | None]:
    """Return whose turn it is to send, for tensors that go from one layout to another, balanced over the ranks.

    The holders take turns, from box to box: a turn says which of them sends the first box. With ``None`` a rank gets
    what it lacks from the holders that have the same place among the holders of a box as the rank itself has among
    those of its own: in a hybrid mesh these are the ranks of its own replica. So it is wherever that is balanced: if
    each replica serves ranks that want equally much.
    """
    nearest: dict[tuple[int, int], bool] = {}
    turns: dict[int, int] = {}
    found: list[int | None] = []
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
        found.append(turn)
    return found


def _is_balanced_by_replica(source: ChunkLayout, target: ChunkLayout) -> bool:
    """Whether ranks of each replica want equally many elements between them."""
    count = int(source.holders.number.max())
    if int(source.holders.number.min()) < count:
        return False
    wanted = torch.zeros(count, dtype=torch.int64)
    wanted.index_add_(0, source.replica_of(target.ranks) % count, target.volumes)
    return bool((wanted == wanted[0]).all())
