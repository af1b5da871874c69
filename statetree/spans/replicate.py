"""Tensors replicated in other memory: with the same geometry and overlap, and with or without the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from statetree.key_paths import Path
from statetree.spans.columns import Columns, interleaved
from statetree.spans.layout import SpanLayout, as_bytes, check_memory, extents, lay_out, make_views
from statetree.spans.memory import Buffer, Memory
from statetree.spans.threads import SERIAL_ELEMENTS, copy_together
from statetree.torch_internals import COPIED_AS_INTEGERS, clone_all, copy_all, quietly

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@quietly
def replicate(tensors: Sequence[torch.Tensor], memory: Memory, *, copy: bool = True) -> list[torch.Tensor]:
    """Replicate the storages of tensors in other memory, and return tensors that lie on them as these do.

    Dtypes, shapes, strides, conjugate and negative bits are the same, and so is overlap: what shared memory does so
    again. Only the bytes that the tensors cover are allocated and copied.

    Args:
        tensors: Plain tensors. (``statetree.leaves.take_apart`` gives those of a tree.)
        memory: Where the new ones lie, from ``memory_of``.
        copy: Whether they hold the same elements; otherwise their contents are undefined. Meta tensors stay meta when
            they are copied, and become real when they are not.

    Raises:
        TypeError: If a tensor is no plain one: sparse, nested, quantized, or a wrapper around others.
        UnsupportedLeaf: If the storage of a tensor was freed.

    Example:
        >>> import torch
        >>> from statetree.spans import memory_of, replicate
        >>> w = torch.arange(6.0).view(2, 3)
        >>> first, second = replicate([w, w.T], memory_of("cpu"))
        >>> second
        tensor([[0., 3.],
                [1., 4.],
                [2., 5.]])
        >>> first.data_ptr() == second.data_ptr(), first.data_ptr() == w.data_ptr()
        (True, False)
    """
    for index, tensor in enumerate(tensors):
        is_torchs = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if not is_torchs or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            raise TypeError(
                f"replicate: tensor {index} ({type(tensor).__qualname__}, {tensor.layout}) is no plain one: expected "
                "strided tensors that are no wrappers. Take it apart with statetree.leaves.take_apart."
            )
    columns = Columns(tensors)
    if copy:
        check_memory("replicate", columns, lambda index: Path((index,)))
    return replicate_columns(columns, extents(columns), memory, copy=copy)


def replicate_columns(columns: Columns, reach: list[int], memory: Memory, *, copy: bool) -> list[torch.Tensor]:
    """Do as ``replicate`` for tensors that are known to be plain, of which ``reach`` are the ``extents``."""
    if copy and memory.device.type != "meta" and not columns.on_cpu:
        meta = [device.type == "meta" for device in columns.devices]
        if any(meta):
            return replicate_apart(columns, reach, meta, {True: Memory("meta"), False: memory}, copy=copy)
    # The usual state has thousands of small tensors with storages of their own. For these, spans, buffers and views are
    # three objects too many: one call of `clone` over all of them does the same in a third of the time.
    if memory.is_plain_host and columns.own_storages:
        clonable = _clonable(columns)
        if all(clonable):
            return _clones(columns) if copy else list(map(torch.empty_like, columns.tensors))
        if any(clonable):
            return replicate_apart(columns, reach, clonable, {True: memory, False: memory}, copy=copy)
    layout = lay_out(columns, reach)
    buffers = memory.carve([span.stop - span.start for span in layout.spans])
    views = make_views(columns, layout, buffers, memory.device)
    if copy and memory.device.type != "meta":
        copy_spans(columns, layout, buffers, views)
    return views


def _clones(columns: Columns) -> list[torch.Tensor]:
    """Return clones of contiguous tensors in host memory, of which larger ones are copied in threads."""
    large = [index for index, nbytes in enumerate(columns.nbytes) if nbytes > SERIAL_ELEMENTS]
    if not large:
        return clone_all(columns.tensors)
    sources = [columns.tensors[index] for index in large]
    targets = list(map(torch.empty_like, sources))
    copy_together(targets, sources, [columns.nbytes[index] for index in large], fresh=True)
    if len(large) == len(columns.tensors):
        return targets
    rest = sorted(set(range(len(columns.tensors))).difference(large))
    return interleaved(len(columns.tensors), large, targets, clone_all([columns.tensors[index] for index in rest]))


def copy_spans(columns: Columns, layout: SpanLayout, buffers: Sequence[Buffer], views: Sequence[torch.Tensor]) -> None:
    """Copy the bytes of every span into its buffer: as a tensor where one covers it exactly, as bytes otherwise."""
    targets, sources, nbytes = [], [], []
    for span, buffer, dense in zip(layout.spans, buffers, layout.dense, strict=True):
        if span.start == span.stop:
            continue
        nbytes.append(span.stop - span.start)
        if dense:
            targets.append(views[span.source])
            sources.append(columns.tensors[span.source])
        else:
            targets.append(as_bytes(buffer.storage, buffer.start, buffer.start + span.stop - span.start))
            sources.append(as_bytes(columns.storages[span.source], span.start, span.stop))
    if not targets:
        return
    if columns.on_cpu and buffers[0].storage.device.type == "cpu":
        copy_together(targets, sources, nbytes, fresh=True)
    else:
        copy_all(targets, sources)


def copy_bytes(sources: Columns, targets: Columns) -> None:
    """Copy the bytes from each tensor's first to its last one into tensors of the same geometry elsewhere."""
    into: list[torch.Tensor] = []
    of: list[torch.Tensor] = []
    for columns, pieces in ((targets, into), (sources, of)):
        for index, length in enumerate(extents(columns)):
            start = columns.offsets[index] * columns.dtypes[index].itemsize
            pieces.append(as_bytes(columns.storages[index], start, start + length))
    copy_all(into, of)


def replicate_apart(
    columns: Columns, reach: list[int], kinds: Sequence[Any], memories: Mapping[Any, Memory], *, copy: bool
) -> list[torch.Tensor]:
    """Replicate tensors of each kind in its memory, apart from those of others, with which they share no storage."""
    fresh = {}
    for kind, memory in memories.items():
        chosen = [index for index, own in enumerate(kinds) if own == kind]
        part = Columns([columns.tensors[index] for index in chosen])
        fresh[kind] = iter(replicate_columns(part, [reach[index] for index in chosen], memory, copy=copy))
    return [next(fresh[kind]) for kind in kinds]


def _clonable(columns: Columns) -> list[bool]:
    """Return for which tensors with storages of their own ``clone`` gives exactly what a copied span would.

    Contiguous host tensors of ordinary dtypes, without conjugate or negative bit.
    """
    special = {dtype for dtype in set(columns.dtypes) if dtype.is_complex or dtype in COPIED_AS_INTEGERS}
    if columns.on_cpu and not special and not any(columns.neg) and all(columns.contiguous):
        return [True] * len(columns.tensors)
    return [
        contiguous and not negative and dtype not in special and device.type == "cpu"
        for contiguous, negative, dtype, device in zip(
            columns.contiguous, columns.neg, columns.dtypes, columns.devices, strict=True
        )
    ]
