"""``gather``: distributed tensors as whole ones, on some ranks or on all."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from statetree.agreement import Statement
from statetree.chunks import whole_on
from statetree.collectives import (
    Departure,
    Receipt,
    Terms,
    as_leaf,
    check_bucket,
    check_choice,
    communicating_device,
    depart,
    movable,
    sources_of,
)
from statetree.compose import collective, leafwise, place_in_tree
from statetree.errors import RankMismatch, StateTreeError
from statetree.exchange import BUCKET_BYTES
from statetree.groups import Group, Timeout, group_of
from statetree.spans import is_dense
from statetree.survey import Survey, agree_on_layouts
from statetree.torch_internals import quietly
from statetree.transforms.allocate_like import allocate_like
from statetree.transforms.offload import offload
from statetree.tree import unflatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from statetree.chunks import Layout


@leafwise
@collective
def gather(
    tree: Any,
    *,
    dst: int | Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
    replicas: Literal["check", "first"] = "check",
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
        replicas: What to do with a path at which the ranks hold tensors over meshes that differ from rank to rank (two
            copies of a model, or two pipeline stages with one name for their layers). With ``"check"`` they are copies
            only if their bytes are the same, which are hashed for that. With ``"first"``, what the first rank's mesh
            holds is taken without a look at the others. Copies within a mesh are not compared.
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
            answer in time, if ``dst`` is not a rank of the group, or if meshes that differ from rank to rank do not
            hold the same (see ``replicas``). On every rank, before anything moves.
        UnsupportedLeaf: If the chunks of a leaf cannot be told, or the group does not hold all of them.
        MemoryError: If there is no memory for the result or the buckets (``RuntimeError`` where torch says so). It is
            taken before anything moves (buckets for the first 1,000 rounds), and the other ranks raise
            ``RankMismatch``.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> st.gather({"w": torch.ones(2)})  # without ranks there is nothing to do
        {'w': tensor([1., 1.])}
    """
    return _gather(tree, dst, group_of("gather", group, timeout), device, bucket_bytes, replicas)


@quietly
def _gather(
    tree: Any,
    dst: int | Sequence[int] | None,
    group: Group,
    device: torch.device | str | int | None,
    bucket_bytes: int,
    replicas: str,
) -> Any:
    def prepare() -> tuple[Statement, list[tuple[Survey, bool]], _Work]:
        check_bucket("gather", bucket_bytes)
        check_choice("gather", replicas)
        receivers = _receivers(dst, group)
        survey = Survey("gather", tree, group, replicas=replicas)
        survey.check_readable()
        where = device if group.rank in receivers else "meta"
        options = f"gather(dst={list(receivers)}, replicas={replicas!r}, bucket_bytes={bucket_bytes})"
        statement = Statement(options, survey.entries(), survey.details())
        return statement, [(survey, True)], _Work(survey, receivers, where, _others(survey, where))

    def load(work: _Work, layouts: Sequence[dict[int, Layout]], key: Any) -> Departure:
        survey, receivers, where, leaves = work
        _put_wholes(leaves, survey, where)
        moving = survey.leading()
        sources, reduction = sources_of(survey, layouts[0], moving, group.rank)
        items = []
        for index in moving:
            target = whole_on(survey.holdings[index].shape, receivers)
            pieces = [movable(leaves[index])] if target.boxes_of(group.rank) else []
            items.append((sources[index], Receipt(target, pieces), survey.holdings[index].dtype))
        kind = communicating_device(group, [holding.device for holding in survey.holdings.values()])
        return depart(Terms(key, group, kind, bucket_bytes), items, reduction)

    work, departure = agree_on_layouts("gather", group, prepare, load)
    departure.move()
    return unflatten(work.survey.spec, work.leaves)


class _Work(NamedTuple):
    """A tree to gather, the ranks that get it and on which device, and the leaves that come out."""

    survey: Survey
    receivers: tuple[int, ...]
    device: torch.device | str | int | None
    leaves: list[Any]


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
    keys, paths = survey.spec.flat_keys(), survey.spec.paths()
    tree = {keys[index]: leaves[index] for index in rest}
    move = partial(offload, copy=False) if torch.device(device).type != "meta" else allocate_like
    try:
        moved = move(tree, device=device)
    except StateTreeError as error:
        place_in_tree(error, {keys[index]: paths[index] for index in rest})
        raise
    for index, leaf in zip(rest, moved.values(), strict=True):
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
    if _is_dense(tuple(shape), tuple(stride)):
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device)


@lru_cache(maxsize=4096)
def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return len(stride) == len(shape) and is_dense(contiguous=False, shape=shape, stride=stride)
