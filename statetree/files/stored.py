"""What a checkpoint's file says of its tensors, without their elements: storages, and views on them."""

from __future__ import annotations

import math
from operator import add, lt, mul, sub
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.spans.layout import extent_bytes
from statetree.torch_internals import quietly, set_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from statetree.chunks.boxes import Box
    from statetree.files.ranges import FileRange

#: How much is read or written at once.
BUCKET_BYTES: Final = 16 << 20


class Storage:
    """Bytes that tensors view. Two tensors share memory only if they view one storage.

    Args:
        entry: What the bytes are called in their file, for messages.
        nbytes: How many there are.
    """

    def __init__(self, entry: str, nbytes: int) -> None:
        self.entry = entry
        self.nbytes = nbytes

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return a copy of the bytes from ``start`` to ``stop``."""
        raise NotImplementedError

    def elements(self, view: StoredTensor, start: int, stop: int) -> torch.Tensor:
        """Return a copy of the elements of a view on this storage, in row-major order, as they lie in memory."""
        size = view.dtype.itemsize
        begin = view.offset + start
        return self.read(begin * size, (view.offset + stop) * size).view(view.dtype)


class FileStorage(Storage):
    """Bytes that lie in a file as they are."""

    def __init__(self, entry: str, place: FileRange) -> None:
        super().__init__(entry, place.length)
        self.place = place

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Read from the file."""
        target = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        self.place.read_into(target, start, self.entry)
        return target

    def elements(self, view: StoredTensor, start: int, stop: int) -> torch.Tensor:
        """Read from the file: all at once, or box by box where the elements do not lie side by side."""
        if view.is_contiguous:
            return super().elements(view, start, stop)
        flat = torch.empty(stop - start, dtype=_NUMBERS[view.dtype.itemsize], device="cpu")
        done = 0
        for offsets, sizes in boxes_of(view.shape, start, stop):
            count = math.prod(sizes)
            first = view.offset + sum(map(mul, offsets, view.stride))
            self.place.copy_strided(flat[done : done + count].view(sizes), view.stride, first, self.entry)
            done += count
        return flat.view(view.dtype)


