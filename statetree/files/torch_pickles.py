"""The pickle of a torch file, read as data: each tensor that it describes must fit the storage that the file has.

``torch.load(weights_only=True)`` runs no code either, but it has no limits of memory, of time or of depth.
"""

from __future__ import annotations

import math
import pickle
import pickletools
import reprlib
from collections import OrderedDict
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.files.pickled_values import MADE_HERE, Rules, made, set_state_attributes
from statetree.files.safe_pickle import BadPickle, Named, PersistentId, StoredObject, check_depth, read_records
from statetree.spans.layout import extent_bytes
from statetree.torch_internals import set_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_LARGEST: Final = 2**62
_MAX_DIMS: Final = 64
_UTILS: Final = "torch._utils."
_LAYOUTS: Final = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}
_KINDS: Final = (torch.dtype, torch.qscheme, torch.layout, torch.memory_format)
_NAMED: Final = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, _KINDS)}
#: Modules of which ``weights_only`` takes nothing, whatever is admitted.
_BLOCKED: Final = frozenset({"os", "sys", "posix", "nt"})
#: The classes that tensors with attributes have.
_CLASSES: Final = {"torch.Tensor": torch.Tensor, "torch.nn.parameter.Parameter": torch.nn.Parameter}


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
    """A class of storages that a pickle names, and the dtype of their elements, or ``None``."""

    def __init__(self, name: str) -> None:
        self.name, self.dtype = name, storage_dtypes()[name]


def storage_id(pid: Any) -> tuple[StorageClass, str, int]:
    """Return the class, key and number of elements of a storage, out of its persistent id.

    Raises:
        BadPickle: If it is none.
    """
    if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage":
        raise BadPickle("it refers to something else than a storage")
    kind, key, _, numel = pid[1:5]
    if not isinstance(kind, StorageClass) or type(key) is not str:
        raise BadPickle("it refers to a storage without a class or a key")
    if any(more is not None for more in pid[5:]):  # torch before 0.4
        raise BadPickle("it refers to a part of a storage")
    (count,) = size_of([numel], "a number of elements")
    return kind, key, count


class _TorchRules(Rules):
    """What is made of a torch file's pickle.

    Args:
        names: The names in it.
        memory: Given the key and the bytes of a storage, returns its memory. Raises ``BadPickle`` if it has none.
    """

    def __init__(self, names: Collection[str], memory: Callable[[str, int], torch.UntypedStorage] | None) -> None:
        self.foreign = foreign_among(names)
        self._memory = memory

    def named(self, name: str) -> Any:
        known = _NAMED.get(name)
        return known if known is not None else StorageClass(name) if name in storage_dtypes() else Named(name)

    def called(self, name: str, args: tuple[Any, ...]) -> Any:
        return _called(name, args)

    def stored(self, pid: Any) -> Any:
        assert self._memory is not None
        return storage_of(self._memory, pid)


def read_pickle(data: bytes, memory: Callable[[str, int], torch.UntypedStorage]) -> tuple[Any, list[str]]:
    """Return what a pickle holds, and the names of classes and functions in it that ``weights_only`` does not admit.

    Args:
        data: The pickle.
        memory: Given the key and the bytes of a storage, returns its memory. Raises ``BadPickle`` if it has none.

    Raises:
        BadPickle: If it is damaged, or describes what the file does not hold.
    """
    records, names = read_records(data)
    rules = _TorchRules(names, memory)
    return made(records, rules), list(rules.foreign)


def storage_of(memory: Callable[[str, int], torch.UntypedStorage], pid: Any) -> torch.TypedStorage:
    """Return a storage by its persistent id, as calls have it."""
    kind, key, count = storage_id(pid)
    dtype = kind.dtype or torch.uint8
    return typed_storage(memory(key, count * dtype.itemsize), dtype)


def plain_pickle(data: bytes) -> Any:
    """Return what a pickle of plain values holds."""
    return made(read_records(data)[0], Rules())


def storage_sizes(data: bytes) -> dict[str, tuple[int, int]]:
    """Return the bytes of an element and the number of elements of each storage in a pickle. No tensor is made."""
    records, names = read_records(data)
    rules = _TorchRules(names, None)
    found: dict[str, tuple[int, int]] = {}
    for record in check_depth(records, rules.foreign):
        if type(record) is PersistentId:
            kind, key, count = storage_id(made(record.args[0], rules))
            found[key] = ((kind.dtype or torch.uint8).itemsize, count)
    return found


