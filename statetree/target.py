"""Target: the leaves whose layouts a tree takes, made or given, and what is known of writing into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from statetree.buffers import Memory
from statetree.chunks import Holding, Layout, location_of, whole_on
from statetree.collectives import Receipt, movable, pieces_of
from statetree.columns import Columns
from statetree.compose import place_in_tree
from statetree.errors import Difference, StateTreeError, TreeMismatch
from statetree.leaf_types.tensor import TENSOR
from statetree.leaves import is_distributed, leaf_type_of
from statetree.overlaps import overlaps_itself, shared_elements
from statetree.paths import Path
from statetree.spans import holds_memory
from statetree.survey import Survey, holding_of, is_strided
from statetree.torch_internals import storage_key
from statetree.transforms._pipeline import replicated
from statetree.transforms.copy_into import prepared_copy
from statetree.unpacking import unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        return self._leaf_of[self._wanted.leaders[self._partners[index]]]

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
        found = [(index, why) for index in indices for why in sorted(self._why_unwritable(index))]
        named = self._spec.paths() if found else []
        refuse(
            self._wanted.verb,
            [Difference(named[index], "writability", "a tensor to move", why) for index, why in found],
        )

    def _why_unwritable(self, index: int) -> set[str]:
        found = set(map(_why_unwritable, self.receipt_pieces(index)))
        if self.is_distributed(index) and self._holding(index).device == "meta":
            found.add(_WITHOUT_MEMORY)  # also on ranks that hold nothing of it
        found.discard("")
        return found

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
        shared = [(owners[a], owners[b]) for a, b in shared_elements(Columns(pieces))]
        shared = [pair for pair in shared if not moved.isdisjoint(pair)]  # of others, prepare_copy knows more
        named = self._spec.paths() if shared else []
        refuse(
            self._wanted.verb,
            [
                Difference(named[b], "overlap", "values of its own", f"a tensor that overlaps {named[a]}")
                for a, b in shared
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


def find_leaders(survey: Survey, indices: Sequence[int]) -> None:
    """Give leaves that elements are moved into their leaders, also those that are not distributed.

    What is moved depends on these ties as on those of distributed leaves, so the ranks have to agree on them.

    Args:
        survey: The tree.
        indices: The leaves, in the order of the paths.
    """
    first: dict[Any, int] = {}
    for index in indices:
        if index not in survey.holdings:
            leaf = survey.leaves[index]
            in_memory = is_bare(leaf) and not leaf.is_meta and leaf.numel()
            survey.leaders[index] = first.setdefault(location_of(leaf), index) if in_memory else index


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


def kept_apart(source: Survey, indices: Sequence[int], written: set[int]) -> list[Any]:
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
    if type(leaf) is torch.Tensor:
        return movable(leaf)
    return movable(leaf.detach().as_subclass(torch.Tensor))


def is_bare(leaf: Any) -> bool:
    """Whether a leaf is a strided tensor that can be cut into boxes."""
    return isinstance(leaf, torch.Tensor) and leaf_type_of(type(leaf)) is TENSOR and is_strided(leaf)
