"""Relayout: a tree's leaves matched with those whose layout they are to take, and moved there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from statetree.agreement import Entry
from statetree.buffers import Memory
from statetree.chunks import Holding, Layout, layout_of, location_of, whole_on
from statetree.collectives import (
    Departure,
    Item,
    Receipt,
    Terms,
    communicating_device,
    depart,
    movable,
    moved_dtype,
    pieces_of,
    sources_of,
)
from statetree.columns import Columns
from statetree.comparing import same_bytes
from statetree.compose import place_in_tree
from statetree.errors import Difference, StateTreeError, TreeMismatch
from statetree.exchange import BUCKET_BYTES, Exchange, Pieces, take_buckets
from statetree.leaf_types.tensor import TENSOR
from statetree.leaves import is_distributed, leaf_type_of, unpack
from statetree.matching import matched
from statetree.overlaps import overlaps_itself, shared_elements
from statetree.paths import Path
from statetree.plans import Move
from statetree.spans import holds_memory
from statetree.summands import Source
from statetree.survey import Survey, holding_of, is_strided
from statetree.torch_internals import storage_key
from statetree.transforms._pipeline import replicated
from statetree.transforms.copy_into import prepared_copy
from statetree.tree import unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from statetree.groups import Group
    from statetree.treespec import TreeSpec

_WITHOUT_MEMORY = "a tensor without memory"
_REMEDY = "Nothing was written. Pass a tree of the same structure, global shapes and dtypes."


class Target:
    """A tree whose leaves take the layouts of another one.

    Args:
        spec: Its structure.
        wanted: The tree that gives the layouts.
        partners: For each leaf the one of ``wanted`` whose layout it takes.
        group: The ranks.
        in_place: Whether the leaves are those of ``wanted`` themselves.

    Attributes:
        leaves: The leaves, fresh ones unless ``in_place``.
    """

    def __init__(
        self, spec: TreeSpec, wanted: Survey, partners: Sequence[int], group: Group, *, in_place: bool
    ) -> None:
        self._spec = spec
        self._wanted = wanted
        self._partners = partners
        self._leaf_of = {partner: index for index, partner in enumerate(partners)}
        self._group = group
        leaves = [wanted.leaves[partner] for partner in partners]
        self.leaves = leaves if in_place else allocated(wanted.verb, leaves, spec)
        self._holdings: dict[int, Holding] = {}

    def is_distributed(self, index: int) -> bool:
        """Whether the ranks hold different parts of a leaf."""
        return self._partners[index] in self._wanted.holdings

    def leader(self, index: int) -> int:
        """Return the first of the leaves that lie in the same memory as this one."""
        return self._leaf_of[leader_of(self._wanted, self._partners[index])]

    def receipt(self, index: int, layouts: dict[int, Layout]) -> Receipt:
        """Return where elements are put.

        Args:
            index: The leaf.
            layouts: Those of ``wanted``.
        """
        leaf, group = self.leaves[index], self._group
        if not self.is_distributed(index):
            return Receipt(whole_on(leaf.shape, range(group.size)), [bare(leaf)] if leaf.numel() else [])
        layout = layouts[self._partners[index]]
        return Receipt(layout, pieces_of(self._holding(index), layout, group.rank))

    def dtype(self, index: int) -> torch.dtype:
        """Return the dtype of a leaf's elements."""
        if not self.is_distributed(index):
            dtype: torch.dtype = self.leaves[index].dtype
            return dtype
        return self._wanted.holdings[self._partners[index]].dtype

    def check_writable(self, indices: Sequence[int]) -> None:
        """Raise ``TreeMismatch`` if elements cannot be put into some of the leaves."""
        named = self._spec.paths()
        refuse(
            self._wanted.verb,
            [
                Difference(named[index], "writability", "a tensor to move", why)
                for index in indices
                for why in dict.fromkeys(self._why_unwritable(index))
            ],
        )

    def _why_unwritable(self, index: int) -> Iterator[str]:
        if self.is_distributed(index) and self._holding(index).device == "meta":
            yield _WITHOUT_MEMORY  # also on ranks that hold nothing of it
        yield from filter(None, map(_why_unwritable, self.receipt_pieces(index)))

    def check_apart(self, moving: Sequence[int]) -> None:
        """Raise ``TreeMismatch`` if elements that move would be put over those of another leaf.

        Args:
            moving: The leaves that are not copied from this rank's own.
        """
        if not moving:
            return
        moved = set(moving)
        local = [index for index in range(len(self.leaves)) if index not in moved]
        pieces, owners = _parts_of([self.leaves[index] for index in local])
        owners = [local[owner] for owner in owners]
        for index in moving:
            if self.leader(index) == index or self.leader(index) not in moved:
                held = self.receipt_pieces(index)
                pieces += held
                owners += [index] * len(held)
        named = self._spec.paths()
        refuse(
            self._wanted.verb,
            [
                Difference(
                    named[owners[b]], "overlap", "values of its own", f"a tensor that overlaps {named[owners[a]]}"
                )
                for a, b in shared_elements(Columns(pieces))
                if not moved.isdisjoint((owners[a], owners[b]))  # of others, prepare_copy knows more
            ],
        )

    def written(self, moving: Sequence[int]) -> set[int]:
        """Return the keys of the storages that elements which move are put into."""
        pieces = [piece for index in moving for piece in self.receipt_pieces(index)]
        return set(map(_storage, pieces))

    def receipt_pieces(self, index: int) -> Sequence[torch.Tensor]:
        """Return this rank's tensors that elements are put into."""
        return self._holding(index).pieces if self.is_distributed(index) else [self.leaves[index]]

    def prepare_copy(self, indices: Sequence[int], sources: Sequence[Any]) -> Callable[[], None]:
        """Prepare copying leaves that this rank has into those of the tree; return the function that does it."""
        keys, named = self._spec.flat_keys(), self._spec.paths()
        verb = self._wanted.verb
        left = {keys[index]: leaf for index, leaf in zip(indices, sources, strict=True)}
        try:
            result, write = prepared_copy(verb, left, {keys[index]: self.leaves[index] for index in indices})
        except TreeMismatch as error:
            path_of = dict(zip(keys, named, strict=True))
            refuse(verb, [found._replace(path=path_of[found.path[0]]) for found in error.differences])
            raise
        for index in indices:
            self.leaves[index] = result[keys[index]]
        return write

    def _holding(self, index: int) -> Holding:
        if index not in self._holdings:
            holding = holding_of(self.leaves[index], self._group)
            assert holding is not None
            self._holdings[index] = holding
        return self._holdings[index]


