"""Everything about a tree that a pure transform may not change."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import torch

from statetree.testing.anatomy import Anatomy, anatomy, is_container
from statetree.testing.memory import storage_of
from statetree.testing.objects import attributes_of
from statetree.testing.regions import raw_bytes
from statetree.testing.values import same_plain
from statetree.testing.walk import walk_with_paths


class _Tensor(NamedTuple):
    version: int | None
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    offset: int | None
    pointer: int | None
    requires_grad: bool
    is_leaf: bool
    bits: tuple[bool, bool]
    grad: int
    hooks: int
    retains_grad: bool


def _record(value: torch.Tensor) -> _Tensor:
    def ask(question: Any) -> Any:
        try:
            return question()
        except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError):
            return None

    return _Tensor(
        version=ask(lambda: value._version),
        dtype=value.dtype,
        shape=ask(lambda: tuple(map(str, value.shape))),
        stride=ask(lambda: tuple(map(str, value.stride()))),
        offset=ask(value.storage_offset),
        pointer=None if storage_of(value) is None else ask(lambda: value.untyped_storage().data_ptr()),
        requires_grad=value.requires_grad,
        is_leaf=value.is_leaf,
        bits=(bool(ask(value.is_conj)), bool(ask(value.is_neg))),
        grad=id(value.grad) if value.is_leaf else 0,
        hooks=len(ask(lambda: value._backward_hooks) or ()),
        retains_grad=bool(ask(lambda: value.retains_grad)),
    )


def _same_body(now: Anatomy, before: Anatomy) -> bool:
    """Whether an object holds the very same things as before, under the same names; plain values may be equal ones."""
    if now.cls is not before.cls or list(now.attributes) != list(before.attributes):
        return False
    parts, others = now.parts(), before.parts()
    pairs = zip(parts, others, strict=False)
    return len(parts) == len(others) and all(a is b or same_plain(a, b) for (_, a), (_, b) in pairs)


_REDUCE: Any = object.__reduce__


def _state_of(value: Any) -> Any:
    """Return what an object written in C holds (an array, a ``bytearray``, a generator); ``None`` of others."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if is_container(value) or isinstance(value, (torch.Tensor, torch.storage.TypedStorage, torch.UntypedStorage)):
        return None
    if attributes_of(value) and getattr(type(value), "__reduce__", None) is _REDUCE:
        return None  # these are all that it holds, and are looked at one by one
    try:
        with memoryview(value) as view:
            return view.format, view.shape, view.strides, view.readonly, view.tobytes()
    except (TypeError, ValueError, BufferError):  # it has no such memory
        pass
    try:
        return pickle.dumps(value)
    except Exception:
        return None


class Watch:
    """Remembers everything about a tree that a pure transform may not change.

    Classes and identities of containers and of what they hold (plain values by type and bits), attributes, default
    factories, versions, dtypes, geometry, gradients, hooks, bytes, storage sizes, and what lies in arrays of NumPy,
    sets, random generators and other objects that can be pickled. Not how far Python's own generators have run.

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
        self._objects = list(walk_with_paths(tree, gradients=True))
        self._bodies = [anatomy(value) for _, value in self._objects]
        self._states = [_state_of(value) for _, value in self._objects]
        self._tensors = [(path, value) for path, value in self._objects if isinstance(value, torch.Tensor)]
        self._records = [_record(value) for _, value in self._tensors]
        owned = [storage for _, value in self._objects if (storage := storage_of(value)) is not None]
        self._storages = list({storage._cdata: storage for storage in owned}.values())
        self._bytes = [(storage.nbytes(), raw_bytes(storage).clone()) for storage in self._storages]

    def check(self) -> None:
        """Raise ``AssertionError`` if anything is different now."""
        for (path, value), before in zip(self._objects, self._bodies, strict=True):
            if not _same_body(anatomy(value), before):
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
        return [path or "<root>" for path, own in held if own is not None and own._cdata == storage._cdata]


def _described(path: str, value: Any) -> str:
    return f"{type(value).__qualname__} at {path or '<root>'}"
