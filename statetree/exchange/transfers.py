"""Transfers: tensors on their way from one layout to another, planned once and moved in buckets."""

from __future__ import annotations

import os
from collections import OrderedDict
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.exchange.buckets import BucketedPlan, Buckets, take_buckets
from statetree.exchange.partial_reduction import Reduction, prepare_reduction
from statetree.exchange.plan import Chunked, Move, Transfer
from statetree.spans.bits import as_plain
from statetree.torch_internals import as_copied, copied_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.chunks.layouts import ChunkLayout
    from statetree.chunks.local import LocalChunks
    from statetree.exchange.executor import Executor
    from statetree.exchange.group import Group
    from statetree.exchange.manifest import Manifest


def sendable_pieces(chunks: LocalChunks, layout: ChunkLayout, rank: int) -> list[torch.Tensor]:
    """Return this rank's pieces in the order of a layout's rows, as tensors that can be sent."""
    if len(chunks.boxes) == 1:
        return [as_sendable(chunks.pieces[0])]
    by_box = dict(zip(chunks.boxes, chunks.pieces, strict=True))
    return [as_sendable(by_box[box]) for box in layout.boxes_of(rank)]


def as_sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one that torch can copy: without class and gradient, as integers if copies would change it."""
    bare = type(tensor) is torch.Tensor and not tensor.requires_grad
    return as_copied(tensor if bare else as_plain(tensor))


def converting_transfer(source: Chunked, target: Chunked, before: torch.dtype, after: torch.dtype) -> Transfer:
    """Return how elements are brought to another dtype on their way: as the smaller of both they travel."""
    if before != after:
        source = source._replace(pieces=[piece.view(before) for piece in source.pieces])  # they may be sent as integers
    return Transfer(source, target, after if after.itemsize < before.itemsize else before)


#: Plans by what the ranks agreed on, each with a digest of what it was made for: the last ones used.
_PLANNED: Final[OrderedDict[Any, tuple[BucketedPlan, bytes]]] = OrderedDict()
_MAX_PLANNED: Final = 16
#: Set (in tests) to look, whenever a plan is used again, whether it is the one that would be made now. A plan that
#: depends on something that the ranks do not agree on moves other elements than it should, and nobody notices.
CHECK_PLANS: Final = "STATETREE_CHECK_PLANS"


class _Leg(NamedTuple):
    """A plan with this rank's tensors, and what is done once their elements are there."""

    plan: BucketedPlan
    transfers: Sequence[Transfer]
    finish: Callable[[], None] | None


class PlannedTransfers(NamedTuple):
    """Everything that moving elements needs, memory included: after that, only the other ranks can fail."""

    legs: Sequence[_Leg]
    group: Group
    buckets: Buckets

    def run(self, executor: Executor) -> None:
        """Move the elements."""
        executor.call(partial(self.group.open, self.buckets[0].device))
        for leg in self.legs:
            leg.plan.run(leg.transfers, self.group, executor, self.buckets)
            if leg.finish is not None:
                executor.call(leg.finish)


class TransferOptions(NamedTuple):
    """How elements are moved."""

    key: Any  # what the ranks agreed on: for one that was seen before, the plan is known
    group: Group  # the ranks
    device: torch.device  # the memory that is sent from and received into
    bucket_bytes: int  # as for ``BucketedPlan``


def plan_transfers(
    options: TransferOptions, transfers: Sequence[Transfer], reduction: Reduction | None = None
) -> PlannedTransfers:
    """Plan how elements move, once partials are put together (``reduction``), and take the memory for it."""
    before = [] if reduction is None else [("partials", reduction.transfers, reduction.finish)]
    moved = [*before, ("elements", transfers, None)]
    legs = [_Leg(_planned(options, what, chosen), chosen, finish) for what, chosen, finish in moved]
    sizes = [leg.plan.bucket_sizes(leg.transfers, options.device) for leg in legs]
    return PlannedTransfers(legs, options.group, take_buckets(sizes, options.device))


def _planned(options: TransferOptions, what: str, transfers: Sequence[Transfer]) -> BucketedPlan:
    """Return a plan, made anew unless it is known."""
    group = options.group
    key = (options.key, what, group.rank, group.global_ranks, options.bucket_bytes)
    known = _PLANNED.pop(key, None)
    if known is None:
        moves = [Move(source.layout, target.layout, copied_dtype(dtype)) for source, target, dtype in transfers]
        plan = BucketedPlan(moves, group, options.bucket_bytes)
        known = plan, _digest(options, transfers)
    elif os.environ.get(CHECK_PLANS) and known[1] != _digest(options, transfers):
        msg = f"the plan of {what} was made for other moves: they depend on something that the ranks do not agree on"
        raise AssertionError(msg)
    _PLANNED[key] = known
    while len(_PLANNED) > _MAX_PLANNED:
        _PLANNED.popitem(last=False)
    return known[0]


def _digest(options: TransferOptions, transfers: Sequence[Transfer]) -> bytes:
    """Return a digest of everything that a plan is made for, and of how many tensors it is run with."""
    found = blake2b(f"{options.bucket_bytes} {len(transfers)}".encode(), digest_size=16)
    for source, target, dtype in transfers:
        found.update(source.layout.digest + target.layout.digest)
        found.update(f"{copied_dtype(dtype)} {len(source.pieces)} {len(target.pieces)} ".encode())
    return found.digest()


def sources_of(
    manifest: Manifest, layouts: dict[int, ChunkLayout], moving: Sequence[int], rank: int
) -> tuple[dict[int, Chunked], Reduction | None]:
    """Return where the elements of distributed leaves come from, and the partials that are put together before."""
    chunks = manifest.chunks
    found = {index: Chunked(layouts[index], sendable_pieces(chunks[index], layouts[index], rank)) for index in moving}
    partials = {index: own for index in moving if (own := chunks[index].partials) is not None}
    if not partials:
        return found, None
    dtypes = [chunks[index].dtype for index in partials]
    reduction = prepare_reduction([found[index] for index in partials], dtypes, list(partials.values()), rank)
    found.update(zip(partials, reduction.reduced, strict=True))
    return found, reduction
