"""What a tree holds, seen without statetree's engines."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from tests.judge.objects import contents_of, is_collection, is_sharded
from tests.judge.pickled_state import holds_attributes_only, reduced
from tests.judge.values import IDENTITIES, PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
#: The methods with which a tensor hands out the tensors that it is made of, by its layout.
_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}
_SCALES = ("q_per_channel_scales", "q_per_channel_zero_points")
_NESTED = ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets", "values")
#: What tensors of several trees may have in common, by name.
_IN_COMMON = frozenset(
    {
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.distributed.device_mesh.DeviceMesh",
        "torch._subclasses.fake_tensor.FakeTensorMode",
    }
)


def walk(tree: Any) -> Iterator[Any]:
    """Yield every object that a tree holds, at any depth, once: containers, tensors, storages and opaque objects."""
    return (value for _, value in walk_with_paths(tree))


def walk_with_paths(tree: Any, *, gradients: bool = False, common: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield what ``walk`` does, with the path that leads there.

    Args:
        tree: Any value.
        gradients: Whether to yield the gradients of tensors, too.
        common: Whether to yield device meshes and fake modes, which many tensors have in common, with all in them.
    """
    pending, seen = [("", tree)], {}
    while pending:
        path, value = pending.pop()
        cls: Any = type(value)
        if has_no_parts(value) or id(value) in seen:
            continue
        if not common and f"{cls.__module__}.{cls.__qualname__}" in _IN_COMMON:
            continue
        seen[id(value)] = value
        yield path, value
        if gradients and isinstance(value, torch.Tensor) and (gradient := gradient_of(value)) is not None:
            pending.append((f"{path}.grad", gradient))
        pending.extend((path + step, child) for step, child in reversed(_children(value)))


def has_no_parts(value: Any) -> bool:
    """Whether a value is plain, or what hangs on it is not part of a tree."""
    return type(value) in PLAIN or isinstance(value, (*IDENTITIES, weakref.ref))


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor, without torch's warning where there can be none."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, torch.storage.TypedStorage):
        return [("._untyped_storage", value._untyped_storage)]
    if isinstance(value, torch.UntypedStorage):
        return []
    parts = contents_of(value).parts()
    if isinstance(value, torch.Tensor):
        inner = [*inner_tensors(value), *scales_of(value)]
        return [(f".{name}", part) for name, part in inner] + parts
    if not (is_collection(value) or holds_attributes_only(type(value))):
        held = reduced(value)
        parts += [(".__reduce__", part) for part in held[1:]] if isinstance(held, list) else []
    return parts


def inner_tensors(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    """Return the tensors that a tensor is made of, by name, if it is not simply a view on a storage."""
    if is_sharded(tensor):
        return []  # its shards lie in its attributes
    if hasattr(tensor, "__tensor_flatten__"):
        return [(name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    return layout_parts(tensor)


def layout_parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that a sparse or a nested tensor is made of, by name; of others, none."""
    names = _NESTED if tensor.is_nested else _PARTS.get(tensor.layout, ())
    bare = tensor.detach() if names else tensor
    return [(f"{name}()", getattr(bare, name)()) for name in names]


def scales_of(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of scales beside the elements of a quantized tensor, by name; of others, none."""
    if is_sharded(tensor) or not tensor.is_quantized:
        return []
    names = () if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric) else _SCALES
    return [(f"{name}()", getattr(tensor, name)()) for name in names]
