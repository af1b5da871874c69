"""What names in the pickles of torch stand for: each tensor that is described must fit the storage that the file has.

``torch.load(weights_only=True)`` runs no code either, but has no limits of memory or depth.
"""

from __future__ import annotations

import math
import reprlib
from collections import OrderedDict
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.files import pickled_values
from statetree.files.pickled_values import require
from statetree.files.unpickling import BadPickle, Known, StoredObject, set_attributes
from statetree.spans.layout import extent_bytes
from statetree.torch_internals import set_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LARGEST: Final = 2**62
#: As many as torch's own kernels take.
MAX_DIMS: Final = 64
_UTILS: Final = "torch._utils."
_KINDS: Final = (torch.dtype, torch.qscheme, torch.layout, torch.memory_format)
#: All layouts of tensors, by what torch calls them.
LAYOUTS: Final = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}


def find(name: str) -> Known | None:
    """Return what a name in a pickle of torch stands for."""
    return _KNOWN.get(name) or (Known() if name in storage_dtypes() else pickled_values.find(name))


def size_of(value: Any) -> tuple[int, ...]:
    """Return a size out of a file."""
    size = _numbers(value, "a size")
    if math.prod(size) > _LARGEST:
        raise BadPickle(f"it has the impossible size {reprlib.repr(size)}")
    return size


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    if type(value) not in (tuple, list, torch.Size) or len(value) > MAX_DIMS:
        raise BadPickle(f"it has something else where {what} is expected")
    if not all(type(part) is int and 0 <= part <= _LARGEST for part in value):
        raise BadPickle(f"it has {what} of {reprlib.repr(value)}")
    return tuple(value)


@cache
def storage_dtypes() -> dict[str, torch.dtype]:
    """Return the classes of storages that torch's files name, and their dtypes. Tried with torch 2.11 to 2.15."""
    typed = {f"torch.{name}": dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()}  # noqa: SLF001
    return {**typed, "torch.storage.UntypedStorage": torch.uint8, "torch.UntypedStorage": torch.uint8}


def storages(memory: Callable[[str, int, int], torch.UntypedStorage]) -> Callable[..., torch.TypedStorage]:
    """Return what makes storages of the parts of their persistent ids."""

    def storage(*pid: Any) -> torch.TypedStorage:
        if len(pid) < 5 or pid[0] != "storage":
            raise BadPickle("it refers to something else than a storage")
        cls, key, _device, count = pid[1:5]
        dtype = storage_dtypes().get(cls.name) if isinstance(cls, StoredObject) else None
        if dtype is None or type(key) is not str:
            raise BadPickle("it refers to a storage without a class or a key")
        if any(more is not None for more in pid[5:]):  # torch before 0.4
            raise BadPickle("it refers to a part of a storage")
        (numel,) = _numbers([count], "a number of elements")
        return _typed(memory(key, numel, dtype.itemsize), dtype)

    return storage


