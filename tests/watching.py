"""What a tree holds, seen without statetree: for tests of purity and independence."""

from __future__ import annotations

import copyreg
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import torch

# Passed by identity: what hangs on them is not part of a tree.
_IDENTITIES = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType, weakref.ref)
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout)
_VALUES += (PurePosixPath, PureWindowsPath, PosixPath)  # which cache their parts
_HEAP_TYPE = 1 << 9
#: Attributes with which torch notes on a jagged tensor's values, whenever they are read, what it may compile for.
_NOTED_BY_TORCH = ("_dynamo", "_specialize_on")


def walk(tree: Any) -> Iterator[Any]:
    """Yield every object that a tree holds, at any depth, once: containers, tensors, storages and opaque objects."""
    pending, seen = [tree], {}
    while pending:
        value = pending.pop()
        if type(value) in _VALUES or isinstance(value, _IDENTITIES) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        pending.extend(children(value))


def children(value: Any) -> list[Any]:
    """Return what lies one level below a value."""
    found: list[Any] = []
    if isinstance(value, torch.Tensor):
        found += inner_tensors(value)
        if value.layout is torch.jagged:  # it caches what it is asked for among its attributes
            return found
        found += [held for name, held in vars(value).items() if not name.startswith(_NOTED_BY_TORCH)]
        return found
    if isinstance(value, torch.storage.TypedStorage):
        return [value._untyped_storage]
    if isinstance(value, torch.UntypedStorage):
        return []
    if isinstance(value, dict):
        # An OrderedDict subclass may override what dict would iterate over.
        found += [*dict.keys(value), *dict.values(value)]
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        base = next(b for b in (list, tuple, deque, set, frozenset) if isinstance(value, b))
        found += base.__iter__(value)
    attributes = _attributes(value)
    found += attributes.values()
    if not attributes and not isinstance(value, (dict, list, tuple, deque, set, frozenset)):
        found += _reduced(value)
    return found


