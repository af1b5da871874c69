"""Overlap between destinations: whether writing into tensors that share memory depends on the order of writing.

Where that cannot be told from strides and addresses in a few steps, tensors are taken to overlap: a copy that could be
made may be refused, and none whose result depends on the order is made.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from operator import le
from typing import TYPE_CHECKING, NamedTuple

from statetree.spans.bits import same_bytes
from statetree.spans.columns import Columns
from statetree.spans.layout import extents

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


def once(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what is left to copy of a tensor that overlaps itself, if each of its elements receives one value.

    Along expanded dims that is the first of the copies, if they are copies in the source as well. Other overlap stays:
    it must be the source's, too, so that equal values are written where elements lie at one address.

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
    """Whether two elements of a tensor may lie at one address (as in an expanded one).

    Surely none do if each step is longer than all smaller ones together reach, as in every view that indexing and
    slicing make. Dims that interleave otherwise, which only ``as_strided`` makes, are taken to overlap.
    """
    covered = 0
    if 0 in shape:
        return False
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step <= covered:
            return True
        covered += (size - 1) * step
    return False


class _View(NamedTuple):
    """Where the bytes of a tensor lie. Equal for tensors that are the same view, up to the shape of contiguous ones."""

    start: int
    stop: int
    dtype: torch.dtype
    steps: tuple[tuple[int, int], ...]  # of each dim that leads anywhere: by how many bytes, and how many elements
    conj: bool
    neg: bool

    def reach_within(self, period: int) -> int:
        """Return how many bytes the elements take, but for steps that are multiples of a period."""
        return self.dtype.itemsize + sum((size - 1) * step for step, size in self.steps if step % period)


def _view(columns: Columns, index: int, reach: int) -> _View:
    dtype, shape = columns.dtypes[index], columns.shapes[index]
    dims = [(prod(shape), 1)] if columns.contiguous[index] else zip(shape, columns.strides[index], strict=True)
    steps = tuple([(step * dtype.itemsize, size) for size, step in dims if size != 1])
    start = columns.pointers[index]
    return _View(start, start + reach, dtype, steps, columns.conj[index], columns.neg[index])


def runs(columns: Columns, reach: list[int]) -> Iterator[list[int]]:
    """Yield groups of several tensors that reach over each other, in the order of their addresses."""
    start = columns.pointers
    for device in set(columns.devices):
        members = [i for i, own in enumerate(columns.devices) if own == device and start[i] and reach[i]]
        run: list[int] = []
        stop = 0
        for index in sorted(members, key=start.__getitem__):
            if start[index] >= stop:
                if len(run) > 1:
                    yield run
                run = []
            run.append(index)
            stop = max(stop, start[index] + reach[index])
        if len(run) > 1:
            yield run


def _views(columns: Columns) -> Iterator[dict[_View, list[int]]]:
    """Yield groups of tensors that reach over each other, by the view that they are, in the order of addresses."""
    reach = extents(columns)
    for run in runs(columns, reach):
        group: dict[_View, list[int]] = {}
        for index in run:
            group.setdefault(_view(columns, index, reach[index]), []).append(index)
        yield group


# Two columns of a matrix reach over each other from the first row to the last, and have no element in common: the parts
# of a fused weight lie so. Modulo the length of a row, the elements of each column lie in one stretch, and what lies
# apart modulo some number lies apart. Boxes of one tensor that do not intersect are apart along some dim, and so modulo
# the stride of the dim before it: each stride of the views is tried. Views that are apart for other reasons only are
# taken to meet: even and odd columns of a matrix with an odd number of them, say.
def _are_apart(views: Sequence[_View]) -> bool:
    """Whether no two of these views have a byte in common, because they are apart modulo one of their strides."""
    origin = min(view.start for view in views)
    for period in {step for view in views for step, _ in view.steps if step}:
        stretches = sorted([((view.start - origin) % period, view.reach_within(period)) for view in views])
        ends = [begin + reach for begin, reach in stretches]
        begins = [*(begin for begin, _ in stretches[1:]), stretches[0][0] + period]  # the first comes round again
        if all(map(le, ends, begins)):
            return True
    return False


def _meeting(views: Sequence[_View]) -> Iterator[tuple[_View, _View]]:
    """Yield the pairs of different views that may have bytes in common. They come in the order of addresses."""
    if _are_apart(views):  # the usual case, in which the pairs need not be gone through
        return
    reaching: list[_View] = []
    for view in views:
        reaching = [other for other in reaching if other.stop > view.start]
        yield from ((other, view) for other in reaching if not _are_apart((other, view)))
        reaching.append(view)


def shared_elements(columns: Columns) -> list[tuple[int, int]]:
    """Return pairs of tensors that may have bytes in common, so that they cannot both be given values of their own.

    Of several tensors that are the same view, each is paired with the next, and one of them with those of other views.
    """
    if are_disjoint(columns):
        return []
    found: list[tuple[int, int]] = []
    for group in _views(columns):
        for members in group.values():
            found += pairwise(members)
        found += [(group[one][-1], group[other][0]) for one, other in _meeting(list(group))]
    return found


def conflicts(targets: Columns, sources: Columns) -> list[tuple[int, int]]:
    """Return pairs of targets that may share elements and may not be written both.

    Two targets that share elements are written both if they overlap exactly as their sources do (a tied model's state
    into a tied model), or if they are the same view and receive the same bits (an untied checkpoint into a tied
    model). Whatever else overlaps is a conflict, whatever the values. A source has the shape of its target.
    """
    if are_disjoint(targets):
        return []
    found: list[tuple[int, int]] = []
    pairs = list(zip(targets.tensors, sources.tensors, strict=True))
    for group in _views(targets):
        indices = [index for members in group.values() for index in members]
        if all(lie_alike(pairs[indices[0]], pairs[index]) for index in indices):
            continue
        for *others, last in group.values():
            found += [(index, last) for index in others if not _receive_alike(pairs[index], pairs[last])]
        for one, other in _meeting(list(group)):
            # Tensors of one view receive the same bits by now, so that one of them that is tied is enough.
            if not any(lie_alike(pairs[a], pairs[b]) for a in group[one] for b in group[other]):
                first, second = group[one][0], group[other][0]
                found.append((min(first, second), max(first, second)))
    return found


def lie_alike(pair: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether the second tensors of two pairs overlap exactly as the first ones do. They may be of other dtypes."""
    for one, its in (pair, other):
        bits = one.is_conj() == its.is_conj() and one.is_neg() == its.is_neg()
        if not bits or one.shape != its.shape or _steps(one) != _steps(its):
            return False
    (a, x), (b, y) = pair, other
    if x.device != y.device or not x.data_ptr():
        return False
    distance, theirs = b.data_ptr() - a.data_ptr(), y.data_ptr() - x.data_ptr()
    if a.dtype == x.dtype and b.dtype == y.dtype:
        return distance == theirs
    # Elements are converted one by one: they must be as many apart.
    return a.dtype == b.dtype and x.dtype == y.dtype and distance * x.itemsize == theirs * a.itemsize


