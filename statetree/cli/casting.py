"""``convert --cast``: floating-point tensors converted as they are read, their ties kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.chunks.boxes import Box
from statetree.cli.shared_bytes import find_ties
from statetree.files.checkpoint import tensors_in
from statetree.files.stored import ChunkedStorage, Composite, Storage, StoredStorage, StoredTensor
from statetree.torch_internals import WITHOUT_KERNELS, can_negate
from statetree.tree.mapping import map_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.files.checkpoint import StoredEntry

_PACKED: Final = getattr(torch, "float4_e2m1fn_x2", None)
_CHECKED_AT_ONCE: Final = 1 << 18


class CastStorage(Storage):
    """A storage whose elements are converted as they are read.

    Attributes:
        has_overflowed: Whether a finite element was read that lies beyond the range of the other dtype.
    """

    def __init__(self, inner: Storage, dtype: torch.dtype, to: torch.dtype) -> None:
        super().__init__(inner.entry, inner.nbytes // dtype.itemsize * to.itemsize)
        self.has_overflowed = False
        self._inner = inner
        self._dtype = dtype
        self._to = to
        self._can_overflow = torch.finfo(to).max < torch.finfo(dtype).max

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Read and convert."""
        size, to = self._dtype.itemsize, self._to.itemsize
        read = self._inner.read(start // to * size, -(-stop // to) * size).view(self._dtype)
        return self._converted(read).view(torch.uint8)[start % to :][: stop - start]

    def elements(self, view: StoredTensor, start: int, stop: int) -> torch.Tensor:
        """Read and convert."""
        before = view.changed(storage=self._inner, dtype=self._dtype)
        return self._converted(self._inner.elements(before, start, stop))

    def _converted(self, elements: torch.Tensor) -> torch.Tensor:
        if self._can_overflow and not self.has_overflowed:
            self.has_overflowed = any(map(self._is_beyond, elements.split(_CHECKED_AT_ONCE)))
        return elements.to(self._to)

    def _is_beyond(self, elements: torch.Tensor) -> bool:
        wide = elements if elements.dtype is torch.float64 else elements.to(torch.float32)
        is_beyond = wide.abs() > torch.finfo(self._to).max
        return bool(is_beyond.any()) and bool((is_beyond & wide.isfinite()).any())


class Cast(NamedTuple):
    """What became of a cast.

    Attributes:
        tree: The tree, its floating-point tensors of another dtype.
        untied: The keys of those that are no longer tied.
        kept: The keys of other tensors of numbers that are no integers, which keep their dtypes.
    """

    tree: Any
    untied: list[str]
    kept: list[str]


def cast(tree: Any, entries: Sequence[StoredEntry], dtype: torch.dtype) -> Cast:
    """Convert the floating-point tensors of a tree.

    Tensors that share a storage go on sharing one, unless something of another dtype lies on it.
    """
    dtypes: dict[int, set[Any]] = {}  # of what lies on each storage; None for what is not cast
    for entry in entries:
        for part in tensors_in(entry.value):
            dtypes.setdefault(id(part.storage), set()).add(part.dtype if part is entry.value else None)
        if isinstance(entry.value, StoredStorage):
            dtypes.setdefault(id(entry.value.storage), set()).add(None)
    cast_storages: dict[int, Storage] = {}
    made: dict[int, Any] = {}
    untied: set[int] = set()

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, StoredTensor) or not is_castable(leaf.dtype) or leaf.dtype == dtype:
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = new(leaf)
        return made[id(leaf)]

    def new(leaf: StoredTensor) -> StoredTensor:
        if len(dtypes[id(leaf.storage)]) > 1 or (leaf.is_neg and not can_negate(dtype)):
            untied.add(id(leaf))
            whole = Box((0,) * len(leaf.shape), leaf.shape)
            dense = ChunkedStorage(leaf.storage.entry, leaf.dtype, leaf.shape, [whole], lambda _: leaf)
            cast_storage = CastStorage(dense, leaf.dtype, dtype)
            plain = {"stride": None, "offset": 0, "is_conj": False, "is_neg": False}
            return leaf.changed(storage=cast_storage, dtype=dtype, **plain)
        key = id(leaf.storage)
        if key not in cast_storages:
            cast_storages[key] = CastStorage(leaf.storage, leaf.dtype, dtype)
        return leaf.changed(storage=cast_storages[key], dtype=dtype)

    result = map_leaves(convert, tree)
    ties = find_ties(entries)
    lost = [entry.key for index, entry in enumerate(entries) if id(entry.value) in untied and index in ties.group_of]
    return Cast(result, lost, [entry.key for entry in entries if _is_passed_over(entry.value, dtype)])


def _is_passed_over(leaf: Any, dtype: torch.dtype) -> bool:
    """Whether a leaf is not cast though its elements are no integers: complex ones, and tensors of several parts."""
    if isinstance(leaf, Composite):
        return leaf.dtype is None or (_is_fractional(leaf.dtype) and leaf.dtype != dtype)
    return isinstance(leaf, StoredTensor) and _is_fractional(leaf.dtype) and not is_castable(leaf.dtype)


def _is_fractional(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def overflowing(entries: Sequence[StoredEntry]) -> list[str]:
    """Return the keys of tensors with elements that a cast, as they were read, found beyond the range of its dtype."""
    return [entry.key for entry in entries if any(map(_has_overflowed, tensors_in(entry.value)))]


def _has_overflowed(part: StoredTensor) -> bool:
    return isinstance(part.storage, CastStorage) and part.storage.has_overflowed


def is_castable(dtype: torch.dtype) -> bool:
    """Whether elements of a dtype are floating-point numbers that torch converts."""
    return dtype.is_floating_point and dtype not in WITHOUT_KERNELS and dtype != _PACKED
