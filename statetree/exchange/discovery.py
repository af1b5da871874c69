"""Discovery: where the ranks cannot know by themselves who holds what, they tell each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statetree.chunks.ranks import ranks_named
from statetree.errors import RankMismatch
from statetree.exchange.replica_check import check_replicas
from statetree.exchange.statements import Statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.chunks.layouts import ChunkLayout
    from statetree.exchange.call import Call
    from statetree.exchange.manifest import Manifest
    from statetree.exchange.replica_check import Copies


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
    layouts, seen = (manifest.own_layouts(), b"") if details_agree else (None, b"")
    if layouts is None:
        layouts, seen = _told(call, manifest)
    lacking = manifest.incomplete(layouts) if manifest.complete else None
    if lacking is not None:
        msg = (
            "the ranks of the group hold only a part of the leaf at %PATH%: expected all of "
            f"{manifest.chunks[lacking].text[2:]}. Pass the group of all ranks that hold it."
        )
        raise manifest.unsupported(lacking, msg)
    return layouts, seen


def _told(call: Call, manifest: Manifest) -> tuple[dict[int, ChunkLayout], bytes]:
    """Have every rank say what it holds, and return the layouts that come of it."""
    told = Statements(call.group, manifest)
    _refine_ties(manifest, told)
    layouts: dict[int, ChunkLayout] = {}
    copies: dict[int, Copies] = {}
    for number, (index, chunks) in enumerate(manifest.chunks.items()):
        held = told.held(number)
        if held.differs and chunks.summands is not None:
            msg = (
                "cannot reduce the leaf at %PATH%: expected Partial over one mesh, got other meshes on other ranks. "
                "Pass the group of one mesh, or redistribute it first."
            )
            raise manifest.unsupported(index, msg)
        if manifest.replicas == "check" and (held.differs or not held.is_known):
            copies[index] = held.copies
        if manifest.replicas == "first" and not held.is_known:
            layouts[index] = held.first
        else:
            # Meshes of their own hold replicas. What is read comes from the first rank's: a mix would be nobody's.
            layouts[index] = held.of_first_mesh if manifest.complete else held.of_all
    check_replicas(call, manifest, copies)
    return layouts, told.digest


def _refine_ties(manifest: Manifest, told: Statements) -> None:
    """Keep only those ties that all ranks see.

    A rank that holds nothing of two leaves has no say: it may take them for one, or not know that they are.

    Args:
        manifest: The tree.
        told: What the ranks said.

    Raises:
        RankMismatch: If two values would be moved into one memory then, or one into a part of several.
    """
    if len(set(map(id, told.ties))) == 1:
        return
    indices = list(manifest.canonical)
    numbers = sorted({number for ties in told.ties for pair in ties.items() for number in pair})
    rows: list[dict[int, int]] = [{} for _ in told.ties]  # for each rank, of the leaves that it holds
    for number in numbers:
        ranks = told.held(number).ranks if number < len(manifest.chunks) else range(len(rows))
        for rank in ranks:
            rows[rank][number] = told.ties[rank].get(number, number)
    first: dict[tuple[int | None, ...], int] = {}
    for number in numbers:
        seen = tuple(row.get(number) for row in rows)
        index = indices[number]
        manifest.canonical[index] = first.setdefault(seen, index) if any(tie is not None for tie in seen) else index
    if not manifest.written:
        return
    for row in rows:
        canonical: dict[int, int] = {}
        for number, tie in row.items():
            index = indices[number]
            if canonical.setdefault(tie, manifest.canonical[index]) != manifest.canonical[index]:
                raise _tied_on_some(manifest, indices[tie], index, [other.get(number) == tie for other in rows])


def _tied_on_some(manifest: Manifest, first: int, index: int, tied: Sequence[bool]) -> RankMismatch:
    path, other = manifest.path(index), manifest.path(first)
    where = ranks_named([rank for rank, found in enumerate(tied) if found])
    msg = (
        f"{manifest.verb}: the ranks do not see the same ties at {path or '<root>'}: expected one memory with {other} "
        f"on every rank or on none, got that on {where} alone. Nothing was moved. Tie them on every rank, or on none."
    )
    return RankMismatch(msg)