def _steps(tensor: torch.Tensor) -> list[int]:
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _receive_alike(pair: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether two targets that are the same view receive the same bits from their sources."""
    if lie_alike(pair, other):
        return True
    return same_bytes(*[source.detach().to(dtype=target.dtype).reshape(-1) for target, source in (pair, other)])


def are_disjoint(columns: Columns) -> bool:
    """Do as ``Columns.disjoint``, and remember it where the tensors were recognised."""
    known = columns.known_addresses
    return columns.disjoint if known is None else known.disjoint(columns)


def all_disjoint(targets: Columns, sources: Columns) -> bool:
    """Whether no two of all these tensors lie over each other, judged by their addresses alone."""

    def judge() -> bool:
        both, names = Columns([*targets.tensors, *sources.tensors]), ("pointers", "nbytes", "contiguous")
        both.adopt({name: getattr(targets, name) + getattr(sources, name) for name in names})
        return both.disjoint

    ours, theirs = targets.known_addresses, sources.known_addresses
    return judge() if ours is None or theirs is None else ours.disjoint_from(theirs, judge)


def reads_of_written(targets: Columns, sources: Columns) -> list[int]:
    """Return which sources reach over a target, or what a target reaches over: writing may change them."""
    both, count = Columns([*targets.tensors, *sources.tensors]), len(targets.tensors)
    over = [run for run in runs(both, extents(both)) if min(run) < count]
    return sorted(index - count for run in over for index in run if index >= count)
