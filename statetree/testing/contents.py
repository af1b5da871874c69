"""What a value holds, one level down, and what is true of it: what all assertions look at.

It is looked at with torch and Python alone, whatever statetree makes of it.
"""

from __future__ import annotations

import copyreg
import enum
import logging
import pathlib
import struct
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

#: The aspects of a tree. Every difference belongs to one.
STRUCTURE, GEOMETRY, VALUES, TIES = "structure", "geometry", "values", "ties"
_PLAIN = frozenset(
    {
        *(type(None), type(...), bool, int, float, complex, str, bytes, pathlib.PosixPath, pathlib.PurePosixPath),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.qscheme),
        *(torch.finfo, torch.iinfo, type(NotImplemented)),
    }
)
#: What is the same only if it is one object, or equal by its own ``==``: nothing that hangs on it belongs to a tree.
_WHOLE: tuple[type, ...] = (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_WHOLE += (weakref.ref, logging.Logger)
_WHOLE_BY_NAME = frozenset({"DeviceMesh", "FakeTensorMode", "ProcessGroup", "ProcessGroupGloo", "ProcessGroupNCCL"})
_SEQUENCES: tuple[Any, ...] = (list, tuple, deque, set, frozenset)
_IMMUTABLE, _HEAP_TYPE = 1 << 8, 1 << 9  # of classes made by a class statement, the second alone is set
_REDUCERS = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
#: The methods that give the tensors of which a sparse tensor is made.
_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _COLUMNS),
}
_NESTED = ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets", "values")
_SCALES = ("q_per_channel_scales", "q_per_channel_zero_points")


def _sizes(sizes: Any) -> tuple[Any, ...]:
    return tuple([size if type(size) is int else "symbol" for size in sizes])  # a symbol equals itself alone


_FACTS: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda tensor: tensor.dtype,
    "layout": lambda tensor: tensor.layout,
    "shape": lambda tensor: _sizes(tensor.shape),
    "strides": lambda tensor: _sizes(tensor.stride()),
    "requires_grad": lambda tensor: tensor.requires_grad,
    "conjugate bit": lambda tensor: tensor.is_conj(),
    "negative bit": lambda tensor: tensor.is_neg(),
    "is_meta": lambda tensor: tensor.is_meta,
    "device": lambda tensor: tensor.device,
    "is_coalesced": lambda tensor: tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None,
    "quantization": lambda tensor: (tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()),
    "placements": lambda tensor: tensor.placements,
    "mesh": lambda tensor: tensor.device_mesh,
    "metadata": lambda tensor: tensor.metadata() if _is_sharded(tensor) else None,
    "fake mode": lambda tensor: tensor.fake_mode,
}


def is_plain(value: Any) -> bool:
    """Whether a value has no parts."""
    return type(value) in _PLAIN or isinstance(value, _WHOLE) or type(value).__name__ in _WHOLE_BY_NAME


def fingerprint(value: Any) -> Hashable:
    """Return what is equal for plain values of one type and the same bits; for others, their class."""
    cls: type = type(value)
    if cls in (float, complex):
        return cls, struct.pack("<dd", value.real, value.imag)
    if cls in (tuple, frozenset):
        return cls, cls(map(fingerprint, value))
    return (cls, value) if is_plain(value) else (cls,)


def brief(value: Any) -> str:
    """Return a short representation of any value."""
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def facts(value: Any) -> dict[str, tuple[str, Any]]:
    """Return what is true of a value with parts, by name, with the aspect that it belongs to."""
    if isinstance(value, torch.Tensor):
        return {name: (GEOMETRY, _answer(question, value)) for name, question in _FACTS.items()}
    if isinstance(value, torch.UntypedStorage):
        return {"bytes": (GEOMETRY, value.nbytes())}
    found: dict[str, tuple[str, Any]] = {}
    if isinstance(value, dict):
        found["keys"] = STRUCTURE, [*map(fingerprint, _keys(value))]
    if isinstance(value, defaultdict):
        found["default factory"] = STRUCTURE, vars(defaultdict)["default_factory"].__get__(value)
    elif isinstance(value, deque):
        found["maxlen"] = STRUCTURE, vars(deque)["maxlen"].__get__(value)  # a subclass may redefine it
    elif not parts(value) and not isinstance(value, (dict, *_SEQUENCES)) and not _is_python(type(value)):
        found["object"] = VALUES, id(value)  # nothing else is known of it
    return found


