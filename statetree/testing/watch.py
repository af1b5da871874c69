"""Everything about a tree that a pure transform may not change."""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import torch

from statetree.testing.memory import storage_of, storages
from statetree.testing.objects import attributes_of
from statetree.testing.regions import raw_bytes
from statetree.testing.walk import NOTED_BY_TORCH, VALUES, walk_with_paths

_SEQUENCES: tuple[Any, ...] = (list, tuple, deque, set, frozenset)


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
    else:
        found += next((base.__iter__(value) for base in _SEQUENCES if isinstance(value, base)), ())
    # Members of classes written in C are made anew whenever they are asked for.
    kept = {name: held for name, held in attributes_of(value).items() if not name.startswith(NOTED_BY_TORCH)}
    return [held if type(held) in VALUES else id(held) for held in (*found, *kept.values())]


_REDUCE: Any = object.__reduce__


def _state_of(value: Any) -> Any:
    """Return what an object written in C holds (an array, a ``bytearray``, a generator); ``None`` of others."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, (torch.Tensor, torch.storage.TypedStorage, torch.UntypedStorage, dict, *_SEQUENCES)):
        return None
    if attributes_of(value) and getattr(type(value), "__reduce__", None) is _REDUCE:
        return None  # these are all that it holds, and are looked at one by one
    try:
        with memoryview(value) as view:
            return view.format, view.shape, view.tobytes()
    except (TypeError, ValueError, BufferError):  # it has no such memory
        pass
    try:
        return pickle.dumps(value)
    except Exception:
        return None


class Watch:
    """Remembers everything about a tree that a pure transform may not change.

    Identities of containers and of what they hold, attributes, versions, geometry, gradients, bytes, storage sizes, and
    what lies in arrays of NumPy, sets, generators and other objects that can be pickled.

    Example:
        >>> import torch
        >>> from statetree.testing import Watch
        >>> state = {"w": torch.arange(3.0)}
        >>> watch = Watch(state)
        >>> _ = state["w"].add_(1)
        >>> watch.check()
        Traceback (most recent call last):
        ...
        AssertionError: Watch: the tensor at ['w'] changed: its version was 0 and is 1
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self._objects = list(walk_with_paths(tree))
        self._below = [_held(value) for _, value in self._objects]
        self._states = [_state_of(value) for _, value in self._objects]
        self._tensors = [(path, value) for path, value in self._objects if isinstance(value, torch.Tensor)]
        self._grads = [value.grad for _, value in self._tensors if value.is_leaf]
        self._records = [_record(value) for _, value in self._tensors]
        self._storages = storages(tree) + storages([grad for grad in self._grads if grad is not None])
        self._bytes = [(storage.nbytes(), raw_bytes(storage).clone()) for storage in self._storages]

    def check(self) -> None:
        """Raise ``AssertionError`` if anything is different now."""
        for (path, value), before in zip(self._objects, self._below, strict=True):
            if _held(value) != before:
                raise AssertionError(f"Watch: the contents or attributes of the {_described(path, value)} changed")
        for (path, value), state in zip(self._objects, self._states, strict=True):
            if state is not None and _state_of(value) != state:
                raise AssertionError(f"Watch: what the {_described(path, value)} holds changed")
        for (path, value), before_record in zip(self._tensors, self._records, strict=True):
            now = _record(value)._asdict()
            changed = [
                f"its {name} was {was} and is {now[name]}"
                for name, was in before_record._asdict().items()
                if was != now[name]
            ]
            if changed:
                raise AssertionError(f"Watch: the tensor at {path or '<root>'} changed: {', '.join(changed)}")
        for storage, (nbytes, before_bytes) in zip(self._storages, self._bytes, strict=True):
            if storage.nbytes() != nbytes or not torch.equal(raw_bytes(storage), before_bytes):
                raise AssertionError(f"Watch: bytes below {', '.join(self._on(storage))} changed")

    def _on(self, storage: torch.UntypedStorage) -> list[str]:
        """Return where the tensors are that lie on a storage."""
        held = [(path, storage_of(value)) for path, value in self._objects]
        paths = [path or "<root>" for path, own in held if own is not None and own._cdata == storage._cdata]
        return paths or ["a gradient"]


def _described(path: str, value: Any) -> str:
    return f"{type(value).__qualname__} at {path or '<root>'}"