def _parts_of(leaves: list[Any]) -> tuple[list[torch.Tensor], list[int]]:
    """Return the plain tensors with memory that leaves consist of, and the index of the leaf of each."""
    unpacked = unpack("", leaves, lambda: [Path()] * len(leaves), memory=False)
    real = [index for index, part in enumerate(unpacked.parts) if not part.is_meta]
    return [unpacked.parts[index] for index in real], [unpacked.owners[index] for index in real]


def leader_of(survey: Survey, index: int) -> int:
    """Return the first leaf of a tree that lies in the same memory as one of its leaves."""
    if index in survey.leaders:
        return survey.leaders[index]
    leaf = survey.leaves[index]
    if not is_bare(leaf) or leaf.is_meta:
        return index
    places = survey.places
    if not places:
        for other in survey.order:
            found = survey.leaves[other]
            if other not in survey.holdings and is_bare(found):
                places.setdefault(location_of(found) if not found.is_meta else id(found), other)
    return places[location_of(leaf)]


def _why_unwritable(piece: torch.Tensor) -> str:
    if piece.is_inference():
        return "an inference tensor"
    if not piece.is_contiguous() and overlaps_itself(piece.shape, piece.stride()):
        return "a tensor that overlaps itself"
    if piece.is_meta or not holds_memory(piece):
        return _WITHOUT_MEMORY
    return ""


def refuse(verb: str, differences: Sequence[Difference]) -> None:
    """Raise ``TreeMismatch`` if there are differences."""
    if differences:
        raise TreeMismatch.between(verb, differences, _REMEDY)


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
        self._wanted = wanted = Survey(source.verb, like, group)
        partners = partners_of(source.verb, source.spec, source.leaves, wanted)
        self._moving = [i for i in source.order if i in source.holdings or partners[i] in wanted.holdings]
        refuse(source.verb, unfit(source, wanted, partners, self._moving))
        self._target = Target(source.spec, wanted, partners, group, in_place=in_place)
        self._target.check_writable(self._moving)
        self._target.check_apart(self._moving)
        moving = set(self._moving)
        local = [index for index in range(len(partners)) if index not in moving]
        written = self._target.written(self._moving)
        self._write = self._target.prepare_copy(local, _kept(source, local, written))

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
            moves.append(Move(sent.layout, received.layout, moved_dtype(dtype)))
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


