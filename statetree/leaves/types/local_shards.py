"""``LocalShardsWrapper``: several shards as the local tensor of a ``DTensor`` (torchrec's)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.leaves.engine_type import EngineLeafType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class LocalShardsType(EngineLeafType):
    """``LocalShardsWrapper``: several shards as the local tensor of a ``DTensor`` (torchrec's)."""

    name = "LocalShardsWrapper"

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        return value.local_shards(), (type(value), value.local_offsets())

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        cls, offsets = context
        return cls(list(parts), list(offsets))

    def elements_only(self, context: Any) -> bool:
        return True

    def describe(self, value: Any) -> Mapping[str, Any]:
        shapes = [tuple(shard.shape) for shard in value.local_shards()]
        return {"dtype": value.dtype, "shards": list(zip(map(tuple, value.local_offsets()), shapes, strict=True))}


LOCAL_SHARDS = LocalShardsType()
