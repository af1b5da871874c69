"""What a tree holds, seen without statetree's engines."""

from __future__ import annotations

import types
import weakref
from collections import deque
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import torch

from statetree.testing.objects import attributes_of, reduced

if TYPE_CHECKING:
    from collections.abc import Iterator

# Passed by identity: what hangs on them is not part of a tree.
_IDENTITIES = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType, weakref.ref)
#: Types whose instances are compared as they are.
VALUES: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes)
VALUES += (torch.dtype, torch.device, torch.Size, torch.layout)
VALUES += (PurePosixPath, PureWindowsPath, PosixPath)  # which cache their parts
_SEQUENCES = (list, tuple, deque, set, frozenset)
#: Attributes with which torch notes on a jagged tensor's values, whenever they are read, what it may compile for.
NOTED_BY_TORCH = ("_dynamo", "_specialize_on")


def walk(tree: Any) -> Iterator[Any]:
    """Yield every object that a tree holds, at any depth, once: containers, tensors, storages and opaque objects."""
    return (value for _, value in walk_with_paths(tree))


def walk_with_paths(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield what ``walk`` does, with the path that leads there."""
    pending, seen = [("", tree)], {}
    while pending:
        path, value = pending.pop()
        if type(value) in VALUES or isinstance(value, _IDENTITIES) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        pending.extend((path + step, child) for step, child in children(value))


def children(value: Any) -> list[tuple[str, Any]]:
    """Return what lies one level below a value, with the step that leads there."""
    if isinstance(value, torch.Tensor):
        found = [(f".<inner {index}>", inner) for index, inner in enumerate(inner_tensors(value))]
        if value.layout is torch.jagged:  # it caches what it is asked for among its attributes
            return found
        return found + [(f".{name}", held) for name, held in vars(value).items() if not name.startswith(NOTED_BY_TORCH)]
    if isinstance(value, torch.storage.TypedStorage):
        return [("._untyped_storage", value._untyped_storage)]
    if isinstance(value, torch.UntypedStorage):
        return []
    contained = _contained(value)
    attributes = [(f".{name}", held) for name, held in attributes_of(value).items()]
    if not attributes and contained is None:
        parts = reduced(value)
        return [(".__reduce__", part) for part in parts[1:]] if isinstance(parts, list) else []
    return (contained or []) + attributes


def _contained(value: Any) -> list[tuple[str, Any]] | None:
    """Return the items of a container, as its base class has them; ``None`` for what is none."""
    if isinstance(value, dict):
        keys = list(dict.keys(value))
        items = [(f"[{key!r:.40}]", dict.__getitem__(value, key)) for key in keys]
        return [*((f"<key {index}>", key) for index, key in enumerate(keys)), *items]
    base = next((base for base in _SEQUENCES if isinstance(value, base)), None)
    if base is None:
        return None
    return [(f"[{index}]", item) for index, item in enumerate(base.__iter__(value))]


def inner_tensors(value: torch.Tensor) -> list[Any]:
    """Return the tensors that a tensor is made of, if it is not simply a view on a storage."""
    if hasattr(value, "__tensor_flatten__"):
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