def foreign_names(data: bytes) -> list[str]:
    """Return the names in a pickle that ``weights_only`` does not admit. No tensor is made.

    Raises:
        BadPickle: If torch cannot read the pickle for another reason: it has no instruction for very large numbers.
    """
    if pickle.LONG4 in data and any(info.name == "LONG4" for info, _, _ in pickletools.genops(data)):
        raise BadPickle("a number of more than 255 bytes")
    return foreign_among(read_records(data)[1])


def foreign_among(names: Collection[str]) -> list[str]:
    """Return those of the names in a pickle that stand for nothing here.

    Raises:
        BadPickle: If torch would not even name one in its own error.
    """
    found = []
    for name in names:
        if name in _NAMED or name in storage_dtypes() or name in _CALLS or name in _CLASSES or name in MADE_HERE:
            continue
        is_lost = name.startswith(_UTILS) and name.removeprefix(_UTILS) not in vars(torch._utils)  # noqa: SLF001
        if is_lost or name.partition(".")[0] in _BLOCKED:
            raise BadPickle(f"torch cannot load it: it refers to {name[:100]}")
        found.append(name)
    return found


def typed_storage(memory: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a storage with a dtype, as calls have it."""
    return torch.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


def _called(name: str, args: tuple[Any, ...]) -> Any:
    """Return the result of a call: what is made of an object that is not loaded is not loaded, either."""
    if name not in _CALLS:
        raise BadPickle(f"it makes a {name} in an unknown way")
    foreign = [arg for arg in args if isinstance(arg, StoredObject)]
    return foreign[-1] if foreign else _CALLS[name](*args)


def _view(storage: Any, offset: Any, size: Any, stride: Any) -> tuple[torch.UntypedStorage, int, Sequence[int], Any]:
    """Return the memory, offset, shape and strides of a tensor that lies in its storage."""
    if not isinstance(storage, torch.TypedStorage):
        raise BadPickle("it has a tensor on something that is no storage")
    memory, itemsize = storage._untyped_storage, storage.dtype.itemsize  # noqa: SLF001
    shape, steps = size_of(size), size_of(stride, "strides")
    (start,) = size_of([offset], "an offset")
    if len(shape) != len(steps):
        raise BadPickle("it has a tensor with more dims than strides, or fewer")
    need = start * itemsize + extent_bytes(shape, steps, itemsize)
    if need > memory.nbytes() and 0 not in shape:
        what = f"of shape {reprlib.repr(shape)} on a storage, which would end at byte {need}"
        raise BadPickle(f"it has a tensor {what}: expected at most {memory.nbytes()}")
    return memory, start, shape, steps


def rebuilt_tensor(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> torch.Tensor:
    """Return a tensor, as ``torch._utils._rebuild_tensor_v2`` makes it.

    Raises:
        BadPickle: If it does not lie in its storage.
    """
    requires_grad, _hooks, told = (*more, False, None, None)[:3]  # the last is what torch calls metadata
    view = _view(storage, offset, size, stride)
    made = torch.empty(0, dtype=storage.dtype, device=view[0].device).set_(*view)
    if type(told) is dict and told:
        set_bits(made, conj=bool(told.get("conj")), neg=bool(told.get("neg")))
    return made.requires_grad_() if requires_grad else made


def _tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> torch.Tensor:
    requires_grad, hooks, dtype, *told = more
    if not isinstance(dtype, torch.dtype):
        raise BadPickle("it has a tensor without a dtype")
    typed = typed_storage(storage._untyped_storage, dtype)  # noqa: SLF001
    return rebuilt_tensor(typed, offset, size, stride, requires_grad, hooks, *told)


def _quantized(storage: Any, offset: Any, size: Any, stride: Any, scheme: Any, requires_grad: Any, *_hooks: Any) -> Any:
    if type(scheme) is not tuple:
        raise BadPickle("it has a quantized tensor of an unknown scheme")
    below_a_byte = isinstance(storage, torch.TypedStorage) and storage.dtype in (torch.quint4x2, torch.quint2x4)
    if below_a_byte and math.prod(size_of(size)) > 4 * storage._untyped_storage.nbytes():  # noqa: SLF001
        raise BadPickle("it has a quantized tensor of more elements than its storage holds")
    if not below_a_byte:
        _view(storage, offset, size, stride)
    # Tensors that hold each other as hooks free each other on a stack that nobody checks.
    return torch._utils._rebuild_qtensor(  # noqa: SLF001
        storage, offset, size, stride, scheme, bool(requires_grad), OrderedDict()
    )


def _sparse(layout: Any, data: Any) -> Any:
    if not isinstance(layout, torch.layout) or type(data) is not tuple or not 3 <= len(data) <= 5:
        raise BadPickle("it has a sparse tensor of an unknown layout")
    count = 2 if layout == torch.sparse_coo else 3
    parts: Any = [*_plain(data[:count]), size_of(data[count])]
    if count == 2:
        return torch.sparse_coo_tensor(*parts, is_coalesced=(*data, None)[3], check_invariants=False)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)


def _nested(*parts: Any) -> Any:
    return torch._utils._rebuild_nested_tensor(*_plain(parts))  # noqa: SLF001


def _plain(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    if not all(type(part) is torch.Tensor and part.layout is torch.strided and not part.is_nested for part in parts):
        raise BadPickle("it has a tensor whose parts are no tensors")
    return parts


def _meta(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> torch.Tensor:
    if not isinstance(dtype, torch.dtype):
        raise BadPickle("it has a tensor without a dtype")
    geometry = size_of(size), size_of(stride, "strides")
    return torch.empty_strided(*geometry, dtype=dtype, device="meta", requires_grad=bool(requires_grad))


def _parameter(inner: Any, requires_grad: Any, _hooks: Any, state: Any = None) -> torch.Tensor:
    if not isinstance(inner, torch.Tensor):
        raise BadPickle("it makes a parameter of what is no tensor")
    return _with_state(torch.nn.Parameter(inner, bool(requires_grad)), state)


def _on_another_device(*_args: Any) -> Any:
    raise BadPickle("torch cannot load it: a tensor of a device that has no storages")


def _with_attributes(function: Any, cls: Any, args: Any, state: Any) -> Any:
    is_known = isinstance(function, Named) and isinstance(cls, Named) and cls.name in _CLASSES
    if not is_known or type(args) is not tuple:
        raise BadPickle("it makes a tensor in an unknown way")
    inner = _called(function.name, args)
    if isinstance(inner, StoredObject):
        return inner
    if not isinstance(inner, torch.Tensor):
        raise BadPickle("it has attributes of something that is no tensor")
    real: Any = _CLASSES[cls.name]
    return _with_state(inner if type(inner) is real else inner.as_subclass(real), state)


def _with_state(made: torch.Tensor, state: Any) -> torch.Tensor:
    """Return a tensor with its attributes: a mapping, or one and that of its slots, of which there are none."""
    attributes = state[0] if type(state) is tuple and len(state) == 2 and not state[1] else state
    if attributes is not None:
        set_state_attributes(made, attributes)
    return made


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or len(kind) > 40 or type(index) not in (int, type(None)):
        raise BadPickle("it has an unknown device")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except RuntimeError as error:
        raise BadPickle(f"it has an unknown device: {str(error)[:60]}") from None


def _layout(name: Any) -> torch.layout:
    if type(name) is not str:  # a nested tuple hashes itself on a stack that nobody checks
        raise BadPickle("it has an unknown layout")
    return _LAYOUTS[name]


#: Calls that make plain values of torch.
PLAIN_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "torch.Size": lambda sizes: torch.Size(size_of(sizes)),
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
}
_CALLS: Final[dict[str, Callable[..., Any]]] = {
    f"{_UTILS}_rebuild_tensor": rebuilt_tensor,
    f"{_UTILS}_rebuild_tensor_v2": rebuilt_tensor,
    f"{_UTILS}_rebuild_tensor_v3": _tensor_v3,
    f"{_UTILS}_rebuild_sparse_tensor": _sparse,
    f"{_UTILS}_rebuild_nested_tensor": _nested,
    f"{_UTILS}_rebuild_qtensor": _quantized,
    f"{_UTILS}_rebuild_meta_tensor_no_storage": _meta,
    f"{_UTILS}_rebuild_parameter": _parameter,
    f"{_UTILS}_rebuild_parameter_with_state": _parameter,
    f"{_UTILS}_rebuild_device_tensor_from_cpu_tensor": _on_another_device,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    **PLAIN_CALLS,
}
