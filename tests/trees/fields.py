"""Trees of dataclasses, attrs classes and registered classes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import attrs
import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE

import statetree as st
from tests.trees.corpus import Ramp, refuse, tree

T = TypeVar("T")


@dataclasses.dataclass
class State:
    weight: Any
    step: int = 0
    nested: Any = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: Any
    inner: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    weight: Any
    inner: Any = None


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class FrozenSlotted:
    weight: Any
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class Empty:
    pass


@dataclasses.dataclass
class Special:
    """Everything that a dataclass may have beside plain fields."""

    shared: ClassVar[list[int]] = [1, 2]
    start: dataclasses.InitVar[int]
    given: dataclasses.InitVar[int] = 5
    computed: Any = dataclasses.field(init=False)
    unset: Any = dataclasses.field(init=False)
    default: int = dataclasses.field(init=False, default=3)
    hidden: Any = dataclasses.field(default=None, repr=False, compare=False)
    last: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self, start: int, given: int) -> None:
        self.computed = torch.arange(start, start + given)


@dataclasses.dataclass
class Rebuilt:
    """Counts how often it is initialised: a copy must not be."""

    weight: Any
    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        type(self).made += 1


class Derived(State):
    """No dataclass itself, and with attributes that are not fields."""


@dataclasses.dataclass
class Locked:
    weight: Any

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        refuse()

    def __getattr__(self, name: str) -> NoReturn:
        msg = f"no {name}"
        raise AttributeError(msg)


@dataclasses.dataclass(slots=True)
class SlottedBase:
    first: Any = None


@dataclasses.dataclass(slots=True)
class SlottedDerived(SlottedBase):
    second: Any = None


@dataclasses.dataclass
class Boxed(Generic[T]):
    content: T


@dataclasses.dataclass
class TupleData(tuple):
    """A tuple with fields."""

    extra: Any = None


@dataclasses.dataclass
class Failure(Exception):
    """A class written in C keeps the arguments: an opaque leaf."""

    message: str


@attrs.define
class Defined:
    weight: Any
    _private: Any = None


@attrs.frozen
class FrozenAttrs:
    weight: Any
    inner: Any = None


@attrs.define(slots=False)
class OpenAttrs:
    weight: Any
    checked: Any = attrs.field(default=0, validator=attrs.validators.instance_of(int), converter=int)
    unset: Any = attrs.field(init=False)


@attrs.define
class DerivedAttrs(Defined):
    more: Any = None


class Registered:
    def __init__(self, left: Any, right: Any, note: str) -> None:
        self.left, self.right, self.note = left, right, note


class Numbered:
    """Registered without keys."""

    def __init__(self, *items: Any) -> None:
        self.items = items


class KnownToOptree:
    def __init__(self, *items: Any) -> None:
        self.items = items


class SameKeys(Numbered):
    """Its flatten function gives all children one key."""


class DictOfLeafType(dict):
    """Registered as a leaf type, though it derives from a container."""


class DictOfLeafTypeType:
    def unpack(self, value: Any) -> tuple[list[Any], Any]:
        return list(value.values()), list(value)

    def pack(self, context: Any, parts: Any) -> Any:
        return DictOfLeafType(zip(context, parts, strict=True))


class Sentinel:
    """Registered as an atom."""


SENTINEL = Sentinel()

st.register_container(
    Registered, lambda r: ((r.left, r.right), r.note, ("left", "right")), lambda note, two: Registered(*two, note)
)
st.register_container(Numbered, lambda n: (n.items, len(n.items)), lambda _, items: Numbered(*items))
st.register_container(SameKeys, lambda n: (n.items, None, ["same"] * len(n.items)), lambda _, items: SameKeys(*items))
optree.register_pytree_node(
    KnownToOptree, lambda n: (n.items, None), lambda _, items: KnownToOptree(*items), namespace=GLOBAL_NAMESPACE
)
st.register_leaf_type(DictOfLeafType, DictOfLeafTypeType())
st.register_leaf_type(Sentinel, None)


@tree()
def dataclass_plain(new: Ramp) -> Any:
    return State(new(2), 3, {"inner": State(new(1), nested=[State(None)])})


@tree()
def dataclass_frozen(new: Ramp) -> Any:
    return [Frozen(new(2), Frozen(new(1))), Slotted(new(2), [Slotted(1)]), FrozenSlotted(new(1), FrozenSlotted(2))]


@tree()
def dataclass_special(new: Ramp) -> Any:
    result = Special(new.number(), last=new(1))
    result.hidden, result.beside = new(2), "not a field"
    return {"special": result}


@tree()
def dataclass_with_unset_slots(new: Ramp) -> Any:
    result, frozen = Slotted(new(1), 2), FrozenSlotted(new(1), 2)
    del result.weight
    object.__delattr__(frozen, "inner")
    return [result, frozen]


@tree()
def dataclass_derived(new: Ramp) -> Any:
    result = Derived(new(1))
    result.tensor, result.plain = new(2), [1, 2]
    return [result, SlottedDerived(new(1), new(2)), Boxed(new(1))]


@tree()
def dataclass_locked(new: Ramp) -> Any:
    result = object.__new__(Locked)
    vars(result)["weight"] = new(2)
    return result


@tree()
def dataclass_of_builtin(new: Ramp) -> Any:
    result = tuple.__new__(TupleData, (new(1), 2))
    result.extra = new(2)
    return [result, Failure("a message")]


@tree()
def attrs_classes(new: Ramp) -> Any:
    opened = OpenAttrs(new(1), 3)
    vars(opened)["beside"] = "not a field"
    derived = DerivedAttrs(new(1), [new(2)], {"a": 1})
    return {"defined": Defined(new(1), new(2)), "frozen": FrozenAttrs(new(1), Frozen(1)), "open": [opened, derived]}


@tree()
def registered(new: Ramp) -> Any:
    return [
        Registered(new(1), {"a": new(2)}, "note"),
        Numbered(),
        Numbered(new(1), [Numbered(2)]),
        SameKeys(1, 2, 3),
        KnownToOptree(new(1)),
    ]


@tree()
def registered_as_leaf(new: Ramp) -> Any:
    return {"leaf": DictOfLeafType(b=new(2), a=new(1)), "atom": SENTINEL, "list": [SENTINEL, SENTINEL]}
