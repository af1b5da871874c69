"""Tensors compared bit by bit: NaNs, and the signs of zeros, included.

They are compared piece by piece, so that a comparison takes a few megabytes of memory however large the tensors are,
and whatever their strides.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.errors import USERS_OWN, unsignalled
from statetree.spans.layout import holds_memory
from statetree.torch_internals import (
    can_negate,
    is_zero_tensor,
    resolved,
    without_common_bits,
)
from statetree.tree.atoms import same_value

if TYPE_CHECKING:
    from collections.abc import Iterator

#: How much of each tensor is looked at at a time: what stays in a processor's cache, and of which torch divides no
#: operation among threads, which would wait for each other at each; and what occupies a device.
_PIECE_BYTES: Final = 256 << 10
_DEVICE_PIECE_BYTES: Final = 64 << 20
_BY_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS: Final = frozenset(_BY_SIZE.values())


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its class and its gradient, on its memory."""
    found = tensor.detach()
    return found if type(found) is torch.Tensor else found.as_subclass(torch.Tensor)


def safely_equal(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal, tensors bit by bit. Never raises."""
    if isinstance(a, torch.Tensor) and type(a) is type(b):
        try:
            return a is b or bool(a.dtype == b.dtype and a.shape == b.shape and same_bytes(a, b))
        except unsignalled(*USERS_OWN):  # total: a subclass may refuse anything
            return False
    if isinstance(a, dict) and type(a) is type(b):
        return a.keys() == b.keys() and all(safely_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, (tuple, list)) and type(a) is type(b):
        return len(a) == len(b) and all(map(safely_equal, a, b))
    return same_value(a, b)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors of one dtype and shape hold the same elements, bit by bit (NaNs and zeros' signs).

    Meta tensors are equal to each other, and so are tensors whose memory was freed.
    """
    without = without_elements(a), without_elements(b)
    if any(without):
        return without[0] == without[1]
    if is_unreadable(a, b):
        return False
    a, b = without_common_bits(a, b)
    if not (a.is_contiguous() and b.is_contiguous()):  # they are, in the order of the strides, if both were transposed
        strides = a.stride()
        order = sorted(range(a.dim()), key=lambda dim: -strides[dim])
        a, b = a.permute(order), b.permute(order)
    if is_host_memory(a) and is_host_memory(b):  # the usual case, in one go
        answer = compare_memory(a.data_ptr(), b.data_ptr(), a.nbytes)
        if answer is not None:
            return answer
    return all(_equal(x, y) for _, x, y in pieces(*distinct_elements(a, b)))


def differing(a: torch.Tensor, b: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the positions at which two plain tensors of one dtype and shape differ, bit by bit.

    Positions count elements in row-major order, whatever the strides (those of ``reshape(-1)``), and ascend. A caller
    who has seen enough stops. Beside what is yielded this takes a few megabytes.

    Args:
        a: A tensor whose memory is there.
        b: Another one, with the same readable bits (see ``is_unreadable``). It may lie on another device.

    Yields:
        Positions as ``int64``, on the device of the tensors (the CPU if they lie on two), none of them empty.

    Example:
        >>> import torch
        >>> a = torch.arange(6.0).view(2, 3)
        >>> b = a.clone()
        >>> b[0, 2] = b[1, 1] = float("nan")
        >>> list(differing(a, b))
        [tensor([2, 4])]
        >>> list(differing(a.T, b.T))
        [tensor([3, 4])]
    """
    for start, x, y in pieces(a, b):
        if x.device.type != "cpu" or not _equal(x, y):
            positions = _positions(x, y, a.dtype.itemsize)
            if positions.numel():
                yield positions.add_(start)


def differ_in_more(a: torch.Tensor, b: torch.Tensor, most: int) -> bool:
    """Whether two tensors, as for ``differing``, surely differ in more than so many elements.

    Counting takes a fraction of the time and memory of positions. It ends where few elements of a piece differ.
    """
    count = 0
    for _, x, y in pieces(a, b):
        found = int(x.ne(y).count_nonzero())
        count += found
        if count > most * (a.dtype.itemsize // x.itemsize):
            return True
        if found * 2 < x.numel():
            break
    return False


def bits_in_pieces(tensor: torch.Tensor, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut a plain tensor in row-major order into pieces of at most so many bytes.

    Yields:
        The position at which a piece begins, and its elements' bits as flat integers on the tensor's device (two for an
        element of 16 bytes). Where the tensor is contiguous, these lie in its memory.
    """
    start = 0
    plain = tensor.detach()
    for piece, _ in cut(plain, plain, max(1, nbytes // tensor.dtype.itemsize)):
        if piece.numel():
            yield start, _flat(as_bits(_resolved(piece)))
        start += piece.numel()


def is_unreadable(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether only one of two tensors has a negative bit, on what torch cannot negate (private functions set it)."""
    return a.is_neg() != b.is_neg() and not can_negate(a.dtype)


def as_bits(plain: torch.Tensor) -> torch.Tensor:
    """Return elements as integers of their size, which no copy changes; those of 16 bytes are left."""
    if plain.dtype in _INTEGERS or plain.dtype.itemsize not in _BY_SIZE:
        return plain
    return plain.view(_BY_SIZE[plain.dtype.itemsize])


def from_bits(integers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return elements of a dtype, from what ``as_bits`` made of them."""
    return integers if integers.dtype == dtype else integers.view(dtype)


def without_elements(tensor: torch.Tensor) -> str:
    """Return why a tensor has no elements to read; an empty text if it has."""
    return "meta" if tensor.is_meta else "" if holds_memory(tensor) else "freed"


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one stretch of memory that reads as it lies."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of such a tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a view of one element may keep its stride


def is_host_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor reads like a stretch of host memory."""
    return tensor.is_cpu and is_flat(tensor) and not is_zero_tensor(tensor)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds what it reads like."""
    plain = tensor.detach()
    if is_zero_tensor(plain):
        return plain.clone()
    return resolved(plain)


def _flat(plain: torch.Tensor) -> torch.Tensor:
    """Return integers in row-major order; two for an element of 16 bytes."""
    plain = plain.contiguous()
    plain = plain.as_strided((plain.numel(),), (1,))  # one element may have any stride
    return plain if plain.dtype in _INTEGERS else plain.view(torch.int64)  # complex128


def distinct_elements(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensors without the copies of elements that both show along expanded dims."""
    for dim, (size, step, other) in enumerate(zip(a.shape, a.stride(), b.stride(), strict=True)):
        if size > 1 and step == 0 == other:
            a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
    return a, b


def pieces(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Cut readable tensors of one dtype and shape in row-major order.

    Yields:
        Where a piece begins, and both tensors' bits there as flat integers: those of ``as_bits``, but for elements of
        16 bytes, which are two integers each.
    """
    a, b = without_common_bits(a, b)
    if is_host_memory(a) and is_host_memory(b):  # the usual case: looked at as integers once
        flats = [_flat(as_bits(tensor.detach())) for tensor in (a, b)]
        step = _PIECE_BYTES // flats[0].itemsize
        per = a.dtype.itemsize // flats[0].itemsize
        parts = zip(*[flat.split(step) for flat in flats], strict=True)
        yield from ((index * step // per, x, y) for index, (x, y) in enumerate(parts) if x.numel())
        return
    one_device = a.device == b.device
    nbytes = _PIECE_BYTES if a.is_cpu or not one_device else _DEVICE_PIECE_BYTES
    start = 0
    for x, y in cut(a, b, nbytes // a.dtype.itemsize):
        count = x.numel()
        if count:
            x, y = (as_bits(_resolved(piece)) for piece in (x, y))
            yield (start, _flat(x if one_device else x.cpu()), _flat(y if one_device else y.cpu()))
        start += count


def cut(a: torch.Tensor, b: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut two tensors alike in row-major order, into pieces of at most so many elements."""
    count = a.numel()
    if count <= most:
        yield a, b
        return
    if a.is_contiguous() and b.is_contiguous():
        a, b = a.view(-1), b.view(-1)
    row = count // a.shape[0]
    if row > most:
        for index in range(a.shape[0]):
            yield from cut(a[index], b[index], most)
        return
    step = most // row
    for start in range(0, a.shape[0], step):
        yield a[start : start + step], b[start : start + step]


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.is_cpu:
        answer = compare_memory(x.data_ptr(), y.data_ptr(), x.nbytes)
        if answer is not None:
            return answer
    return x.equal(y)


def _positions(x: torch.Tensor, y: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Return the elements at which two contiguous pieces of integers differ, in ascending order."""
    np = _numpy() if x.is_cpu else None  # it takes a third of the time that torch takes on one core
    found = x.ne(y).nonzero().view(-1) if np is None else torch.from_numpy(np.flatnonzero(x.numpy() != y.numpy()))
    return found if itemsize == x.itemsize else (found // (itemsize // x.itemsize)).unique_consecutive()


@cache
def _numpy() -> Any:
    try:
        import numpy as np
    except ImportError:
        return None
    return np


@cache
def _memcmp() -> Any:
    """Return the C library's ``memcmp``, which is twice as quick as ``torch.equal``; ``None`` where it is not found."""
    try:
        function = ctypes.CDLL(None).memcmp
    except unsignalled(OSError, TypeError, AttributeError):  # not on Windows
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_int
    return function


def compare_memory(a: int, b: int, nbytes: int) -> bool | None:
    """Whether host memory at two addresses is equal; ``None`` if that cannot be asked here."""
    function = _memcmp()
    return None if function is None else not function(a, b, nbytes)
