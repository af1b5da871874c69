"""The leaf type of every class: those that users registered, and those that come with statetree."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.errors import StateTreeError
from statetree.leaves.registry import LEAF_TYPES, REGISTERED
from statetree.leaves.types.fake import UNINITIALIZED
from statetree.leaves.types.opaque import OpaqueType
from statetree.leaves.types.special import is_strided
from statetree.leaves.types.storage import STORAGE
from statetree.leaves.types.tensor import TENSOR, forget_slots
from statetree.leaves.types.wrapper import UNTRACEABLE, WRAPPER
from statetree.tree.atoms import is_atom_type
from statetree.tree.registry import forget_later
from statetree.tree.stand_ins import STAND_INS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statetree.leaves.engine_type import EngineLeafType

#: Leaf types of classes that are looked for by name: their modules (of ``types``) are loaded only when they are met.
_BY_NAME: Final[dict[str, tuple[str, str]]] = {
    "torch.distributed.tensor._api.DTensor": ("dtensor", "DTENSOR"),
    "torch.distributed.tensor.DTensor": ("dtensor", "DTENSOR"),
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": ("sharded_tensor", "SHARDED"),
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": ("async_collective", "ASYNC_COLLECTIVE"),
    "torch.distributed.tensor._shards_wrapper.LocalShardsWrapper": ("dtensor", "LOCAL_SHARDS"),
    "torch._subclasses.fake_tensor.FakeTensor": ("fake", "FAKE"),
    "statetree.leaves.engine_type.LeafPart": ("part", "PART"),
    "statetree.leaves.types.converted.ConvertedLeaf": ("converted", "CONVERTED"),
    "torchao.optim.subclass_8bit.OptimState8bit": ("wrapper", "LOW_BIT"),
    "torchao.optim.subclass_4bit.OptimState4bit": ("wrapper", "LOW_BIT"),
    "torchao.optim.subclass_fp8.OptimStateFp8": ("wrapper", "LOW_BIT"),
}


def leaf_type_of(cls: type) -> EngineLeafType | None:
    """Return the leaf type of a class, or ``None`` for atoms."""
    try:
        return LEAF_TYPES[cls]
    except KeyError:
        forget_later(cls, _forget_recognised)
        found = LEAF_TYPES[cls] = _recognise(cls)
        return found


def _forget_recognised(phase: str, about: Mapping[str, int]) -> None:
    """Before a full collection, let go of classes: of those made at run time, some may be in use nowhere else."""
    if phase == "start" and about["generation"] >= 2:
        for cls in set(LEAF_TYPES) - REGISTERED.keys():
            LEAF_TYPES.pop(cls, None)
        forget_slots()


#: For objects of any class that has no leaf type of its own. What it finds inside is looked up here.
OPAQUE: Final = OpaqueType(leaf_type_of)


def _recognise(cls: type) -> EngineLeafType | None:
    if is_atom_type(cls):
        return None
    for base in cls.__mro__:
        if REGISTERED.get(base):
            return LEAF_TYPES[base]
        name = f"{base.__module__}.{base.__qualname__}"
        if name in _BY_NAME:
            module, attribute = _BY_NAME[name]
            return getattr(import_module(f"statetree.leaves.types.{module}"), attribute)  # type: ignore[no-any-return]
    if issubclass(cls, torch.Tensor):
        if issubclass(cls, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
            return UNINITIALIZED
        if hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__"):
            return WRAPPER
        return TENSOR if cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ else UNTRACEABLE
    if issubclass(cls, (torch.UntypedStorage, torch.storage.TypedStorage)):
        return STORAGE
    return OPAQUE


def is_plain(value: Any) -> bool:
    """Whether a value is an atom, which no transform changes."""
    return leaf_type_of(type(value)) is None


def is_distributed(leaf: Any) -> bool:
    """Whether the ranks of a group hold different parts of a leaf."""
    leaf_type = leaf_type_of(type(leaf))
    return leaf_type is not None and leaf_type.is_distributed(leaf)


def is_cuttable(leaf: Any) -> bool:
    """Whether a leaf is a strided tensor, not distributed, that can be cut into boxes."""
    if type(leaf) is torch.Tensor and not leaf.__dict__:
        return is_strided(leaf)
    leaf_type = leaf_type_of(type(leaf)) if isinstance(leaf, torch.Tensor) else None
    return leaf_type is not None and leaf_type.native and is_strided(leaf) and not leaf_type.is_distributed(leaf)


#: Why elements cannot be written to a leaf that is stored: it would hold what its file does not.
IN_A_FILE: Final = "a tensor in a file"


def is_stored(leaf: Any) -> bool:
    """Whether the elements of a leaf lie in a file, and are read when they are needed."""
    return type(leaf) in STAND_INS


def global_bytes(leaf: Any) -> int:
    """Return how many bytes the elements of a distributed leaf have on all ranks together."""
    leaf_type = leaf_type_of(type(leaf))
    assert leaf_type is not None
    shape, dtype = leaf_type.global_shape(leaf)
    return int(torch.Size(shape).numel()) * int(dtype.itemsize)


def holds_tensor(key: Any) -> bool:
    """Whether a key of a mapping is or holds a tensor."""
    if isinstance(key, (tuple, frozenset)):
        return any(map(holds_tensor, key))
    leaf_type = leaf_type_of(type(key))
    try:
        if leaf_type is None:
            return False
        parts, _, attributes = leaf_type.contents(key)
        return bool(parts) or bool(attributes)
    except StateTreeError:  # it cannot be looked into, and nothing says that there is a tensor
        return False


def facts(value: Any) -> Mapping[str, Any]:
    """Return what must agree between two leaves for the bytes of one to be copied into the other."""
    leaf_type = leaf_type_of(type(value))
    if leaf_type is None:
        return {"leaf type": "plain value"}
    return {"leaf type": leaf_type.name or type(value).__qualname__, **leaf_type.describe(value)}


def may_be_deferred(cls: type) -> bool:
    """Whether leaves of a class may stand for tensors that are not there yet: see ``materialized``."""
    leaf_type = leaf_type_of(cls)
    return leaf_type is not None and leaf_type.deferred


def materialized(leaf: Any) -> Any:
    """Return the tensor that a leaf stands for, once a collective has written it or it is read; others as they are."""
    while (leaf_type := leaf_type_of(type(leaf))) is not None and leaf_type.deferred:
        (leaf,) = leaf_type.unpack(leaf)[0]
    return leaf


def is_value(leaf: Any) -> bool:
    """Whether a leaf is no tensor: a plain value or an opaque object, which ``copy_into`` takes from its source."""
    leaf_type = leaf_type_of(type(leaf))
    return leaf_type is None or leaf_type.opaque
