"""What objects hold, one level down: what they contain, how they are set up, and their attributes."""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tests.judge.messages import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # of Python's C
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
        if _is_python_class(base):
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
    return any(base is not object and not _is_python_class(base) for base in cls.__mro__)


def _is_python_class(cls: type) -> bool:
    """Whether a class was made by a class statement, so that its slots are Python's. C's cannot be changed."""
    return cls.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE


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


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor says itself which tensors it is made of."""
    return hasattr(type(tensor), "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a device, but no memory there."""
    return f"{type(tensor).__module__}".startswith("torch._subclasses.fake_tensor")


class Same:
    """Something kept, so that nothing else gets its address, and equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __repr__(self) -> str:
        return brief(self.value)


def _sizes(tensor: torch.Tensor, sizes: Iterable[Any]) -> tuple[Any, ...]:
    # Sizes that are symbols equal nothing but themselves.
    symbol = (lambda _: "ragged") if tensor.layout is torch.jagged else str
    return tuple(size if type(size) is int else symbol(size) for size in sizes)


#: What a tensor is, by name: what is asked of it, and answered with ``None`` by one that cannot say.
_FACTS: dict[str, Callable[[Any], Any]] = {
    **{
        name: operator.attrgetter(name)
        for name in ("dtype", "layout", "requires_grad", "is_nested", "is_quantized", "is_meta", "device")
    },
    "shape": lambda tensor: _sizes(tensor, tensor.shape),
    "strides": lambda tensor: _sizes(tensor, tensor.stride()),
    "conj bit": torch.Tensor.is_conj,
    "neg bit": torch.Tensor.is_neg,
    "coalesced": lambda tensor: tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None,
    "quantization scheme": lambda tensor: tensor.qscheme() if tensor.is_quantized else None,
    "scale": lambda tensor: tensor.q_scale() if tensor.is_quantized else None,
    "zero point": lambda tensor: tensor.q_zero_point() if tensor.is_quantized else None,
    "axis": lambda tensor: tensor.q_per_channel_axis() if tensor.is_quantized else None,
    "fake mode": lambda tensor: Same(tensor.fake_mode) if is_fake(tensor) else None,
    "placements": lambda tensor: tensor.placements,
    "mesh": lambda tensor: tensor.device_mesh,
    "metadata": lambda tensor: tensor.metadata() if is_sharded(tensor) else None,
    "sharding spec": lambda tensor: tensor.sharding_spec() if is_sharded(tensor) else None,
    "process group": lambda tensor: Same(tensor._process_group) if is_sharded(tensor) else None,
}
PLURAL = ("strides", "placements")


def facts_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what a tensor says of itself, by name."""
    return answers(tensor, _FACTS)


def answers(value: Any, questions: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Return what a value answers to questions, by their names; ``None`` to those that it refuses."""

    def answer(question: Callable[[Any], Any]) -> Any:
        try:
            return question(value)
        except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError):
            return None

    return {name: answer(question) for name, question in questions.items()}
