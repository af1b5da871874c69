"""A tree as a collective sees it: what this rank holds of every leaf, and what the ranks tell each other of that."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from statetree.agreement import CONTAINER, Agreed, Entry, Statement, agree, digest, ranks_named, ready
from statetree.boxes import Box
from statetree.chunks import Holding, Layout, layout_of
from statetree.columns import Columns
from statetree.comparing import may_be_under_way, settled
from statetree.errors import RankMismatch, UnsupportedLeaf
from statetree.leaves import QUANTIZED, facts, holds_tensor, is_distributed, leaf_type_of
from statetree.paths import Path, exactly, unique_keys
from statetree.replicas import Copies, check_replicas, first_copy
from statetree.spans import check_memory
from statetree.tree import flatten, flatten_for_copy
from statetree.unpacking import located, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.containers import Container
    from statetree.groups import Group
    from statetree.treespec import TreeSpec

L = TypeVar("L")
W = TypeVar("W")


class Survey:
    """A tree, as a collective sees it.

    Attributes:
        leaves: Its leaves, collectives under way waited for.
        spec: Its structure.
        order: The indices of the leaves, in the order of their paths: the same on every rank.
        holdings: What this rank holds of each distributed leaf, by its index.
        leaders: For every distributed leaf the first one (in the order of the paths) that lies in the same memory; for
            others that elements are moved into, too.
        written: Whether elements are moved into its leaves: then the ranks must see the same ties.
        replicas: Where meshes differ from rank to rank, whether their elements are compared (``"check"``), or the first
            mesh's taken (``"first"``). With ``None`` all keep what they have.
    """

    def __init__(
        self, verb: str, tree: Any, group: Group, *, written: bool = False, replicas: str | None = None
    ) -> None:
        leaves, self.spec = flatten_for_copy(tree, holds_tensor, verb=verb)
        self.leaves = list(map(settled, leaves)) if any(map(may_be_under_way, set(map(type, leaves)))) else leaves
        self.verb = verb
        self.written = written
        self.replicas = replicas

        outline = _outline_of(self.spec)
        self.order = outline.order
        self._keys = outline.keys
        self._structure = outline.structure
        self.holdings: dict[int, Holding] = {}
        self.leaders: dict[int, int] = {}
        first: dict[Any, int] = {}
        for index in self.order:
            holding = self._holding(index, group)
            if holding is not None:
                self.holdings[index] = holding
                key = (holding.text, holding.detail, tuple(holding.boxes), holding.tie)
                self.leaders[index] = first.setdefault(key, index)

    def _holding(self, index: int, group: Group) -> Holding | None:
        leaf = self.leaves[index]
        try:
            return holding_of(leaf, group)
        except Exception as error:
            raise located(self.verb, "tell the chunks of", error, self.spec.paths, self.leaves, index) from error

    def entries(self) -> list[Entry]:
        """Return what must be the same on all ranks."""
        texts = [self._text(index) for index in self.order]
        return [*map(Entry, self._keys, texts), *self._structure]

    def _text(self, index: int) -> str:
        holding = self.holdings.get(index)
        if holding is not None:
            return holding.text
        try:
            return _text_of(self.leaves[index])
        except Exception as error:
            raise located(self.verb, "describe", error, self.spec.paths, self.leaves, index) from error

    def details(self) -> list[str]:
        """Return what usually is the same on all ranks: which of them hold what, and ties."""
        return [*(holding.detail for holding in self.holdings.values()), str(self.ties())]

    def ties(self) -> list[int]:
        """Return, for every leaf that has a leader, the number of that one."""
        number = {index: number for number, index in enumerate(self.leaders)}
        return [number[leader] for leader in self.leaders.values()]

    @property
    def is_known(self) -> bool:
        """Whether the layouts of all leaves are known without asking the other ranks."""
        return all(holding.layout is not None for holding in self.holdings.values())

    def known_layouts(self, *, complete: bool) -> dict[int, Layout] | None:
        """Return the layouts of the distributed leaves, if this rank knows them by itself.

        Args:
            complete: Whether the ranks must hold every leaf completely. ``None`` is returned where they do not.
        """
        if not self.is_known:
            return None
        layouts = {index: layout for index, holding in self.holdings.items() if (layout := holding.layout) is not None}
        return None if complete and _incomplete(self, layouts) is not None else layouts

    def check_readable(self) -> None:
        """Raise ``UnsupportedLeaf`` if the elements of a distributed leaf cannot be read."""
        owners = [index for index, holding in self.holdings.items() for _ in holding.pieces]
        pieces = [piece for holding in self.holdings.values() for piece in holding.pieces]
        for index, piece in zip(owners, pieces, strict=True):
            holding = self.holdings[index]
            if piece.is_meta and (holding.layout is None or holding.device != "meta"):  # or not so on every rank
                path = self.path(index)
                msg = (
                    f"{self.verb}: a chunk of the leaf at {path or '<root>'} is on meta: expected elements. Load it "
                    "first."
                )
                raise UnsupportedLeaf(msg, path)
        check_memory(self.verb, Columns(pieces), lambda place: self.path(owners[place]))

    def leading(self) -> list[int]:
        """Return the distributed leaves to move: one of those that lie in the same memory, and none without memory."""
        return [
            index for index, leader in self.leaders.items() if index == leader and self.holdings[index].device != "meta"
        ]

    def path(self, index: int) -> Path:
        """Return the path of a leaf."""
        return self.spec.paths()[index]


class _Outline(NamedTuple):
    """What depends on a tree's structure alone: the leaves by their paths, their keys in that order, and containers."""

    order: list[int]
    keys: list[str]
    structure: list[Entry]


