"""What a tree holds, seen without statetree's engines."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from statetree.testing.anatomy import anatomy, is_collection, is_sharded
from statetree.testing.objects import reduced, stands_on_c
from statetree.testing.values import IDENTITIES, PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterator


def walk(tree: Any) -> Iterator[Any]:
    """Yield every object that a tree holds, at any depth, once: containers, tensors, storages and opaque objects."""
    return (value for _, value in walk_with_paths(tree))


def walk_with_paths(tree: Any, *, gradients: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield what ``walk`` does, with the path that leads there; and, if asked to, the gradients of tensors."""
    pending, seen = [("", tree)], {}
    while pending:
        path, value = pending.pop()
        if type(value) in PLAIN or isinstance(value, (*IDENTITIES, weakref.ref)) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        if gradients and isinstance(value, torch.Tensor) and (gradient := gradient_of(value)) is not None:
            pending.append((f"{path}.grad", gradient))
        pending.extend((path + step, child) for step, child in reversed(children(value)))


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor, without torch's warning where there can be none."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def children(value: Any) -> list[tuple[str, Any]]:
    """Return what lies one level below a value, with the step that leads there."""
    if isinstance(value, torch.storage.TypedStorage):
        return [("._untyped_storage", value._untyped_storage)]
    if isinstance(value, torch.UntypedStorage):
        return []
    body = anatomy(value)
    parts = body.parts()
    if isinstance(value, torch.Tensor):
        return [(f".<inner {index}>", inner) for index, inner in enumerate(inner_tensors(value))] + parts
    if not is_collection(value) and (not body.attributes or stands_on_c(body.cls)):
        held = reduced(value)
        parts += [(".__reduce__", part) for part in held[1:]] if isinstance(held, list) else []
    return parts


def inner_tensors(value: torch.Tensor) -> list[Any]:
    """Return the tensors that a tensor is made of, if it is not simply a view on a storage."""
    if is_sharded(value):
        return []  # its shards lie in its attributes
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
