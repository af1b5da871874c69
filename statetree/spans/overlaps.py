"""Overlap between destinations: whether writing into tensors that share memory depends on the order of writing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from statetree.spans.bits import same_bytes
from statetree.spans.columns import Columns
from statetree.spans.layout import extents
from statetree.torch_internals import copy_each, set_bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def overlaps_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements of a tensor lie in the same place (as in an expanded one)."""
    covered = 0
    dims = sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1)
    if any(size == 0 for _, size in dims):
        return False
    for position, (step, size) in enumerate(dims):
        if step == 0:
            return True
        if step <= covered:  # the dim may interleave with the smaller ones: count the places
            reach = covered + sum((size - 1) * step for step, size in dims[position:]) + 1
            places = torch.arange(reach, device="cpu").as_strided(shape, stride)
            return bool(places.unique().numel() != places.numel())
        covered += (size - 1) * step
    return False


def conflicts(targets: Columns, sources: Columns) -> list[tuple[int, int]]:
    """Return pairs of targets that share elements but are to receive different values.

    Targets that overlap exactly as their sources do, or whose sources agree wherever they overlap, do not conflict.

    Args:
        targets: Tensors that will be written to.
        sources: For each target the tensor of the same shape whose elements it receives.
    """
    if lie_apart(targets):
        return []
    groups: dict[int, list[int]] = {}
    keys = _memories(targets)
    if len(set(keys)) == len(keys):
        return []
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    reach = extents(targets)
    found: list[tuple[int, int]] = []
    for members in groups.values():
        for cluster in _clusters(targets, members, reach):
            if not _tied_alike(targets, sources, cluster):
                found += _conflicts_by_trial(targets, sources, cluster, reach)
    return found


def lie_apart(columns: Columns) -> bool:
    """Do as ``Columns.apart``, and remember it where the tensors were recognised."""
    place = columns.place
    return columns.apart if place is None else place.apart(columns)


def all_apart(targets: Columns, sources: Columns) -> bool:
    """Whether no two of all these tensors lie over each other, judged by their addresses alone."""
    ours, theirs = targets.place, sources.place
    if ours is not None and theirs is not None:
        return ours.apart_from(theirs, lambda: _all_apart(targets, sources))
    return _all_apart(targets, sources)


def _all_apart(targets: Columns, sources: Columns) -> bool:
    both = Columns([*targets.tensors, *sources.tensors])
    known = ("pointers", "nbytes", "contiguous")
    both.adopt({name: getattr(targets, name) + getattr(sources, name) for name in known})
    return both.apart


def reads_of_written(targets: Columns, sources: Columns) -> list[int]:
    """Return which sources lie in memory that some target lies in too, so that writing may change them."""
    keys = _memories(Columns([*targets.tensors, *sources.tensors]))
    written = set(keys[: len(targets.tensors)])
    return [index for index, key in enumerate(keys[len(targets.tensors) :]) if key in written]


def _memories(columns: Columns) -> list[int]:
    """Return a number for the memory that each tensor lies in: its storage, or what several storages share.

    Storages that torch did not allocate (made from NumPy arrays, say) may lie over each other.
    """
    keys = columns.storage_keys
    if columns.resizable:
        return keys
    extent = {
        key: (pointer, pointer + size)
        for key, pointer, size in zip(keys, columns.storage_pointers, columns.storage_bytes, strict=True)
    }
    merged: dict[int, int] = {}
    last_key, last_stop = 0, -1
    for key, (start, stop) in sorted(extent.items(), key=lambda item: item[1]):
        if start >= last_stop or not start:
            last_key = key
        merged[key] = last_key
        last_stop = max(last_stop, stop)
    return [merged[key] for key in keys]


def _clusters(targets: Columns, members: list[int], reach: list[int]) -> list[list[int]]:
    """Return groups of targets in one memory whose extents overlap."""
    start = targets.pointers
    clusters: list[list[int]] = []
    stop = -1
    for index in sorted((index for index in members if reach[index]), key=start.__getitem__):
        if start[index] < stop:
            clusters[-1].append(index)
        else:
            clusters.append([index])
        stop = max(stop, start[index] + reach[index])
    return [cluster for cluster in clusters if len(cluster) > 1]