def path_order(spec: TreeSpec) -> list[int]:
    """Return the indices of the leaves in the order of their paths."""
    return _outline_of(spec).order


@lru_cache(maxsize=32)
def _outline_of(spec: TreeSpec) -> _Outline:
    paths, keys = spec.paths(), spec.flat_keys()
    order = sorted(range(spec.num_leaves), key=lambda index: paths[index].sort_key())
    containers: list[tuple[tuple[Any, ...], str]] = []
    links = spec.links()
    pending: list[tuple[int, tuple[Any, ...]]] = [(spec.root(), ())] if spec.nodes else []
    while pending:
        ref, path = pending.pop()
        kind, names = spec.nodes[~ref][:2]
        containers.append((path, _container_text(kind, names)))
        pending += [(child, (*path, name)) for name, child in zip(names, links[~ref], strict=True) if child < 0]
    containers.sort(key=_sort_key)
    named = unique_keys([str(Path(path)) or "<root>" for path, _ in containers], [path for path, _ in containers])
    structure = [Entry(f"{name}{CONTAINER}", text) for name, (_, text) in zip(named, containers, strict=True)]
    return _Outline(order, [keys[index] for index in order], structure)


def _sort_key(container: tuple[tuple[Any, ...], str]) -> Any:
    return Path(container[0]).sort_key()


def _container_text(kind: Container, names: tuple[Any, ...]) -> str:
    family = kind.family if isinstance(kind.family, str) else getattr(kind.family, "__qualname__", str(kind.family))
    if not kind.keyed or all(type(name) is str for name in names):
        return f"a {family} of {len(names)}"
    return f"a {family} with the keys {', '.join(sorted(map(exactly, names)))}"


def holding_of(leaf: Any, group: Group) -> Holding | None:
    """Return what this rank of a group holds of a distributed leaf; ``None`` if a leaf is not distributed.

    Raises:
        UnsupportedLeaf: If it is, but its chunks cannot be told. ``%PATH%`` in the message stands for the path.
    """
    leaf_type = leaf_type_of(type(leaf))
    if leaf_type is None:
        return None
    if type(leaf) in (torch.Tensor, torch.nn.Parameter):
        if leaf.__dict__ and any(map(is_distributed, flatten(leaf.__dict__)[0])):
            raise _hidden(leaf)
        return None
    holding = getattr(leaf_type, "holding", None)
    if holding is not None:
        found: Holding = holding(leaf, group)
        return found
    chunks = getattr(leaf_type, "chunks", None)
    if chunks is not None:
        from statetree.leaf_types.dtensor import known_here

        shape, dtype, listed = chunks(leaf)
        boxes = [Box(tuple(o), tuple(a + b for a, b in zip(o, t.shape, strict=True))) for o, t in listed]
        return known_here(leaf, tuple(shape), dtype, boxes, [tensor.detach() for _, tensor in listed])
    if hasattr(type(leaf), "__create_chunk_list__"):
        from statetree.leaf_types.dtensor import listed_chunks

        return listed_chunks(leaf)
    if _hides_chunks(leaf):
        raise _hidden(leaf)
    return None


