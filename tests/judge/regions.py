"""Where tensors lie: their storages, ranges of bytes in these, and the bytes themselves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from tests.judge.walk import inner_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

L = TypeVar("L")


class Region(NamedTuple):
    """A range of bytes in a storage."""

    storage: int
    address: int  # of the storage; 0 without memory
    start: int
    length: int
    solid: bool = True  # whether every byte is one of an element

    def in_memory(self) -> Region:
        """Return the same bytes with their address, for storages that are pieces of others."""
        return self if not self.address else Region(0, 0, self.address + self.start, self.length, self.solid)


class View(NamedTuple):
    """A plain tensor, or a storage, met on both sides."""

    path: str
    left: Region
    right: Region

    def in_memory(self) -> View:
        """Return the view with addresses in place of storages."""
        return View(self.path, self.left.in_memory(), self.right.in_memory())


def crossing(one: list[tuple[int, int, L]], other: list[tuple[int, int, L]]) -> Iterator[tuple[L, L]]:
    """Yield pairs of ranges of memory that have bytes in common: at least one of each group that lies over each other.

    Args:
        one: Ranges: the first address, the number of bytes, and what the range is called.
        other: Others.
    """
    placed = [(*place, side) for side, places in enumerate((one, other)) for place in places if place[1]]
    placed.sort(key=lambda place: place[:2])
    farthest: list[tuple[int, L | None]] = [(0, None), (0, None)]  # where what was met on either side ends
    for start, length, label, side in placed:
        end, partner = farthest[1 - side]
        if partner is not None and start < end:
            yield (partner, label) if side else (label, partner)
        if start + length > farthest[side][0]:
            farthest[side] = start + length, label


def storage_of(value: Any) -> torch.UntypedStorage | None:
    """Return the host storage below a plain tensor or a storage, or ``None``."""
    if isinstance(value, torch.UntypedStorage):
        return value
    if not isinstance(value, torch.Tensor) or hasattr(type(value), "__tensor_flatten__") or inner_tensors(value):
        return None
    try:
        storage = value.untyped_storage()
        if storage.device.type == "meta":  # as those of fake tensors are, which warn of their address
            return None
        storage.data_ptr()  # that of a wrapper may be none: torch crashes when its bytes are read
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    return storage


def region_of(tensor: torch.Tensor) -> Region:
    """Return the range from the first byte of a tensor's elements to the last."""
    size = tensor.element_size()
    length = distinct = 0
    if tensor.numel():
        dims = list(zip(tensor.shape, tensor.stride(), strict=True))
        length = (sum((n - 1) * step for n, step in dims) + 1) * size
        distinct = math.prod(n for n, step in dims if step) * size
    storage = tensor.untyped_storage()
    address = 0 if storage.device.type == "meta" else storage.data_ptr()  # torch warns of asking fake ones
    return Region(storage._cdata, address, int(tensor.storage_offset()) * size, length, length == distinct)


def bits_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of the elements as they lie in memory, or ``None`` if the memory is gone."""
    size = tensor.element_size()
    storage = tensor.untyped_storage()
    region = region_of(tensor)
    if not region.length:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    if region.start + region.length > storage.nbytes():
        return None
    shape = (*tensor.shape, size)
    strides = (*(step * size for step in tensor.stride()), 1)
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, tensor.storage_offset() * size, shape, strides)


def raw_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of a storage, as a view on it."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))
