"""Overlap between destinations: whether writing into tensors that share memory depends on the order of writing."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from statetree.spans.bits import as_bits, same_bytes
from statetree.spans.columns import Columns
from statetree.spans.layout import extents
from statetree.spans.positions import places_of, put

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def once(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what is left to copy of a tensor that overlaps itself, if each of its elements receives one value.

    Along expanded dims that is the first of the copies, if they are copies in the source as well. Other overlap stays:
    it must be the source's, too, so that equal values are written where elements lie in one place.

    Returns:
        The tensors to copy; ``None`` if the result would depend on the order of writing.
    """
    for dim, (size, step) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and step == 0:
            first = source.narrow(dim, 0, 1)
            if source.stride(dim) and not same_bytes(source, first.expand_as(source)):
                return None
            target, source = target.narrow(dim, 0, 1), first
    alike = all(a == b for size, a, b in zip(target.shape, target.stride(), source.stride(), strict=True) if size > 1)
    return (target, source) if alike or not overlaps_itself(target.shape, target.stride()) else None


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


def laid_like(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of values that overlaps itself as a target does; ``None`` if some place would receive several."""
    fresh = torch.empty_strided(target.shape, target.stride(), dtype=values.dtype, device=values.device)
    put(fresh, places_of(torch.arange(values.numel(), device=values.device), fresh), as_bits(values.reshape(-1)))
    return fresh if same_bytes(fresh, values) else None


def conflicts(targets: Columns, sources: Columns) -> list[tuple[int, int]]:
    """Return pairs of targets that share elements and may not be written both.

    Two targets that share elements are written both if they overlap exactly as their sources do (a tied model's state
    into a tied model), or if they are the same view and receive the same bits (an untied checkpoint into a tied
    model). Whatever else overlaps is a conflict, whatever the values.

    Args:
        targets: Tensors that will be written to.
        sources: For each target the tensor of the same shape whose elements it receives.
    """
    if are_disjoint(targets):
        return []
    reach = extents(targets)
    found: list[tuple[int, int]] = []
    memories: list[int] = []
    for cluster in _clusters(targets, reach):
        memories = memories or _memories(sources)
        alike = _Alike(targets, sources, memories)
        if all(alike.overlap(cluster[0], index) for index in cluster):
            continue
        views: dict[_View, list[int]] = {}
        for index in cluster:
            views.setdefault(_view(targets, index), []).append(index)
        for members in views.values():
            last = members[-1]
            found += [(index, last) for index in members[:-1] if not alike.receive(index, last)]
        # In an order that depends on nothing but where they lie, so that the answer does not, either.
        ordered = sorted(views, key=str)
        ordered.sort(key=lambda view: view.pointer)
        group = {views[view][0]: views[view] for view in ordered}
        for first, second in _colliding(targets, list(group), reach):
            if not any(alike.overlap(a, b) for a in group[first] for b in group[second]):
                found.append((min(first, second), max(first, second)))
    return found


class _View(NamedTuple):
    """What is equal for tensors that are the same view on the same memory, up to the shape of contiguous ones."""

    pointer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool
    neg: bool


def _view(columns: Columns, index: int) -> _View:
    shape, stride = tuple(columns.shapes[index]), _steps(columns, index)
    if columns.contiguous[index]:
        shape, stride = (prod(shape),), (1,)
    pointer, dtype = columns.pointers[index], columns.dtypes[index]
    return _View(pointer, dtype, shape, stride, columns.conj[index], columns.neg[index])


def _steps(columns: Columns, index: int) -> tuple[int, ...]:
    """Return the strides, without those that lead nowhere."""
    return tuple(
        [0 if size == 1 else step for size, step in zip(columns.shapes[index], columns.strides[index], strict=True)]
    )


class _Alike:
    """Pairs of targets whose sources give the elements that they share the same bits."""

    def __init__(self, targets: Columns, sources: Columns, memories: list[int]) -> None:
        self._targets = targets
        self._sources = sources
        self._memories = memories  # that the sources lie in

    def overlap(self, a: int, b: int) -> bool:
        """Whether the sources overlap exactly as the targets do."""
        targets, sources = self._targets, self._sources
        if self._memories[a] != self._memories[b] or not self._is_laid_out_alike(a, b):
            return False
        distance = targets.pointers[b] - targets.pointers[a]
        other = sources.pointers[b] - sources.pointers[a]
        if targets.dtypes[a] == sources.dtypes[a] and targets.dtypes[b] == sources.dtypes[b]:
            return distance == other
        # Elements are converted one by one: they must be as many apart.
        if targets.dtypes[a] != targets.dtypes[b] or sources.dtypes[a] != sources.dtypes[b]:
            return False
        return distance * sources.dtypes[a].itemsize == other * targets.dtypes[a].itemsize

    def _is_laid_out_alike(self, *indices: int) -> bool:
        targets, sources = self._targets, self._sources
        return all(
            _steps(sources, index) == _steps(targets, index)
            and sources.conj[index] == targets.conj[index]
            and sources.neg[index] == targets.neg[index]
            for index in indices
        )

    def receive(self, a: int, b: int) -> bool:
        """Whether two targets that are the same view receive the same bits."""
        return self.overlap(a, b) or same_bytes(self._received(a).reshape(-1), self._received(b).reshape(-1))

    def _received(self, index: int) -> torch.Tensor:
        source = self._sources.tensors[index].detach()
        dtype = self._targets.dtypes[index]
        return source if source.dtype == dtype else source.to(dtype=dtype)


def are_disjoint(columns: Columns) -> bool:
    """Do as ``Columns.disjoint``, and remember it where the tensors were recognised."""
    place = columns.place
    return columns.disjoint if place is None else place.disjoint(columns)


def all_disjoint(targets: Columns, sources: Columns) -> bool:
    """Whether no two of all these tensors lie over each other, judged by their addresses alone."""
    ours, theirs = targets.place, sources.place
    if ours is not None and theirs is not None:
        return ours.disjoint_from(theirs, lambda: _all_disjoint(targets, sources))
    return _all_disjoint(targets, sources)


def _all_disjoint(targets: Columns, sources: Columns) -> bool:
    return _joined(targets, sources, "pointers", "nbytes", "contiguous").disjoint


def _joined(targets: Columns, sources: Columns, *names: str) -> Columns:
    """Return the columns of both, with what is known of each."""
    both = Columns([*targets.tensors, *sources.tensors])
    both.adopt({name: getattr(targets, name) + getattr(sources, name) for name in names})
    both.adopt({"resizable": targets.resizable and sources.resizable})
    return both


def reads_of_written(targets: Columns, sources: Columns) -> list[int]:
    """Return which sources lie in memory that some target lies in too, so that writing may change them."""
    keys = _memories(_joined(targets, sources, "storage_keys", "storage_pointers", "storage_bytes"))
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


def _clusters(columns: Columns, reach: list[int]) -> Iterator[list[int]]:
    """Yield groups of tensors in one memory whose extents overlap, in the order in which they begin."""
    groups: dict[int, list[int]] = {}
    for index, key in enumerate(_memories(columns)):
        if reach[index]:
            groups.setdefault(key, []).append(index)
    start = columns.pointers
    for members in groups.values():
        if len(members) == 1:
            continue
        cluster: list[int] = []
        stop = -1
        for index in sorted(members, key=start.__getitem__):
            if start[index] >= stop:
                if len(cluster) > 1:
                    yield cluster
                cluster = []
            cluster.append(index)
            stop = max(stop, start[index] + reach[index])
        if len(cluster) > 1:
            yield cluster


def shared_elements(columns: Columns) -> list[tuple[int, int]]:
    """Return pairs of tensors that have bytes in common, so that they cannot both be given values of their own."""
    return [pair for _, pairs in _collisions(columns) for pair in pairs]


def sharing(columns: Columns) -> list[int]:
    """Return which tensors have bytes in common with another one (and some that lie among these)."""
    return sorted(index for cluster, pairs in _collisions(columns) if pairs for index in cluster)


def _collisions(columns: Columns) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """Yield groups of tensors that lie across each other, each with the pairs of them that have bytes in common."""
    if are_disjoint(columns):
        return
    reach = extents(columns)
    for cluster in _clusters(columns, reach):
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
