"""Layouts of torch's own tensors that are not one view on a storage: sparse, nested and quantized ones.

Each is a leaf type: how the inner tensors are reached and put back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.errors import UnsupportedLeaf, unsignalled
from statetree.leaves.engine_type import EngineLeafType
from statetree.torch_internals import compressed_indices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

QUANTIZED: Final = frozenset(
    getattr(torch, name) for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4") if hasattr(torch, name)
)


def _sparse_facts(value: torch.Tensor, own: Mapping[str, Any]) -> dict[str, Any]:
    return {  # in this order, which checkpoints keep
        "layout": value.layout,
        "shape": value.shape,
        "number of specified elements": value._nnz(),
        **own,
        "memory": "meta" if value.is_meta else "present",
    }


class _SparseCoo(EngineLeafType):
    def unpack(self, value: torch.Tensor) -> tuple[list[Any], Any]:
        detached = value.detach()
        return [detached._indices(), detached._values()], (value.shape, value.is_coalesced())

    def pack(self, context: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        shape, coalesced = context
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        return _sparse_facts(value, {"coalesced": value.is_coalesced()})


class _SparseCompressed(EngineLeafType):
    def unpack(self, value: torch.Tensor) -> tuple[list[Any], Any]:
        detached = value.detach()
        return [*compressed_indices(detached), detached.values()], (value.shape, value.layout)

    def pack(self, context: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        shape, layout = context
        compressed, plain, values = parts
        return torch.sparse_compressed_tensor(compressed, plain, values, shape, layout=layout, check_invariants=False)

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        return _sparse_facts(value, {"block shape": tuple(value.detach().values().shape[1:])})


class _StridedNested(EngineLeafType):
    """Nested tensors of the first generation: one buffer, and the sizes, strides and offsets of the pieces in it."""

    def unpack(self, value: torch.Tensor) -> tuple[list[Any], Any]:
        detached = value.detach()
        pieces = [
            detached._nested_tensor_size(),
            detached._nested_tensor_strides(),
            detached._nested_tensor_storage_offsets(),
        ]
        return [detached.values(), *pieces], None

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


class _Quantized(EngineLeafType):
    """Quantized tensors: the integers are a view on the same storage, the scales come beside them."""

    def unpack(self, value: torch.Tensor) -> tuple[list[Any], Any]:
        if value.dtype not in _INTEGERS:
            raise UnsupportedLeaf(
                f"the leaf at %PATH% has the dtype {value.dtype}, which packs several numbers into a byte and has no "
                "exact copy: expected quint8, qint8 or qint32. Dequantize it first."
            )
        integers = torch.empty(0, dtype=_INTEGERS[value.dtype], device=value.device)
        integers.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        if value.is_meta:
            return [integers], (value.dtype, None)
        try:
            scheme = value.qscheme()
        except unsignalled(RuntimeError):
            msg = "the leaf at %PATH% is quantized, and has no scale: expected what torch.quantize_per_tensor makes."
            raise UnsupportedLeaf(msg) from None
        if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return [integers], (value.dtype, {"scale": value.q_scale(), "zero_point": value.q_zero_point()})
        channels = value.q_per_channel_scales(), value.q_per_channel_zero_points()
        return [integers, *channels], (value.dtype, {"axis": value.q_per_channel_axis()})

    def pack(self, context: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (integers, *channels), (dtype, quantizer) = parts, context
        if integers.is_meta:  # where torch has neither quantizers nor strides
            return torch.empty(integers.shape, dtype=dtype, device="meta")
        if quantizer is None:
            msg = "the leaf at %PATH% is quantized and on meta, without a scale: expected one with elements."
            raise UnsupportedLeaf(msg)
        make: Any = torch._empty_per_channel_affine_quantized if channels else torch._empty_affine_quantized
        named = dict(zip(("scales", "zero_points"), channels, strict=False))
        fresh: torch.Tensor = make(integers.shape, dtype=dtype, device=integers.device, **quantizer, **named)
        return fresh.set_(integers.untyped_storage(), integers.storage_offset(), integers.shape, integers.stride())

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        common = {"layout": "quantized", "shape": value.shape}
        if value.is_meta:
            return {**common, "memory": "meta"}
        scheme = value.qscheme()
        if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return {**common, "scheme": scheme, "scale": value.q_scale(), "zero point": value.q_zero_point()}
        return {
            **common,
            "scheme": scheme,
            "axis": value.q_per_channel_axis(),
            "scales": value.q_per_channel_scales().tolist(),
            "zero points": value.q_per_channel_zero_points().tolist(),
        }


_INTEGERS = {
    getattr(torch, name): integer
    for name, integer in (("quint8", torch.uint8), ("qint8", torch.int8), ("qint32", torch.int32))
    if hasattr(torch, name)
}
_LAYOUTS: dict[torch.layout, EngineLeafType] = {
    torch.sparse_coo: _SparseCoo(),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc), _SparseCompressed()),
}
_NESTED = _StridedNested()
_QUANTIZED = _Quantized()


def special_layout(value: torch.Tensor) -> EngineLeafType | None:
    """Return how a tensor is laid out if it is not one view on a storage."""
    if value.layout is not torch.strided:
        special = _LAYOUTS.get(value.layout)
        if special is None:
            raise UnsupportedLeaf(
                f"the leaf at %PATH% has the layout {value.layout}, which has no exact copy: expected a strided, "
                "sparse, nested or quantized tensor. Convert it (for example with to_dense) first."
            )
        return special
    if value.is_nested:
        return _NESTED
    return _QUANTIZED if value.dtype in QUANTIZED else None


def is_strided(leaf: torch.Tensor) -> bool:
    """Whether a tensor of torch's own class is nothing but a strided view of numbers."""
    return leaf.layout is torch.strided and not leaf.is_nested and leaf.dtype not in QUANTIZED