def _hidden(leaf: Any) -> UnsupportedLeaf:
    msg = (
        f"the leaf at %PATH% (a {type(leaf).__qualname__}) holds a distributed tensor inside: expected it as a "
        "leaf of its own. Register the class as a container, or give its leaf type a chunks method."
    )
    return UnsupportedLeaf(msg)


def _hides_chunks(leaf: Any) -> bool:
    """Whether there is a distributed tensor inside a leaf that is none."""
    try:
        unpacked = unpack("", [leaf], lambda: [Path()], memory=False)
    except UnsupportedLeaf as error:  # which does not know the path
        raise error.__cause__ or error from None
    return unpacked.holds_distributed()


def _text_of(leaf: Any) -> str:
    """Say what a leaf that is not distributed must have in common on all ranks."""
    cls = type(leaf)
    if (cls is torch.Tensor or cls is torch.nn.Parameter) and is_strided(leaf):
        return f"a tensor {leaf.dtype} {tuple(leaf.shape)}"
    if leaf_type_of(cls) is None:
        return "a plain value"
    known = facts(leaf)
    named = [str(known[name]) for name in ("dtype", "shape", "layout") if name in known]
    return " ".join([f"a {known['leaf type']}", *named])


def is_strided(leaf: torch.Tensor) -> bool:
    """Whether a tensor of torch's own class is nothing but a strided view of numbers."""
    return leaf.layout is torch.strided and not leaf.is_nested and leaf.dtype not in QUANTIZED


def settle(group: Group, survey: Survey, agreed: Agreed, *, complete: bool = True) -> tuple[dict[int, Layout], bytes]:
    """Return the layouts of the distributed leaves, and a digest of what the ranks had to tell each other for that.

    Where the ranks know only their own boxes, or see meshes or ties differently, they tell each other.

    Args:
        group: The ranks.
        survey: The tree.
        agreed: What the ranks agreed on.
        complete: Whether the ranks must hold every leaf completely.

    Raises:
        UnsupportedLeaf: If they do not. On every rank.
        RankMismatch: If leaves that elements are moved into are tied on some of the ranks only, or the elements of
            meshes that differ from rank to rank are not the same, as far as that is looked at. On every rank.
    """
    layouts: dict[int, Layout] = {}
    seen = b""
    if agreed.details_agree and survey.is_known:
        layouts = survey.known_layouts(complete=False) or {}
    else:
        holdings = survey.holdings.values()
        told = json.dumps([survey.ties(), [holding.detail for holding in holdings], [h.boxes for h in holdings]])
        rows = [json.loads(text) for text in group.all_gather_bytes(told.encode())]
        seen = digest([json.dumps(rows)])
        _refine_ties(survey, [(ties, held) for ties, _, held in rows])
        copies: dict[int, Copies] = {}
        for number, (index, holding) in enumerate(survey.holdings.items()):
            first = rows[0][1][number]
            apart = [rank for rank, (_, meshes, _) in enumerate(rows) if meshes[number] != first]
            if apart and holding.summands is not None:
                path = survey.path(index)
                msg = (
                    f"{survey.verb}: cannot reduce the leaf at {path or '<root>'}: expected Partial over one mesh, got "
                    "other meshes on other ranks. Pass the group of one mesh, or redistribute it first."
                )
                raise UnsupportedLeaf(msg, path)
            held = [[Box(*map(tuple, box)) for box in boxes[number]] for _, _, boxes in rows]
            if survey.replicas == "check" and (apart or holding.layout is None):
                details = [meshes[number] for _, meshes, _ in rows]
                # Ranks that know their own chunks only may have any mesh.
                meshes = range(len(rows)) if holding.layout is None else list(map(details.index, details))
                copies[index] = Copies(meshes, held)
            # Meshes of their own hold replicas. What is read comes from the first rank's: a mix would be nobody's.
            boxes = {rank: own for rank, own in enumerate(held) if not (complete and rank in apart)}
            if survey.replicas == "first" and holding.layout is None:
                boxes = first_copy(holding.shape, boxes)
            layouts[index] = layout_of(holding.shape, boxes)
        check_replicas(survey, group, copies)
    lacking = _incomplete(survey, layouts) if complete else None
    if lacking is not None:
        path = survey.path(lacking)
        msg = (
            f"{survey.verb}: the ranks of the group hold only a part of the leaf at {path or '<root>'}: expected "
            f"all of {survey.holdings[lacking].text[2:]}. Pass the group of all ranks that hold it."
        )
        raise UnsupportedLeaf(msg, path)
    return layouts, seen


