"""Parts of leaves that are made of several distributed tensors, as leaves of a lowered tree."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from statetree.leaves.engine_type import EngineLeafType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from statetree.chunks.local import LocalChunks
    from statetree.chunks.ranks import Ranks


class PartType(EngineLeafType):
    """A part: this rank's tensors of it."""

    distributed = True

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        return value.tensors, value

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        return context.of(parts)

    def elements_only(self, context: Any) -> bool:
        return True

    def with_dtype(self, context: Any, dtype: torch.dtype) -> Any:
        made = copy(context)
        made.dtype = dtype  # also where no tensor says so
        return made

    def describe(self, value: Any) -> Mapping[str, Any]:
        return {"dtype": value.dtype, "shape": value.shape}

    def local_chunks(self, value: Any, ranks: Ranks) -> LocalChunks:
        chunks: LocalChunks = value.local_chunks(ranks)
        return chunks


PART = PartType()
