"""What stands for the objects in torch's files: tensors without their elements."""

from __future__ import annotations

import math
import reprlib
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.files.safe_pickle import BadPickle, Foreign, Named
from statetree.files.stored import Composite, StoredStorage, StoredTensor
from statetree.files.torch_names import storage_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable

_LARGEST: Final = 2**62
_MAX_DIMS: Final = 64
_MAX_PARTS: Final = 5
_LAYOUTS: Final = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}
_VALUES: Final = (torch.dtype, torch.qscheme, torch.layout, torch.memory_format)
_BELOW_A_BYTE: Final = (torch.quint4x2, torch.quint2x4)
_UTILS: Final = "torch._utils."
REBUILD_SPARSE: Final = f"{_UTILS}_rebuild_sparse_tensor"
#: Classes that are no functions to call, but arguments of these.
_CLASSES: Final = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})
_CONTAINERS: Final = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "builtins.set",
        "builtins.bytearray",
        "builtins.complex",
        "_codecs.encode",
    }
)


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
        raise BadPickle(f"it has the impossible size {str(tuple(value))[:60]}")
    return tuple(value)


class StorageClass:
    """A class of storages: the dtype of their elements, or ``None``."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype


def storage_id(pid: Any, length: int) -> tuple[StorageClass, str, int]:
    """Return the class, key and number of elements of a storage."""
    if type(pid) is not tuple or len(pid) < length or pid[0] != "storage":
        raise BadPickle("it refers to something else than a storage")
    kind, key, _, numel = pid[1:5]
    if not isinstance(kind, StorageClass) or type(key) is not str:
        raise BadPickle("it refers to a storage without a class or a key")
    (count,) = size_of([numel], "a number of elements")
    return kind, key, count


class TorchObjects:
    """Makes what stands for the objects in a pickle.

    Attributes:
        foreign: The names of classes and functions that are not loaded from files.
    """

    def __init__(self) -> None:
        self.foreign: dict[str, None] = {}
        self._calls: dict[str, Callable[..., Any]] = {
            f"{_UTILS}_rebuild_tensor": self._tensor,
            f"{_UTILS}_rebuild_tensor_v2": self._tensor,
            f"{_UTILS}_rebuild_tensor_v3": self._tensor_v3,
            f"{_UTILS}_rebuild_parameter": self._parameter,
            f"{_UTILS}_rebuild_parameter_with_state": self._parameter_with_state,
            REBUILD_SPARSE: self._sparse,
            f"{_UTILS}_rebuild_nested_tensor": self._nested,
            f"{_UTILS}_rebuild_qtensor": self._quantized,
            f"{_UTILS}_rebuild_meta_tensor_no_storage": self._meta,
            f"{_UTILS}_rebuild_device_tensor_from_cpu_tensor": self._from_cpu,
            "torch._tensor._rebuild_from_type_v2": self._with_attributes,
            "torch.Size": lambda sizes: torch.Size(size_of(sizes)),
            "torch.device": _device,
            "torch.serialization._get_layout": lambda name: _LAYOUTS[name],
        }

    def names(self, module: str, name: str) -> Any:
        """Return what stands for a name in a module."""
        full = f"{module}.{name}"
        if module == "torch" and isinstance(getattr(torch, name, None), _VALUES):
            return getattr(torch, name)
        if full in storage_dtypes():
            return StorageClass(storage_dtypes()[full])
        if full in self._calls or full in _CLASSES or full in _CONTAINERS:
            return Named(full)
        self.foreign[full] = None
        return Foreign(full)

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return what stands for the result of a call."""
        if name not in self._calls:
            raise BadPickle(f"it makes a {name} in an unknown way")
        if any(isinstance(arg, Foreign) for arg in args):
            return next(arg for arg in args if isinstance(arg, Foreign))
        return self._calls[name](*args)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> StoredTensor:
        given: tuple[Any, ...] = (*more, None, None, None)
        requires_grad, _hooks, bits = given[:3]
        return _view(storage, _dtype(storage), offset, size, stride, requires_grad, bits)

    def _tensor_v3(self, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> StoredTensor:
        given: tuple[Any, ...] = (*more, None, None, None, None)
        requires_grad, _hooks, dtype, bits = given[:4]
        if not isinstance(dtype, torch.dtype):
            raise BadPickle("it has a tensor without a dtype")
        return _view(storage, dtype, offset, size, stride, requires_grad, bits)

    def _parameter(self, data: Any, requires_grad: Any, _hooks: Any = None) -> Any:
        if isinstance(data, StoredTensor):
            return data.changed(is_parameter=True, requires_grad=bool(requires_grad))
        if isinstance(data, Composite):
            return _attributed(data, (f"{_UTILS}_rebuild_parameter", (data, bool(requires_grad), {})))
        raise BadPickle("it has a parameter that is no tensor")

    def _parameter_with_state(self, data: Any, requires_grad: Any, hooks: Any, state: Any) -> Any:
        inner = self._parameter(data, requires_grad, hooks)
        args: tuple[Any, ...] = (data, bool(requires_grad), {}, state)
        return _attributed(inner, (f"{_UTILS}_rebuild_parameter_with_state", args))

    def _with_attributes(self, function: Any, cls: Any, args: Any, state: Any) -> Any:
        if not isinstance(function, Named) or not isinstance(cls, Named) or cls.name not in _CLASSES:
            raise BadPickle("it makes a tensor in an unknown way")
        inner = self.call(function.name, args)
        if not isinstance(inner, (StoredTensor, Composite)):
            raise BadPickle("it has attributes of something that is no tensor")
        return _attributed(inner, ("torch._tensor._rebuild_from_type_v2", (function, cls, args, state)))

    def _sparse(self, layout: Any, data: Any) -> Composite:
        if not isinstance(layout, torch.layout) or type(data) is not tuple or not 3 <= len(data) <= _MAX_PARTS:
            raise BadPickle("it has a sparse tensor of an unknown layout")
        parts = _parts(*(part for part in data if isinstance(part, StoredTensor)))
        values = 1 if layout == torch.sparse_coo else 2
        shape = size_of(data[values + 1])
        call = (REBUILD_SPARSE, (layout, data))
        # Values first: the order in which statetree.dcp saves them.
        return Composite(str(layout).split(".")[-1], parts[::-1], dtype=parts[values].dtype, shape=shape, call=call)

    def _nested(self, *args: Any) -> Composite:
        parts = _parts(*args)
        return Composite("nested", parts, dtype=parts[0].dtype, call=(f"{_UTILS}_rebuild_nested_tensor", args))

    def _quantized(self, storage: Any, offset: Any, size: Any, stride: Any, scheme: Any, *rest: Any) -> Composite:
        if type(scheme) is not tuple or len(scheme) > _MAX_PARTS:
            raise BadPickle("it has a quantized tensor of an unknown scheme")
        dtype = _dtype(storage)
        if dtype in _BELOW_A_BYTE:
            view = StoredTensor(storage.storage, torch.uint8, (storage.storage.nbytes,))
        else:
            view = _view(storage, dtype, offset, size, stride)
        more = _parts(*(part for part in scheme if isinstance(part, StoredTensor)))
        call = (f"{_UTILS}_rebuild_qtensor", (storage, offset, size, stride, scheme, *rest))
        return Composite("quantized", (view, *more), dtype=dtype, shape=size_of(size), call=call)

    def _meta(self, dtype: Any, size: Any, stride: Any, requires_grad: Any) -> Composite:
        if not isinstance(dtype, torch.dtype):
            raise BadPickle("it has a tensor without a dtype")
        shape, steps = size_of(size), size_of(stride, "strides")
        call = (f"{_UTILS}_rebuild_meta_tensor_no_storage", (dtype, shape, steps, bool(requires_grad)))
        return Composite("meta", (), dtype=dtype, shape=shape, call=call)

    def _from_cpu(self, data: Any, dtype: Any, _device_name: Any, requires_grad: Any) -> StoredTensor:
        (view,) = _parts(data)
        if view.dtype != dtype:
            raise BadPickle("it has a tensor of two dtypes")
        return view.changed(requires_grad=bool(requires_grad))


def _dtype(storage: Any) -> torch.dtype:
    if not isinstance(storage, StoredStorage):
        raise BadPickle("it has a tensor on something that is no storage")
    return torch.uint8 if storage.dtype is None else storage.dtype


def _view(
    storage: Any,
    dtype: torch.dtype,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = None,
    bits: Any = None,
) -> StoredTensor:
    if not isinstance(storage, StoredStorage):
        raise BadPickle("it has a tensor on something that is no storage")
    shape, steps = size_of(size), size_of(stride, "strides")
    (start,) = size_of([offset], "an offset")
    if len(shape) != len(steps):
        raise BadPickle("it has a tensor with more dims than strides, or fewer")
    view = StoredTensor(storage.storage, dtype, shape, steps, start, requires_grad=bool(requires_grad))
    need = start * dtype.itemsize + view.span
    if need > storage.storage.nbytes and view.numel:
        raise BadPickle(
            f"it has a tensor of shape {str(shape)[:60]} on {storage.storage.entry}, which would end at byte {need}: "
            f"expected at most {storage.storage.nbytes}"
        )
    if type(bits) is dict and bits:
        return view.changed(is_conj=bool(bits.get("conj")), is_neg=bool(bits.get("neg")))
    return view


def _parts(*parts: Any) -> tuple[StoredTensor, ...]:
    if not all(isinstance(part, StoredTensor) for part in parts):
        raise BadPickle("it has a tensor whose parts are no tensors")
    return parts


def _attributed(inner: StoredTensor | Composite, call: tuple[str, tuple[Any, ...]]) -> Composite:
    if isinstance(inner, Composite):
        return Composite(inner.kind, inner.parts, dtype=inner.dtype, shape=inner.shape, call=call)
    return Composite("with attributes", (inner,), dtype=inner.dtype, shape=inner.shape, call=call, inner=inner)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or len(kind) > 40:
        raise BadPickle("it has an unknown device")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except RuntimeError as error:
        raise BadPickle(f"it has an unknown device: {str(error)[:60]}") from None
