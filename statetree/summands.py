"""Summands: tensors of which each rank holds an addend (``Partial``), put together before they are moved on.

The ranks that hold summands of a box share the work: each receives one slab of all summands, and reduces it. What
comes of it is a tensor that is sharded by slabs.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from statetree.boxes import Box, in_slabs
from statetree.chunks import Layout, by_rank, layout_of
from statetree.exchange import Exchange, Pieces
from statetree.plans import Move

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.groups import Group

_COMBINE: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Source(NamedTuple):
    """Where the elements of a tensor come from: the layout, and this rank's pieces in the order of its rows."""

    layout: Layout
    pieces: Sequence[torch.Tensor]


def reduce_summands(
    sources: Sequence[Source],
    dtypes: Sequence[torch.dtype],
    summands: Sequence[tuple[str, tuple[Layout, ...]]],
    group: Group,
    device: torch.device,
    bucket_bytes: int,
) -> list[Source]:
    """Reduce tensors of which the ranks hold summands.

    Args:
        sources: The tensors. Each rank of a layout holds one summand of its boxes.
        dtypes: Their dtypes.
        summands: For each, how summands are put together, and the layout of every one of them.
        group: The ranks.
        device: The memory that is sent from and received into.
        bucket_bytes: As for ``Exchange``.

    Returns:
        The reduced tensors, in other layouts.
    """
    moves: list[Move] = []
    pieces: list[Pieces] = []
    gathered: list[tuple[Layout, list[torch.Tensor]]] = []
    for (layout, own), dtype, (_, layouts) in zip(sources, dtypes, summands, strict=True):
        target = _shared_out(layout)
        stacks = [own[0].new_empty((len(layouts), *box.sizes)) for box in target.boxes_of(group.rank)]
        for number, summand in enumerate(layouts):
            moves.append(Move(summand, target, dtype))
            mine = own if summand.boxes_of(group.rank) else []
            pieces.append(Pieces(mine, [stack[number] for stack in stacks]))
        gathered.append((target, stacks))
    Exchange(moves, group, bucket_bytes).run(pieces, group, device)
    return [
        Source(target, [_reduced(stack, reduction) for stack in stacks])
        for (target, stacks), (reduction, _) in zip(gathered, summands, strict=True)
    ]


def _shared_out(layout: Layout) -> Layout:
    """Cut every box into slabs, one for each of the ranks that hold it."""
    holders: defaultdict[Box, list[int]] = defaultdict(list)
    for rank, boxes in by_rank(layout).items():
        for box in boxes:
            holders[box].append(rank)
    shares: defaultdict[int, list[Box]] = defaultdict(list)
    for box, ranks in holders.items():
        slabs = in_slabs(box, len(ranks))
        for number, slab in enumerate(slabs):
            shares[ranks[number * len(ranks) // len(slabs)]].append(slab)
    return layout_of(layout.shape, shares)


@cache
def reduces(reduction: str, dtype: torch.dtype) -> bool:
    """Whether torch can put summands of a dtype together, and has that dtype again."""
    try:
        return _reduced(torch.ones(2, 1, dtype=dtype), reduction).dtype == dtype
    except (RuntimeError, NotImplementedError):
        return False


def _reduced(stack: torch.Tensor, reduction: str) -> torch.Tensor:
    result = stack[0]
    for summand in stack[1:]:
        result = _COMBINE[reduction](result, summand)
    return result / len(stack) if reduction == "avg" else result
