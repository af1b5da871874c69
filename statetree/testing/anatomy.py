"""What objects are made of, one level down: what they contain, how they are set up, and their attributes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import torch

from statetree.testing.objects import attributes_of, brief

#: Attributes with which torch notes on a jagged tensor's values, whenever they are read, what it may compile for.
_NOTED_BY_TORCH = ("_dynamo", "_specialize_on")
_SEQUENCES: tuple[Any, ...] = (list, tuple, deque, set, frozenset)
_maxlen: Any = vars(deque)["maxlen"].__get__
_default_factory: Any = vars(defaultdict)["default_factory"].__get__


class Anatomy(NamedTuple):
    """The parts of an object, each with the step that leads there.

    Attributes:
        cls: Its class.
        keys: Those of a mapping, in their order.
        items: What a container contains, as its builtin class has it.
        settings: The default factory of a mapping, and the greatest length of a deque.
        attributes: The instance attributes, without what torch notes among them.
    """

    cls: type
    keys: list[tuple[str, Any]]
    items: list[tuple[str, Any]]
    settings: list[tuple[str, Any]]
    attributes: dict[str, Any]

    def parts(self) -> list[tuple[str, Any]]:
        """Return all of them, in their order."""
        return [
            *self.keys,
            *self.items,
            *self.settings,
            *((f".{name}", held) for name, held in self.attributes.items()),
        ]


def anatomy(value: Any) -> Anatomy:
    """Take an object apart without calling its own methods; of those of its keys, ``__repr__`` and ``__hash__``."""
    keys: list[tuple[str, Any]] = []
    items: list[tuple[str, Any]] = []
    settings: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        base = OrderedDict if isinstance(value, OrderedDict) else dict
        listed = list(base.__iter__(value))
        keys = [(f"<key {index}>", key) for index, key in enumerate(listed)]
        items = [(f"[{_shown(key)}]", dict.__getitem__(value, key)) for key in listed]
    else:
        sequence = next((base for base in _SEQUENCES if isinstance(value, base)), None)
        if sequence is not None:
            items = [(f"[{index}]", item) for index, item in enumerate(sequence.__iter__(value))]
    if isinstance(value, deque):
        settings = [(".maxlen", _maxlen(value))]
    elif isinstance(value, defaultdict):
        settings = [(".default_factory", _default_factory(value))]
    attributes = attributes_of(value)
    if isinstance(value, torch.Tensor):
        attributes = {name: held for name, held in attributes.items() if not name.startswith(_NOTED_BY_TORCH)}
    return Anatomy(type(value), keys, items, settings, attributes)


def _shown(key: Any) -> str:
    return repr(key) if type(key) is str else brief(key)  # names of parameters are long, and differ at their ends


def is_collection(value: Any) -> bool:
    """Whether a value contains others: a mapping, a sequence or a set."""
    return isinstance(value, (dict, *_SEQUENCES))


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a ``ShardedTensor``, which refuses to be asked for most of what others answer."""
    return any(base.__name__ == "ShardedTensor" for base in type(tensor).__mro__)
