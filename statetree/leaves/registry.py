"""The registry of leaf types: which class is unpacked into tensors how. It is open to users.

A *plain tensor* here is one that is nothing but a view on a storage: strided, and not a wrapper around other tensors.
Everything below this package (spans) sees only plain tensors, the *parts*; everything above sees leaves.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from statetree.errors import UnsupportedLeaf
from statetree.leaves.engine_type import EngineLeafType, ListedPart
from statetree.leaves.leaf_type import LeafType
from statetree.tree.registry import declare_leaf_class

if TYPE_CHECKING:
    import torch

    from statetree.chunks.local import LocalChunks
    from statetree.chunks.ranks import Ranks
    from statetree.leaves.engine_type import LeafContents
    from statetree.leaves.leaf_type import Chunks

#: Leaf types by class. ``None`` stands for atoms.
LEAF_TYPES: Final[dict[type, EngineLeafType | None]] = {}
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
        raise TypeError(f"register_leaf_type: expected a class, got {cls!r}.")
    given: Any = leaf_type() if isinstance(leaf_type, type) else leaf_type
    if given is not None and not isinstance(given, EngineLeafType):
        named = [(getattr(given, name, None), getattr(type(given), name, None)) for name in ("unpack", "pack")]
        if not all(callable(own) and of not in (LeafType.unpack, LeafType.pack) for own, of in named):
            msg = f"register_leaf_type: the leaf type for {cls.__qualname__} lacks unpack or pack: got {given!r}."
            raise TypeError(msg)
        given = RegisteredType(given, cls)
    declare_leaf_class(cls, subclasses=subclasses)
    REGISTERED[cls] = subclasses
    LEAF_TYPES[cls] = given
    for known in [known for known in LEAF_TYPES if subclasses and issubclass(known, cls) and known not in REGISTERED]:
        del LEAF_TYPES[known]


class RegisteredType(EngineLeafType):
    """A leaf type that a user registered (``given``), as the engines see it.

    What ``given`` does not define has the default of ``LeafType``.
    """

    registered = True

    def __init__(self, given: Any, cls: type) -> None:
        self.given = given
        self.name = getattr(given, "name", "") or (cls.__qualname__ if not isinstance(given, LeafType) else "")
        for method in ("unpack", "pack", "describe", "layout", "part_names", "cuts", "reshaped"):
            if hasattr(given, method):
                setattr(self, method, getattr(given, method))
        self.distributed = getattr(type(given), "layout", LeafType.layout) is not LeafType.layout

    def contents(self, value: Any) -> LeafContents:
        """Do as ``unpack``. A list, which only chunks may be in, is refused where there is no layout."""
        found = super().contents(value)
        if not self.distributed:
            _refuse_lists(found[0])
        return found

    def distributed_parts(self, value: Any, parts: Sequence[Any]) -> Sequence[ListedPart | None]:
        """Return what ``layout`` says of the parts of a value."""
        if not self.distributed:
            return super().distributed_parts(value, parts)
        rows = self.layout(value)
        if len(rows) != len(parts):
            raise _misfit("what it is unpacked into", f"{len(parts)} rows", len(rows))
        _refuse_lists([part for part, row in zip(parts, rows, strict=True) if row is None])
        return [None if row is None else _chunked(part, row) for part, row in zip(parts, rows, strict=True)]

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
        return self._only_part(value).chunks_as(value)

    def global_shape(self, value: Any) -> tuple[Sequence[int], torch.dtype]:
        """Return the global shape of a distributed value, and the dtype of its elements."""
        if not self.distributed:
            return super().global_shape(value)
        part = self._only_part(value)
        return part.shape, part.dtype

    def _only_part(self, value: Any) -> ListedPart:
        (part,) = self.distributed_parts(value, self.unpack(value)[0])
        assert part is not None
        return part


def _chunked(part: Any, row: Chunks) -> ListedPart:
    shape, offsets = row
    is_listed = isinstance(part, (list, tuple))
    tensors = list(part) if is_listed else [part]
    if not is_listed and len(shape) == len(offsets) and not any(isinstance(o, Sequence) for o in offsets):
        offsets = [cast("Sequence[int]", offsets)]  # those of a single chunk may stand by themselves
    if len(tensors) != len(offsets):
        raise _misfit("its chunks", f"{len(tensors)} offsets", len(offsets))
    return ListedPart(tensors, shape, [(*map(int, offset),) for offset in offsets], is_listed=is_listed)


def _refuse_lists(parts: Sequence[Any]) -> None:
    """Raise ``UnsupportedLeaf`` if a part that has no layout is a list: nobody could tell of what it is the chunks."""
    if any(isinstance(part, (list, tuple)) for part in parts):
        raise UnsupportedLeaf(
            "the leaf at %PATH% is unpacked into a list of tensors in the place of one: expected that of chunks only, "
            "of a part of which layout says where they begin. Return the tensors one by one."
        )


def _misfit(what: str, expected: str, got: int) -> UnsupportedLeaf:
    return UnsupportedLeaf(
        f"the layout of the leaf at %PATH% does not fit {what}: expected {expected}, got {got}. Correct its leaf type."
    )
