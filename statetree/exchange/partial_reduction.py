"""Partials: tensors of which each rank holds partial values (``Partial``), put together before they are moved on.

The ranks that hold partials of a box share the work: each receives one slab of all partials, and reduces it. What
comes of it is a tensor that is sharded by slabs.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from statetree.chunks.boxes import Box, in_slabs
from statetree.chunks.layouts import ChunkLayout, by_rank, layout_of
from statetree.chunks.reductions import reduce_in_place
from statetree.exchange.plan import Chunked, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Reduction(NamedTuple):
    """Partials on their way to the ranks that put them together."""

    transfers: list[Transfer]  # where each partial goes
    #: The tensors that come of it, in other layouts. They hold their elements after ``finish``.
    reduced: list[Chunked]
    #: This rank's slabs of all partials of a tensor, one behind the other, and how they are put together.
    stacks: list[tuple[torch.Tensor, str]]

    def finish(self) -> None:
        """Put the partials together, once they have arrived."""
        for stack, reduction in self.stacks:
            reduce_in_place(stack, reduction)


def prepare_reduction(
    sources: Sequence[Chunked],
    dtypes: Sequence[torch.dtype],
    partials: Sequence[tuple[str, tuple[ChunkLayout, ...]]],
    rank: int,
) -> Reduction:
    """Take the memory for reducing tensors of which the ranks hold partials: each rank of a layout one of its boxes.

    ``partials`` say for each how these are put together, and the layout of every one of them.
    """
    found = Reduction([], [], [])
    for (layout, own), dtype, (reduction, layouts) in zip(sources, dtypes, partials, strict=True):
        shared = _shared_out(layout)
        stacks = [own[0].new_empty((len(layouts), *box.sizes)) for box in shared.boxes_of(rank)]
        for number, partial in enumerate(layouts):
            mine = own if partial.boxes_of(rank) else []
            slabs = Chunked(shared, [stack[number] for stack in stacks])
            found.transfers.append(Transfer(Chunked(partial, mine), slabs, dtype))
        found.reduced.append(Chunked(shared, [stack[0] for stack in stacks]))
        found.stacks.extend((stack.view(dtype), reduction) for stack in stacks)
    return found


@lru_cache(maxsize=1024)  # or each tensor is a plan of its own
def _shared_out(layout: ChunkLayout) -> ChunkLayout:
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
