"""Spans: the bytes of storages that plain tensors cover, copied once however many tensors look at them.

Storages are cut into *spans* (stretches of bytes that the tensors' elements lie in), each of which is copied as a
whole; tensors are *views* on spans. Overlap, strides, expanded dims and storage order come out as they were by
themselves, and a ten-element view of a gigabyte costs ten elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.errors import UnsupportedLeaf, unsignalled
from statetree.torch_internals import COPIED_AS_INTEGERS, is_functional, is_transformed, set_bits, without_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.spans.columns import Columns
    from statetree.spans.memory import Buffer

#: A storage is cut at the gaps between its views where these take more than half of the hull and more than this.
MIN_GAP_BYTES: Final = 1 << 20


class Span(NamedTuple):
    """Bytes ``start`` to ``stop`` of one storage. ``source`` is the index of a tensor on it."""

    source: int
    start: int
    stop: int


class SpanLayout(NamedTuple):
    """How tensors lie in spans."""

    spans: list[Span]  # the spans that cover them
    span_of: list[int]  # for each tensor, the index of its span
    offsets: list[int]  # for each tensor, where it begins in its span, in elements
    dense: list[bool]  # for each span, whether copying its first tensor copies every byte of it exactly once


def extent_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Return the distance from a tensor's first byte to behind its last one; 0 for an empty tensor."""
    last = 0
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * step
    return (last + 1) * itemsize


def extents(columns: Columns) -> list[int]:
    """Return ``extent_bytes`` of every tensor."""
    if all(columns.contiguous):
        return columns.nbytes
    return [
        nbytes if contiguous else extent_bytes(shape, stride, dtype.itemsize)
        for nbytes, contiguous, shape, stride, dtype in zip(
            columns.nbytes, columns.contiguous, columns.shapes, columns.strides, columns.dtypes, strict=True
        )
    ]