#: Integers of each size: elements are moved as these, since not every dtype can be copied.
_NUMBERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class ChunkedStorage(Storage):
    """A whole tensor, row by row, whose elements lie in boxes that are found as they are needed.

    Args:
        entry: What it is called, for messages.
        dtype: Its dtype.
        shape: Its shape.
        boxes: Boxes that cover every element once.
        find: Given the index of a box, returns its elements.
    """

    def __init__(
        self,
        entry: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        boxes: Sequence[Box],
        find: Callable[[int], StoredTensor],
    ) -> None:
        super().__init__(entry, math.prod(shape) * dtype.itemsize)
        self._dtype = dtype
        self._shape = shape
        self._boxes = boxes
        self._find = find

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Put together what the boxes have of the bytes; both ends lie between elements."""
        number = _NUMBERS[self._dtype.itemsize]
        first, last = start // number.itemsize, stop // number.itemsize
        flat = torch.zeros(last - first, dtype=number, device="cpu")
        done = 0
        for offsets, sizes in boxes_of(self._shape, first, last):
            count = math.prod(sizes)
            self._fill(flat[done : done + count].view(sizes), offsets)
            done += count
        return flat.view(torch.uint8)

    def _fill(self, target: torch.Tensor, offsets: tuple[int, ...]) -> None:
        """Fill a box of the tensor, and read no more of each stored box than that: its rows may be long."""
        for index, box in enumerate(self._boxes):
            start = tuple(map(max, offsets, box.start))
            stop = tuple(map(min, map(add, offsets, target.shape), box.stop))
            if all(map(lt, start, stop)):
                place = target[tuple(map(slice, map(sub, start, offsets), map(sub, stop, offsets)))]
                source = self._find(index)
                begin = source.offset + sum(map(mul, map(sub, start, box.start), source.stride))
                part = source.changed(shape=tuple(place.shape), offset=begin)
                place.copy_(part.read(0, part.numel).view(target.dtype).view(place.shape))


class StoredTensor:
    """A strided tensor in a file: a view on a storage, as torch has it (strides and offset count elements).

    (What stands for leaves is of plain classes: tuples and dataclasses would be containers.)
    """

    __slots__ = ("dtype", "is_conj", "is_neg", "is_parameter", "offset", "requires_grad", "shape", "storage", "stride")

    def __init__(
        self,
        storage: Storage,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...] | None = None,
        offset: int = 0,
        *,
        requires_grad: bool = False,
        is_parameter: bool = False,
        is_conj: bool = False,
        is_neg: bool = False,
    ) -> None:
        self.storage = storage
        self.dtype = dtype
        self.shape = shape
        self.stride = dense_strides(shape) if stride is None else stride
        self.offset = offset
        self.requires_grad = requires_grad
        self.is_parameter = is_parameter
        self.is_conj = is_conj
        self.is_neg = is_neg

    def changed(self, **changes: Any) -> StoredTensor:
        """Return a tensor that is like this one but for some attributes."""
        return StoredTensor(**{name: getattr(self, name) for name in self.__slots__} | changes)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take if each is stored once."""
        return self.numel * self.dtype.itemsize

    @property
    def span(self) -> int:
        """How many bytes of the storage lie between its first and its last element, both included."""
        return extent_bytes(self.shape, self.stride, self.dtype.itemsize)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie side by side, row by row."""
        return not self.numel or all(
            size == 1 or step == dense
            for size, step, dense in zip(self.shape, self.stride, dense_strides(self.shape), strict=True)
        )

    @quietly
    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return a copy of the elements from ``start`` to ``stop`` in row-major order, as a one-dimensional tensor."""
        found = self.storage.elements(self, start, stop)
        if self.is_conj or self.is_neg:
            set_bits(found, conj=self.is_conj, neg=self.is_neg)
            return found.resolve_conj().resolve_neg()
        return found

    def pieces(self) -> Iterator[torch.Tensor]:
        """Return all elements in row-major order, a bucket at a time."""
        step = max(1, BUCKET_BYTES // self.dtype.itemsize)
        for start in range(0, self.numel, step):
            yield self.read(start, min(start + step, self.numel))


class Composite:
    """A tensor of several parts (sparse, nested, quantized…), or one with attributes of its own.

    Args:
        kind: What it is.
        parts: The tensors that it consists of.
        dtype: Its dtype, if the file says.
        shape: Its shape, if the file says.
        call: The name of the function that makes it, and its arguments, where torch's loader has one.
        inner: The tensor that it is apart from its attributes, if that is all there is to it.
    """

    def __init__(
        self,
        kind: str,
        parts: tuple[StoredTensor, ...],
        *,
        dtype: torch.dtype | None = None,
        shape: tuple[int, ...] | None = None,
        call: tuple[str, tuple[Any, ...]] | None = None,
        inner: StoredTensor | None = None,
    ) -> None:
        self.kind = kind
        self.parts = parts
        self.dtype = dtype
        self.shape = shape
        self.call = call
        self.inner = inner

    @property
    def nbytes(self) -> int:
        """How many bytes its parts take."""
        return sum(part.nbytes for part in self.parts)


class StoredStorage:
    """A storage that is in the tree by itself. ``dtype`` is ``None`` for an untyped one."""

    def __init__(self, storage: Storage, dtype: torch.dtype | None) -> None:
        self.storage = storage
        self.dtype = dtype


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie side by side, row by row."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return boxes (offsets and sizes) that together are the elements from ``start`` to ``stop`` in row-major order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row
    if start % row or last == first:  # the first row is not whole
        end = min(stop, (first + 1) * row)
        for offsets, sizes in boxes_of(shape[1:], start - first * row, end - first * row):
            yield (first, *offsets), (1, *sizes)
        first += 1
    if last > first:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if last >= first and stop % row:
        for offsets, sizes in boxes_of(shape[1:], 0, stop - last * row):
            yield (last, *offsets), (1, *sizes)
