"""What the engines ask of a leaf type, beside what users write; and parts, which stand for what leaves are made of.

A leaf that is one distributed tensor (a ``DTensor`` of plain tensors, say) is described by its leaf type alone. Where a
leaf is made of several, ``lowering`` puts a part in the place of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Self

from statetree.chunks.local import chunks_at, listed_chunks
from statetree.errors import UnsupportedLeaf
from statetree.leaves.leaf_type import LeafType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from statetree.chunks.local import LocalChunks
    from statetree.chunks.ranks import Ranks

#: What a value is made of: the parts that hold its elements (a list in the place of one of which this rank holds
#: several chunks), what putting it together needs beside them, and a tree of what else it carries, which is copied
#: with them and compared with nothing. A plain tuple, since there is one for every leaf.
LeafContents = tuple["Sequence[Any]", Any, Any]


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

    def whole(self, empty: Callable[[tuple[int, ...]], torch.Tensor], made: dict[Any, torch.Tensor]) -> torch.Tensor:  # noqa: ARG002 - for others
        """Return memory for all of its elements: what ``empty`` makes, or where they lie in something in ``made``."""
        return empty(self.shape)

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

    def local_chunks(self, ranks: Ranks) -> LocalChunks:  # noqa: ARG002 - it knows no others
        """Return which boxes this rank holds."""
        return self.chunks_as(self)

    def chunks_as(self, value: Any) -> LocalChunks:
        """Return which boxes this rank holds, of a value that this part is all of."""
        return chunks_at(value, self.shape, self.dtype, self.tensors, self.offsets)


class WholePart(ListedPart):
    """A part that is whole on every rank, of a leaf of which other parts are not."""

    __slots__ = ()
    is_assumed_equal = True


class EngineLeafType(LeafType):
    """A leaf type as the engines see it. Those of users are adapted to it; all others derive from it.

    Engines do not check for classes: whatever depends on the leaf is one of these.
    """

    #: Whether the ranks of a group hold different chunks of each value. ``layout`` sets it.
    distributed: bool = False
    #: Whether values are taken apart by pickle. They are then treated as plain values are: ``copy_into`` takes them
    #: from its source, and ``similarity`` compares their classes and the tensors inside.
    opaque: bool = False
    native: bool = False  # whether values are tensors of torch itself: a strided one is nothing but a view on a storage
    has_elements: bool = True  # whether values have elements at all (fake and uninitialized tensors have none)
    registered: bool = False  # whether a user registered it, so that its context says what the parts do not
    deferred: bool = False  # whether values only stand for the tensor that ``unpack`` waits for, or reads
    local_tensor: str | None = None  # the attribute that holds all of this rank's elements of a value, if there is one

    def contents(self, value: Any) -> LeafContents:
        """Do as ``unpack``, and return what the value carries beside its elements."""
        parts, context = self.unpack(value)
        return parts, context, None

    def assemble(self, context: Any, parts: Sequence[Any], attributes: Any) -> Any:  # noqa: ARG002 - for others
        """Return a fresh value of what ``contents`` returns."""
        return self.pack(context, parts)

    def local_pair(self, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor] | None:  # noqa: ARG002 - for others
        """Return the local tensors of two values that differ in these at most; ``None`` if they may in more."""
        return None

    def elements_only(self, context: Any) -> bool:  # noqa: ARG002 - for others
        """Whether the parts hold elements alone, and nothing that putting them together depends on."""
        return False

    def with_dtype(self, context: Any, dtype: torch.dtype) -> Any:  # noqa: ARG002 - for others
        """Return the context of a value whose elements are of another dtype. Asked where ``elements_only`` holds."""
        return context

    def distributed_parts(self, value: Any, parts: Sequence[Any]) -> Sequence[ListedPart | None]:  # noqa: ARG002
        """Return what ``layout`` says of the parts of a value: ``None`` for whole ones, and those of no layout."""
        return [None] * len(parts)

    def is_distributed(self, value: Any) -> bool:
        """Whether this value is one tensor of which the ranks of a group hold different chunks.

        A value of several parts is not: each of them may be one. Classes that list their chunks by the protocol of
        ``torch.distributed.checkpoint`` are, too.
        """
        return self.distributed or hasattr(type(value), "__create_chunk_list__")

    def local_chunks(self, value: Any, ranks: Ranks) -> LocalChunks:  # noqa: ARG002 - for others
        """Return which chunks of a distributed value this rank holds, and where the others are, if that is known.

        Raises:
            UnsupportedLeaf: If that cannot be told. ``%PATH%`` in the message stands for the path.
        """
        return listed_chunks(value)

    def global_shape(self, value: Any) -> tuple[Sequence[int], torch.dtype]:
        """Return the global shape of a distributed value, and the dtype of its elements."""
        return value.shape, value.dtype