def _typed(memory: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


def _untyped(storage: Any) -> torch.UntypedStorage:
    if not isinstance(storage, torch.TypedStorage):
        raise BadPickle("it has a tensor on something that is no storage")
    return storage._untyped_storage  # noqa: SLF001


def _view(storage: Any, offset: Any, size: Any, stride: Any) -> tuple[torch.UntypedStorage, int, Sequence[int], Any]:
    """Return the memory, offset, shape and strides of a tensor that lies in its storage."""
    memory, itemsize = _untyped(storage), storage.dtype.itemsize
    shape, steps = size_of(size), _numbers(stride, "strides")
    (start,) = _numbers([offset], "an offset")
    if len(shape) != len(steps):
        raise BadPickle("it has a tensor with more dims than strides, or fewer")
    need = start * itemsize + extent_bytes(shape, steps, itemsize)
    if need > memory.nbytes() and 0 not in shape:
        what = f"of shape {reprlib.repr(shape)} on a storage, which would end at byte {need}"
        raise BadPickle(f"it has a tensor {what}: expected at most {memory.nbytes()}")
    return memory, start, shape, steps


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> torch.Tensor:
    """Return a tensor, as ``torch._utils._rebuild_tensor_v2`` makes it."""
    requires_grad, _hooks, bits = (*more, False, None, None)[:3]  # the last is what torch calls metadata
    view = _view(storage, offset, size, stride)
    made = torch.empty(0, dtype=storage.dtype, device=view[0].device).set_(*view)
    if type(bits) is dict and bits:
        set_bits(made, conj=bool(bits.get("conj")), neg=bool(bits.get("neg")))
    return made.requires_grad_() if requires_grad else made


def _tensor_v3(storage: Any, *geometry_and_more: Any) -> torch.Tensor:
    *geometry, requires_grad, hooks, dtype = geometry_and_more[:6]
    return _tensor(_typed(_untyped(storage), _dtype(dtype)), *geometry, requires_grad, hooks, *geometry_and_more[6:])


def _dtype(dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise BadPickle("it has a tensor without a dtype")
    return dtype


def _quantized(storage: Any, offset: Any, size: Any, stride: Any, scheme: Any, requires_grad: Any, *_hooks: Any) -> Any:
    memory = _untyped(storage)
    if type(scheme) is not tuple:
        raise BadPickle("it has a quantized tensor of an unknown scheme")
    if storage.dtype in (torch.quint4x2, torch.quint2x4):  # several in a byte
        if math.prod(size_of(size)) > 4 * memory.nbytes():
            raise BadPickle("it has a quantized tensor of more elements than its storage holds")
    else:
        _view(storage, offset, size, stride)
    if memory.device.type == "meta":
        return _without_elements()
    # Hooks are left out: tensors that hold each other as hooks free each other on a stack that nobody checks.
    return torch._utils._rebuild_qtensor(  # noqa: SLF001
        storage, offset, size, stride, scheme, bool(requires_grad), OrderedDict()
    )


def _sparse(layout: Any, data: Any) -> Any:
    if not isinstance(layout, torch.layout) or type(data) is not tuple or not 3 <= len(data) <= 5:
        raise BadPickle("it has a sparse tensor of an unknown layout")
    count = 2 if layout == torch.sparse_coo else 3
    parts: Any = [*_strided(data[:count]), size_of(data[count])]
    if count == 2:
        return torch.sparse_coo_tensor(*parts, is_coalesced=(*data, None)[3], check_invariants=False)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)


def _nested(*parts: Any) -> Any:
    if any(part.is_meta for part in _strided(parts)):
        return _without_elements()
    return torch._utils._rebuild_nested_tensor(*parts)  # noqa: SLF001


def _without_elements() -> torch.Tensor:
    """Return what stands for a tensor that torch makes only with its elements: on ``meta``, and on no storage."""
    return torch.empty(0, device="meta")


def _strided(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    if not all(type(part) is torch.Tensor and part.layout is torch.strided and not part.is_nested for part in parts):
        raise BadPickle("it has a tensor whose parts are no tensors")
    return parts


def _meta(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> torch.Tensor:
    shape, steps = size_of(size), _numbers(stride, "strides")
    if len(shape) != len(steps) or extent_bytes(shape, steps, 1) > _LARGEST:  # torch multiplies numbers of 64 bits
        raise BadPickle(f"it has a tensor of impossible strides {reprlib.repr(steps)}")
    return torch.empty_strided(shape, steps, dtype=_dtype(dtype), device="meta", requires_grad=bool(requires_grad))


def _parameter(inner: Any, requires_grad: Any, _hooks: Any, state: Any = None) -> torch.Tensor:
    if not isinstance(inner, torch.Tensor):
        raise BadPickle("it makes a parameter of what is no tensor")
    return _with_state(torch.nn.Parameter(inner, bool(requires_grad)), state)


def _with_attributes(function: Any, cls: Any, args: Any, state: Any) -> Any:
    known = _KNOWN.get(function.name) if isinstance(function, StoredObject) else None
    if known is None or known.make is None or cls not in (torch.Tensor, torch.nn.Parameter) or type(args) is not tuple:
        raise BadPickle("it makes a tensor in an unknown way")
    inner = known.make(*args)
    if not isinstance(inner, torch.Tensor):
        raise BadPickle("it has attributes of something that is no tensor")
    return _with_state(inner if type(inner) is cls else inner.as_subclass(cls), state)


def _with_state(made: torch.Tensor, state: Any) -> torch.Tensor:
    """Return a tensor with its attributes: a mapping, or one and that of its slots, of which there are none."""
    attributes = state[0] if type(state) is tuple and len(state) == 2 and not state[1] else state
    require(attributes is None or type(attributes) is dict, "attributes")
    return set_attributes(made, attributes)  # type: ignore[no-any-return]  # what it is given


def _torch_size(numbers: Any) -> torch.Size:
    # Any numbers of 64 bits: nothing is made of this one.
    require(all(type(number) is int and -(2**63) <= number < 2**63 for number in numbers), "a Size")
    return torch.Size(numbers)


def _device(kind: Any, *index: Any) -> torch.device:
    require(type(kind) is str and len(kind) <= 40, "a device")
    return torch.device(kind, *index)


def _generator(state: Any, device: Any) -> torch.Generator:
    seed, offset, data = state
    made = torch.Generator(device)
    made.manual_seed(seed)
    if offset is not None:
        made.set_offset(offset)
    return made if data.is_meta else made.set_state(data.clone())


_KNOWN: Final[dict[str, Known]] = {
    **{f"torch.{name}": Known(value=value) for name, value in vars(torch).items() if isinstance(value, _KINDS)},
    "torch.Tensor": Known(value=torch.Tensor),
    "torch.nn.parameter.Parameter": Known(value=torch.nn.Parameter),
    "torch.Size": Known(_torch_size),
    "torch.device": Known(_device),
    "torch._C.Generator": Known(_generator, takes_state=True),
    "torch.serialization._get_layout": Known(lambda name: LAYOUTS[name if type(name) is str else ""]),
    f"{_UTILS}_rebuild_tensor": Known(_tensor),
    f"{_UTILS}_rebuild_tensor_v2": Known(_tensor),
    f"{_UTILS}_rebuild_tensor_v3": Known(_tensor_v3),
    f"{_UTILS}_rebuild_sparse_tensor": Known(_sparse),
    f"{_UTILS}_rebuild_nested_tensor": Known(_nested),
    f"{_UTILS}_rebuild_qtensor": Known(_quantized),
    f"{_UTILS}_rebuild_meta_tensor_no_storage": Known(_meta),
    f"{_UTILS}_rebuild_parameter": Known(_parameter),
    f"{_UTILS}_rebuild_parameter_with_state": Known(_parameter),
    "torch._tensor._rebuild_from_type_v2": Known(_with_attributes),
}
