"""Tensors of torch itself: strided, sparse, nested and quantized ones, fake and uninitialized ones, and storages."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.errors import UnsupportedLeaf
from statetree.tree.instances import slots_of
from statetree.leaves.registry import QUANTIZED
from statetree.spans.layout import holds_memory
from statetree.torch_internals import as_class, is_zero_tensor
from statetree.tree.flatten import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.tree.spec import TreeSpec


class Identity(NamedTuple):
    """What a tensor object is beside its elements: its class, and what it carries."""

    cls: type
    requires_grad: bool
    attributes: TreeSpec | None  # the structure of the attributes, whose leaves are further parts

    def restore(self, fresh: torch.Tensor, attribute_leaves: Sequence[Any]) -> torch.Tensor:
        """Turn a fresh tensor without identity into one with this."""
        if self.cls is not type(fresh):
            fresh = as_class(fresh, self.cls, requires_grad=self.requires_grad)
        elif self.requires_grad:
            fresh.requires_grad_()
        if self.attributes is not None:
            set_attributes(fresh, unflatten(self.attributes, attribute_leaves))
        return fresh


_slots_of = lru_cache(maxsize=1024)(slots_of)


def attributes_of(value: torch.Tensor) -> dict[str, Any]:
    """Return the Python attributes of a tensor, those in slots included."""
    attributes = dict(vars(value))
    if type(value) is not torch.Tensor:
        for name, slot in _slots_of(type(value)).items():
            try:
                attributes[name] = slot.__get__(value)
            except AttributeError:  # the slot was never set
                continue
    return attributes


def set_attributes(value: torch.Tensor, attributes: Mapping[str, Any]) -> None:
    """Set Python attributes of a tensor, past any ``__setattr__``."""
    slots = _slots_of(type(value))
    for name, kept in attributes.items():
        if name in slots:
            slots[name].__set__(value, kept)
        else:
            value.__dict__[name] = kept


def identity_of(value: torch.Tensor) -> tuple[Identity | None, list[Any]]:
    """Return what a tensor is beside its elements (``None`` if nothing), and the leaves of its attributes."""
    attributes = attributes_of(value)
    if not attributes:
        plain = type(value) is torch.Tensor and not value.requires_grad
        return (None if plain else Identity(type(value), value.requires_grad, None)), []
    leaves, spec = flatten(attributes)
    return Identity(type(value), value.requires_grad, spec), leaves


class TensorType:
    """``torch.Tensor``, ``Parameter``, ``Buffer`` and plain subclasses, of every layout."""

    name = "Tensor"

    def unpack(self, value: torch.Tensor) -> tuple[Sequence[Any], Any]:
        identity, attributes = identity_of(value)
        layout = _special_layout(value)
        if layout is None:
            value.untyped_storage().nbytes()  # raises where there is none, as for the tensors inside a vmap
            if is_zero_tensor(value):
                return [value.detach().clone(), *attributes], (identity, None, 1)
            return [value, *attributes], (None if identity is None else (identity, None, 1))
        inner, context = layout.unpack(value)
        return [*inner, *attributes], (identity, (layout, context), len(inner))

    def pack(self, context: Any, parts: Sequence[Any]) -> torch.Tensor:
        identity, special, count = context
        fresh: torch.Tensor = parts[0] if special is None else special[0].pack(special[1], parts[:count])
        return fresh if identity is None else identity.restore(fresh, parts[count:])

    def essential(self, context: Any, inner: Sequence[Any]) -> Sequence[Any]:
        """Return what holds the elements, without the attributes."""
        return inner[: context[2]]

    def elements_only(self, context: Any) -> bool:
        """Whether the inner tensors hold nothing that putting them together depends on."""
        return context[1] is None

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        layout = _special_layout(value)
        if layout is None:
            return {
                "layout": torch.strided,
                "dtype": value.dtype,
                "shape": value.shape,
                "memory": "meta" if value.is_meta else "present" if _is_there(value) else "freed",
            }
        return {"dtype": value.dtype, **layout.describe(value)}


def _is_there(value: torch.Tensor) -> bool:
    return holds_memory(value) and not is_zero_tensor(value)


class _Layout:
    """One way of laying out a tensor that is not strided: how its inner tensors are reached and put back."""

    def unpack(self, value: torch.Tensor) -> tuple[list[Any], Any]:
        raise NotImplementedError

    def pack(self, context: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        raise NotImplementedError


def _memory(value: Any) -> str:
    return "meta" if value.device.type == "meta" else "present"


class _SparseCoo(_Layout):
    def unpack(self, value: torch.Tensor) -> tuple[list[Any], Any]:
        bare = value.detach()
        return [bare._indices(), bare._values()], (value.shape, value.is_coalesced())

    def pack(self, context: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        shape, coalesced = context
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        return {
            "layout": value.layout,
            "shape": value.shape,
            "number of specified elements": value._nnz(),
            "coalesced": value.is_coalesced(),
            "memory": _memory(value),
        }


class _SparseCompressed(_Layout):
    def unpack(self, value: torch.Tensor) -> tuple[list[Any], Any]:
        bare = value.detach()
        by_rows = value.layout in (torch.sparse_csr, torch.sparse_bsr)
        compressed = bare.crow_indices() if by_rows else bare.ccol_indices()
        plain = bare.col_indices() if by_rows else bare.row_indices()
        return [compressed, plain, bare.values()], (value.shape, value.layout)

    def pack(self, context: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        shape, layout = context
        compressed, plain, values = parts
        return torch.sparse_compressed_tensor(compressed, plain, values, shape, layout=layout, check_invariants=False)

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        return {
            "layout": value.layout,
            "shape": value.shape,
            "number of specified elements": value._nnz(),
            "block shape": tuple(value.detach().values().shape[1:]),
            "memory": _memory(value),
        }


class _StridedNested(_Layout):
    """Nested tensors of the first generation: one buffer, and the sizes, strides and offsets of the pieces in it."""

    def unpack(self, value: torch.Tensor) -> tuple[list[Any], Any]:
        bare = value.detach()
        pieces = [
            bare._nested_tensor_size(),
            bare._nested_tensor_strides(),
            bare._nested_tensor_storage_offsets(),
        ]
        return [bare.values(), *pieces], None

    def pack(self, context: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        buffer, *pieces = parts
        if buffer.untyped_storage().nbytes() != buffer.nbytes:  # nested tensors take all of their storage for theirs
            start = buffer.storage_offset() * buffer.itemsize
            piece: Any = buffer.untyped_storage()[start : start + buffer.nbytes]
            buffer = torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(piece, 0, buffer.shape, (1,))
        if pieces[0].dim() != 2:  # of no components at all
            return torch.nested.nested_tensor([], dtype=buffer.dtype, device=buffer.device)
        return torch._nested_view_from_buffer(buffer, *(piece.to("cpu") for piece in pieces))

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        return {
            "layout": "strided nested",
            "sizes": value._nested_tensor_size().tolist(),
            "strides": value._nested_tensor_strides().tolist(),
        }


class _Quantized(_Layout):
    """Quantized tensors: the integers are a view on the same storage, the scales come beside them."""

    def unpack(self, value: torch.Tensor) -> tuple[list[Any], Any]:
        if value.dtype not in _INTEGERS:
            msg = (
                f"the leaf at %PATH% has the dtype {value.dtype}, which packs several numbers into a byte and has no "
                "exact copy: expected quint8, qint8 or qint32. Dequantize it first."
            )
            raise UnsupportedLeaf(msg)
        integers = torch.empty(0, dtype=_INTEGERS[value.dtype], device=value.device)
        integers.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        if value.is_meta:
            return [integers], (value.dtype, None, None)
        if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return [integers], (value.dtype, value.q_scale(), value.q_zero_point())
        scales, zero_points = value.q_per_channel_scales(), value.q_per_channel_zero_points()
        return [integers, scales, zero_points], (value.dtype, value.q_per_channel_axis())

    def pack(self, context: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        integers, *channels = parts
        if integers.is_meta:  # where torch has neither quantizers nor strides
            return torch.empty(integers.shape, dtype=context[0], device="meta")
        if channels:
            dtype, axis = context
            scales, zero_points = channels
            fresh = torch._empty_per_channel_affine_quantized(
                integers.shape,
                scales=scales,
                zero_points=zero_points,
                axis=axis,
                dtype=dtype,
                device=integers.device,
            )
        else:
            dtype, scale, zero_point = context
            if scale is None:
                msg = "the leaf at %PATH% is quantized and on meta, without a scale: expected one with elements."
                raise UnsupportedLeaf(msg)
            fresh = torch._empty_affine_quantized(
                integers.shape, scale=scale, zero_point=zero_point, dtype=dtype, device=integers.device
            )
        storage = integers.untyped_storage()
        return fresh.set_(storage, integers.storage_offset(), integers.shape, integers.stride())

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        if value.is_meta:
            return {"layout": "quantized", "shape": value.shape, "memory": "meta"}
        scheme = value.qscheme()
        common = {"layout": "quantized", "shape": value.shape, "scheme": scheme}
        if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return {**common, "scale": value.q_scale(), "zero point": value.q_zero_point()}
        return {
            **common,
            "axis": value.q_per_channel_axis(),
            "scales": value.q_per_channel_scales().tolist(),
            "zero points": value.q_per_channel_zero_points().tolist(),
        }


_INTEGERS = {
    getattr(torch, name): integer
    for name, integer in (("quint8", torch.uint8), ("qint8", torch.int8), ("qint32", torch.int32))
    if hasattr(torch, name)
}
_LAYOUTS: dict[torch.layout, _Layout] = {
    torch.sparse_coo: _SparseCoo(),
    torch.sparse_csr: _SparseCompressed(),
    torch.sparse_csc: _SparseCompressed(),
    torch.sparse_bsr: _SparseCompressed(),
    torch.sparse_bsc: _SparseCompressed(),
}
_NESTED = _StridedNested()
_QUANTIZED = _Quantized()


def _special_layout(value: torch.Tensor) -> _Layout | None:
    """Return how a tensor is laid out if it is not one view on a storage."""
    if value.layout is not torch.strided:
        special = _LAYOUTS.get(value.layout)
        if special is None:
            msg = (
                f"the leaf at %PATH% has the layout {value.layout}, which has no exact copy: expected a strided, "
                "sparse, nested or quantized tensor. Convert it (for example with to_dense) first."
            )
            raise UnsupportedLeaf(msg)
        return special
    if value.is_nested:
        return _NESTED
    return _QUANTIZED if value.dtype in QUANTIZED else None


class FakeType:
    """Fake tensors: no bytes, only what they pretend to be."""

    name = "FakeTensor"

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        own = attributes_of(_like_fake(value))
        carried = {name: kept for name, kept in attributes_of(value).items() if name not in own}
        leaves, spec = flatten(carried)
        return leaves, (value, spec)

    def pack(self, context: Any, parts: Sequence[Any]) -> torch.Tensor:
        value, spec = context
        fresh = _like_fake(value)
        set_attributes(fresh, unflatten(spec, parts))
        return fresh

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        return {"dtype": value.dtype, "shape": value.shape}


def _like_fake(value: Any) -> torch.Tensor:
    with value.fake_mode:
        fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fresh.requires_grad_(value.requires_grad)


class UninitializedType:
    """Parameters and buffers of lazy modules, which have no shape yet."""

    name = "uninitialized"

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        leaves, spec = flatten(dict(vars(value)))
        return leaves, (type(value), value.requires_grad, value.device, value.dtype, spec)

    def pack(self, context: Any, parts: Sequence[Any]) -> torch.Tensor:
        cls, requires_grad, device, dtype, spec = context
        fresh: torch.Tensor = cls(requires_grad=requires_grad, device=device, dtype=dtype)
        vars(fresh).update(unflatten(spec, parts))
        return fresh

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        return {"dtype": value.dtype}


class StorageType:
    """``UntypedStorage`` and ``TypedStorage``: all their bytes."""

    name = "storage"

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        typed = isinstance(value, torch.storage.TypedStorage)
        storage = value._untyped_storage if typed else value
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
        return [view], (value.dtype if typed else None)

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        view: torch.Tensor = parts[0]
        storage = view.untyped_storage()
        if storage.nbytes() != view.nbytes:  # a piece of a slab
            storage = storage[view.storage_offset() : view.storage_offset() + view.nbytes]
        if context is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=context, _internal=True)

    def describe(self, value: Any) -> Mapping[str, Any]:
        typed = isinstance(value, torch.storage.TypedStorage)
        storage = value._untyped_storage if typed else value
        return {"bytes": storage.nbytes(), "dtype": value.dtype if typed else None, "memory": _memory(storage)}


TENSOR = TensorType()
FAKE = FakeType()
UNINITIALIZED = UninitializedType()
STORAGE = StorageType()
