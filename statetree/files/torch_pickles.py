"""The pickle of a torch file, looked at before torch reads it: what torch would make of it must fit the file.

``torch.load(weights_only=True)`` runs no code, but it has no limits of memory, of time or of depth, and takes memory
for whatever size a pickle states. Here the pickle is read with stand-ins for all that torch would make.
"""

from __future__ import annotations

import math
import reprlib
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.files.safe_pickle import MADE_BY_READER, BadPickle, Foreign, Named, Reader
from statetree.spans.layout import extent_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from statetree.files.zip_archive import ZipMember

_LARGEST: Final = 2**62
_MAX_DIMS: Final = 64
_UTILS: Final = "torch._utils."
_LAYOUTS: Final = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}
#: Calls that make a tensor of another one, which was looked at already.
_OF_A_TENSOR: Final = frozenset(
    {
        f"{_UTILS}_rebuild_parameter",
        f"{_UTILS}_rebuild_parameter_with_state",
        f"{_UTILS}_rebuild_device_tensor_from_cpu_tensor",
    }
)
#: What stands as an argument of these.
_CLASSES: Final = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})


class StorageReference(NamedTuple):
    """A storage that a pickle refers to: its key in the archive, its bytes, and the dtype of its elements."""

    key: str
    nbytes: int
    dtype: torch.dtype | None


class StridedOutline(NamedTuple):
    """A strided tensor that a pickle describes, as torch has it: offset and strides count elements.

    ``bits`` is whether it is conjugated, and whether it is negated: its memory does not hold then what it reads like.
    """

    storage: StorageReference
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bits: tuple[bool, bool] = (False, False)


class _OtherTensor:
    """A tensor of several parts, one on meta, or one with attributes."""


class PickledTree(NamedTuple):
    """What a pickle holds, with stand-ins for what torch would make.

    Attributes:
        tree: The tree.
        keys: The keys of the storages that have bytes, in the order in which torch loads them.
        foreign: The names of classes and functions that ``weights_only`` does not admit.
    """

    tree: Any
    keys: list[str]
    foreign: list[str]


def size_of(value: Any, what: str = "a size") -> tuple[int, ...]:
    """Return a size out of a file.

    Raises:
        BadPickle: If it is none that a tensor can have.
    """
    if type(value) not in (tuple, list, torch.Size) or len(value) > _MAX_DIMS:
        raise BadPickle(f"it has something else where {what} is expected")
    if not all(type(part) is int and 0 <= part <= _LARGEST for part in value):
        raise BadPickle(f"it has {what} of {reprlib.repr(value)}")
    if math.prod(value) > _LARGEST:
        raise BadPickle(f"it has the impossible size {reprlib.repr(tuple(value))}")
    return tuple(value)


@cache
def storage_dtypes() -> dict[str, torch.dtype | None]:
    """Return the classes of storages that torch's files name, and their dtypes. Tried with torch 2.11 to 2.15."""
    typed = {f"torch.{name}": dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()}  # noqa: SLF001
    return {**typed, "torch.storage.UntypedStorage": None, "torch.UntypedStorage": None}


