"""What stands for a tensor in a file: its dtype, shape and strides are known, its elements are read when asked for."""

from __future__ import annotations

import platform
from collections import Counter
from importlib import import_module
from itertools import chain
from operator import mul
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.autograd.graph import increment_version

from statetree.chunks.axis_blocks import AxisRegion
from statetree.chunks.boxes import Box, whole_box
from statetree.errors import CheckpointError, UnsupportedLeaf, check_later, suppress, with_checks
from statetree.files.strided_reading import NUMBERS, in_buckets, read_strided
from statetree.files.unread import unread
from statetree.files.untrusted import refuse, shape_text
from statetree.key_paths import Path
from statetree.leaves.builtin import facts
from statetree.leaves.casting import castable, out_of_range
from statetree.leaves.copying import copied_leaves
from statetree.leaves.engine_type import EngineLeafType
from statetree.leaves.parts import unpack
from statetree.leaves.registry import register_leaf_type
from statetree.leaves.types.tensor import identified, kind_of
from statetree.spans.layout import extent_bytes
from statetree.torch_internals import copy_each, quietly, set_bits, storage_key
from statetree.tree.stand_ins import STAND_INS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from statetree.files.ranges import FileRange


#: Processors that read numbers wherever they begin (in DCP's files, that is anywhere), but none of 16 bytes at once.
_UNALIGNED: Final = ("x86_64", "AMD64", "aarch64", "arm64")
#: Up to here, elements may be repeated as often as they like.
_FREE_BYTES: Final = 64 << 20


class StoredPiece(NamedTuple):
    """A box of a tensor, and where its elements lie in a file: offset and strides count elements.

    ``bits`` is whether what lies there has to be conjugated, and whether it has to be negated.
    """

    box: Box
    file: FileRange
    stride: tuple[int, ...]
    offset: int = 0
    bits: tuple[bool, bool] = (False, False)


class OutOfRange(CheckpointError):
    """Elements that the dtype they are read into cannot hold."""

    found: tuple[str, str] = ("", "")  # what was got, and what is expected


def fill_by(
    read: Callable[[tuple[int, ...], torch.Tensor], None], target: torch.Tensor, dtype: torch.dtype, label: str
) -> None:
    """Fill a tensor, a bucket at a time, by a function that reads the elements of a box in a dtype and on the CPU."""
    for box in in_buckets(target.shape, dtype.itemsize):
        part = target[(*map(slice, box.start, box.stop),)]
        scratch = torch.empty(box.sizes, dtype=dtype, device="cpu")
        read(box.start, scratch)
        if part.dtype == dtype:
            copy_each([part], [scratch])
            continue
        found = out_of_range(scratch, part.dtype)
        if found is not None:
            what = f"it has elements out of range: expected {found[1]}, got {found[0]}"
            error = OutOfRange(f"read: {label}: {what}. Convert to a dtype of a larger range.")
            error.found = found
            raise error
        part.copy_(scratch.resolve_conj().resolve_neg())  # torch forgets the bits as it converts


