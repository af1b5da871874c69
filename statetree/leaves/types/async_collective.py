"""``AsyncCollectiveTensor``: the result of a collective that is still under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.leaves.engine_type import EngineLeafType

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class AsyncCollectiveType(EngineLeafType):
    """``AsyncCollectiveTensor``: waited for, then the tensor that it wraps."""

    name = "AsyncCollectiveTensor"
    deferred = True

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        waited: torch.Tensor = value.wait()
        return [waited], "waited"

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        return parts[0]


ASYNC_COLLECTIVE = AsyncCollectiveType()
