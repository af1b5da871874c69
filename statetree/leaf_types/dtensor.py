"""Tensors of ``torch.distributed``: ``DTensor``, and results of collectives that are still under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.leaf_types.wrapper import WrapperType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


class DTensorType(WrapperType):
    """``DTensor``: its local tensor, with the mesh and placements kept."""

    elements_only = True

    def describe(self, value: Any) -> Mapping[str, Any]:
        return {
            "dtype": value.dtype,
            "shape": value.shape,
            "mesh": value.device_mesh,
            "placements": value.placements,
            "local shape": value._local_tensor.shape,
        }


class AsyncCollectiveType:
    """``AsyncCollectiveTensor``: waited for, then the tensor that it wraps."""

    name = "AsyncCollectiveTensor"

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        waited: torch.Tensor = value.wait()
        return [waited], "waited"

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        return parts[0]


DTENSOR = DTensorType()
ASYNC_COLLECTIVE = AsyncCollectiveType()