class StoredTensor:
    """A tensor whose elements lie in a file.

    Transforms take it as the tensor that it stands for, and read its elements from the file where they need them.

    Args:
        outline: The tensor that it stands for: on ``meta``, or in memory that is mapped from the file.
        check: Raises ``CheckpointError`` if the file is not what it was.
        find: Yields its pieces that have elements in a box; ``None`` if it is no strided tensor.

    Attributes:
        dtype: The dtype.
        shape: The shape; of a nested tensor, how many it is made of.
        requires_grad: As the tensor's.

    Example:
        >>> import tempfile, statetree as st, torch
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> st.save({"w": torch.arange(6.0).view(2, 3)}, path)
        >>> stored = st.files.open(path)
        >>> stored["w"]
        StoredTensor(float32, [2, 3])
        >>> stored["w"].read((slice(1, 2),))
        tensor([[3., 4., 5.]])
        >>> st.offload(stored)
        {'w': tensor([[0., 1., 2.],
                [3., 4., 5.]])}
    """

    def __init__(
        self,
        outline: torch.Tensor,
        check: Callable[[], None],
        find: Callable[[Box], Iterable[StoredPiece]] | None,
    ) -> None:
        self.outline = outline
        self.dtype = outline.dtype
        self.shape = torch.Size([outline.size(0)]) if outline.is_nested else outline.shape  # which a nested one lacks
        self.requires_grad = outline.requires_grad
        self._check = check
        self._find = find
        self._kept = outline  # as it is stored

    @classmethod
    def at(cls, file: FileRange, dtype: torch.dtype, shape: Sequence[int]) -> StoredTensor:
        """Return a tensor whose elements, in row-major order, are the bytes of a range of a file.

        Raises:
            CheckpointError: If the range has not as many bytes as the tensor.
        """
        outline = torch.empty(tuple(shape), dtype=dtype, device="meta")
        if file.length != outline.nbytes:
            what = f"{dtype} of shape {shape_text(outline.shape)} does not fit its range of the file"
            refuse(file.label, f"{what}: expected {outline.nbytes} bytes, got {file.length}")
        pieces = [StoredPiece(whole_box(outline.shape), file, outline.stride())]
        return cls(outline, lambda: file.files.check(file.path), lambda _: pieces)

    def __repr__(self) -> str:
        return f"StoredTensor({str(self.dtype).removeprefix('torch.')}, {list(self.shape)})"

    @property
    def device(self) -> torch.device:
        """Where its elements are read to."""
        return torch.device("cpu")

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.outline.numel()

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take if each is stored once."""
        if not self.is_strided:
            with suppress(UnsupportedLeaf):  # what cannot be taken apart can be shown
                return 0 if self.outline.is_meta else sum(unpack("read", [self.outline], list).columns.nbytes)
            return self.outline.nbytes
        return self.numel * self.dtype.itemsize

    @property
    def is_strided(self) -> bool:
        """Whether it is a strided tensor, of which boxes can be read."""
        return self._find is not None

    def _pieces(self) -> list[StoredPiece]:
        assert self._find is not None, "no strided tensor"
        return list(self._find(whole_box(self.shape)))

    @property
    def is_made(self) -> bool:
        """Whether its elements are made when they are read: they lie nowhere as they are."""
        return self.is_strided and not self.is_as_stored

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to it but its elements, one after the other."""
        tensor = self.outline
        is_plain = self.is_strided and type(tensor) is torch.Tensor and tensor.is_contiguous() and not vars(tensor)
        return is_plain and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())

    @property
    def is_as_stored(self) -> bool:
        """Whether it has the dtype that the file has: its elements are not converted when they are read."""
        return self._kept.dtype == self.dtype

    def to(self, dtype: torch.dtype) -> StoredTensor:
        """Return a tensor whose elements are converted as they are read. It is not tied to others any more."""
        if dtype == self.dtype:
            return self
        made = StoredTensor(
            torch.empty_strided(self.shape, self.stride(), dtype=dtype, device="meta"), self._check, self._find
        )
        made._kept = self._kept
        return made

    def stride(self) -> tuple[int, ...]:
        """Return its strides, as the file has them."""
        return self.outline.stride()

    @quietly
    def tensor(self) -> torch.Tensor:
        """Return the tensor: in memory that is mapped from the file, where it is stored in one piece.

        Raises:
            CheckpointError: If the file was changed since it was opened. Verbs look again when they have copied it.
        """
        pieces = [] if self._find is None else self._pieces()
        if not self.outline.is_meta or self._find is None:
            self._check()
            for piece in pieces:
                piece.file.verify()
            self.look_again()
            return self.outline
        if self.is_as_stored and len(pieces) == 1 and pieces[0].box.sizes == tuple(self.shape):
            piece = pieces[0]
            mapped = piece.file.mapped()
            self.look_again()
            found = torch.empty(0, dtype=self.dtype, device="cpu")
            itemsize = self.dtype.itemsize
            is_aligned = piece.file.start % itemsize == 0 or (itemsize < 16 and platform.machine() in _UNALIGNED)
            # An outline on meta lacks the elements alone: what else the tensor is comes from there.
            bits = self.outline.is_conj(), self.outline.is_neg()
            if is_aligned and piece.bits == bits and tuple(piece.stride) == tuple(self.stride()):
                found = found.set_(mapped, piece.offset, self.shape, piece.stride)
                if any(bits):
                    set_bits(found, conj=bits[0], neg=bits[1])
                return self.seen_as(found)
        return self.seen_as(self.read())

    def look_again(self) -> None:
        """Have its file checked once more, when the verb ends that reads its elements."""
        if self._find is None:
            check_later(self._check)
            return
        for piece in self._pieces():
            _look_again(piece.file)

    @quietly
    def read(self, index: Sequence[slice] = ()) -> torch.Tensor:
        """Return the elements of a box, in fresh memory.

        Args:
            index: A slice of step 1 for each of the first dims. Without any, all elements are read.

        Raises:
            CheckpointError: If the file cannot be read, or was changed since it was opened.
        """
        bounds = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=False)]
        start = (*(first for first, _ in bounds), *[0] * (len(self.shape) - len(bounds)))
        sizes = (*(max(0, last - first) for first, last in bounds), *self.shape[len(bounds) :])
        target = torch.empty(sizes, dtype=self.dtype, device="cpu")
        self.read_into(start, target)
        return target

    def read_into(self, start: Sequence[int], target: torch.Tensor) -> None:
        """Fill a tensor with the elements of a box of its shape, and convert them to its dtype.

        Args:
            start: Where the box begins.
            target: Any plain tensor, on any device.
        """
        self.read_block(AxisRegion.box(start), target)

    def read_block(self, region: AxisRegion, target: torch.Tensor) -> None:
        """Fill a plain tensor, which has a dim for each axis of a block, with its elements, converted to its dtype."""
        assert self._find is not None, "no strided tensor"
        self._check()
        if not target.numel():
            return
        sizes = tuple(target.shape)
        hull = region.hull(sizes)
        for piece in self._find(hull):
            if piece.box == hull and hull.sizes == sizes and region.dims == (*range(len(sizes)),):
                self._fill(target, piece, piece.offset)  # all of it, as it is
                _look_again(piece.file)
                continue
            for box, part in region.parts_within(piece.box, sizes):
                offset = piece.offset + part.offset(piece.stride)
                part_piece = piece._replace(stride=part.strides(piece.stride))
                self._fill(target[(*map(slice, box.start, box.stop),)], part_piece, offset)
                _look_again(piece.file)

    def _fill(self, target: torch.Tensor, piece: StoredPiece, offset: int) -> None:
        dtype, has_bits = self._kept.dtype, any(piece.bits)
        number = NUMBERS[dtype.itemsize]
        is_plain = target.device.type == "cpu" and target.dtype == dtype
        if is_plain and not has_bits and not target.is_conj() and not target.is_neg():
            increment_version(target)  # as torch does where it writes, for the checks of autograd
            read_strided(piece.file, target.view(number), offset, piece.stride)
            return

        def read(start: tuple[int, ...], scratch: torch.Tensor) -> None:
            read_strided(piece.file, scratch.view(number), offset + sum(map(mul, start, piece.stride)), piece.stride)
            if has_bits:
                set_bits(scratch, conj=piece.bits[0], neg=piece.bits[1])

        fill_by(read, target, dtype, piece.file.label)

    @property
    def is_repetitive(self) -> bool:
        """Whether its elements are many more than the file has: a few bytes can stand for a terabyte."""
        return self.is_strided and self.nbytes > max(_FREE_BYTES, 16 * span_bytes(self.outline))

    def boxes(self) -> Iterator[tuple[slice, ...]]:
        """Return boxes of at most a bucket, in row-major order, which together are the tensor.

        Of dims along which one element is repeated, they have the first index only, if there is much of it.
        """
        shape = tuple(self.shape)
        if self.is_repetitive:
            shape = tuple([min(size, 1) if not step else size for size, step in zip(shape, self.stride(), strict=True)])
        for box in in_buckets(shape, self.dtype.itemsize):
            yield (*map(slice, box.start, box.stop),)

    def location(self) -> Any:
        """Return what is equal for stored tensors that are the same view on the same bytes, of which there are some."""
        if self._find is None or not self.numel:
            return id(self)
        views = [(str(p.file.path), p.file.start, p.offset, p.stride, p.box, p.bits) for p in self._pieces()]
        return (*views, self.dtype, self._kept.dtype)

    def fresh(self) -> torch.Tensor:
        """Return the tensor in memory of its own."""
        found: torch.Tensor = with_checks(lambda: copied_leaves("read", [self.tensor()], lambda: [Path()])[0])
        return found

    def unread(self) -> torch.Tensor:
        """Return what a predicate is asked about: a tensor that is read when its elements are looked at."""
        return unread(self.outline, self.fresh)

    def seen_as(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the memory of another one, which is beside its elements what this one is."""
        is_so = kind_of(tensor) == kind_of(self.outline)
        return tensor if is_so else identified(tensor.detach(), self.outline)

    @staticmethod
    def converted_later(values: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
        """Return of stored tensors those to convert as they are read: tied to no other one, and no different then."""
        keys = [_memory_keys(value) for value in values]
        users = Counter(chain.from_iterable(keys))

        def later(value: StoredTensor) -> StoredTensor | None:
            if value.dtype == dtype or not value.dtype.is_floating_point:
                return value
            return value.to(dtype) if value.is_plain and value.is_as_stored and castable(value.dtype, dtype) else None

        tied = [any(users[key] > 1 for key in own) for own in keys]
        return [None if is_tied else later(value) for value, is_tied in zip(values, tied, strict=True)]

    @staticmethod
    def derived(values: Sequence[Any], outline: torch.Tensor, fill: Callable[..., None]) -> Any:
        """Return a stored tensor whose elements are made of those of others when they are read."""
        return import_module("statetree.files.derived").DerivedTensor(outline, values, fill)  # which stands on this


def _look_again(file: FileRange) -> None:
    if not file.is_held:
        check_later(file.files.check, file.path)


def span_bytes(outline: torch.Tensor) -> int:
    """Return how many bytes lie between the first and the last element of a strided tensor, both included."""
    return extent_bytes(tuple(outline.shape), tuple(outline.stride()), outline.dtype.itemsize)


def _memory_keys(stored: StoredTensor) -> set[int]:
    """Return what stored tensors have in common that may share memory."""
    if stored.outline.is_meta:
        return {id(stored)}
    tensors = [stored.outline] if stored.is_strided else unpack("cast", [stored.outline], list).parts
    return {storage_key(tensor.untyped_storage()) for tensor in tensors}


class StoredType(EngineLeafType):
    """``StoredTensor``: the tensor that it stands for, whose elements are read where they are needed."""

    deferred = True

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        """Return the tensor."""
        return [value.tensor()], value

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        """Return the tensor in other memory. It may have been copied there by another thread than unpacked it."""
        context.look_again()
        return parts[0]

    def describe(self, value: Any) -> Mapping[str, Any]:
        """Return the facts of the tensor, without reading it."""
        return {**facts(value.outline), "memory": "present"} if value.is_strided else facts(value.outline)


register_leaf_type(StoredTensor, StoredType(), subclasses=True)
STAND_INS.add(StoredTensor)
