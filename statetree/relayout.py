"""Relayout: a tree's leaves matched with those whose layout they are to take, and moved there."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from statetree.agreement import Entry
from statetree.chunks import Holding, Layout, layout_of, whole_on
from statetree.collectives import (
    Departure,
    Item,
    Terms,
    communicating_device,
    depart,
    sources_of,
)
from statetree.comparing import same_bytes
from statetree.errors import Difference
from statetree.exchange import BUCKET_BYTES, Exchange, Pieces, take_buckets
from statetree.matching import matched
from statetree.plans import Move
from statetree.spans import holds_memory
from statetree.summands import Source
from statetree.survey import Survey
from statetree.target import Target, bare, find_leaders, is_bare, kept_apart, refuse
from statetree.torch_internals import copied_dtype, storage_key
from statetree.tree import unflatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.boxes import Box
    from statetree.groups import Group
    from statetree.treespec import TreeSpec


def partners_of(verb: str, spec: TreeSpec, leaves: Sequence[Any], wanted: Survey) -> list[int]:
    """Return, for each leaf of a tree, the one of ``wanted`` in the same place.

    Raises:
        TreeMismatch: If the structures do not match.
    """
    order, differences = matched(spec, leaves, wanted.spec, wanted.leaves)
    refuse(verb, differences)
    return list(range(spec.num_leaves)) if order is None else order


class Relayout:
    """What ``reshard`` does, prepared as far as it can be without the other ranks.

    Args:
        source: The tree whose elements are moved.
        like: The tree whose layouts they take.
        group: The ranks.
        in_place: Whether to write into ``like``'s tensors.

    Raises:
        TreeMismatch: If the trees do not fit, or a tensor cannot be written.
    """

    def __init__(self, source: Survey, like: Any, group: Group, *, in_place: bool) -> None:
        self._group = group
        self._source = source
        source.check_readable()
        self._wanted = wanted = Survey(source.verb, like, group, written=True)
        self._partners = partners = partners_of(source.verb, source.spec, source.leaves, wanted)
        self._moving = [i for i in source.order if i in source.holdings or partners[i] in wanted.holdings]
        find_leaders(wanted, [partners[i] for i in self._moving])
        self._leaders = dict(wanted.leaders)
        refuse(source.verb, unfit(source, wanted, partners, self._moving))
        self._target = Target(source.spec, wanted, partners, group, in_place=in_place)
        self._target.check_writable(self._moving)
        self._target.check_apart(self._moving)
        moving = set(self._moving)
        local = [index for index in range(len(partners)) if index not in moving]
        written = self._target.written(self._moving)
        self._write = self._target.prepare_copy(local, kept_apart(source, local, written))

    def entries(self) -> list[Entry]:
        """Return what must be the same on all ranks."""
        return [*self._source.entries(), *(Entry(f"{path} (like)", text) for path, text in self._wanted.entries())]

    def details(self) -> list[str]:
        """Return what usually is the same on all ranks."""
        return [*self._source.details(), *self._wanted.details()]

    @property
    def surveys(self) -> Sequence[tuple[Survey, bool]]:
        """The trees whose layouts are needed, and whether the ranks must hold them completely."""
        return [(self._source, True), (self._wanted, False)]

    def load(self, layouts: dict[int, Layout], places: dict[int, Layout], key: Any, bucket_bytes: int) -> Departure:
        """Take the memory that moving the elements takes.

        Args:
            layouts: Those of the source.
            places: Those that its tensors take.
            key: What the ranks agreed on.
            bucket_bytes: As for ``Exchange``.
        """
        group, source = self._group, self._source
        if self._wanted.leaders != self._leaders:  # of tensors that this rank holds nothing of, others know more
            refuse(source.verb, tied_apart(source, self._wanted, self._partners, self._moving))
        leading = [i for i in self._moving if i in layouts and source.leaders[i] == i]
        sources, reduction = sources_of(source, layouts, leading, group.rank)
        items = self._items(sources, places, range(group.size))
        kinds = [holding.device for survey in (source, self._wanted) for holding in survey.holdings.values()]
        return depart(Terms(key, group, communicating_device(group, kinds), bucket_bytes), items, reduction)

    def run_alone(self) -> Any:
        """Do as ``run`` where the source has no distributed leaves: this rank has all that it needs."""
        group = self._group
        places = {index: _own_part(holding, group.rank) for index, holding in self._wanted.holdings.items()}
        moves, pieces = [], []
        for sent, received, dtype in self._items({}, places, [group.rank]):
            moves.append(Move(sent.layout, received.layout, copied_dtype(dtype)))
            pieces.append(Pieces(sent.pieces, received.pieces))
        exchange, host = Exchange(moves, group, BUCKET_BYTES), torch.device("cpu")
        exchange.run(pieces, group, take_buckets([exchange.bucket_sizes(pieces, host)], host))
        return self.finished()

    def _items(self, sources: dict[int, Source], places: dict[int, Layout], everywhere: Sequence[int]) -> list[Item]:
        source, target = self._source, self._target
        items: list[Item] = []
        for index in self._moving:
            if target.leader(index) == index:
                leader = source.leaders.get(index, index)
                if leader not in sources:
                    leaf = source.leaves[index]
                    pieces = [bare(leaf)] if leaf.numel() else []
                    sources[leader] = Source(whole_on(leaf.shape, everywhere), pieces)
                items.append((sources[leader], target.receipt(index, places), target.dtype(index)))
        return apart(items)

    def finished(self) -> Any:
        """Write what does not come from other ranks, and return the resulting tree."""
        self._write()
        return unflatten(self._source.spec, self._target.leaves)


def _own_part(holding: Holding, rank: int) -> Layout:
    """Return the layout of a tensor as if the other ranks had nothing of it."""
    return _part_on(rank, holding.shape, tuple(holding.boxes))


@lru_cache(maxsize=4096)
def _part_on(rank: int, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Layout:
    return layout_of(shape, {rank: boxes})


def unfit(source: Survey, wanted: Survey, partners: Sequence[int], moving: Sequence[int]) -> list[Difference]:
    """Return why leaves cannot take the layouts of others.

    Args:
        source: The leaves to move.
        wanted: Those that give the layouts.
        partners: For each leaf of ``source`` its partner in ``wanted``.
        moving: The leaves of which one side is distributed.
    """
    found = [difference for index in moving for difference in _unfit(source, index, wanted, partners[index])]
    return found or tied_apart(source, wanted, partners, moving)


def tied_apart(source: Survey, wanted: Survey, partners: Sequence[int], moving: Sequence[int]) -> list[Difference]:
    """Return where different values would go to one memory, as far as this rank holds them. Arguments: as ``unfit``."""
    found: list[Difference] = []
    first: dict[int, int] = {}
    for index in moving:
        leader = first.setdefault(wanted.leaders[partners[index]], index)
        if leader != index and not _tied_alike(source, index, leader):
            tied = f"a tensor that is tied to {source.path(leader)}"
            found.append(Difference(source.path(index), "ties", "values of its own", tied))
    return found


def _unfit(source: Survey, index: int, wanted: Survey, partner: int) -> list[Difference]:
    leaf = source.leaves[index]
    ours, theirs = _facts(source, index), _facts(wanted, partner)
    found: list[tuple[str, Any, Any]] = []
    if isinstance(ours, str) or isinstance(theirs, str):
        found.append(("leaf type", _shown(ours), _shown(theirs)))
    elif ours != theirs:
        found += [(kind, a, b) for kind, a, b in zip(("dtype", "shape"), ours, theirs, strict=True) if a != b]
    target = wanted.holdings.get(partner)
    if target is not None and target.summands is not None:
        found.append(("placements", "elements", f"{target.text}, which cannot be a target"))
    holding = source.holdings.get(index)
    if holding.device == "meta" if holding else is_bare(leaf) and (leaf.is_meta or not holds_memory(leaf)):
        found.append(("memory", "a tensor without elements", "elements"))
    return [Difference(source.path(index), *difference) for difference in found]


def _facts(survey: Survey, index: int) -> tuple[torch.dtype, tuple[int, ...]] | str:
    """Return the dtype and global shape of a leaf that can be cut into boxes; of others, what they are."""
    leaf, holding = survey.leaves[index], survey.holdings.get(index)
    if holding is not None:
        return holding.dtype, holding.shape
    return (leaf.dtype, tuple(leaf.shape)) if is_bare(leaf) else f"a {type(leaf).__qualname__}"


def _shown(found: tuple[torch.dtype, tuple[int, ...]] | str) -> str:
    return found if isinstance(found, str) else f"a tensor {found[0]} {found[1]}"


def _tied_alike(source: Survey, index: int, leader: int) -> bool:
    """Whether two leaves of the source may go to one memory: they are tied as well, or hold the same elements."""
    if index in source.leaders and source.leaders[index] == source.leaders.get(leader):
        return True
    ours, theirs = source.holdings.get(index), source.holdings.get(leader)
    if ours is None and theirs is None:
        return same_elements(source.leaves[index], source.leaves[leader])
    if ours is None or theirs is None or (ours.text, ours.detail) != (theirs.text, theirs.detail):
        return False
    return all(map(same_bytes, ours.pieces, theirs.pieces))


def same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors of one dtype and shape are in the same place, or hold the same elements."""
    a, b = bare(a), bare(b)
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.is_conj() == b.is_conj():
        return a.is_neg() == b.is_neg() or same_bytes(a, b)
    return same_bytes(a, b)


def apart(items: Sequence[Item]) -> list[Item]:
    """Return what moves, with sources that are not changed by writing into any of the receipts."""
    written = {storage_key(piece.untyped_storage()) for _, receipt, _ in items for piece in receipt.pieces}

    def is_written(piece: torch.Tensor) -> bool:
        return storage_key(piece.untyped_storage()) in written

    def kept(source: Source) -> Source:
        if not any(map(is_written, source.pieces)):
            return source
        return Source(source.layout, [piece.clone() if is_written(piece) else piece for piece in source.pieces])

    return [(kept(sent), received, dtype) for sent, received, dtype in items]
