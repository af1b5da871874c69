"""``partition_replicas``: of what several ranks hold, each keeps a fair part."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from statetree.chunks.boxes import Box
from statetree.chunks.layouts import ChunkLayout, by_rank, layout_of, whole_on
from statetree.declare import collective
from statetree.exchange.consensus import Entry
from statetree.exchange.driver import exchange
from statetree.exchange.senders import choose_owners
from statetree.leaves.builtin import facts, holds_tensor, is_plain
from statetree.leaves.parts import unpack
from statetree.leaves.replicas import replicated
from statetree.leaves.ties import tied_leaves
from statetree.spans.memory import memory_of
from statetree.tree.flatten import flatten_for_copy, unflatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from statetree.chunks.local import LocalChunks
    from statetree.exchange.group import Group, Timeout
    from statetree.exchange.manifest import Manifest

T = TypeVar("T")


@collective
def partition_replicas(tree: T, *, group: ProcessGroup | None = None, timeout: Timeout = None) -> T:
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
        UnsupportedLeaf: If the chunks of a leaf are unknown.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> st.partition_replicas({"w": torch.ones(2)})  # a single rank keeps everything
        {'w': tensor([1., 1.])}
    """
    with exchange("partition_replicas", group, timeout) as run:
        source = run.manifest(tree)
        bundles = _bundles(source)
        same = unflatten(source.spec, list(source.leaves))
        empty, _ = flatten_for_copy(replicated(source.verb, same, memory_of("meta"), copy=False), holds_tensor)
        place = {index: position for position, index in enumerate(source.order)}
        ties = Entry("<ties>", str([[place[index] for index in bundle] for bundle in bundles]))
        (layouts,) = run.layouts(source, beside=[ties])
        run.expect()
        kept = _kept(source, bundles, layouts, run.group)
        run.ready()
        return source.lift([leaf if i in kept else empty[i] for i, leaf in enumerate(source.leaves)])


def _bundles(manifest: Manifest) -> list[list[int]]:
    """Return groups of tied leaves, in the order of the paths, for all leaves that are not distributed."""
    local = [index for index in manifest.order if index not in manifest.chunks and not is_plain(manifest.leaves[index])]
    unpacked = unpack(
        manifest.verb,
        [manifest.leaves[index] for index in local],
        lambda: list(map(manifest.path, local)),
        memory=False,
    )
    tied = tied_leaves(unpacked)
    return [[local[member] for member in members] for position, members in enumerate(tied) if members[0] == position]


def _kept(
    manifest: Manifest, bundles: Sequence[Sequence[int]], layouts: dict[int, ChunkLayout], group: Group
) -> set[int]:
    """Return the leaves that this rank keeps."""
    members: list[Sequence[int]] = []
    shares: list[tuple[ChunkLayout, int]] = []
    for bundle in bundles:
        members.append(bundle)
        shares.append(
            (whole_on((sum(_nbytes(manifest.leaves[index]) for index in bundle) or 1,), range(group.size)), 1)
        )
    followers: defaultdict[int, list[int]] = defaultdict(list)
    leaders = manifest.largest_parts()  # the parts of a leaf are kept or left together
    for index, canonical in manifest.canonical.items():
        leader = leaders.get(index, index)
        followers[canonical if leader == index else manifest.canonical[leader]].append(index)
    for canonical, copies in followers.items():
        chunks = manifest.chunks[canonical]
        held = (layouts[canonical],) if chunks.partials is None else chunks.partials[1]
        members.append(copies)
        if prod(chunks.shape):
            shares.append((_by_share(held), chunks.dtype.itemsize))
        else:  # it weighs nothing: who has it may be seen differently where meshes differ, and nothing else may follow
            shares.append((whole_on((1,), _ranks_of(chunks, group)), 0))
    owned = choose_owners(shares, group.size)
    kept = {index for index, leaf in enumerate(manifest.leaves) if is_plain(leaf)}
    for tied, owners in zip(members, owned, strict=True):
        if bool((owners == group.rank).any()):
            kept.update(tied)
    return kept


def _ranks_of(chunks: LocalChunks, group: Group) -> Sequence[int]:
    """Return the ranks that hold something empty, which no layout has."""
    meshed = () if chunks.mesh is None else chunks.mesh.ranks
    return [rank for rank, number in enumerate(group.global_ranks) if number in meshed] or range(group.size)


@lru_cache(maxsize=1024)
def _by_share(held: tuple[ChunkLayout, ...]) -> ChunkLayout:
    """Return a layout with one box for each set of boxes that a rank holds: they are kept or left together."""
    first = held[0]
    if len(held) == 1 and bool((first.ranks[1:] > first.ranks[:-1]).all()):  # no rank has several boxes
        stops = first.distinct.volumes.cumsum(0)
        starts = stops - first.distinct.volumes
        which = first.distinct.which
        return ChunkLayout((int(stops[-1]) if len(stops) else 0,), first.ranks, starts[which, None], stops[which, None])
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
    if "dtype" not in known or not all(type(size) is int for size in known.get("shape", "?")):  # jagged dims are texts
        return 0
    return int(torch.Size(known["shape"]).numel()) * int(known["dtype"].itemsize)
