"""What the engines ask of a leaf type, beside what users write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from statetree.chunks.local import chunks_at, listed_chunks
from statetree.errors import UnsupportedLeaf
from statetree.leaves.leaf_type import LeafType

if TYPE_CHECKING:
    import torch

    from statetree.chunks.axis_blocks import AxisRegion
    from statetree.chunks.local import LocalChunks
    from statetree.chunks.ranks import Ranks


class DistributedPart(NamedTuple):
    """One of the parts of a value, of which each rank holds chunks.

    Attributes:
        tensors: The chunks that this rank holds.
        shape: The global shape.
        offsets: Where each of the chunks begins in it.
        is_listed: Whether ``unpack`` returns the chunks as a list.
    """

    tensors: Sequence[torch.Tensor]
    shape: tuple[int, ...]
    offsets: Sequence[tuple[int, ...]]
    is_listed: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        if not self.tensors:
            msg = (
                "the dtype of the leaf at %PATH% is not known: expected an empty tensor in the list of chunks of a "
                "rank that holds none. Correct its leaf type."
            )
            raise UnsupportedLeaf(msg)
        return self.tensors[0].dtype


class EngineLeafType(LeafType):
    """What the engines ask of a leaf type. Those of users are adapted to it; all others derive from it.

    Engines do not check for classes: whatever depends on the leaf is one of these.

    Attributes:
        distributed: Whether the ranks of a group hold different chunks of each value. ``layout`` sets it.
        opaque: Whether values are taken apart by pickle. They are then treated as plain values are: ``copy_into``
            takes them from its source, and ``similarity`` compares their classes and the tensors inside.
        bare: Whether values are tensors of torch itself: a strided one is nothing but a view on a storage.
        has_elements: Whether values have elements at all (fake and uninitialized tensors have none).
        registered: Whether a user registered it, so that its context says what the parts do not.
        settles: Whether values may stand for tensors that a collective has not yet written: see ``settle``.
        stored: Whether the elements of values lie in files, and are read when they are needed: see ``derived``.
        local_tensor: The name of the attribute that holds all of this rank's elements of a value, if there is one.
    """

    distributed: bool = False
    opaque: bool = False
    bare: bool = False
    has_elements: bool = True
    registered: bool = False
    settles: bool = False
    stored: bool = False
    local_tensor: str | None = None

    def essential(self, context: Any, inner: Sequence[Any]) -> Sequence[Any]:  # noqa: ARG002 - for others
        """Return those of the parts that hold a value's elements, without its attributes. By default all."""
        return inner

    def elements_only(self, context: Any) -> bool:  # noqa: ARG002 - for others
        """Whether the essential parts hold elements alone, and nothing that putting them together depends on."""
        return False

    def with_dtype(self, context: Any, dtype: torch.dtype) -> Any:  # noqa: ARG002 - for others
        """Return the context of a value whose elements are of another dtype. Asked where ``elements_only`` holds."""
        return context

    def converted_later(self, values: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:  # noqa: ARG002 - for others
        """Return values that ``cast`` need not read: those to convert as leaves that are converted when they are read.

        Args:
            values: All values of a tree.
            dtype: What they become.

        Returns:
            For each value what stands for it, or ``None`` if it is to be read now.
        """
        return [None] * len(values)

    def derived(self, values: Sequence[Any], outline: torch.Tensor, fill: Callable[..., None]) -> Any:
        """Return a leaf whose elements are made of those of stored values when they are read.

        Args:
            values: The values.
            outline: What the leaf is like, on ``meta``.
            fill: Fills a tensor with the elements of a box, from where this begins.
        """
        raise NotImplementedError

    def blocks(self, value: Any) -> Sequence[tuple[AxisRegion, tuple[int, ...]]] | None:  # noqa: ARG002 - for others
        """Return where the parts of a value lie in it, with their sizes, if it was made of blocks of other tensors."""
        return None

    def same_context(self, a: Any, b: Any) -> bool:  # noqa: ARG002 - for others
        """Whether two values whose facts agree agree in everything but the tensors inside. By default they do."""
        return True

    def detach(self, context: Any) -> None:
        """Let no writing to a value change its context any more, which is then packed once. By default none does."""

    def unpack_together(self, values: Sequence[Any]) -> tuple[Sequence[Any], Any, Sequence[int]]:
        """Take several opaque values apart as one, so that what they have in common stays so.

        Returns:
            The tensors, a context from which ``pack`` makes a list of all values, and for each tensor which value it
            was found in.
        """
        raise NotImplementedError

    def settle(self, value: Any) -> Any:
        """Wait for a collective under way, and return the tensor that the value stands for."""
        return value

    def gathered(self, value: Any, context: Any, parts: Sequence[Any]) -> Any:
        """Return what a ``DTensor`` becomes whose local tensor, the first of the parts, is the whole one by now."""
        raise NotImplementedError

    def unpack_parts(self, value: Any) -> tuple[Sequence[Any], Any]:
        """Do as ``unpack``, but with a list for a part that is several chunks."""
        return self.unpack(value)

    def pack_parts(self, context: Any, parts: Sequence[Any]) -> Any:
        """Return a fresh value of what ``unpack_parts`` returns."""
        return self.pack(context, parts)

    def distributed_parts(self, value: Any) -> list[DistributedPart | None]:
        """Return what ``layout`` says of the parts of a value: ``None`` for whole ones, and those of no layout."""
        return [None] * len(self.unpack_parts(value)[0])

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


class ListedContext(NamedTuple):
    """The context of a value some of whose parts are lists of chunks: how many each has, or -1 where it is none."""

    context: Any
    counts: tuple[int, ...]

    def nested(self, flat: Sequence[Any]) -> list[Any]:
        """Return the parts again, from their chunks one after the other."""
        pending = iter(flat)
        return [next(pending) if count < 0 else [next(pending) for _ in range(count)] for count in self.counts]


def flat_chunks(inner: Sequence[Any], context: Any) -> tuple[Sequence[Any], Any]:
    """Return the chunks of all parts one after the other, and a context from which they become lists again."""
    counts = tuple([len(part) if isinstance(part, (list, tuple)) else -1 for part in inner])
    if all(count < 0 for count in counts):
        return inner, context
    flat = [chunk for part, count in zip(inner, counts, strict=True) for chunk in ([part] if count < 0 else part)]
    return flat, ListedContext(context, counts)


class RegisteredType(EngineLeafType):
    """A leaf type that a user registered, as the engines see it.

    Args:
        given: A ``LeafType``, or any object with ``unpack`` and ``pack``.
        cls: The class that it is for.
    """

    registered = True

    def __init__(self, given: Any, cls: type) -> None:
        self.given = given
        self.name = getattr(given, "name", "") or (cls.__qualname__ if not isinstance(given, LeafType) else "")
        for method in ("describe", "layout", "part_names", "cuts", "reshaped"):
            if hasattr(given, method):
                setattr(self, method, getattr(given, method))
        self.distributed = getattr(type(given), "layout", LeafType.layout) is not LeafType.layout

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        """Return the tensors inside a value, the chunks of a part one after the other."""
        return flat_chunks(*self.given.unpack(value))

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        """Return a fresh value."""
        if isinstance(context, ListedContext):
            return self.given.pack(context.context, context.nested(parts))
        return self.given.pack(context, parts)

    def unpack_parts(self, value: Any) -> tuple[Sequence[Any], Any]:
        """Do as ``unpack``, but with a list for a part that is several chunks."""
        found: tuple[Sequence[Any], Any] = self.given.unpack(value)
        return found

    def pack_parts(self, context: Any, parts: Sequence[Any]) -> Any:
        """Return a fresh value of what ``unpack_parts`` returns."""
        return self.given.pack(context, parts)

    def distributed_parts(self, value: Any) -> list[DistributedPart | None]:
        """Return what ``layout`` and ``unpack`` say of the parts of a value: ``None`` for whole ones."""
        if not self.distributed:
            return super().distributed_parts(value)
        inner, rows = self.unpack_parts(value)[0], self.layout(value)
        if len(rows) != len(inner):
            msg = (
                f"the layout of the leaf at %PATH% does not fit what it is unpacked into: expected {len(inner)} rows, "
                f"got {len(rows)}. Correct its leaf type."
            )
            raise UnsupportedLeaf(msg)
        found: list[DistributedPart | None] = []
        for part, row in zip(inner, rows, strict=True):
            if row is None:
                found.append(None)
                continue
            shape, offsets = row
            is_listed = isinstance(part, (list, tuple))
            tensors = list(part) if is_listed else [part]
            if not is_listed and len(shape) == len(offsets) and not any(isinstance(o, Sequence) for o in offsets):
                offsets = [cast("Sequence[int]", offsets)]  # those of a single chunk may stand by themselves
            if len(tensors) != len(offsets):
                msg = (
                    f"the layout of the leaf at %PATH% does not fit its chunks: expected {len(tensors)} offsets, got "
                    f"{len(offsets)}. Correct its leaf type."
                )
                raise UnsupportedLeaf(msg)
            found.append(DistributedPart(tensors, (*shape,), [(*map(int, offset),) for offset in offsets], is_listed))
        return found

    def is_distributed(self, value: Any) -> bool:
        """Whether this value is one tensor of which the ranks of a group hold different chunks."""
        if not self.distributed:
            return super().is_distributed(value)
        rows = self.layout(value)
        return len(rows) == 1 and rows[0] is not None

    def local_chunks(self, value: Any, ranks: Ranks) -> LocalChunks:
        """Return which chunks of a distributed value this rank holds."""
        if not self.distributed:
            return super().local_chunks(value, ranks)
        part = self._only_part(value)
        return chunks_at(value, part.shape, part.dtype, part.tensors, part.offsets)

    def global_shape(self, value: Any) -> tuple[Sequence[int], torch.dtype]:
        """Return the global shape of a distributed value, and the dtype of its elements."""
        if not self.distributed:
            return super().global_shape(value)
        part = self._only_part(value)
        return part.shape, part.dtype

    def _only_part(self, value: Any) -> DistributedPart:
        (part,) = self.distributed_parts(value)
        assert part is not None
        return part