def _incomplete(survey: Survey, layouts: dict[int, Layout]) -> int | None:
    """Return the first leaf of which the ranks hold only a part."""
    for index, layout in layouts.items():
        summands = survey.holdings[index].summands
        if not all(held.is_complete for held in (layout, *(summands[1] if summands else ()))):
            return index
    return None


def _refine_ties(survey: Survey, by_rank: Sequence[tuple[Sequence[int], Sequence[Any]]]) -> None:
    """Keep only those ties that all ranks see.

    A rank that holds nothing of two leaves has no say: it may take them for one, or not know that they are.

    Args:
        survey: The tree.
        by_rank: For each rank its ``ties``, and the boxes that it holds of each distributed leaf.

    Raises:
        RankMismatch: If two values would be moved into one memory then, or one into a part of several.
    """
    first: dict[tuple[int | None, ...], int] = {}
    indices = list(survey.leaders)
    rows = [
        [tie if number >= len(held) or held[number] else None for number, tie in enumerate(ties)]
        for ties, held in by_rank
    ]
    for index, seen in zip(indices, zip(*rows, strict=True), strict=True):
        survey.leaders[index] = first.setdefault(seen, index) if any(tie is not None for tie in seen) else index
    if not survey.written:
        return
    for row in rows:
        leaders: dict[int, int] = {}
        for number, tie in enumerate(row):
            index = indices[number]
            if tie is not None and leaders.setdefault(tie, survey.leaders[index]) != survey.leaders[index]:
                raise _tied_on_some(survey, indices[tie], index, [row[number] == tie for row in rows])


def _tied_on_some(survey: Survey, leader: int, index: int, tied: Sequence[bool]) -> RankMismatch:
    path, first = survey.path(index), survey.path(leader)
    where = ranks_named([rank for rank, found in enumerate(tied) if found])
    msg = (
        f"{survey.verb}: the ranks do not see the same ties at {path or '<root>'}: expected one memory with {first} on "
        f"every rank or on none, got that on {where} alone. Nothing was moved. Tie them on every rank, or on none."
    )
    return RankMismatch(msg)


def agree_on_layouts(
    verb: str,
    group: Group,
    prepare: Callable[[], tuple[Statement, Sequence[tuple[Survey, bool]], W]],
    load: Callable[[W, Sequence[dict[int, Layout]], Any], L],
) -> tuple[W, L]:
    """Make sure that all ranks are ready and mean the same, and know who holds what.

    Usually every rank knows that by itself, so that a single agreement is enough. Otherwise they tell each other, and
    agree once more when they are ready.

    Args:
        verb: The collective, for messages.
        group: Its ranks.
        prepare: As for ``agree``. Beside the statement it returns the trees whose layouts are wanted, each with whether
            the ranks must hold it completely, and what ``load`` needs besides.
        load: Given that, the layouts of each tree and what the ranks agreed on, does all that can fail before data
            moves, such as taking memory.

    Returns:
        What ``prepare`` returned last, and what ``load`` returned.
    """

    def begin() -> tuple[Statement, tuple[Sequence[tuple[Survey, bool]], W, list[L]]]:
        statement, surveys, work = prepare()
        known = [survey.known_layouts(complete=complete) for survey, complete in surveys]
        layouts = [found for found in known if found is not None]
        key = (statement.key, (b"",) * len(surveys))
        return statement, (surveys, work, [load(work, layouts, key)] if len(layouts) == len(known) else [])

    agreed, (surveys, work, loaded) = agree(verb, group, begin)
    settled = [settle(group, survey, agreed, complete=complete) for survey, complete in surveys]
    seen = tuple(what for _, what in settled)
    if any(seen):
        loaded.clear()  # before memory is taken again
        layouts = [found for found, _ in settled]
        loaded.append(agree(verb, group, lambda: (ready(verb), load(work, layouts, (agreed.key, seen))))[1])
    return work, loaded.pop()
