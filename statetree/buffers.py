"""Buffers: where copies of spans are put. Plain, pinned and shared host memory, and memory of a device.

Large buffers are allocations of their own, backed by huge pages where the platform gives them. Small ones are carved
out of slabs where an allocation is dear (pinning, or a file descriptor each).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import warnings
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.torch_internals import quietly, shared_storage

if TYPE_CHECKING:
    from collections.abc import Sequence

#: From this size on a buffer is an allocation of its own, on huge pages.
LARGE_BYTES: Final = 1 << 20
#: How large a slab may become.
SLAB_BYTES: Final = 64 << 20
#: Where buffers begin in a slab: at the start of a cache line, which suits every dtype.
ALIGNMENT: Final = 64
_HUGE_PAGE_BYTES: Final = 2 << 20


class Buffer(NamedTuple):
    """A piece of memory: ``storage`` from ``start`` (in bytes) on."""

    storage: torch.UntypedStorage
    start: int


class Memory:
    """A kind of memory to take buffers from.

    Args:
        device: Where the memory lies.
        pin_memory: Page-locked host memory, from which an accelerator copies without a detour.
        share_memory: Host memory that other processes can map.

    Raises:
        ValueError: If pinned or shared memory is asked for on a device.
    """

    def __init__(
        self,
        device: torch.device | str | int = "cpu",
        *,
        pin_memory: bool = False,
        share_memory: bool = False,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type != "cpu" and (pin_memory or share_memory):
            msg = f"pin_memory and share_memory are kinds of host memory: expected the device 'cpu', got '{device}'."
            raise ValueError(msg)
        self.pin_memory = pin_memory and _can_pin()
        self.share_memory = share_memory

    @property
    def is_plain_host(self) -> bool:
        """Whether this is ordinary memory, as ``torch.empty`` gives it."""
        return self.device.type == "cpu" and not self.pin_memory and not self.share_memory

    def carve(self, sizes: Sequence[int], *, slabs: bool | None = None) -> list[Buffer]:
        """Return a buffer for each size, in bytes.

        Args:
            sizes: How many bytes each buffer holds.
            slabs: Whether small buffers share allocations. By default they do where an allocation is dear.
        """
        if slabs is None:
            slabs = self.pin_memory or self.share_memory
        if not slabs:
            return [Buffer(self._allocate(size), 0) for size in sizes]
        result: list[Buffer | None] = [None] * len(sizes)
        batch: list[int] = []
        filled = 0
        for index, size in enumerate(sizes):
            if size >= LARGE_BYTES:
                result[index] = Buffer(self._allocate(size), 0)
                continue
            if filled + size > SLAB_BYTES:
                self._carve_slab(sizes, batch, filled, result)
                batch, filled = [], 0
            batch.append(index)
            filled += -(-size // ALIGNMENT) * ALIGNMENT
        self._carve_slab(sizes, batch, filled, result)
        return [buffer for buffer in result if buffer is not None]

    def _carve_slab(self, sizes: Sequence[int], batch: list[int], filled: int, result: list[Buffer | None]) -> None:
        if not batch:
            return
        slab = self._allocate(filled)
        start = 0
        for index in batch:
            size = sizes[index]
            if self.share_memory:
                # A piece would be a storage of its own that other processes know nothing of.
                result[index] = Buffer(slab, start)
            else:
                piece: Any = slab[start : start + size]
                result[index] = Buffer(piece, 0)
            start += -(-size // ALIGNMENT) * ALIGNMENT

    def _allocate(self, size: int) -> torch.UntypedStorage:
        storage = shared_storage(size) if self.share_memory else torch.UntypedStorage(size, device=self.device)
        if self.device.type == "cpu" and size >= LARGE_BYTES:
            _advise_huge_pages(storage.data_ptr(), size)
        if self.pin_memory and size:
            _pin(storage)
        return storage


@quietly
def memory_of(
    device: torch.device | str | int = "cpu", *, pin_memory: bool = False, share_memory: bool = False
) -> Memory:
    """Return a kind of memory, whatever modes of the user are active."""
    return Memory(device, pin_memory=pin_memory, share_memory=share_memory)


@cache
def _can_pin() -> bool:
    if torch.cuda.is_available():
        return True
    warnings.warn(
        "pin_memory=True needs an accelerator and there is none: ordinary memory is used instead.",
        UserWarning,
        stacklevel=6,
    )
    return False


def _pin(storage: torch.UntypedStorage) -> None:
    """Page-lock a storage's memory until the storage is freed.

    ``cudaHostRegister`` pins exactly these bytes, shared ones too; torch's own pinned allocator rounds every request
    up to a power of two. Tried with torch 2.13 (no device), written for 2.11 to 2.13.
    """
    from torch.cuda import _pin_memory_utils

    pointer = storage.data_ptr()
    _pin_memory_utils.pin_memory(pointer, storage.nbytes())
    finalizer = weakref.finalize(storage, _pin_memory_utils.unpin_memory, pointer)
    finalizer.atexit = False  # CUDA may be gone by then


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


def _advise_huge_pages(pointer: int, size: int) -> None:
    """Ask for huge pages, which fault in a five hundredth of the steps. A refusal changes nothing."""
    function = _madvise()
    if function is None or size < _HUGE_PAGE_BYTES:
        return
    start = -(-pointer // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (pointer + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        function(start, length, mmap.MADV_HUGEPAGE)