class StorageClass:
    """A class of storages that a pickle names: the dtype of their elements, or ``None``."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype


def storage_id(pid: Any, length: int) -> tuple[StorageClass, str, int]:
    """Return the class, key and number of elements of a storage, out of its persistent id.

    Raises:
        BadPickle: If it is none.
    """
    if type(pid) is not tuple or len(pid) < length or pid[0] != "storage":
        raise BadPickle("it refers to something else than a storage")
    kind, key, _, numel = pid[1:5]
    if not isinstance(kind, StorageClass) or type(key) is not str:
        raise BadPickle("it refers to a storage without a class or a key")
    (count,) = size_of([numel], "a number of elements")
    return kind, key, count


def read_pickle(data: bytes, prefix: str, members: Mapping[str, ZipMember]) -> PickledTree:
    """Look at a pickle.

    Args:
        data: The pickle.
        prefix: What the names of the archive's members begin with.
        members: The archive's members.

    Raises:
        BadPickle: If it is damaged, or describes what the archive does not hold.
    """
    found = _TorchPickle(prefix, members)
    tree = Reader(data, found.call, found.names, found.storage).load()
    return PickledTree(tree, list(found.keys), list(found.foreign))


class _TorchPickle:
    def __init__(self, prefix: str, members: Mapping[str, ZipMember]) -> None:
        self._prefix = prefix
        self._members = members
        self.foreign: dict[str, None] = {}
        self.keys: dict[str, None] = {}
        self._calls: dict[str, Callable[..., Any]] = {
            f"{_UTILS}_rebuild_tensor": self._tensor,
            f"{_UTILS}_rebuild_tensor_v2": self._tensor,
            f"{_UTILS}_rebuild_tensor_v3": self._tensor_v3,
            f"{_UTILS}_rebuild_sparse_tensor": self._sparse,
            f"{_UTILS}_rebuild_nested_tensor": self._nested,
            f"{_UTILS}_rebuild_qtensor": self._quantized,
            f"{_UTILS}_rebuild_meta_tensor_no_storage": self._meta,
            "torch._tensor._rebuild_from_type_v2": self._with_attributes,
            **PLAIN_CALLS,
            **dict.fromkeys(_OF_A_TENSOR, self._of_a_tensor),
        }

    def names(self, module: str, name: str) -> Any:
        """Return what stands for a name in a module. Nothing is imported."""
        full = f"{module}.{name}"
        known = vars(torch).get(name) if module == "torch" else None
        if isinstance(known, (torch.dtype, torch.qscheme, torch.layout, torch.memory_format)):
            return known
        if full in storage_dtypes():
            return StorageClass(storage_dtypes()[full])
        if full in self._calls or full in _CLASSES or full in MADE_BY_READER:
            return Named(full)
        self.foreign[full] = None
        return Foreign(full)

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return what stands for the result of a call."""
        if name not in self._calls:
            raise BadPickle(f"it makes a {name} in an unknown way")
        foreign = next((arg for arg in args if isinstance(arg, Foreign)), None)
        return self._calls[name](*args) if foreign is None else foreign

    def storage(self, pid: Any) -> StorageReference:
        """Return what stands for a storage."""
        kind, key, count = storage_id(pid, 5)
        member = self._members.get(f"{self._prefix}data/{key}")
        if member is None:
            raise BadPickle(f"it has a tensor on the storage {key[:40]!r}, which the archive does not hold")
        need = count * (kind.dtype.itemsize if kind.dtype else 1)
        if need != member.nbytes:
            raise BadPickle(f"it says that the storage {member.name!r} has {need} bytes: it has {member.nbytes}")
        if need:
            self.keys[key] = None
        return StorageReference(key, need, kind.dtype)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> StridedOutline:
        dtype = storage.dtype if isinstance(storage, StorageReference) else None
        told = more[2] if len(more) > 2 and type(more[2]) is dict else {}  # what torch calls metadata
        bits = (bool(told.get("conj")), bool(told.get("neg")))
        return _view(storage, dtype or torch.uint8, offset, size, stride)._replace(bits=bits)

    def _tensor_v3(self, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> StridedOutline:
        dtype = more[2] if len(more) > 2 else None
        if not isinstance(dtype, torch.dtype):
            raise BadPickle("it has a tensor without a dtype")
        return _view(storage, dtype, offset, size, stride)

    def _quantized(self, storage: Any, offset: Any, size: Any, stride: Any, scheme: Any, *_more: Any) -> _OtherTensor:
        if type(scheme) is not tuple:
            raise BadPickle("it has a quantized tensor of an unknown scheme")
        below_a_byte = isinstance(storage, StorageReference) and storage.dtype in (torch.quint4x2, torch.quint2x4)
        if below_a_byte and math.prod(size_of(size)) > 4 * storage.nbytes:
            raise BadPickle("it has a quantized tensor of more elements than its storage holds")
        if not below_a_byte:
            self._tensor(storage, offset, size, stride)
        return _OtherTensor()

    def _sparse(self, layout: Any, data: Any) -> _OtherTensor:
        if not isinstance(layout, torch.layout) or type(data) is not tuple or not 3 <= len(data) <= 5:
            raise BadPickle("it has a sparse tensor of an unknown layout")
        parts = 2 if layout == torch.sparse_coo else 3
        if not all(isinstance(part, StridedOutline) for part in data[:parts]):
            raise BadPickle("it has a tensor whose parts are no tensors")
        size_of(data[parts])
        return _OtherTensor()

    def _of_a_tensor(self, inner: Any, *_more: Any) -> Any:
        if not isinstance(inner, (StridedOutline, _OtherTensor)):
            raise BadPickle("it makes a parameter, or moves, what is no tensor")
        return inner

    def _nested(self, *parts: Any) -> _OtherTensor:
        if not all(isinstance(part, StridedOutline) for part in parts):
            raise BadPickle("it has a tensor whose parts are no tensors")
        return _OtherTensor()

    def _meta(self, dtype: Any, size: Any, stride: Any, _requires_grad: Any) -> _OtherTensor:
        if not isinstance(dtype, torch.dtype):
            raise BadPickle("it has a tensor without a dtype")
        if len(size_of(size)) != len(size_of(stride, "strides")):
            raise BadPickle("it has a tensor with more dims than strides, or fewer")
        return _OtherTensor()

    def _with_attributes(self, function: Any, cls: Any, args: Any, _state: Any) -> Any:
        is_known = isinstance(function, Named) and isinstance(cls, Named) and cls.name in _CLASSES
        if not is_known or type(args) is not tuple:
            raise BadPickle("it makes a tensor in an unknown way")
        inner = self.call(function.name, args)
        if not isinstance(inner, (StridedOutline, _OtherTensor, Foreign)):
            raise BadPickle("it has attributes of something that is no tensor")
        return _OtherTensor()


def _view(storage: Any, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> StridedOutline:
    if not isinstance(storage, StorageReference):
        raise BadPickle("it has a tensor on something that is no storage")
    shape, steps = size_of(size), size_of(stride, "strides")
    (start,) = size_of([offset], "an offset")
    if len(shape) != len(steps):
        raise BadPickle("it has a tensor with more dims than strides, or fewer")
    need = start * dtype.itemsize + extent_bytes(shape, steps, dtype.itemsize)
    if need > storage.nbytes and 0 not in shape:
        raise BadPickle(
            f"it has a tensor of shape {reprlib.repr(shape)} on the storage {storage.key}, which would end at byte "
            f"{need}: expected at most {storage.nbytes}"
        )
    return StridedOutline(storage, dtype, shape, steps, start)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or len(kind) > 40 or type(index) not in (int, type(None)):
        raise BadPickle("it has an unknown device")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except RuntimeError as error:
        raise BadPickle(f"it has an unknown device: {str(error)[:60]}") from None


#: Calls that make plain values of torch.
PLAIN_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "torch.Size": lambda sizes: torch.Size(size_of(sizes)),
    "torch.device": _device,
    "torch.serialization._get_layout": lambda name: _LAYOUTS[name],
}
