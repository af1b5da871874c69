"""What the corpus is made of: named factories, tensors unique by position, and a few values in common."""

from __future__ import annotations

import enum
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch


class Tree(NamedTuple):
    """A named factory of trees."""

    name: str
    make: Callable[[], Any]
    #: What the ``UnsupportedLeaf`` says that verbs which copy tensors raise; empty where they copy the tree exactly.
    refused: str = ""
    #: A copy is something else than the tree, as where a collective is waited for.
    changes: bool = False
    #: Keys that are equal only to themselves: the tree matches no other.
    keyed_by_identity: bool = False

    def __str__(self) -> str:
        return self.name


class Ramp:
    """Makes tensors whose elements are unique by position, also over several tensors."""

    def __init__(self) -> None:
        self.next = 1

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        count = math.prod(shape)
        values = torch.arange(self.next, self.next + count, device="cpu")
        self.next += count
        if dtype.is_complex:
            values = torch.complex(values.double(), values.double() + 0.5)
        return values.to(dtype).reshape(shape)

    def number(self) -> int:
        self.next += 1
        return self.next - 1


TREES: list[Tree] = []
DISTRIBUTED_TREES: list[Tree] = []


def tree(*, into: list[Tree] = TREES, **facts: Any) -> Callable[[Callable[[Ramp], Any]], Callable[[Ramp], Any]]:
    """Add a factory to the corpus under its own name."""

    def add(factory: Callable[[Ramp], Any]) -> Callable[[Ramp], Any]:
        into.append(Tree(factory.__name__, functools.partial(made, factory), **facts))
        return factory

    return add


def made(factory: Callable[[Ramp], Any]) -> Any:
    with quiet():
        return factory(Ramp())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what torch says about prototypes and deprecations while a tree is made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def a_function(*values: Any) -> Any:
    return values


A_LAMBDA = lambda *values: values  # noqa: E731 - it is a lambda that is wanted


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def refuse(*args: Any, **kwargs: Any) -> NoReturn:
    msg = "this must not be called"
    raise RuntimeError(msg)


class Held:
    """An object of no known class."""
