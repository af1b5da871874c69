"""Discovery: where the ranks cannot know by themselves who holds what, they tell each other.

Most ranks say the same. Each text is sent once, and looked at once; of a layout over a mesh, the mesh is told, and
where each rank's boxes are follows from that. So what a rank hears grows with the ranks and with the leaves, and with
the product of neither.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from statetree.chunks.boxes import Box
from statetree.chunks.layouts import ChunkLayout, Split, by_rank, layout_of, mesh_layout
from statetree.chunks.local import MeshSplits
from statetree.chunks.ranks import ranks_named
from statetree.declare import cached_property
from statetree.errors import RankMismatch
from statetree.exchange.consensus import text_digest
from statetree.exchange.manifest import ABSENT
from statetree.exchange.replica_check import Copies, check_replicas, first_copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from statetree.chunks.local import LocalChunks
    from statetree.exchange.call import Call
    from statetree.exchange.group import Group
    from statetree.exchange.manifest import Manifest

T = TypeVar("T")


def discover_layouts(call: Call, manifest: Manifest, *, details_agree: bool) -> tuple[dict[int, ChunkLayout], bytes]:
    """Return the layouts of the distributed leaves, and a digest of what the ranks had to tell each other for that.

    Where the ranks know only their own boxes, or see meshes or ties differently, they tell each other. All raise if
    they hold only a part of a leaf, if what is written is tied on some of them only, or if replicas differ.
    """
    layouts, seen = (manifest.own_layouts(), b"") if details_agree else (None, b"")
    if layouts is None:
        layouts, seen = _told(call, manifest)
    if manifest.complete:
        manifest.check_complete(layouts)
    return layouts, seen


def _told(call: Call, manifest: Manifest) -> tuple[dict[int, ChunkLayout], bytes]:
    """Have every rank say what it holds, and return the layouts that come of it."""
    told = _Statements(call.group, manifest)
    _refine_ties(manifest, told)
    layouts: dict[int, ChunkLayout] = {}
    copies: dict[int, Copies] = {}
    for number, (index, chunks) in enumerate(manifest.chunks.items()):
        held = told.held(number)
        if held.differs and chunks.partials is not None:
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


def _refine_ties(manifest: Manifest, told: _Statements) -> None:
    """Keep only those ties that all ranks see; refuse them if two values would be moved into one memory then.

    A rank that holds nothing of two leaves has no say: it may take them for one, or not know that they are.
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
        seen = tuple([row.get(number) for row in rows])
        index = indices[number]
        manifest.canonical[index] = first.setdefault(seen, index) if any(tie is not None for tie in seen) else index
    if not manifest.written:
        return
    for row in rows:
        canonical: dict[int, int] = {}
        for number, tie in row.items():
            index = indices[number]
            if canonical.setdefault(tie, manifest.canonical[index]) != manifest.canonical[index]:
                path, other = manifest.path(index), manifest.path(indices[tie])
                where = ranks_named([rank for rank, its in enumerate(rows) if its.get(number) == tie])
                raise RankMismatch(
                    f"{manifest.verb}: the ranks do not see the same ties at {path or '<root>'}: expected one memory "
                    f"with {other} on every rank or on none, got that on {where} alone. Nothing was moved. Tie them on "
                    "every rank, or on none."
                )


class Way(NamedTuple):
    """How a rank holds leaves: over a mesh, or in boxes that only it knows."""

    detail: str  # as ``LocalChunks`` has it
    mesh: MeshSplits | None  # the mesh, and how it cuts a tensor
    boxes: tuple[Box, ...]  # this rank's boxes, without a mesh
    is_known: bool  # whether it knows the boxes of the other ranks, too


class _Statements:
    """What the ranks said. All ranks of the group make one at the same time.

    Attributes:
        ties: For every rank the ties that it sees: the numbers of leaves that are tied to earlier ones, with those.
        digest: A digest of everything.
    """

    def __init__(self, group: Group, manifest: Manifest) -> None:
        self._group = group
        self._chunks = list(manifest.chunks.values())
        numbers: dict[Way, int] = {}
        ways = []
        for chunks in self._chunks:
            boxes = () if chunks.mesh is not None else tuple(chunks.boxes)
            way = Way(chunks.detail, chunks.mesh, boxes, chunks.layout is not None)
            ways.append(numbers.setdefault(way, len(numbers)))
        ties = [pair for pair in enumerate(manifest.ties()) if pair[0] != pair[1]]
        heard = [group.told_once(json.dumps(stated).encode()) for stated in (ties, ways, list(numbers))]
        seen, numbered, listed = heard
        self.ties = _of_ranks([dict(json.loads(text)) for text, _ in seen], seen)
        #: For each distributed leaf its number in each list of numbers: equal for most leaves.
        self._columns = list(zip(*[json.loads(text) for text, _ in numbered], strict=True))
        known: dict[Way, int] = {}
        lists = [[known.setdefault(_way(*told), len(known)) for told in json.loads(text)] for text, _ in listed]
        self._ways = list(known)
        pairs = list(zip(_of_ranks(range(len(numbered)), numbered), _of_ranks(range(len(lists)), listed), strict=True))
        camps = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        #: Ranks that said the same: which numbers, and what these stand for.
        self._camps = [(numbering, lists[told]) for numbering, told in camps]
        self._camp_of = torch.tensor([camps[pair] for pair in pairs])
        self._held: dict[Any, Held] = {}
        self.digest = text_digest([str(heard)])

    def held(self, number: int) -> Held:
        """Return who holds what of a distributed leaf, by its number."""
        chunks = self._chunks[number]
        column = self._columns[number]
        key = (column, chunks.shape)
        if key not in self._held:
            ways = torch.tensor([told[column[numbering]] for numbering, told in self._camps])
            self._held[key] = Held(self._group, chunks, self._ways, ways[self._camp_of])
        return self._held[key]


