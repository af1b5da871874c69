"""Parts of leaves that are made of several distributed tensors: strided tensors of which each rank holds boxes.

A leaf that is one distributed tensor (a ``DTensor`` of plain tensors, say) is described by its leaf type alone. Where a
leaf is made of several, ``lowering`` puts a part in the place of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

from statetree.chunks.local import chunks_at
from statetree.leaves.engine_type import DistributedPart, EngineLeafType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from statetree.chunks.local import LocalChunks
    from statetree.chunks.ranks import Ranks


class LeafPart(ABC):
    """A strided tensor of which the ranks hold boxes.

    Attributes:
        tensors: This rank's tensors, as they lie in the leaf.
        dtype: The dtype of the elements.
        shape: The global shape.
    """

    __slots__ = ("dtype", "shape", "tensors")
    #: In messages.
    _statetree_text: ClassVar[str] = "a distributed tensor"

    #: Whether its leaf is made of parts, and not of their tensors.
    stays_part = False

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, shape: Sequence[int]) -> None:
        self.tensors = tensors
        self.dtype = dtype
        self.shape = tuple(shape)

    @property
    def is_assumed_equal(self) -> bool:
        """Whether ranks that hold different chunks of the leaf are taken to hold the same of this part."""
        return False

    @abstractmethod
    def of(self, tensors: Sequence[torch.Tensor]) -> LeafPart:
        """Return the same part of other tensors."""

    @abstractmethod
    def local_chunks(self, ranks: Ranks) -> LocalChunks:
        """Return which boxes this rank holds, and where the others are, if that is known."""


class ListedPart(LeafPart):
    """A part of which each rank knows its own boxes: what ``EngineLeafType.layout`` says of it.

    Attributes:
        listed: That.
    """

    __slots__ = ("listed",)

    def __init__(self, listed: DistributedPart) -> None:
        super().__init__(listed.tensors, listed.dtype, listed.shape)
        self.listed = listed

    def of(self, tensors: Sequence[torch.Tensor]) -> ListedPart:
        """Return the same part of other tensors."""
        return ListedPart(self.listed._replace(tensors=tensors))

    def local_chunks(self, ranks: Ranks) -> LocalChunks:
        """Return which boxes this rank holds."""
        return chunks_at(self, self.shape, self.dtype, self.tensors, self.listed.offsets)


class WholePart(ListedPart):
    """A part that is whole on every rank, of a leaf of which other parts are not."""

    __slots__ = ()

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(DistributedPart([tensor], tuple(tensor.shape), [(0,) * tensor.dim()], is_listed=False))

    @property
    def is_assumed_equal(self) -> bool:
        """Whether ranks that hold different chunks of the leaf are taken to hold the same of this part."""
        return True

    def of(self, tensors: Sequence[torch.Tensor]) -> WholePart:
        """Return the same part of other tensors."""
        return WholePart(tensors[0])


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

    def global_shape(self, value: Any) -> tuple[Sequence[int], torch.dtype]:
        return value.shape, value.dtype

    def describe(self, value: Any) -> Mapping[str, Any]:
        return {"dtype": value.dtype, "shape": value.shape}

    def local_chunks(self, value: Any, ranks: Ranks) -> LocalChunks:
        """Return which boxes of a part this rank holds."""
        chunks: LocalChunks = value.local_chunks(ranks)
        return chunks


PART = PartType()
