"""Buffers: where copies of spans are put. Plain, pinned and shared host memory, and memory of a device.

Large buffers are allocations of their own. Small ones are carved out of slabs where an allocation is dear (pinning, or
a file descriptor each).
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.errors import unsignalled, warn
from statetree.torch_internals import quietly, shared_storage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: From this size on a buffer is an allocation of its own.
LARGE_BYTES: Final = 1 << 20
#: How large a slab may become: glibc maps what is larger than 32 MB anew each time, page by page.
SLAB_BYTES: Final = 16 << 20
#: Where buffers begin in a slab: at the start of a cache line, which suits every dtype.
ALIGNMENT: Final = 64
#: Anonymous mappings are shared with forked processes unless one asks otherwise (which is not possible on Windows).
_PRIVATE: Final[dict[str, Any]] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)
#: From this part of the whole on a buffer in shared memory is an allocation of its own.
_FEW: Final = 32


class Buffer(NamedTuple):
    """A piece of memory: ``storage`` from ``start`` (in bytes) on."""

    storage: torch.UntypedStorage
    start: int


class Block(NamedTuple):
    """A stretch of memory, and where in it buffers lie: the index of each, and its first byte."""

    nbytes: int
    offsets: list[tuple[int, int]]


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
        self.pin_memory = pin_memory and _can_pin() and (_registers() or not share_memory)
        self.share_memory = share_memory

    @property
    def is_plain_host(self) -> bool:
        """Whether this is ordinary memory, as ``torch.empty`` gives it."""
        return self.device.type == "cpu" and not self.pin_memory and not self.share_memory

    def carve(self, sizes: Sequence[int]) -> list[Buffer]:
        """Return a buffer for each size, in bytes. Small ones share allocations where an allocation is dear."""
        if not (self.pin_memory or self.share_memory):
            return [Buffer(self.block(size), 0) for size in sizes]
        result: dict[int, Buffer] = {}
        for block in self.arrange(sizes):
            storage = self.block(block.nbytes)
            result.update((index, self.piece(storage, start, sizes[index])) for index, start in block.offsets)
        return [result[index] for index in range(len(sizes))]

    def arrange(self, sizes: Sequence[int]) -> Iterator[Block]:
        """Say which buffers share a block of memory. Large ones are alone, small ones lie in slabs.

        Shared memory takes a file descriptor for each block: there are at most about a hundred, however many buffers
        there are and however large.
        """
        alone, most = LARGE_BYTES, SLAB_BYTES
        if self.share_memory:
            alone, most = max(alone, sum(sizes) // _FEW), max(most, sum(sizes) // _FEW)
        offsets: list[tuple[int, int]] = []
        filled = 0
        for index, size in enumerate(sizes):
            if size >= alone:
                yield Block(size, [(index, 0)])
                continue
            if offsets and filled + size > most:
                yield Block(filled, offsets)
                offsets, filled = [], 0
            offsets.append((index, filled))
            filled += -(-size // ALIGNMENT) * ALIGNMENT
        if offsets:
            yield Block(filled, offsets)

    def piece(self, block: torch.UntypedStorage, start: int, size: int) -> Buffer:
        """Return a buffer that is a part of a block."""
        if self.share_memory:
            # A piece would be a storage of its own that other processes know nothing of.
            return Buffer(block, start)
        part: Any = block[start : start + size]
        return Buffer(part, 0)

    def block(self, size: int) -> torch.UntypedStorage:
        """Return memory that is an allocation of its own."""
        pins = self.pin_memory and bool(size)
        if pins and not _registers():
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).untyped_storage()
        if self.share_memory:
            storage = _share(size)
        elif pins:  # on pages of its own: those that it shared with other memory could be registered already
            pages = mmap.mmap(-1, size, **_PRIVATE)
            storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
        else:
            storage = torch.UntypedStorage(size, device=self.device)
        if pins:
            _pin(storage)
        return storage


def _share(size: int) -> torch.UntypedStorage:
    """Return shared memory that is there, so that touching it cannot fail, or raise ``OSError`` and leave nothing.

    It is an anonymous file where there are such: ``/dev/shm`` is small in containers, and torch leaves a file in it
    when it is full.
    """
    try:
        descriptor = _anonymous_file()
        if descriptor is None:
            _look_for_room(size)
            return shared_storage(size)
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)
            return shared_storage(size, descriptor)
        except RuntimeError:
            os.close(os.dup(descriptor))  # torch dups it, too: if this fails it says why
            raise
        finally:
            os.close(descriptor)
    except unsignalled(OSError, RuntimeError) as error:  # the latter is torch's
        code, reason = getattr(error, "errno", None) or errno.ENOMEM, getattr(error, "strerror", None) or error
    raise OSError(
        code,
        f"share_memory: cannot take a block of shared memory: expected {size} bytes on a file descriptor, got: "
        f"{reason}. Make room (in a container: its memory limit, or --shm-size for /dev/shm), raise the limit of open "
        "files (ulimit -n), stage less, or lower max_snapshots.",
    )


def _anonymous_file() -> int | None:
    """Open a file in memory that has no name; ``None`` if torch is to share memory by names, or there are none."""
    if not hasattr(os, "memfd_create") or torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return None
    try:
        return os.memfd_create("statetree", os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):  # not in this kernel, or forbidden in this sandbox
            return None
        raise


def _look_for_room(size: int) -> None:
    """Raise ``OSError`` if ``/dev/shm`` has no room, before torch leaves a file there that nobody removes."""
    try:
        room = os.statvfs("/dev/shm")
    except unsignalled(OSError):
        return  # shared memory is elsewhere here
    if size > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC) + " in /dev/shm")


@quietly
def memory_of(
    device: torch.device | str | int = "cpu", *, pin_memory: bool = False, share_memory: bool = False
) -> Memory:
    """Return a kind of memory, whatever modes of the user are active."""
    return Memory(device, pin_memory=pin_memory, share_memory=share_memory)


@cache
def _can_pin() -> bool:
    if torch.accelerator.is_available():
        return True
    warn("pin_memory=True needs an accelerator and there is none: ordinary memory is used instead.")
    return False


def _registers() -> bool:
    """Whether memory is pinned where it lies, shared memory too. Other accelerators than CUDA's only allocate it."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is None or accelerator.type == "cuda"


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
