"""The classes that generated trees are made of, at the top of a module, so that trees can be pickled."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import torch


class DictSubclass(dict[Any, Any]):
    """A subclass of dict, whose instances may have attributes."""


class ListSubclass(list[Any]):
    """A subclass of list, whose instances may have attributes."""


class TupleSubclass(tuple[Any, ...]):
    """A subclass of tuple, whose instances may have attributes."""


class NamedPair(NamedTuple):
    """A namedtuple."""

    first: Any
    second: Any


@dataclasses.dataclass
class Pair:
    """A dataclass."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenPair:
    """A dataclass that cannot be changed."""

    first: Any
    second: Any


@dataclasses.dataclass(slots=True)
class SlottedPair:
    """A dataclass without a ``__dict__``, whose ``__init__`` would do something else."""

    first: Any
    second: Any
    sum: Any = dataclasses.field(init=False, default=None)


class Thing:
    """An object of a class that nobody knows."""


class TensorSubclass(torch.Tensor):
    """A subclass of torch.Tensor."""


class Color(enum.Enum):
    """An enum."""

    RED = 1


def a_factory() -> list[Any]:
    """Return an empty list."""
    return []


def having(value: Any, **attributes: Any) -> Any:
    """Return an object with some more attributes."""
    for name, held in attributes.items():
        setattr(value, name, held)
    return value