def inner_tensors(value: torch.Tensor) -> list[Any]:
    """Return the tensors that a tensor is made of, if it is not simply a view on a storage."""
    if hasattr(type(value), "__tensor_flatten__"):
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if value.is_nested:
        bare = value.detach()
        return [bare.values(), bare._nested_tensor_size()]
    if value.layout is torch.sparse_coo:
        bare = value.detach()
        return [bare._indices(), bare._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        bare = value.detach()
        return [bare.crow_indices(), bare.col_indices(), bare.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        bare = value.detach()
        return [bare.ccol_indices(), bare.row_indices(), bare.values()]
    return []


def _attributes(value: Any) -> dict[str, Any]:
    result = dict(getattr(value, "__dict__", None) or ())
    for base in type(value).__mro__:
        if base.__flags__ & _HEAP_TYPE:
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    try:
                        result.setdefault(name, member.__get__(value))
                    except AttributeError:
                        continue
    return result


def _reduced(value: Any) -> list[Any]:
    try:
        reducer = copyreg.dispatch_table.get(type(value))
        result = value.__reduce_ex__(4) if reducer is None else reducer(value)
    except Exception:  # any object at all may be met
        return []
    return [] if isinstance(result, str) else [part for part in result[1:] if part is not None]


def storages(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storages with bytes of their own that a tree's tensors lie on, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for value in walk(tree):
        storage = storage_of(value)
        if storage is not None:
            found[storage._cdata] = storage
    return list(found.values())


def storage_of(value: Any) -> torch.UntypedStorage | None:
    """Return the host storage below a plain tensor or a storage, or ``None``."""
    if isinstance(value, torch.UntypedStorage):
        return value
    if not isinstance(value, torch.Tensor) or "Fake" in type(value).__name__ or inner_tensors(value):
        return None
    if hasattr(type(value), "__tensor_flatten__"):
        return None
    try:
        storage = value.untyped_storage()
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    return None if storage.device.type == "meta" else storage


def raw_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of a storage, as a view on it."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (storage.nbytes(),), (1,))


def scribble(tree: Any) -> int:
    """Turn over every bit of every storage of a tree, in place. Returns how many bytes there were."""
    count = 0
    for storage in storages(tree):
        view = raw_bytes(storage)
        view.bitwise_not_()
        count += view.numel()
    return count


def shares_memory(left: Any, right: Any) -> bool:
    """Whether any storage of one tree overlaps one of the other, by address: whoever made it."""
    mine, others = storages(left), storages(right)  # held: some are made on request, and none may take another's place
    return any(
        start < stop_b and start_b < stop
        for start, stop in map(_range, mine)
        for start_b, stop_b in map(_range, others)
    )


def _range(storage: torch.UntypedStorage) -> tuple[int, int]:
    return (storage.data_ptr(), storage.data_ptr() + storage.nbytes()) if storage.nbytes() else (0, 0)


class _Tensor(NamedTuple):
    version: int | None
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    offset: int | None
    pointer: int | None
    requires_grad: bool
    is_leaf: bool
    bits: tuple[bool, bool]
    grad: int
    cls: type


def _record(value: torch.Tensor) -> _Tensor:
    def ask(question: Any) -> Any:
        try:
            return question()
        except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError):
            return None

    return _Tensor(
        version=ask(lambda: value._version),
        shape=ask(lambda: tuple(map(str, value.shape))),
        stride=ask(lambda: tuple(map(str, value.stride()))),
        offset=ask(value.storage_offset),
        pointer=None if storage_of(value) is None else ask(lambda: value.untyped_storage().data_ptr()),
        requires_grad=value.requires_grad,
        is_leaf=value.is_leaf,
        bits=(bool(ask(value.is_conj)), bool(ask(value.is_neg))),
        grad=id(value.grad) if value.is_leaf else 0,
        cls=type(value),
    )


def _held(value: Any) -> list[Any]:
    """Return the identities of what a container holds, in its order, and of what lies in an object's attributes."""
    found: list[Any] = []
    if isinstance(value, torch.Tensor) and value.layout is torch.jagged:
        return found
    if isinstance(value, dict):
        base = OrderedDict if isinstance(value, OrderedDict) else dict
        keys = list(base.__iter__(value))
        found += keys + [dict.__getitem__(value, key) for key in keys]
    elif isinstance(value, (list, tuple, deque)):
        found += next(b for b in (list, tuple, deque) if isinstance(value, b)).__iter__(value)
    # Members of classes written in C are made anew whenever they are asked for.
    kept = {name: held for name, held in _attributes(value).items() if not name.startswith(_NOTED_BY_TORCH)}
    return [held if type(held) in _VALUES else id(held) for held in (*found, *kept.values())]


class Watch:
    """Remembers everything about a tree that a pure transform may not change.

    Identities of containers and of what they hold, attributes, versions, geometry, gradients, bytes, storage sizes.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.objects = list(walk(tree))
        self.below = [_held(value) for value in self.objects]
        self.tensors = [value for value in self.objects if isinstance(value, torch.Tensor)]
        self.grads = [value.grad for value in self.tensors if value.is_leaf]
        self.records = list(map(_record, self.tensors))
        self.storages = storages(tree) + storages([grad for grad in self.grads if grad is not None])
        self.bytes = [(storage.nbytes(), raw_bytes(storage).clone()) for storage in self.storages]

    def check(self) -> None:
        """Raise ``AssertionError`` if anything is different now."""
        assert list(map(_held, self.objects)) == self.below, "a container or an attribute changed"
        for value, before in zip(self.tensors, self.records, strict=True):
            assert _record(value) == before, f"a tensor changed: {before} is now {_record(value)}"
        for storage, (nbytes, before_bytes) in zip(self.storages, self.bytes, strict=True):
            assert storage.nbytes() == nbytes, "a storage changed its size"
            assert torch.equal(raw_bytes(storage), before_bytes), "bytes changed"


def plain_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree that are views on host storages, each object once."""
    return [value for value in walk(tree) if isinstance(value, torch.Tensor) and storage_of(value) is not None]


def covered_bytes(tree: Any) -> int:
    """Return how many bytes a tree's tensors need: for each storage those from the first that is viewed to the last."""
    reach: dict[int, tuple[int, int]] = {}
    for value in walk(tree):
        storage = storage_of(value)
        if storage is None:
            continue
        start, stop = 0, storage.nbytes()
        if isinstance(value, torch.Tensor):
            if not value.numel():
                continue
            size = value.element_size()
            start = value.storage_offset() * size
            last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
            stop = start + (last + 1) * size
            start -= start % 16  # a span begins where every dtype may
        known = reach.get(storage._cdata, (start, stop))
        reach[storage._cdata] = (min(start, known[0]), max(stop, known[1]))
    return sum(stop - start for start, stop in reach.values())
