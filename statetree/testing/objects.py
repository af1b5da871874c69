"""What objects hold, one level down: what they contain, how they are set up, and their attributes."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import torch

from statetree.testing.messages import brief

#: What torch notes on its own objects when they are read, by class: the beginnings of the attributes' names.
_CACHES: dict[str, tuple[str, ...]] = {
    "torch.nested._internal.nested_tensor.NestedTensor": (
        *("_ragged_idx", "_size", "_strides", "_metadata_cache"),
        "_sym_",
    ),
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": ("_hash",),
    "torch.distributed.device_mesh.DeviceMesh": ("_hash", "_flatten_mapping"),
}
#: Attributes with which torch notes on a jagged tensor's values, whenever they are read, what it may compile for.
_NOTED_ON_TENSORS = ("_dynamo", "_specialize_on")
_HEAP_TYPE = 1 << 9  # set for classes made by a class statement, whose slots are Python's
_SEQUENCES: tuple[Any, ...] = (list, tuple, deque, set, frozenset)
# The builtin classes' own descriptors: those of a subclass may do anything.
_maxlen: Any = vars(deque)["maxlen"].__get__
_default_factory: Any = vars(defaultdict)["default_factory"].__get__


class Contents(NamedTuple):
    """The parts of an object.

    Attributes:
        cls: Its class.
        keys: Those of a mapping, in their order.
        items: What a container contains, as its builtin class has it, with the steps that lead there.
        settings: The default factory of a mapping, and the greatest length of a deque, with the steps that lead there.
        attributes: The instance attributes, without what torch notes among them.
    """

    cls: type
    keys: list[Any]
    items: list[tuple[str, Any]]
    settings: list[tuple[str, Any]]
    attributes: dict[str, Any]

    def parts(self) -> list[tuple[str, Any]]:
        """Return all of them in their order, with the steps that lead there."""
        keys = ((f"<key {index}>", key) for index, key in enumerate(self.keys))
        attributes = ((f".{name}", held) for name, held in self.attributes.items())
        return [*keys, *self.items, *self.settings, *attributes]


def contents_of(value: Any) -> Contents:
    """Take an object apart without calling its own methods; of those of its keys, ``__repr__`` and ``__hash__``."""
    keys: list[Any] = []
    items: list[tuple[str, Any]] = []
    settings: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        keys = list((OrderedDict if isinstance(value, OrderedDict) else dict).__iter__(value))
        items = [(f".{_key(key)}", dict.__getitem__(value, key)) for key in keys]
    elif is_collection(value):
        base = next(base for base in _SEQUENCES if isinstance(value, base))
        items = [(f".{index}", item) for index, item in enumerate(base.__iter__(value))]
    if isinstance(value, deque):
        settings = [(".maxlen", _maxlen(value))]
    elif isinstance(value, defaultdict):
        settings = [(".default_factory", _default_factory(value))]
    attributes = attributes_of(value)
    if isinstance(value, torch.Tensor):
        attributes = {name: held for name, held in attributes.items() if not name.startswith(_NOTED_ON_TENSORS)}
    return Contents(type(value), keys, items, settings, attributes)


def _key(key: Any) -> str:
    return key if type(key) is str else brief(key)  # names of parameters are long, and differ at their ends


def attributes_of(value: Any, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the instance attributes: those of ``__dict__`` in their order, then those in slots by name.

    Without those that torch sets when it reads one of its own objects.
    """
    cls: Any = type(value)
    caches = caches_of(cls)
    found = getattr(value, "__dict__", None)
    named = found.items() if isinstance(found, dict) else ()  # ``list[int]`` passes on what its class has
    result = {name: kept for name, kept in named if name not in skip and not (caches and name.startswith(caches))}
    slots: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__flags__ & _HEAP_TYPE:
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType) and name not in skip:
                    try:
                        slots.setdefault(f"{name} of {base.__qualname__}", member.__get__(value))
                    except AttributeError:
                        continue
    return {**result, **dict(sorted(slots.items()))}


@functools.lru_cache(maxsize=1024)
def caches_of(cls: Any) -> tuple[str, ...]:
    """Return how the names of the attributes begin that torch sets when it reads an object of its own class."""
    return sum((_CACHES.get(f"{base.__module__}.{base.__qualname__}", ()) for base in cls.__mro__), ())


def stands_on_c(cls: type) -> bool:
    """Whether instances of a class may hold something besides attributes: one of its bases is written in C."""
    return any(base is not object and not base.__flags__ & _HEAP_TYPE for base in cls.__mro__)


def is_collection(value: Any) -> bool:
    """Whether a value contains others: a mapping, a sequence or a set."""
    return isinstance(value, (dict, *_SEQUENCES))


def is_record(cls: type) -> bool:
    """Whether a class is a dataclass or an attrs class whose instances hold nothing but attributes."""
    return (dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__")) and not stands_on_c(cls)


def is_container(value: Any) -> bool:
    """Whether a value is a node of a tree, and no leaf: a mapping, a sequence or a record."""
    if isinstance(value, (type, torch.Size)):
        return False
    return isinstance(value, (dict, list, tuple, deque)) or is_record(type(value))


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a ``ShardedTensor``, which refuses to be asked for most of what others answer."""
    return any(base.__name__ == "ShardedTensor" for base in type(tensor).__mro__)
