"""Plans of containers, opaque objects and plain values."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch

from statetree.testing import samples
from statetree.testing.arguments import check_one_of, refuse
from statetree.testing.plans import Plan, Printed
from statetree.testing.samples import (
    DictSubclass,
    FrozenPair,
    ListSubclass,
    NamedPair,
    Pair,
    SlottedPair,
    Thing,
    TupleSubclass,
    a_factory,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from statetree.testing.plans import Numbers


@dataclasses.dataclass(frozen=True, repr=False)
class Value(Printed):
    """A plain value as a leaf."""

    value: Any

    def make(self, numbers: Numbers) -> Any:  # noqa: ARG002 - as all plans do
        """Return the value."""
        return self.value


@dataclasses.dataclass(frozen=True, repr=False)
class Node(Printed):
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

    def __post_init__(self) -> None:
        check_one_of("Node: kind", self.kind, NODES)
        for child in (*self.children, *(value for _, value in self.attributes)):
            if not isinstance(child, Plan):
                refuse("Node: children", "plans, such as Value(1)", child, TypeError)
        if self.kind in PAIRS and len(self.children) != 2:
            refuse("Node: children", f"two in a {self.kind}", self.children)
        if self.kind == "bounded" and len(self.children) > _BOUND:
            refuse("Node: children", "five at most in a bounded", self.children)
        if self.kind not in MAPPINGS and self.keys:
            refuse("Node: keys", f"none in a {self.kind}", self.keys)
        if self.kind in MAPPINGS and len(self.keys) != len(self.children):
            refuse("Node: keys", f"{len(self.children)}, one for each child", self.keys)
        if len(dict.fromkeys(self.keys)) < len(self.keys):
            refuse("Node: keys", "different ones", self.keys)
        if self.attributes and self.kind not in (*WITH_ATTRIBUTES, "Counter", "Pair", "Thing"):
            refuse("Node: attributes", f"none in a {self.kind}", self.attributes)

    def make(self, numbers: Numbers) -> Any:
        """Make the children, and the container of them."""
        children = [child.make(numbers) for child in self.children]
        made = NODES[self.kind](children, self.keys)
        for name, value in self.attributes:
            setattr(made, name, value.make(numbers))
        numbers.made.append(made)
        return made


@dataclasses.dataclass(frozen=True, repr=False)
class Again(Printed):
    """What the tree holds already, once more: the same object, not an equal one.

    Attributes:
        index: Which of the containers and tensors before it, modulo their number. If there are none, it is ``None``.
    """

    index: int = 0

    def make(self, numbers: Numbers) -> Any:
        """Return what was made before."""
        return numbers.made[self.index % len(numbers.made)] if numbers.made else None


def _items(children: list[Any], keys: tuple[Any, ...]) -> dict[Any, Any]:
    return dict(zip(keys, children, strict=True))


def _slotted(children: list[Any], _: tuple[Any, ...]) -> SlottedPair:
    pair = SlottedPair(*children)
    pair.sum = "sum"
    return pair


def _thing(children: list[Any], _: tuple[Any, ...]) -> Thing:
    thing = Thing()
    vars(thing).update({f"attribute{index}": child for index, child in enumerate(children)})
    return thing


_BOUND = 5
MAPPINGS: dict[str, Callable[[list[Any], tuple[Any, ...]], Any]] = {
    "dict": _items,
    "OrderedDict": lambda children, keys: OrderedDict(_items(children, keys)),
    "defaultdict": lambda children, keys: defaultdict(a_factory, _items(children, keys)),
    "Counter": lambda children, keys: Counter(_items(children, keys)),
    "DictSubclass": lambda children, keys: DictSubclass(_items(children, keys)),
}
SEQUENCES: dict[str, Callable[[list[Any], tuple[Any, ...]], Any]] = {
    "list": lambda children, _: children,
    "tuple": lambda children, _: tuple(children),
    "ListSubclass": lambda children, _: ListSubclass(children),
    "TupleSubclass": lambda children, _: TupleSubclass(children),
    "deque": lambda children, _: deque(children),
    "bounded": lambda children, _: deque(children, maxlen=_BOUND),
}
PAIRS: dict[str, Callable[[list[Any], tuple[Any, ...]], Any]] = {
    "NamedPair": lambda children, _: NamedPair(*children),
    "Pair": lambda children, _: Pair(*children),
    "FrozenPair": lambda children, _: FrozenPair(*children),
    "SlottedPair": _slotted,
    "return_type": lambda children, _: torch.return_types.max(children),  # type: ignore[arg-type]
}
if hasattr(samples, "AttrsPair"):  # pragma: no branch - tests of statetree need attrs
    PAIRS["AttrsPair"] = lambda children, _: samples.AttrsPair(*children)
NODES = {**MAPPINGS, **SEQUENCES, **PAIRS, "Thing": _thing}
WITH_ATTRIBUTES = ("OrderedDict", "DictSubclass", "ListSubclass", "TupleSubclass")
