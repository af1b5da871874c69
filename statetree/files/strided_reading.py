"""Elements at strides in a range of a file, read into a tensor."""

from __future__ import annotations

import ctypes
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.chunks.boxes import in_slabs, whole_box
from statetree.errors import UnsupportedLeaf
from statetree.files.ranges import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.chunks.boxes import Box
    from statetree.files.ranges import FileRange

#: Gaps from this size on are left out by a read for each run of elements; a request to a remote file costs more.
_GAP_BYTES: Final = 8 << 10
#: Elements are moved as integers of their size, since not every dtype can be copied.
NUMBERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def memory_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, and hold the tensor.

    (NumPy, which would do this, may not be installed.)
    """
    size = tensor.numel() * tensor.dtype.itemsize
    if not size:
        return memoryview(b"")
    address = tensor.data_ptr()
    if not address:
        msg = f"a tensor of the shape {tuple(tensor.shape)} has no memory: expected one with elements. Materialize it."
        raise UnsupportedLeaf(msg)
    memory: Any = (ctypes.c_char * size).from_address(address)
    memory.tensor = tensor
    return memoryview(memory).cast("B")


def in_buckets(shape: Sequence[int], itemsize: int) -> list[Box]:
    """Return boxes of at most a bucket, in row-major order, which together are a tensor of a shape."""
    whole = whole_box(shape)
    return in_slabs(whole, max(1, -(-whole.volume * itemsize // BUCKET_BYTES)))


def read_strided(file: FileRange, target: torch.Tensor, offset: int, stride: Sequence[int]) -> None:
    """Fill a tensor with the elements that lie at strides from an offset, both counted in elements.

    Elements that lie close together are read at once with what is between them, which is at most as much again.
    """
    if target.stride() == tuple(stride) and target.is_contiguous():
        file.fill(memory_view(target), offset * target.itemsize)
        return
    dims = sorted(((step, dim) for dim, step in enumerate(stride) if target.shape[dim] > 1), key=itemgetter(0))
    for step, dim in dims:
        if not step:  # an expanded dim: its elements are one
            first = target.narrow(dim, 0, 1)
            read_strided(file, first, offset, stride)
            target.copy_(first.expand_as(target))
            return
    order = [dim for _, dim in reversed(dims)]
    rest = [dim for dim in range(target.dim()) if dim not in order]
    flat = target.permute(rest + order)[(0,) * len(rest)] if rest else target.permute(order)
    _read(file, flat, [stride[dim] for dim in order], offset)


def _gap(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie between the innermost ones that follow each other and the next such; 0 if all do.

    It is negative where elements overlap: views that do may span as much memory as if they did not.
    """
    run = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != run:
            return step - run
        run *= size
    return 0


def _read(file: FileRange, target: torch.Tensor, stride: Sequence[int], offset: int) -> None:
    """Fill a tensor whose elements lie at falling strides from an offset. All are there: the caller has looked."""
    pending = [(target, offset)]
    while pending:
        part, at = pending.pop()
        if not part.numel():
            continue
        size, steps = part.dtype.itemsize, stride[len(stride) - part.dim() :]
        span = 1 + sum((count - 1) * step for count, step in zip(part.shape, steps, strict=True))
        gap = _gap(part.shape, steps)
        # One call costs as much as reading a gap of this size: measured, beside the copy that joined reads need.
        is_wide = gap * size >= _GAP_BYTES and not file.files.is_remote
        if part.is_contiguous() and not gap:
            file.fill(memory_view(part), at * size)
        elif span <= 2 * part.numel() and span * size <= BUCKET_BYTES and not is_wide:
            scratch = torch.empty(span, dtype=part.dtype, device="cpu")
            file.fill(memory_view(scratch), at * size)
            part.copy_(scratch.as_strided(part.shape, steps))
        elif (is_wide or span > 2 * part.numel()) and part.dim() > 1:
            pending += [(row, at + index * steps[0]) for index, row in enumerate(part.unbind(0))][::-1]
        elif part.shape[0] == 1:
            pending.append((part[0], at))
        else:
            half = part.shape[0] // 2
            pending += [(part[half:], at + half * steps[0]), (part[:half], at)]
