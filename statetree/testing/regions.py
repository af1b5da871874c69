"""Where tensors lie: ranges of bytes in storages, and the bytes themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Region(NamedTuple):
    """A range of bytes in a storage."""

    storage: int
    address: int  # of the storage; 0 without memory
    start: int
    length: int

    def in_memory(self) -> Region:
        """Return the same bytes with their address, for storages that are pieces of others."""
        return self if not self.address else Region(0, 0, self.address + self.start, self.length)

    def overlaps_in_memory(self, other: Region) -> bool:
        """Whether two ranges have bytes in common, whatever their storages are."""
        if not (self.address and other.address):
            return False
        mine, its = self.address + self.start, other.address + other.start
        return mine < its + other.length and its < mine + self.length


class View(NamedTuple):
    """A plain tensor, or a storage, met on both sides."""

    path: str
    left: Region
    right: Region

    def in_memory(self) -> View:
        """Return the view with addresses in place of storages."""
        return View(self.path, self.left.in_memory(), self.right.in_memory())


def overlapping(views: list[View], side: str) -> Iterator[tuple[str, str]]:
    """Return the pairs of views whose ranges of bytes overlap, each pair once."""
    placed = sorted((getattr(view, side), view.path) for view in views)
    active: list[tuple[Region, str]] = []
    for region, path in placed:
        active = [
            (other, name)
            for other, name in active
            if other.storage == region.storage and other.start + other.length > region.start
        ]
        yield from ((min(name, path), max(name, path)) for _, name in active)
        active.append((region, path))


def region_of(tensor: torch.Tensor) -> Region:
    """Return the range from the first byte of a tensor's elements to the last."""
    size = tensor.element_size()
    length = 0
    if tensor.numel():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        length = (last + 1) * size
    storage = tensor.untyped_storage()
    return Region(storage._cdata, storage.data_ptr(), int(tensor.storage_offset()) * size, length)


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
