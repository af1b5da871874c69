"""The registry of leaf types: which class is unpacked into tensors how. It is open to users.

A *plain tensor* here is one that is nothing but a view on a storage: strided, and not a wrapper around other tensors.
Everything below this package (spans) sees only plain tensors, the *parts*; everything above sees leaves.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

from statetree.leaves.engine_type import EngineLeafType, RegisteredType
from statetree.tree.registry import declare_leaf_class

if TYPE_CHECKING:
    from statetree.leaves.leaf_type import LeafType

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
        msg = f"register_leaf_type: expected a class, got {cls!r}."
        raise TypeError(msg)
    given: Any = leaf_type() if isinstance(leaf_type, type) else leaf_type
    if given is not None and not (callable(getattr(given, "unpack", None)) and callable(getattr(given, "pack", None))):
        msg = f"register_leaf_type: the leaf type for {cls.__qualname__} lacks unpack or pack: got {given!r}."
        raise TypeError(msg)
    adapted = given is None or isinstance(given, EngineLeafType)
    instance: EngineLeafType | None = given if adapted else RegisteredType(given, cls)
    declare_leaf_class(cls, subclasses=subclasses)
    REGISTERED[cls] = subclasses
    LEAF_TYPES[cls] = instance
    for known in [known for known in LEAF_TYPES if subclasses and issubclass(known, cls) and known not in REGISTERED]:
        del LEAF_TYPES[known]
