"""Leaf types: how a value is unpacked into plain tensors and packed again. One registry, open to users.

A *plain tensor* here is one that is nothing but a view on a storage: strided, and not a wrapper around other tensors.
Everything below this package (spans) sees only plain tensors, the *parts*; everything above sees leaves.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from statetree.chunks.cuts import Cut, cut_alike
from statetree.chunks.local import chunks_at, listed_chunks
from statetree.errors import UnsupportedLeaf
from statetree.tree.registry import declare_leaf_class

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from statetree.chunks.local import LocalChunks
    from statetree.chunks.ranks import Ranks

#: The global shape of what a rank holds chunks of, and where each of these begins in it.
Chunks = tuple["Sequence[int]", "Sequence[Sequence[int]]"]


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


class LeafType:
    """How values of one class are taken apart into tensors, and put together again.

    Derive from it, and register the class with ``register_leaf_type``. ``unpack`` and ``pack`` are what every leaf type
    has; all other methods and attributes have defaults. Transforms do not check for classes: whatever depends on the
    leaf is one of these.

    Attributes:
        name: What values are called in comparisons and messages; by default their class's name.
        distributed: Whether the ranks of a group hold different chunks of each value. ``layout`` sets it.
        opaque: Whether values are taken apart by pickle. They are then treated as plain values are: ``copy_into``
            takes them from its source, and ``similarity`` compares their classes and the tensors inside.
        bare: Whether values are tensors of torch itself: a strided one is nothing but a view on a storage.
        has_elements: Whether values have elements at all (fake and uninitialized tensors have none).
        registered: Whether a user registered it, so that its context says what the parts do not. ``register_leaf_type``
            sets it.
        settles: Whether values may stand for tensors that a collective has not yet written: see ``settle``.
        local_tensor: The name of the attribute that holds all of this rank's elements of a value, if there is one.

    Example:
        >>> import statetree as st, torch
        >>> class Scaled:
        ...     def __init__(self, values, scale):
        ...         self.values, self.scale = values, scale
        >>> class ScaledType(st.LeafType):
        ...     def unpack(self, value):
        ...         return [value.values], value.scale
        ...
        ...     def pack(self, context, parts):
        ...         return Scaled(parts[0], context)
        ...
        ...     def describe(self, value):
        ...         return {"scale": value.scale}
        >>> st.register_leaf_type(Scaled, ScaledType())
        >>> st.offload({"x": Scaled(torch.ones(2), 0.5)})["x"].values
        tensor([1., 1.])
    """

    name: str = ""
    distributed: bool = False
    opaque: bool = False
    bare: bool = False
    has_elements: bool = True
    registered: bool = False
    settles: bool = False
    local_tensor: str | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "layout" in vars(cls):
            cls.distributed = True

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        """Return the tensors inside a value, and the context that ``pack`` needs beside them.

        The tensors may be of any leaf type themselves. A tensor that *is* the value is taken as plain.
        """
        raise NotImplementedError

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        """Return a fresh value from the context and new tensors in place of those of ``unpack``."""
        raise NotImplementedError

    def describe(self, value: Any) -> Mapping[str, Any]:  # noqa: ARG002 - for others
        """Return the facts, by name, that must agree for one value's bytes to be copied into another's.

        ``dtype`` and ``shape`` are the usual ones. What is left out is not compared: ``similarity``, ``digest``,
        ``delta`` and the ranks of a collective do not notice that it differs. By default nothing is compared.
        """
        return {}

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

    def layout(self, value: Any) -> Sequence[Chunks | None]:
        """Return of which tensors the ranks of a group hold chunks, for each of what ``unpack`` returns.

        ``unpack`` returns for such a part the chunk that this rank holds, or a list of several (of a rank that holds
        none, an empty tensor). What ``gather`` makes of a value with one part is a tensor. Of several parts it packs a
        value again, of whole tensors; a context that says where chunks begin has to be without effect then.

        Returns:
            For each part its global shape, and where each of this rank's chunks begins in it; ``None`` for a part
            that each rank has as a whole.
        """
        raise NotImplementedError

    def part_names(self, context: Any, count: int) -> Sequence[str]:  # noqa: ARG002 - for others
        """Return the names of what ``unpack`` returns, for the paths of parts. By default they are numbered."""
        return list(map(str, range(count)))

    def cuts(self, value: Any, inner: Sequence[torch.Tensor]) -> Sequence[tuple[Cut | None, ...]]:
        """Return how the tensors inside a value are cut where it is the local tensor of a ``DTensor``.

        By default a dim that is as long as the value's is cut alike, and others are whole on every rank.
        """
        return [cut_alike(value.shape, tensor.shape) for tensor in inner]

    def reshaped(self, context: Any, shape: Sequence[int], stride: Sequence[int]) -> Any:  # noqa: ARG002 - for others
        """Return the context of a value of another shape: it was the chunk of one rank, and becomes the whole."""
        return context

    def gathered(self, value: Any, context: Any, parts: Sequence[Any]) -> Any:
        """Return what a ``DTensor`` becomes whose local tensor, the first of the parts, is the whole one by now."""
        raise NotImplementedError

    def distributed_parts(self, value: Any) -> list[DistributedPart | None]:
        """Return what ``layout`` and ``unpack`` say of the parts of a distributed value: ``None`` for whole ones."""
        inner, rows = self.unpack(value)[0], self.layout(value)
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
        """Whether this value is one tensor of which the ranks of a group hold different chunks.

        A value of several parts is not: each of them may be one. Classes that list their chunks by the protocol of
        ``torch.distributed.checkpoint`` are, too.
        """
        if not self.distributed:
            return hasattr(type(value), "__create_chunk_list__")
        rows = self.layout(value)
        return len(rows) == 1 and rows[0] is not None

    def local_chunks(self, value: Any, ranks: Ranks) -> LocalChunks:  # noqa: ARG002 - for others
        """Return which chunks of a distributed value this rank holds, and where the others are, if that is known.

        Raises:
            UnsupportedLeaf: If that cannot be told. ``%PATH%`` in the message stands for the path.
        """
        if not self.distributed:
            return listed_chunks(value)
        part = self._only_part(value)
        return chunks_at(value, part.shape, part.dtype, part.tensors, part.offsets)

    def _only_part(self, value: Any) -> DistributedPart:
        (part,) = self.distributed_parts(value)
        assert part is not None
        return part

    def global_shape(self, value: Any) -> tuple[Sequence[int], torch.dtype]:
        """Return the global shape of a distributed value, and the dtype of its elements."""
        if not self.distributed:
            return value.shape, value.dtype
        part = self._only_part(value)
        return part.shape, part.dtype


class _Adapted(LeafType):
    """A leaf type that a user wrote without deriving from ``LeafType``."""

    def __init__(self, given: Any, cls: type) -> None:
        self.given = given
        self.name = getattr(given, "name", cls.__qualname__)
        self.distributed = hasattr(given, "layout")
        for method in ("unpack", "pack", "describe", "layout"):
            if hasattr(given, method):
                setattr(self, method, getattr(given, method))


#: Leaf types by class. ``None`` stands for atoms.
LEAF_TYPES: Final[dict[type, LeafType | None]] = {}
#: The classes of those that users registered, and whether these are for their subclasses, too.
REGISTERED: Final[dict[type, bool]] = {}


def register_leaf_type(cls: type, leaf_type: LeafType | type[LeafType] | None, *, subclasses: bool = False) -> None:
    """Say how values of a class are unpacked into tensors and packed again.

    Args:
        cls: The class. Its instances become leaves, also where it derives from a container.
        leaf_type: A ``LeafType`` (or its class, which is instantiated), or any object with ``unpack`` and ``pack``; or
            ``None`` to make the class an atom: its instances hold no tensors and are passed by identity.
        subclasses: Whether it is for instances of subclasses, too, but for those that are registered themselves. By
            default it is for exactly this class.

    Raises:
        TypeError: If ``cls`` is not a class, or ``leaf_type`` lacks ``unpack`` or ``pack``.
        ValueError: If ``cls`` is a builtin container.

    Example:
        >>> import statetree as st
        >>> class Tokenizer: ...
        >>> st.register_leaf_type(Tokenizer, None)
        >>> tokenizer = Tokenizer()
        >>> st.offload({"tokenizer": tokenizer})["tokenizer"] is tokenizer
        True
    """
    if not inspect.isclass(cls):
        msg = f"register_leaf_type: expected a class, got {cls!r}."
        raise TypeError(msg)
    instance: Any = leaf_type() if isinstance(leaf_type, type) else leaf_type
    if instance is not None and not isinstance(instance, LeafType):
        if not callable(getattr(instance, "unpack", None)) or not callable(getattr(instance, "pack", None)):
            msg = f"register_leaf_type: the leaf type for {cls.__qualname__} lacks unpack or pack: got {instance!r}."
            raise TypeError(msg)
        instance = _Adapted(instance, cls)
    if instance is not None:
        instance.registered = True
    declare_leaf_class(cls, subclasses=subclasses)
    REGISTERED[cls] = subclasses
    LEAF_TYPES[cls] = instance
    for known in [known for known in LEAF_TYPES if subclasses and issubclass(known, cls) and known not in REGISTERED]:
        del LEAF_TYPES[known]
