"""``gather``: distributed tensors as whole ones, on some ranks or on all."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from statetree.agreement import Statement, agree
from statetree.chunks import whole_on
from statetree.collectives import Receipt, as_leaf, check_bucket, communicating_device, exchange, movable, sources_of
from statetree.compose import collective, leafwise
from statetree.errors import RankMismatch
from statetree.exchange import BUCKET_BYTES
from statetree.groups import Group, Timeout, group_of
from statetree.spans import is_dense
from statetree.survey import Survey, settle
from statetree.torch_internals import quietly
from statetree.transforms.allocate_like import allocate_like
from statetree.transforms.offload import offload
from statetree.tree import unflatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup


@leafwise
@collective
def gather(
    tree: Any,
    *,
    dst: int | Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: Timeout = None,
) -> Any:
    """Turn distributed tensors into whole ones.

    ``DTensor``, ``ShardedTensor`` and other distributed leaves become plain tensors of their global shape, whatever
    their placements: uneven and strided shards, several mesh dims, and summands (``Partial``), which are reduced.
    Leaves on the same memory are moved once, and lie on the same memory again.

    Args:
        tree: Any tree, the same on every rank up to elements and plain values.
        dst: Which ranks of the group get the tensors: one, several, or with ``None`` all.
        group: The ranks that take part; by default all. Together they must hold every distributed tensor completely.
        device: Where the tensors are put; by default where the shards lie.
        bucket_bytes: How many bytes a rank sends and receives at a time, by default 64 MiB. Two such buckets are the
            memory that it takes beside the result.
        timeout: How long each collective may take, in seconds or as a ``timedelta``; by default what the group allows.

    Returns:
        A tree of the same structure. On ranks outside of ``dst``, every tensor in it is a ``meta`` tensor of its global
        shape and dtype.

    Aliasing:
        Leaves that are not distributed are passed through (with ``device``: if they lie there already).

    Collective:
        Every rank of the group calls it, with the same options.

    Raises:
        RankMismatch: If the ranks hold different trees or pass different options, if one of them failed or did not
            answer in time, or if ``dst`` is not a rank of the group. On every rank, before anything moves.
        UnsupportedLeaf: If the chunks of a leaf cannot be told, or the group does not hold all of them.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> st.gather({"w": torch.ones(2)})  # without ranks there is nothing to do
        {'w': tensor([1., 1.])}
    """
    return _gather(tree, dst, group_of("gather", group, timeout), device, bucket_bytes)


@quietly
def _gather(
    tree: Any, dst: int | Sequence[int] | None, group: Group, device: torch.device | str | int | None, bucket_bytes: int
) -> Any:
    def prepare() -> tuple[Statement, tuple[Survey, tuple[int, ...], list[Any]]]:
        check_bucket("gather", bucket_bytes)
        receivers = _receivers(dst, group)
        survey = Survey("gather", tree, group)
        survey.check_readable()
        where = device if group.rank in receivers else "meta"
        leaves = _others(survey, where)
        _put_wholes(leaves, survey, where)
        options = f"gather(dst={list(receivers)}, bucket_bytes={bucket_bytes})"
        return Statement(options, survey.entries(), survey.details()), (survey, receivers, leaves)

    agreed, (survey, receivers, leaves) = agree("gather", group, prepare)
    layouts, seen = settle(group, survey, agreed)
    if seen:  # the ties may not be what they seemed
        _put_wholes(leaves, survey, device if group.rank in receivers else "meta")
    moving = survey.leading()
    sources = sources_of(survey, layouts, moving, group, bucket_bytes)
    items = []
    for index in moving:
        target = whole_on(survey.holdings[index].shape, receivers)
        pieces = [movable(leaves[index])] if target.boxes_of(group.rank) else []
        items.append((sources[index], Receipt(target, pieces), survey.holdings[index].dtype))
    kind = communicating_device(group, [holding.device for holding in survey.holdings.values()])
    exchange((agreed.key, seen), items, group, kind, bucket_bytes)
    return unflatten(survey.spec, leaves)


def _receivers(dst: int | Sequence[int] | None, group: Group) -> tuple[int, ...]:
    chosen: Sequence[Any] = range(group.size) if dst is None else (dst,) if isinstance(dst, int) else dst
    receivers = tuple(sorted(set(chosen)))
    if not all(isinstance(rank, int) and 0 <= rank < group.size for rank in receivers):
        msg = f"gather: dst must name ranks of the group: expected some of 0 to {group.size - 1}, got {dst!r}."
        raise RankMismatch(msg)
    return receivers


def _others(survey: Survey, device: torch.device | str | int | None) -> list[Any]:
    """Return the leaves, those that are not distributed on a device (or as they are)."""
    leaves = list(survey.leaves)
    rest = [index for index in range(len(leaves)) if index not in survey.holdings]
    if device is None or not rest:
        return leaves
    tree = {key: leaves[index] for index, key in zip(rest, map(survey.spec.flat_keys().__getitem__, rest), strict=True)}
    move = partial(offload, copy=False) if torch.device(device).type != "meta" else allocate_like
    for index, leaf in zip(rest, move(tree, device=device).values(), strict=True):
        leaves[index] = leaf
    return leaves


def _put_wholes(leaves: list[Any], survey: Survey, device: torch.device | str | int | None) -> None:
    """Put fresh tensors of the global shapes in the places of distributed leaves."""
    for index, leader in survey.leaders.items():
        leaf, holding = survey.leaves[index], survey.holdings[index]
        if leaf is survey.leaves[leader] and index != leader:
            leaves[index] = leaves[leader]
            continue
        if index == leader:
            where = holding.device or None if device is None or holding.device == "meta" else device
            stride = leaf.stride() if isinstance(leaf, torch.Tensor) else ()
            fresh = _empty(holding.shape, stride, holding.dtype, where)
        else:
            fresh = leaves[leader].detach()
        leaves[index] = as_leaf(fresh, leaf)


def _empty(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device | str | int | None
) -> torch.Tensor:
    if len(stride) == len(shape) and is_dense(contiguous=False, shape=shape, stride=stride):
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device)
