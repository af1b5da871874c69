"""Leaf types: how a value is unpacked into plain tensors and packed again. One registry, open to users.

A *plain tensor* here is one that is nothing but a view on a storage: strided, and not a wrapper around other tensors.
Everything below this module (spans, buffers) sees only plain tensors, the *parts*; everything above sees leaves.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import torch

from statetree.tree.atoms import is_atom_type
from statetree.errors import StateTreeError
from statetree.tree.registry import declare_leaf_class

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@runtime_checkable
class LeafType(Protocol):
    """How values of one class are unpacked and packed.

    An implementation may also have ``describe(value) -> Mapping[str, object]``: the facts, by name, that must agree
    for one value's bytes to be copied into another's. ``dtype`` and ``shape`` are the usual ones; what is left out
    is not compared.
    """

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        """Return the tensors inside a value, and the context that ``pack`` needs beside them.

        The tensors may be of any leaf type themselves. A tensor that *is* the value is taken as plain.
        """
        ...

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        """Return a fresh value from the context and new tensors in place of those of ``unpack``."""
        ...


#: Leaf types by class. ``None`` stands for atoms.
_TYPES: dict[type, LeafType | None] = {}

#: Leaf types of classes that are looked for by name, so that their modules are loaded only when they are met.
_BY_NAME: Final[dict[str, tuple[str, str]]] = {
    "torch.distributed.tensor._api.DTensor": ("statetree.leaves.types.dtensor", "DTENSOR"),
    "torch.distributed.tensor.DTensor": ("statetree.leaves.types.dtensor", "DTENSOR"),
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": (
        "statetree.leaves.types.sharded_tensor",
        "SHARDED",
    ),
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": (
        "statetree.leaves.types.dtensor",
        "ASYNC_COLLECTIVE",
    ),
    "torch.distributed.tensor._shards_wrapper.LocalShardsWrapper": ("statetree.leaves.types.dtensor", "LOCAL_SHARDS"),
    "torch._subclasses.fake_tensor.FakeTensor": ("statetree.leaves.types.tensor", "FAKE"),
}


def register_leaf_type(cls: type, leaf_type: LeafType | type[LeafType] | None) -> None:
    """Say how values of exactly this class are unpacked into tensors and packed again.

    Args:
        cls: The class. Its instances become leaves, also where it derives from a container. Subclasses are not
            affected.
        leaf_type: A ``LeafType`` (or its class, which is instantiated), or ``None`` to make the class an atom: its
            instances hold no tensors and are passed by identity.

    Raises:
        TypeError: If ``cls`` is not a class, or ``leaf_type`` lacks ``unpack`` or ``pack``.

    Example:
        >>> import statetree as st, torch
        >>> class Scaled:
        ...     def __init__(self, values, scale):
        ...         self.values, self.scale = values, scale
        >>> class ScaledType:
        ...     def unpack(self, value):
        ...         return [value.values], value.scale
        ...
        ...     def pack(self, context, parts):
        ...         return Scaled(parts[0], context)
        >>> st.register_leaf_type(Scaled, ScaledType())
        >>> st.offload({"x": Scaled(torch.ones(2), 0.5)})["x"].values
        tensor([1., 1.])
    """
    if not inspect.isclass(cls):
        msg = f"register_leaf_type: expected a class, got {cls!r}."
        raise TypeError(msg)
    instance: Any = leaf_type() if isinstance(leaf_type, type) else leaf_type
    if instance is not None and not isinstance(instance, LeafType):
        msg = f"register_leaf_type: the leaf type for {cls.__qualname__} lacks unpack or pack: got {instance!r}."
        raise TypeError(msg)
    declare_leaf_class(cls)
    _TYPES[cls] = instance


def leaf_type_of(cls: type) -> LeafType | None:
    """Return the leaf type of a class, or ``None`` for atoms."""
    try:
        return _TYPES[cls]
    except KeyError:
        found = _TYPES[cls] = _recognise(cls)
        return found


def _recognise(cls: type) -> LeafType | None:
    if is_atom_type(cls):
        return None
    for base in cls.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in _BY_NAME:
            module, attribute = _BY_NAME[name]
            return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
    from statetree.leaves.types import opaque, tensor, wrapper

    if issubclass(cls, torch.Tensor):
        if issubclass(cls, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
            return tensor.UNINITIALIZED
        if hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__"):
            return wrapper.WRAPPER
        dispatches = cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        return wrapper.UNTRACEABLE if dispatches else tensor.TENSOR
    if issubclass(cls, (torch.UntypedStorage, torch.storage.TypedStorage)):
        return tensor.STORAGE
    return opaque.OPAQUE


def is_plain(value: Any) -> bool:
    """Whether a value is an atom, which no transform changes."""
    return leaf_type_of(type(value)) is None


def is_distributed(leaf: Any) -> bool:
    """Whether the ranks of a group hold different parts of a leaf."""
    leaf_type = leaf_type_of(type(leaf))
    return hasattr(leaf_type, "holding") or hasattr(leaf_type, "chunks") or hasattr(type(leaf), "__create_chunk_list__")


def global_bytes(leaf: Any) -> int:
    """Return how many bytes the elements of a distributed leaf have on all ranks together."""
    chunks = getattr(leaf_type_of(type(leaf)), "chunks", None)
    if chunks is not None:
        shape, dtype, _ = chunks(leaf)
        return int(torch.Size(shape).numel()) * int(dtype.itemsize)
    size = leaf.size() if callable(getattr(leaf, "size", None)) else leaf.shape
    return int(torch.Size(size).numel()) * int(leaf.dtype.itemsize)


def holds_tensor(key: Any) -> bool:
    """Whether a key of a mapping is or holds a tensor."""
    if isinstance(key, (tuple, frozenset)):
        return any(map(holds_tensor, key))
    leaf_type = leaf_type_of(type(key))
    try:
        return leaf_type is not None and bool(leaf_type.unpack(key)[0])
    except StateTreeError:  # it cannot be looked into, and nothing says that there is a tensor
        return False


QUANTIZED: Final = frozenset(
    getattr(torch, name) for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4") if hasattr(torch, name)
)


def facts(value: Any) -> Mapping[str, Any]:
    """Return what must agree between two leaves for the bytes of one to be copied into the other."""
    leaf_type = leaf_type_of(type(value))
    if leaf_type is None:
        return {"leaf type": "plain value"}
    describe = getattr(leaf_type, "describe", None)
    name = {"leaf type": getattr(leaf_type, "name", type(value).__qualname__)}
    return name if describe is None else {**name, **describe(value)}
