"""Parts of leaves that are made of several distributed tensors: strided tensors of which each rank holds boxes.

A leaf that is one distributed tensor (a ``DTensor`` of plain tensors, say) is described by its leaf type alone. Where a
leaf is made of several, ``lowering`` puts a part in the place of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Self

from statetree.chunks.local import chunks_at
from statetree.errors import UnsupportedLeaf
from statetree.leaves.engine_type import EngineLeafType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from statetree.chunks.local import LocalChunks
    from statetree.chunks.ranks import Ranks


class LeafPart(ABC):
    """A strided tensor of which the ranks hold boxes: this rank's tensors, as they lie in the leaf."""

    __slots__ = ("dtype", "shape", "tensors")
    #: In messages.
    _statetree_text: ClassVar[str] = "a distributed tensor"
    #: Whether its leaf is made of parts, and not of their tensors.
    stays_part = False
    #: Whether ranks that hold different chunks of the leaf are taken to hold the same of this part.
    is_assumed_equal = False

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, shape: Sequence[int]) -> None:
        self.tensors = tensors
        self.dtype = dtype
        self.shape = tuple(shape)

    def of(self, tensors: Sequence[torch.Tensor]) -> Self:
        """Return the same part of other tensors."""
        made = copy(self)
        made.tensors = tensors
        made.dtype = tensors[0].dtype if tensors else self.dtype
        return made

    @abstractmethod
    def local_chunks(self, ranks: Ranks) -> LocalChunks:
        """Return which boxes this rank holds, and where the others are, if that is known."""


class ListedPart(LeafPart):
    """A part of which each rank knows its own boxes: what ``layout`` says of it, or all where others are not whole.

    Its tensors begin at ``offsets`` in the global shape. In what ``unpack`` returns they are a list if ``is_listed``.
    """

    __slots__ = ("is_listed", "offsets")

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        shape: Sequence[int],
        offsets: Sequence[Sequence[int]],
        *,
        is_listed: bool = False,
    ) -> None:
        if not tensors:
            raise UnsupportedLeaf(
                "the dtype of the leaf at %PATH% is not known: expected an empty tensor in the list of chunks of a "
                "rank that holds none. Correct its leaf type."
            )
        super().__init__(tensors, tensors[0].dtype, shape)
        self.offsets = offsets
        self.is_listed = is_listed

    def local_chunks(self, ranks: Ranks) -> LocalChunks:
        """Return which boxes this rank holds."""
        return self.chunks_as(self)

    def chunks_as(self, value: Any) -> LocalChunks:
        """Return which boxes this rank holds, of a value that this part is all of."""
        return chunks_at(value, self.shape, self.dtype, self.tensors, self.offsets)


class WholePart(ListedPart):
    """A part that is whole on every rank, of a leaf of which other parts are not."""

    __slots__ = ()
    is_assumed_equal = True


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