def is_dense(contiguous: bool, shape: Sequence[int], stride: Sequence[int]) -> bool:  # noqa: FBT001 - a column
    """Whether a tensor covers every byte between its first and its last one exactly once."""
    if contiguous or 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def holds_memory(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's storage reaches as far as its elements."""
    if tensor.is_meta:
        return True
    if is_functional(tensor) or is_transformed(tensor):
        return False
    itemsize = tensor.dtype.itemsize
    reach = tensor.nbytes if tensor.is_contiguous() else extent_bytes(tensor.shape, tensor.stride(), itemsize)
    return not reach or tensor.storage_offset() * itemsize + reach <= tensor.untyped_storage().nbytes()


def check_memory(verb: str, columns: Columns, where: Callable[[int], Any]) -> None:
    """Raise ``UnsupportedLeaf`` for the first tensor whose storage is freed or too small for it.

    Args:
        verb: For the message.
        columns: The tensors.
        where: Gives a tensor's path, by its index.
    """
    try:
        if columns.whole:
            return
        wrapped = columns.have_no_address
    except unsignalled(NotImplementedError, RuntimeError):  # no storage to ask
        wrapped = True
        if not any(map(is_transformed, columns.tensors)):
            raise
    if wrapped:
        of_function = (is_functional(tensor) or is_transformed(tensor) for tensor in columns.tensors)
        path = where(next(index for index, flag in enumerate(of_function) if flag))
        msg = (
            f"{verb}: the leaf at {path or '<root>'} is a tensor inside a function of torch.func (vmap, grad, "
            f"functionalize): expected one with memory of its own. Call {verb} outside of the function."
        )
        raise UnsupportedLeaf(msg, path)
    for index, (need, have) in enumerate(zip(extents(columns), columns.storage_bytes, strict=True)):
        if not need:
            continue
        begin = columns.tensors[index].storage_offset() * columns.dtypes[index].itemsize
        if begin + need > have:
            path = where(index)
            msg = (
                f"{verb}: the storage of the leaf at {path or '<root>'} was freed or resized: expected at least "
                f"{begin + need} bytes, got {have}. Restore it (FSDP: unshard or use its state_dict) first."
            )
            raise UnsupportedLeaf(msg, path)


def lay_out(columns: Columns, reach: list[int]) -> SpanLayout:
    """Cut the storages of tensors, of which ``reach`` are the ``extents``, into spans."""
    count = len(columns.tensors)
    if columns.own_storages:
        starts = [offset * dtype.itemsize for offset, dtype in zip(columns.offsets, columns.dtypes, strict=True)]
        spans = [
            Span(index, start, start + length) for index, (start, length) in enumerate(zip(starts, reach, strict=True))
        ]
        dense = [_copies_as_tensor(columns, index) for index in range(count)]
        return SpanLayout(spans, list(range(count)), [0] * count, dense)
    groups: dict[int, list[int]] = {}
    for index, key in enumerate(columns.storage_keys):
        groups.setdefault(key, []).append(index)
    layout = SpanLayout([], [0] * count, [0] * count, [])
    for members in groups.values():
        _cut(columns, reach, members, layout)
    return layout


# What to copy of a storage on which several tensors lie? Its hull, from the first byte that is covered to the last,
# keeps their distances, is one copy, and leaves them on one storage again: so it is usual. But two small views at the
# ends of a gigabyte must not cost a gigabyte, so that a storage is cut where nothing is covered, if that saves more
# than half of the hull and more than 1 MiB (below that, one more allocation costs more than the bytes). Then what was
# one storage becomes several, which nobody can tell by writing to the tensors: a cut never goes through a view, nor
# between views that touch, since these may be put together again with `as_strided`.
def _cut(columns: Columns, reach: list[int], members: list[int], layout: SpanLayout) -> None:
    """Cut one storage into spans, and place its tensors in them."""
    starts = {index: columns.offsets[index] * columns.dtypes[index].itemsize for index in members}
    filled = sorted((index for index in members if reach[index]), key=starts.__getitem__)
    runs: list[list[int]] = []  # tensors that overlap or touch
    stops: list[int] = []
    for index in filled:
        if runs and starts[index] <= stops[-1]:
            runs[-1].append(index)
            stops[-1] = max(stops[-1], starts[index] + reach[index])
        else:
            runs.append([index])
            stops.append(starts[index] + reach[index])
    if runs:
        hull = stops[-1] - starts[runs[0][0]]
        gaps = hull - sum(stop - starts[run[0]] for run, stop in zip(runs, stops, strict=True))
        if gaps <= MIN_GAP_BYTES or 2 * gaps <= hull:
            runs, stops = [filled], [stops[-1]]
    else:
        runs, stops = [[members[0]]], [starts[members[0]]]
    empty = [index for index in members if not reach[index]]
    for number, (run, stop) in enumerate(zip(runs, stops, strict=True)):
        # Every tensor must begin at a multiple of its own item size.
        alignment = max(columns.dtypes[index].itemsize for index in run)
        start = starts[run[0]] // alignment * alignment
        for index in run:
            layout.span_of[index] = len(layout.spans)
            layout.offsets[index] = (starts[index] - start) // columns.dtypes[index].itemsize
        if number == 0:
            for index in empty:
                layout.span_of[index] = len(layout.spans)
        first = run[0]
        layout.spans.append(Span(first, start, stop))
        layout.dense.append(
            starts[first] == start and reach[first] == stop - start and _copies_as_tensor(columns, first)
        )


def _copies_as_tensor(columns: Columns, index: int) -> bool:
    """Whether copying a tensor into one of the same geometry copies every byte of its extent."""
    return (
        not columns.conj[index]
        and not columns.neg[index]
        and columns.dtypes[index] not in COPIED_AS_INTEGERS
        and is_dense(columns.contiguous[index], columns.shapes[index], columns.strides[index])
    )


def make_views(
    columns: Columns, layout: SpanLayout, buffers: Sequence[Buffer], device: torch.device
) -> list[torch.Tensor]:
    """Return for each tensor one of the same dtype, geometry and bits, on the buffer of its span."""
    views = []
    for span, offset, dtype, shape, stride in zip(
        layout.span_of, layout.offsets, columns.dtypes, columns.shapes, columns.strides, strict=True
    ):
        storage, start = buffers[span]
        view = without_elements(dtype, device).set_(storage, start // dtype.itemsize + offset, shape, stride)
        views.append(view)
    if any(columns.neg) or any(columns.conj):
        for view, conj, neg in zip(views, columns.conj, columns.neg, strict=True):
            set_bits(view, conj=conj, neg=neg)
    return views


def as_bytes(storage: torch.UntypedStorage, start: int, stop: int) -> torch.Tensor:
    """Return bytes ``start`` to ``stop`` of a storage as a ``uint8`` tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (stop - start,), (1,))
