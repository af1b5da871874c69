"""Discovery: where the ranks cannot know by themselves who holds what, they tell each other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from statetree.chunks.boxes import Box
from statetree.chunks.layouts import layout_of
from statetree.errors import RankMismatch, UnsupportedLeaf
from statetree.exchange.consensus import digest, ranks_named
from statetree.exchange.manifest import ABSENT
from statetree.exchange.replica_check import Copies, check_replicas, first_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.chunks.layouts import ChunkLayout
    from statetree.exchange.call import Call
    from statetree.exchange.manifest import Manifest


def discover_layouts(call: Call, manifest: Manifest, *, details_agree: bool) -> tuple[dict[int, ChunkLayout], bytes]:
    """Return the layouts of the distributed leaves, and a digest of what the ranks had to tell each other for that.

    Where the ranks know only their own boxes, or see meshes or ties differently, they tell each other.

    Args:
        call: The collective.
        manifest: The tree.
        details_agree: Whether all ranks see meshes and ties alike.

    Raises:
        UnsupportedLeaf: If the ranks hold only a part of a leaf. On every rank.
        RankMismatch: If leaves that elements are moved into are tied on some of the ranks only, or the elements of
            meshes that differ from rank to rank are not the same, as far as that is looked at. On every rank.
    """
    if details_agree and manifest.is_known:
        layouts = {index: layout for index, chunks in manifest.chunks.items() if (layout := chunks.layout) is not None}
        seen = b""
    else:
        layouts, seen = _told(call, manifest)
    lacking = manifest.incomplete(layouts) if manifest.complete else None
    if lacking is not None:
        path = manifest.path(lacking)
        msg = (
            f"{manifest.verb}: the ranks of the group hold only a part of the leaf at {path or '<root>'}: expected "
            f"all of {manifest.chunks[lacking].text[2:]}. Pass the group of all ranks that hold it."
        )
        raise UnsupportedLeaf(msg, path)
    return layouts, seen


def _told(call: Call, manifest: Manifest) -> tuple[dict[int, ChunkLayout], bytes]:
    """Have every rank say what it holds, and return the layouts that come of it."""
    held = manifest.chunks.values()
    known = [chunks.layout is not None for chunks in held]
    told = json.dumps([manifest.ties(), [chunks.detail for chunks in held], [chunks.boxes for chunks in held], known])
    rows = [json.loads(text) for text in call.group.all_gather_bytes(told.encode())]
    _refine_ties(manifest, [(ties, boxes) for ties, _, boxes, _ in rows])
    layouts: dict[int, ChunkLayout] = {}
    copies: dict[int, Copies] = {}
    for number, (index, chunks) in enumerate(manifest.chunks.items()):
        details = [meshes[number] for _, meshes, _, _ in rows]
        present = [rank for rank, detail in enumerate(details) if detail != ABSENT]
        elsewhere = {rank for rank in present if details[rank] != details[present[0]]}
        # Ranks that know their own chunks only may have any mesh.
        own_only = not all(row[3][number] for rank, row in enumerate(rows) if rank in present)
        if elsewhere and chunks.summands is not None:
            path = manifest.path(index)
            msg = (
                f"{manifest.verb}: cannot reduce the leaf at {path or '<root>'}: expected Partial over one mesh, got "
                "other meshes on other ranks. Pass the group of one mesh, or redistribute it first."
            )
            raise UnsupportedLeaf(msg, path)
        boxes = [[Box(*map(tuple, box)) for box in listed[number]] for _, _, listed, _ in rows]
        if manifest.replicas == "check" and (elsewhere or own_only):
            meshes = range(len(rows)) if own_only else list(map(details.index, details))
            copies[index] = Copies(meshes, boxes)
        # Meshes of their own hold replicas. What is read comes from the first rank's: a mix would be nobody's.
        chosen = {rank: own for rank, own in enumerate(boxes) if not (manifest.complete and rank in elsewhere)}
        if manifest.replicas == "first" and own_only:
            chosen = first_copy(chunks.shape, chosen)
        layouts[index] = layout_of(chunks.shape, chosen)
    check_replicas(call, manifest, copies)
    return layouts, digest([json.dumps(rows)])


def _refine_ties(manifest: Manifest, by_rank: Sequence[tuple[Sequence[int], Sequence[Any]]]) -> None:
    """Keep only those ties that all ranks see.

    A rank that holds nothing of two leaves has no say: it may take them for one, or not know that they are.

    Args:
        manifest: The tree.
        by_rank: For each rank its ``ties``, and the boxes that it holds of each distributed leaf.

    Raises:
        RankMismatch: If two values would be moved into one memory then, or one into a part of several.
    """
    first: dict[tuple[int | None, ...], int] = {}
    indices = list(manifest.canonical)
    rows = [
        [tie if number >= len(held) or held[number] else None for number, tie in enumerate(ties)]
        for ties, held in by_rank
    ]
    for index, seen in zip(indices, zip(*rows, strict=True), strict=True):
        manifest.canonical[index] = first.setdefault(seen, index) if any(tie is not None for tie in seen) else index
    if not manifest.written:
        return
    for row in rows:
        canonical: dict[int, int] = {}
        for number, tie in enumerate(row):
            index = indices[number]
            if tie is not None and canonical.setdefault(tie, manifest.canonical[index]) != manifest.canonical[index]:
                raise _tied_on_some(manifest, indices[tie], index, [row[number] == tie for row in rows])


def _tied_on_some(manifest: Manifest, first: int, index: int, tied: Sequence[bool]) -> RankMismatch:
    path, other = manifest.path(index), manifest.path(first)
    where = ranks_named([rank for rank, found in enumerate(tied) if found])
    msg = (
        f"{manifest.verb}: the ranks do not see the same ties at {path or '<root>'}: expected one memory with {other} "
        f"on every rank or on none, got that on {where} alone. Nothing was moved. Tie them on every rank, or on none."
    )
    return RankMismatch(msg)
