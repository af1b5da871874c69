"""Plans of containers, opaque objects and plain values."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch

from statetree.testing import samples
from statetree.testing.source_code import PrintsAsCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from statetree.testing.numbered import Numbers


@dataclasses.dataclass(frozen=True, repr=False)
class Value(PrintsAsCode):
    """A plain value as a leaf."""

    value: Any

    def make(self, numbers: Numbers) -> Any:  # noqa: ARG002 - as all plans do
        """Return the value."""
        return self.value


@dataclasses.dataclass(frozen=True, repr=False)
class Node(PrintsAsCode):
    """How a container or an opaque object is made of its children.

    Attributes:
        kind: One of ``NODES``.
        children: Plans of what it holds.
        keys: Their keys, in mappings.
        attributes: Names and plans of instance attributes.
    """

    kind: str
    children: tuple[Any, ...] = ()
    keys: tuple[Any, ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()

    def make(self, numbers: Numbers) -> Any:
        """Make the children, and the container of them."""
        children = [child.make(numbers) for child in self.children]
        if self.kind in MAPPINGS:
            made = MAPPINGS[self.kind](dict(zip(self.keys, children, strict=True)))
        else:
            made = _OF_CHILDREN[self.kind](children)
        for name, value in self.attributes:
            setattr(made, name, value.make(numbers))
        numbers.made.append(made)
        return made


@dataclasses.dataclass(frozen=True, repr=False)
class Again(PrintsAsCode):
    """What the tree holds already, once more: the same object, not an equal one.

    Attributes:
        index: Which of the containers and tensors before it, modulo their number. If there are none, it is ``None``.
    """

    index: int = 0

    def make(self, numbers: Numbers) -> Any:
        """Return what was made before."""
        return numbers.made[self.index % len(numbers.made)] if numbers.made else None


def _slotted(children: list[Any]) -> samples.SlottedPair:
    pair = samples.SlottedPair(*children)
    pair.sum = "sum"
    return pair


def _thing(children: list[Any]) -> samples.Thing:
    thing = samples.Thing()
    vars(thing).update({f"attribute{index}": child for index, child in enumerate(children)})
    return thing


MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "dict": lambda items: items,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda items: defaultdict(samples.a_factory, items),
    "Counter": Counter,
    "DictSubclass": samples.DictSubclass,
}
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda children: children,
    "tuple": tuple,
    "ListSubclass": samples.ListSubclass,
    "TupleSubclass": samples.TupleSubclass,
    "deque": deque,
    "bounded": lambda children: deque(children, maxlen=5),
}
PAIRS: dict[str, Callable[[list[Any]], Any]] = {
    "NamedPair": lambda children: samples.NamedPair(*children),
    "Pair": lambda children: samples.Pair(*children),
    "FrozenPair": lambda children: samples.FrozenPair(*children),
    "SlottedPair": _slotted,
    "return_type": lambda children: torch.return_types.max(children),  # type: ignore[arg-type]
}
if hasattr(samples, "AttrsPair"):  # pragma: no branch - tests of statetree need attrs
    PAIRS["AttrsPair"] = lambda children: samples.AttrsPair(*children)
_OF_CHILDREN = {**SEQUENCES, **PAIRS, "Thing": _thing}
NODES = (*MAPPINGS, *_OF_CHILDREN)
WITH_ATTRIBUTES = ("OrderedDict", "DictSubclass", "ListSubclass", "TupleSubclass")