def parts(value: Any, *, everything: bool = False) -> dict[str, Any]:
    """Return what a value holds, by the steps that lead there. Steps that end in ``()`` make it anew each time.

    Args:
        value: Any value.
        everything: Whether to add the attributes that a class of Python's leaves out of what pickle takes.
    """
    found: dict[str, Any] = {}
    if is_plain(value) or isinstance(value, torch.UntypedStorage):
        return found
    cls = type(value)
    if isinstance(value, torch.Tensor):
        found = _inner(value)
    elif isinstance(value, torch.storage.TypedStorage):
        found = {".untyped": value._untyped_storage}
    elif isinstance(value, dict):
        for index, key in enumerate(_keys(value)):
            step = f".{key if type(key) is str else brief(key)}"
            while step in found:
                step += "'"
            found[step] = dict.__getitem__(value, key)
            if not is_plain(key):
                found[f"<key {index}>"] = key
        if isinstance(value, defaultdict):
            found[".default_factory"] = value.default_factory
    elif isinstance(value, _SEQUENCES):
        base = next(base for base in _SEQUENCES if isinstance(value, base))
        items = list(base.__iter__(value))
        if base in (set, frozenset):
            items.sort(key=brief)
        found = {f".{index}": item for index, item in enumerate(items)}
    elif not _is_python(cls) and (state := reduced(value)) is not None:
        found = {"()": state}
        if not (everything or _is_in_c(cls)):
            return found
    return found | _attributes(value)


def walk(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield every object that a tree holds, at any depth, once, with its path; gradients, too."""
    pending, seen = [("", tree)], {}
    while pending:
        path, value = pending.pop()
        if not is_plain(value) and id(value) not in seen:
            seen[id(value)] = value  # kept, so that nothing else gets its address
            yield path.removeprefix("."), value
            held = parts(value, everything=True)
            if isinstance(value, torch.Tensor) and gradient(value) is not None:
                held[".grad"] = gradient(value)
            pending += [(path + step, part) for step, part in reversed(held.items())]


def gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor, without torch's warning where there can be none."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def elements(value: Any) -> torch.Tensor | None:
    """Return the plain tensor that a tensor or a storage is a view of memory by, or ``None`` if it is none."""
    if isinstance(value, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value, 0, (value.nbytes(),), (1,))
    if not isinstance(value, torch.Tensor) or _is_sharded(value) or value.layout is not torch.strided:
        return None
    if value.is_nested or hasattr(type(value), "__tensor_flatten__") or torch.nn.parameter.is_lazy(value):
        return None
    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            plain = value.detach()
            plain.untyped_storage()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return plain


def reduced(value: Any) -> Any:
    """Return what pickle would take of an object, with its iterators as lists; ``None`` if it refuses."""
    try:
        reducer = copyreg.dispatch_table.get(type(value))
        result = value.__reduce_ex__(4) if reducer is None else reducer(value)
    except Exception:
        return None
    iterators = (3, 4)
    is_text = isinstance(result, str)
    return result if is_text else [list(part) if at in iterators and part else part for at, part in enumerate(result)]


def _is_python(cls: type) -> bool:
    """Whether attributes are all that an instance holds: nothing is in C, and pickle is told nothing else."""
    tells = any(getattr(cls, name, None) is not getattr(object, name, None) for name in _REDUCERS)
    return not (_is_in_c(cls) or tells or cls in copyreg.dispatch_table)


def _is_in_c(cls: type) -> bool:
    mine = (base for base in cls.__mro__ if base is not object)
    return any(base.__flags__ & (_IMMUTABLE | _HEAP_TYPE) != _HEAP_TYPE for base in mine)


def _keys(value: dict[Any, Any]) -> list[Any]:
    return list((OrderedDict if isinstance(value, OrderedDict) else dict).__iter__(value))


def _attributes(value: Any) -> dict[str, Any]:
    """Return instance attributes by their steps: those of ``__dict__`` in their order, then those in slots by name."""
    named = getattr(value, "__dict__", None)
    found = dict(named) if isinstance(named, dict) else {}
    slots: dict[str, Any] = {}
    for base in type(value).__mro__:
        if base.__flags__ & _HEAP_TYPE:
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    try:
                        slots.setdefault(name, member.__get__(value))
                    except AttributeError:
                        continue
    found |= dict(sorted(slots.items()))
    if isinstance(value, torch.Tensor):  # torch keeps notes of its own there
        is_plain_tensor = type(value) is torch.Tensor
        notes = ("_dynamo", "_specialize_on") if is_plain_tensor else ("_", "fake_mode")
        if is_plain_tensor or type(value).__module__.startswith("torch."):
            found = {name: held for name, held in found.items() if not name.startswith(notes)}
    return {f".{name}": held for name, held in found.items()}


def _inner(tensor: torch.Tensor) -> dict[str, Any]:
    if _is_sharded(tensor):
        return {f".local_shards.{index}": shard.tensor for index, shard in enumerate(tensor.local_shards())}  # type: ignore[attr-defined]
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        found = {f".{name}": getattr(tensor, name) for name in names}
        return found if hasattr(tensor, "placements") else {**found, ".__tensor_flatten__()": context}
    names = _NESTED if tensor.is_nested else _SPARSE.get(tensor.layout, ())
    if tensor.is_quantized and tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        names = _SCALES
    if not names and tensor.layout is not torch.strided and tensor.layout is not torch.jagged:
        names = ("to_dense",)
    with torch.no_grad():
        return {f".{name}()": getattr(tensor.detach(), name)() for name in names}


def _is_sharded(tensor: torch.Tensor) -> bool:
    return any(base.__name__ == "ShardedTensor" for base in type(tensor).__mro__)


def _answer(question: Callable[[Any], Any], tensor: torch.Tensor) -> Any:
    try:
        return question(tensor)
    except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError):
        return None  # it does not say
