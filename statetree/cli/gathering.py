"""Reads the elements of strided views from files, and little of what lies between them."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final

import torch

from statetree.spans.layout import extent_bytes

if TYPE_CHECKING:
    from statetree.cli.files import Region

#: So much is read at once even if little of it is of use, and so much by itself if what is around it is of none.
_NEAR_BYTES: Final = 1 << 20
_RUN_BYTES: Final = 512


def gather(region: Region, entry: str, target: torch.Tensor, stride: tuple[int, ...], offset: int) -> None:
    """Fill a tensor with the elements that lie at strides from an offset.

    Args:
        region: Where to read.
        entry: What is read, for messages.
        target: What to fill. Its dtype tells the size of elements; strides and offset count these.
        stride: How far apart they lie in each of the target's dims.
        offset: Where the first one lies.
    """
    order = sorted(range(target.dim()), key=stride.__getitem__, reverse=True)
    sizes = [target.shape[dim] if stride[dim] else 1 for dim in order]  # expanded elements are read once
    found = torch.empty(sizes, dtype=target.dtype, device="cpu")
    _fill(region, entry, found, tuple(stride[dim] for dim in order), offset)
    target.permute(order).copy_(found.expand(target.permute(order).shape))


def _fill(region: Region, entry: str, target: torch.Tensor, stride: tuple[int, ...], offset: int) -> None:
    """Fill a contiguous tensor whose dims come in the order of their strides: largest first."""
    size = target.element_size()
    pending = [(target, offset)]
    while pending:
        part, begin = pending.pop()
        shape = tuple(part.shape)
        span, run = extent_bytes(shape, stride, size), _num_side_by_side(shape, stride)
        if span <= max(_NEAR_BYTES, 2 * part.numel() * size):
            found = torch.empty(span, dtype=torch.uint8, device="cpu")
            region.read_into(found, begin * size, entry)
            part.copy_(found.view(part.dtype).as_strided(shape, stride))
        elif run * size >= _RUN_BYTES:
            outer = _outer_dims(shape, run)
            steps = (range(0, count * step, step) for count, step in zip(shape[:outer], stride, strict=False))
            starts = ((begin + sum(each)) * size for each in product(*steps))
            region.read_runs(part.view(-1), starts, run * size, entry)
        else:
            dim = next(dim for dim, count in enumerate(shape) if count > 1)
            half = shape[dim] // 2
            pending.append((part.narrow(dim, half, shape[dim] - half), begin + half * stride[dim]))
            pending.append((part.narrow(dim, 0, half), begin))


def _num_side_by_side(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return how many elements of the inner dims lie side by side."""
    run = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != run:
            break
        run *= size
    return run


def _outer_dims(shape: tuple[int, ...], run: int) -> int:
    """Return how many dims there are above those that together have so many elements."""
    outer = len(shape)
    while run > 1 or (outer and shape[outer - 1] == 1):
        outer -= 1
        run //= shape[outer]
    return outer