def _kept(source: Survey, indices: Sequence[int], written: set[int]) -> list[Any]:
    """Return some of the leaves, whose elements stay as they are while storages are written."""
    leaves = source.leaves
    parts, owners = _parts_of([leaves[index] for index in indices]) if written else ([], [])
    changed = {indices[owner] for part, owner in zip(parts, owners, strict=True) if _storage(part) in written}
    return [
        _fresh(source.verb, leaves, source.spec, [index], _device_of(leaves[index]), copy=True)[0]
        if index in changed
        else leaves[index]
        for index in indices
    ]


def _storage(piece: torch.Tensor) -> int:
    return storage_key(piece.untyped_storage())


def _own_part(holding: Holding, rank: int) -> Layout:
    """Return the layout of a tensor as if the other ranks had nothing of it."""
    return layout_of(holding.shape, {rank: holding.boxes})


def allocated(verb: str, leaves: Sequence[Any], spec: TreeSpec) -> list[Any]:
    """Return fresh tensors like those of leaves, on the same devices; real ones for those on ``meta``.

    Args:
        verb: The collective, for messages.
        leaves: The leaves.
        spec: The structure that they belong to.
    """
    result = list(leaves)
    by_device: dict[torch.device, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) or is_distributed(leaf):
            by_device.setdefault(_device_of(leaf), []).append(index)
    for device, indices in by_device.items():
        for index, leaf in zip(indices, _fresh(verb, leaves, spec, indices, device, copy=False), strict=True):
            result[index] = leaf
    return result


def _fresh(
    verb: str, leaves: Sequence[Any], spec: TreeSpec, indices: Sequence[int], device: torch.device, *, copy: bool
) -> list[Any]:
    """Return some leaves on memory of their own, with or without the same elements."""
    keys, paths = spec.flat_keys(), spec.paths()
    try:
        found = replicated(verb, {keys[index]: leaves[index] for index in indices}, Memory(device), copy=copy)
    except StateTreeError as error:
        place_in_tree(error, {keys[index]: paths[index] for index in indices})
        raise
    return list(found.values())


def _device_of(leaf: Any) -> torch.device:
    """Return where a leaf's elements lie, or are to lie if it has none."""
    if isinstance(leaf, torch.Tensor):
        devices = [leaf.device]
    else:
        devices = [part.device for part in unpack("", [leaf], lambda: [Path()], memory=False).parts]
    if devices and devices[0].type != "meta":
        return devices[0]
    mesh = getattr(leaf, "device_mesh", None)
    return torch.device("cpu" if mesh is None or mesh.device_type == "meta" else mesh.device_type)


def bare(leaf: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor leaf without class and gradient, as it is moved."""
    return movable(leaf.detach().as_subclass(torch.Tensor))


def is_bare(leaf: Any) -> bool:
    """Whether a leaf is a strided tensor that can be cut into boxes."""
    return isinstance(leaf, torch.Tensor) and leaf_type_of(type(leaf)) is TENSOR and is_strided(leaf)


def unfit(source: Survey, wanted: Survey, partners: Sequence[int], moving: Sequence[int]) -> list[Difference]:
    """Return why leaves cannot take the layouts of others.

    Args:
        source: The leaves to move.
        wanted: Those that give the layouts.
        partners: For each leaf of ``source`` its partner in ``wanted``.
        moving: The leaves of which one side is distributed.
    """
    found = [difference for index in moving for difference in _unfit(source, index, wanted, partners[index])]
    if found:
        return found
    first: dict[int, int] = {}
    for index in moving:
        leader = first.setdefault(leader_of(wanted, partners[index]), index)
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
    else:
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

    def kept(piece: torch.Tensor) -> torch.Tensor:
        return piece.clone() if storage_key(piece.untyped_storage()) in written else piece

    return [(sent._replace(pieces=list(map(kept, sent.pieces))), received, dtype) for sent, received, dtype in items]