def _of_ranks(values: Sequence[T], told: Sequence[tuple[bytes, list[int]]]) -> list[T]:
    """Return for every rank the value that stands for the text which it told."""
    found = {rank: value for value, (_, ranks) in zip(values, told, strict=True) for rank in ranks}
    return [found[rank] for rank in range(len(found))]


def _way(detail: str, mesh: Any, boxes: Any, is_known: bool) -> Way:  # noqa: FBT001 - as it was told
    """Return a way as it was before it was told."""
    if mesh is not None:
        shape, ranks, splits = mesh
        mesh = MeshSplits(tuple(shape), tuple(ranks), tuple([Split(*split) for split in splits]))
    return Way(detail, mesh, tuple([Box(tuple(start), tuple(stop)) for start, stop in boxes]), is_known)


class Held:
    """Who holds what of leaves of one shape that each rank holds in one way (``way_of``, by its number in ``ways``).

    ``chunks`` is what this rank knows of one of them. ``is_known`` is whether all ranks that hold any know the others'
    boxes by themselves.
    """

    def __init__(self, group: Group, chunks: LocalChunks, ways: Sequence[Way], way_of: torch.Tensor) -> None:
        self._index, self._rank = group.index, group.rank
        self._shape = chunks.shape
        self._way_of = way_of
        #: What is held at all, in the order of the first rank that holds it so.
        self._ways = {number: ways[number] for number in dict.fromkeys(way_of.tolist())}
        present = [way for way in self._ways.values() if way.detail != ABSENT]
        self._details = list(dict.fromkeys(way.detail for way in present))
        self.is_known = all(way.is_known for way in present)

    @property
    def differs(self) -> bool:
        """Whether ranks see different meshes."""
        return len(self._details) > 1

    @cached_property
    def of_all(self) -> ChunkLayout:
        """The boxes that every rank holds."""
        return self._layout(self._ways)

    @cached_property
    def of_first_mesh(self) -> ChunkLayout:
        """The boxes of those ranks that see the mesh that the first rank sees."""
        return self._layout(number for number, way in self._ways.items() if way.detail == self._details[0])

    @cached_property
    def first(self) -> ChunkLayout:
        """The boxes of the first ranks that have all elements between them."""
        return layout_of(self._shape, first_copy(self._shape, by_rank(self.of_first_mesh)))

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks that hold anything."""
        found: list[int] = self.of_all.ranks.unique().tolist()
        return found

    @cached_property
    def copies(self) -> Copies:
        """What is compared. Ranks that know their own chunks only may have any mesh."""
        boxes = by_rank(self.of_all)
        ranks = range(len(self._way_of))
        meshes: Sequence[int] = ranks
        if self.is_known:
            found = {detail: mesh for mesh, detail in enumerate(self._details)}
            mesh_of = {number: found.get(way.detail, len(found)) for number, way in self._ways.items()}
            meshes = [mesh_of[number] for number in self._way_of.tolist()]
        return Copies(self._rank, self._shape, meshes, [boxes.get(rank, []) for rank in ranks])

    def _layout(self, numbers: Iterable[int]) -> ChunkLayout:
        """Return the boxes of the ranks that hold the leaves in some ways."""
        ranks: list[torch.Tensor] = []
        corners: list[torch.Tensor] = []
        for number in numbers:
            _, mesh, boxes, _ = self._ways[number]
            here = self._way_of == number
            if mesh is None:
                holders = here.nonzero()[:, 0]
                own = torch.tensor(boxes, dtype=torch.int64).view(len(boxes), 2, len(self._shape))
                ranks.append(holders.repeat_interleave(len(boxes)))
                corners.append(own.repeat(len(holders), 1, 1))
            else:
                members = tuple([self._index.get(rank, -1) for rank in mesh.ranks])
                layout = mesh_layout(self._shape, mesh.shape, members, mesh.splits)
                rows = here[layout.ranks]
                ranks.append(layout.ranks[rows])
                corners.append(torch.stack([layout.starts, layout.stops], 1)[rows])
        starts, stops = torch.cat(corners).unbind(1)
        return ChunkLayout(self._shape, torch.cat(ranks), starts, stops, disjoint=False)
