"""``partition_replicas``: of what several ranks hold, each keeps a fair part."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.agreement import Entry, Statement
from statetree.boxes import Box
from statetree.buffers import memory_of
from statetree.chunks import Layout, by_rank, layout_of, whole_on
from statetree.compose import collective
from statetree.groups import Group, Timeout, group_of
from statetree.leaves import facts, holds_tensor, is_plain
from statetree.plans import choose_owners, owners_of
from statetree.survey import Survey, agree_on_layouts
from statetree.ties import tied_leaves
from statetree.torch_internals import quietly
from statetree.transforms._pipeline import replicated
from statetree.tree import flatten_for_copy, unflatten
from statetree.unpacking import unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup


@collective
def partition_replicas(tree: Any, *, group: ProcessGroup | None = None, timeout: Timeout = None) -> Any:
    """Keep every chunk that several ranks hold on exactly one of them.

    Ranks hold the same where tensors are not distributed (DDP), or replicated over a mesh dim (HSDP). Where meshes
    differ from rank to rank, bytes are compared. Which rank keeps what is balanced by bytes: the largest first, the
    least loaded rank takes it. Tied tensors stay together.

    Args:
        tree: Any tree, the same on every rank up to elements and plain values.
        group: The ranks that take part; by default all.
        timeout: How long each collective may take, in seconds or as a ``timedelta``; by default what the group allows.

    Returns:
        A tree of the same structure. Where another rank keeps a tensor, this one has a leaf of the same type on
        ``meta`` (for a ``DTensor``, its local tensor is). Plain values stay on every rank.

    Aliasing:
        What a rank keeps is passed through.

    Collective:
        Every rank of the group calls it.

    Raises:
        RankMismatch: If the ranks hold different trees, if one of them failed or did not answer in time, or if meshes
            that differ from rank to rank do not hold the same bytes. On every rank.
        UnsupportedLeaf: If the chunks of a leaf cannot be told.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> st.partition_replicas({"w": torch.ones(2)})  # a single rank keeps everything
        {'w': tensor([1., 1.])}
    """
    return _partition_replicas(tree, group_of("partition_replicas", group, timeout))


@quietly
def _partition_replicas(tree: Any, group: Group) -> Any:
    verb = "partition_replicas"

    def prepare() -> tuple[Statement, list[tuple[Survey, bool]], _Work]:
        survey = Survey(verb, tree, group, replicas="check")
        bundles = _bundles(survey)
        place = {index: position for position, index in enumerate(survey.order)}
        ties = str([[place[index] for index in bundle] for bundle in bundles])
        same = unflatten(survey.spec, list(survey.leaves))
        on_meta = replicated(verb, same, memory_of("meta", pin_memory=False, share_memory=False), copy=False)
        empty, _ = flatten_for_copy(on_meta, holds_tensor)
        entries = [*survey.entries(), Entry("<ties>", ties)]
        return Statement(f"{verb}()", entries, survey.details()), [(survey, False)], _Work(survey, bundles, empty)

    def load(work: _Work, layouts: Sequence[dict[int, Layout]], _: Any) -> list[Any]:
        kept = _kept(work.survey, work.bundles, layouts[0], group)
        return [leaf if index in kept else work.empty[index] for index, leaf in enumerate(work.survey.leaves)]

    work, leaves = agree_on_layouts(verb, group, prepare, load)
    return unflatten(work.survey.spec, leaves)


class _Work(NamedTuple):
    """A tree, its groups of tied leaves, and all its leaves on ``meta``."""

    survey: Survey
    bundles: list[list[int]]
    empty: list[Any]


def _bundles(survey: Survey) -> list[list[int]]:
    """Return groups of tied leaves, in the order of the paths, for all leaves that are not distributed."""
    local = [index for index in survey.order if index not in survey.holdings and not is_plain(survey.leaves[index])]
    unpacked = unpack(survey.verb, [survey.leaves[index] for index in local], survey.spec.paths, memory=False)
    tied = tied_leaves(unpacked)
    return [[local[member] for member in members] for position, members in enumerate(tied) if members[0] == position]


def _kept(survey: Survey, bundles: Sequence[Sequence[int]], layouts: dict[int, Layout], group: Group) -> set[int]:
    """Return the leaves that this rank keeps."""
    members: list[Sequence[int]] = []
    shares: list[tuple[Layout, int]] = []
    for bundle in bundles:
        members.append(bundle)
        shares.append((whole_on((sum(_nbytes(survey.leaves[index]) for index in bundle) or 1,), range(group.size)), 1))
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for index, leader in survey.leaders.items():
        followers[leader].append(index)
    for leader, copies in followers.items():
        holding = survey.holdings[leader]
        held = [layouts[leader]] if holding.summands is None else holding.summands[1]
        members.append(copies)
        shares.append((_by_share(held), holding.dtype.itemsize))
    owned = choose_owners(shares, group.size)
    kept = {index for index, leaf in enumerate(survey.leaves) if is_plain(leaf)}
    for tied, (layout, _), owners in zip(members, shares, owned, strict=True):
        if group.rank in owners_of(layout, owners).tolist():
            kept.update(tied)
    return kept


def _by_share(held: Sequence[Layout]) -> Layout:
    """Return a layout with one box for each set of boxes that a rank holds: they are kept or left together."""
    shares: dict[Any, Box] = {}
    ranks: dict[int, list[Box]] = {}
    position = 0
    for number, layout in enumerate(held):
        for rank, boxes in by_rank(layout).items():
            key = (number, tuple(boxes))
            if key not in shares:
                size = sum(torch.Size(box.sizes).numel() for box in boxes)
                shares[key] = Box((position,), (position + size,))
                position += size
            ranks[rank] = [shares[key]]
    return layout_of((position,), ranks)


def _nbytes(leaf: Any) -> int:
    """Return the bytes of a leaf as far as all ranks see them alike."""
    known = facts(leaf)
    if "shape" not in known or "dtype" not in known:
        return 0
    return int(torch.Size(known["shape"]).numel()) * int(known["dtype"].itemsize)