def _tied_alike(targets: Columns, sources: Columns, cluster: list[int]) -> bool:
    """Whether the sources of overlapping targets overlap in the same way."""
    first = cluster[0]
    if any(sources.storage_keys[index] != sources.storage_keys[first] for index in cluster):
        return False
    shift = sources.pointers[first] - targets.pointers[first]
    return all(
        sources.pointers[index] - targets.pointers[index] == shift
        and sources.strides[index] == targets.strides[index]
        and sources.dtypes[index] == targets.dtypes[index] == targets.dtypes[first]
        and sources.conj[index] == targets.conj[index]
        and sources.neg[index] == targets.neg[index]
        for index in cluster
    )


def _conflicts_by_trial(
    targets: Columns, sources: Columns, cluster: list[int], reach: list[int]
) -> list[tuple[int, int]]:
    """Write to a scratch copy of the targets' memory, and look which values did not stay."""
    start = targets.pointers
    alignment = max(targets.dtypes[index].itemsize for index in cluster)
    begin = start[cluster[0]] // alignment * alignment
    if any((start[index] - begin) % targets.dtypes[index].itemsize for index in cluster):
        return [(cluster[0], cluster[1])]  # foreign memory at odd addresses: not worth trying
    size = max(start[index] + reach[index] for index in cluster) - begin
    scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
    views, values = [], []
    for index in cluster:
        dtype = targets.dtypes[index]
        view = torch.empty(0, dtype=dtype, device="cpu")
        offset = (start[index] - begin) // dtype.itemsize
        view.set_(scratch.untyped_storage(), offset, targets.shapes[index], targets.strides[index])
        set_bits(view, conj=targets.conj[index], neg=targets.neg[index])
        source = sources.tensors[index].detach()
        views.append(view)
        values.append((source if source.dtype == dtype else source.to(dtype=dtype)).to("cpu"))
    copy_each(views, values)
    lost = [
        number for number, (view, value) in enumerate(zip(views, values, strict=True)) if not same_bytes(view, value)
    ]
    if not lost:
        return []
    writers = _marks(len(cluster), size)
    for number, index in enumerate(cluster):
        _bytes_of(writers, targets, index, start[index] - begin).fill_(number)
    found = []
    for number in lost:
        index = cluster[number]
        there, last = (_bytes_of(memory, targets, index, start[index] - begin) for memory in (scratch, writers))
        present = there.clone()
        copy_each([views[number]], [values[number]])
        found.append((index, cluster[int(last[there != present].max())]))
        there.copy_(present)
    return found


def shared_elements(columns: Columns) -> list[tuple[int, int]]:
    """Return pairs of tensors that have bytes in common, so that they cannot both be given values of their own."""
    return [pair for _, pairs in _collisions(columns) for pair in pairs]


def sharing(columns: Columns) -> list[int]:
    """Return which tensors have bytes in common with another one (and some that lie among these)."""
    return sorted(index for cluster, pairs in _collisions(columns) if pairs for index in cluster)


def _collisions(columns: Columns) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """Yield groups of tensors that lie across each other, each with the pairs of them that have bytes in common."""
    if lie_apart(columns):
        return
    groups: dict[int, list[int]] = {}
    for index, key in enumerate(_memories(columns)):
        groups.setdefault(key, []).append(index)
    reach = extents(columns)
    for members in groups.values():
        for cluster in _clusters(columns, members, reach):
            yield cluster, _colliding(columns, cluster, reach)


def _colliding(columns: Columns, cluster: list[int], reach: list[int]) -> list[tuple[int, int]]:
    """Mark the bytes of one tensor after the other with its number, and see whose they were before."""
    start = columns.pointers
    begin = start[cluster[0]]
    stop = max(start[index] + reach[index] for index in cluster)
    marks = _marks(len(cluster), stop - begin)
    found = []
    for number, index in enumerate(cluster, 1):
        elements = _bytes_of(marks, columns, index, start[index] - begin)
        if bool(elements.any()):
            before = elements.clone()  # an expanded tensor cannot be written to in places
            while other := int(before.max()):
                found.append((cluster[other - 1], index))
                before.masked_fill_(before == other, 0)
        elements.fill_(number)
    return found


def _marks(most: int, nbytes: int) -> torch.Tensor:
    """Return a zero for each byte, with room for numbers up to ``most``."""
    return torch.zeros(nbytes, dtype=torch.uint8 if most < 256 else torch.int32, device="cpu")


def _bytes_of(memory: torch.Tensor, columns: Columns, index: int, start: int) -> torch.Tensor:
    """Return what lies in the place of each byte of a tensor, of whose memory the first is at ``start``."""
    itemsize = columns.dtypes[index].itemsize
    strides = [step * itemsize for step in columns.strides[index]]
    return memory.as_strided((*columns.shapes[index], itemsize), (*strides, 1), start)
