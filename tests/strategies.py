"""Hypothesis strategies for state trees: any containers, any tensors, ties of any kind.

Every strategy comes in two forms. ``tree_plans`` draws a *plan*, which prints as code and makes the same tree anew as
often as it is asked to; ``state_trees`` and ``tied_trees`` draw the trees themselves. Elements of tensors are unique
by position, over all tensors of a tree.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

NAN = float("nan")
MAX_SIDE = 3

COMMON_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
)
DIFFERENTIABLE = frozenset(dtype for dtype in COMMON_DTYPES if dtype.is_floating_point or dtype.is_complex) - {
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}


# What trees are made of. The classes are here, so that specs and trees can be pickled.


class Mapping(dict):
    """A subclass of dict, whose instances may have attributes."""


class Sequence_(list):
    """A subclass of list, whose instances may have attributes."""


class NamedPair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenPair:
    first: Any
    second: Any


class Thing:
    """An opaque object."""


class PlainTensor(torch.Tensor):
    """A subclass of torch.Tensor."""


class Colour(enum.Enum):
    RED = 1


def a_factory() -> list[Any]:
    return []


class Numbers:
    """Counts from element to element, over all tensors of a tree, and holds the storages that views share."""

    def __init__(self) -> None:
        self.next = 1
        self.bases: dict[int, torch.Tensor] = {}

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        numbers = torch.arange(self.next, self.next + count)
        self.next += count
        if dtype is torch.bool:
            return numbers.remainder(2).bool().reshape(tuple(shape))
        if dtype.is_complex:
            half = {torch.complex64: torch.float32, torch.complex128: torch.float64}[dtype]
            return torch.complex(numbers.to(half), numbers.to(half) + 0.5).reshape(tuple(shape))
        if dtype.itemsize == 1 or dtype in (torch.float16, torch.bfloat16, torch.uint16):  # too short to count far
            raw = numbers.to(torch.int32).view(torch.uint8).view(count, 4)[:, : dtype.itemsize]
            return raw.contiguous().view(dtype).reshape(tuple(shape))
        return numbers.to(dtype).reshape(tuple(shape))

    def base(self, index: int) -> torch.Tensor:
        if index not in self.bases:
            self.bases[index] = self((4, 6), torch.float32)
        return self.bases[index]


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """How one tensor is made."""

    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (2,)
    geometry: str = "contiguous"
    wrap: str = "tensor"

    def make(self, numbers: Numbers) -> torch.Tensor:
        return WRAPS[self.wrap](GEOMETRIES[self.geometry](self, numbers), numbers)


def _contiguous(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    return numbers(plan.shape, plan.dtype)


def _transposed(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    return numbers(plan.shape[::-1], plan.dtype).permute(tuple(reversed(range(len(plan.shape)))))


def _gaps(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    return numbers([2 * side for side in plan.shape], plan.dtype)[(slice(1, None, 2),) * len(plan.shape)]


def _inside(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    count = math.prod(plan.shape)
    return numbers([count + 8], plan.dtype)[5 : 5 + count].view(plan.shape)


def _expanded(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    return numbers([1, *plan.shape[1:]] if plan.shape else [], plan.dtype).expand(plan.shape)


def _channels_last(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    if len(plan.shape) != 3:
        return _transposed(plan, numbers)
    return numbers((1, *plan.shape), plan.dtype).to(memory_format=torch.channels_last)


def _conjugated(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    tensor = numbers(plan.shape, plan.dtype)
    return tensor.conj() if plan.dtype.is_complex else tensor


def _negated(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    tensor = numbers(plan.shape, plan.dtype)
    return torch._neg_view(tensor) if plan.dtype in DIFFERENTIABLE else tensor


def _meta(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    return torch.empty(plan.shape, dtype=plan.dtype, device="meta")


GEOMETRIES: dict[str, Callable[[TensorPlan, Numbers], torch.Tensor]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "gaps": _gaps,
    "inside": _inside,
    "expanded": _expanded,
    "channels_last": _channels_last,
    "conjugated": _conjugated,
    "negated": _negated,
    "meta": _meta,
}


def _requires_grad(tensor: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    return tensor.requires_grad_() if tensor.dtype in DIFFERENTIABLE else tensor


def _parameter(tensor: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=tensor.dtype in DIFFERENTIABLE)


def _attribute(tensor: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    tensor.note = ["note", numbers([2], torch.float32)]  # type: ignore[attr-defined]
    return tensor


WRAPS: dict[str, Callable[[torch.Tensor, Numbers], torch.Tensor]] = {
    "tensor": lambda tensor, numbers: tensor,
    "requires_grad": _requires_grad,
    "parameter": _parameter,
    "frozen": lambda tensor, numbers: torch.nn.Parameter(tensor, requires_grad=False),
    "buffer": lambda tensor, numbers: torch.nn.Buffer(tensor),
    "subclass": lambda tensor, numbers: torch.Tensor._make_subclass(PlainTensor, tensor),
    "attribute": _attribute,
}


@dataclasses.dataclass(frozen=True)
class ViewPlan:
    """How one view on a storage of 24 numbers, which others share, is made."""

    base: int = 0
    kind: str = "whole"
    start: int = 0
    stop: int = 24

    def make(self, numbers: Numbers) -> Any:
        base = numbers.base(self.base)
        return VIEWS[self.kind](base, min(self.start, self.stop), max(self.start, self.stop))


VIEWS: dict[str, Callable[[torch.Tensor, int, int], Any]] = {
    "whole": lambda base, start, stop: base,
    "alias": lambda base, start, stop: base.view(24),
    "slice": lambda base, start, stop: base.view(24)[start:stop],
    "steps": lambda base, start, stop: base.view(24)[start:stop:3],
    "transposed": lambda base, start, stop: base.t(),
    "rows": lambda base, start, stop: base[start // 6 : stop // 6],
    "columns": lambda base, start, stop: base[:, start // 4 : stop // 4],
    "element": lambda base, start, stop: base.view(24)[min(start, 23)],
    "expanded": lambda base, start, stop: base.view(24)[start:stop].expand(2, stop - start),
    "overlapping": lambda base, start, stop: base.as_strided((3, 3), (1, 2), min(start, 16)),
    "bytes": lambda base, start, stop: base.view(24).view(torch.uint8)[start : stop + 3],
    "complex": lambda base, start, stop: torch.view_as_complex(base.view(12, 2)).conj(),
    "parameter": lambda base, start, stop: torch.nn.Parameter(base.view(24)[start:stop]),
    "detached": lambda base, start, stop: torch.nn.Parameter(base).detach(),
    "storage": lambda base, start, stop: base.untyped_storage(),
}


@dataclasses.dataclass(frozen=True)
class Value:
    """A plain value as a leaf."""

    value: Any

    def make(self, numbers: Numbers) -> Any:
        return self.value


@dataclasses.dataclass(frozen=True)
class Node:
    """How one container, or opaque object, is made of its children."""

    kind: str
    children: tuple[Any, ...] = ()
    keys: tuple[Any, ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()

    def make(self, numbers: Numbers) -> Any:
        children = [child.make(numbers) for child in self.children]
        made = NODES[self.kind](children, self.keys)
        for name, value in self.attributes:
            setattr(made, name, value.make(numbers))
        return made


def _thing(children: list[Any], keys: tuple[Any, ...]) -> Thing:
    thing = Thing()
    vars(thing).update({f"attribute{index}": child for index, child in enumerate(children)})
    return thing


def _items(children: list[Any], keys: tuple[Any, ...]) -> dict[Any, Any]:
    return dict(zip(keys, children, strict=True))


NODES: dict[str, Callable[[list[Any], tuple[Any, ...]], Any]] = {
    "dict": _items,
    "OrderedDict": lambda children, keys: OrderedDict(_items(children, keys)),
    "defaultdict": lambda children, keys: defaultdict(a_factory, _items(children, keys)),
    "Counter": lambda children, keys: Counter(_items(children, keys)),
    "Mapping": lambda children, keys: Mapping(_items(children, keys)),
    "list": lambda children, keys: children,
    "Sequence_": lambda children, keys: Sequence_(children),
    "tuple": lambda children, keys: tuple(children),
    "deque": lambda children, keys: deque(children),
    "bounded": lambda children, keys: deque(children, maxlen=5),
    "NamedPair": lambda children, keys: NamedPair(*children),
    "Pair": lambda children, keys: Pair(*children),
    "FrozenPair": lambda children, keys: FrozenPair(*children),
    "return_type": lambda children, keys: torch.return_types.max(children),
    "Thing": _thing,
}
MAPPINGS = ("dict", "OrderedDict", "defaultdict", "Counter", "Mapping")
SEQUENCES = ("list", "Sequence_", "tuple", "deque", "bounded")
PAIRS = ("NamedPair", "Pair", "FrozenPair", "return_type")
WITH_ATTRIBUTES = ("OrderedDict", "Mapping", "Sequence_")


# Strategies


def dtypes() -> st.SearchStrategy[torch.dtype]:
    return st.sampled_from(COMMON_DTYPES)


def shapes(*, max_dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, MAX_SIDE), max_size=max_dims).map(tuple)


def tensor_plans() -> st.SearchStrategy[TensorPlan]:
    """Plans of single tensors: dtypes, shapes with 0 and 1, strides, bits, classes, attributes."""
    return st.builds(
        TensorPlan,
        dtype=dtypes(),
        shape=shapes(),
        geometry=st.sampled_from(list(GEOMETRIES)),
        wrap=st.sampled_from(list(WRAPS)),
    )


def tensors() -> st.SearchStrategy[torch.Tensor]:
    """Tensors of every dtype, geometry and class; elements are unique by position."""
    return tensor_plans().map(lambda plan: plan.make(Numbers()))


def view_plans(*, max_bases: int = 3) -> st.SearchStrategy[ViewPlan]:
    """Plans of views that overlap in a few storages."""
    return st.builds(
        ViewPlan,
        base=st.integers(0, max_bases - 1),
        kind=st.sampled_from(list(VIEWS)),
        start=st.integers(0, 24),
        stop=st.integers(0, 24),
    )


def plain_values() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.sampled_from([Colour.RED, a_factory, Pair, torch.float32, torch.device("cpu"), torch.Size([2, 1])]),
    )


def keys() -> st.SearchStrategy[Any]:
    """Keys of mappings: those that ordinary states have, and those that are hard to tell apart."""
    return st.one_of(
        st.text("ab.", max_size=3),
        st.integers(0, 3),
        st.sampled_from(
            [True, False, None, 0.0, -0.0, 1.0, NAN, "0", "1", "True", "None", "", ".", "[0]", "['a']", "\ud800", b"a"]
        ),
        st.sampled_from([Colour.RED, (0,), ("0",), (False, "a"), (), frozenset({"a", "b"}), NamedPair(1, "a"), int]),
        st.text(max_size=2),
    )


def tree_plans(
    leaves: st.SearchStrategy[Any] | None = None, *, max_leaves: int = 12, opaque: bool = True
) -> st.SearchStrategy[Any]:
    """Plans of trees.

    Args:
        leaves: Plans of leaves; by default tensors and plain values.
        max_leaves: How many leaves a tree has at most, about.
        opaque: Whether there are opaque objects.
    """
    chosen = leaves if leaves is not None else st.one_of(tensor_plans(), st.builds(Value, plain_values()))

    def extend(smaller: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        children = st.deferred(lambda: smaller)  # its representation does not grow with the depth
        items = st.lists(st.tuples(keys(), children), max_size=4, unique_by=lambda item: item[0])
        attributes = st.dictionaries(st.sampled_from(["_metadata", "extra", "a"]), children, max_size=2).map(
            lambda named: tuple(named.items())
        )
        mappings = st.tuples(st.sampled_from(MAPPINGS), items, attributes).map(
            lambda drawn: Node(
                drawn[0],
                tuple(child for _, child in drawn[1]),
                tuple(key for key, _ in drawn[1]),
                drawn[2] if drawn[0] in WITH_ATTRIBUTES else (),
            )
        )
        sequences = st.tuples(st.sampled_from(SEQUENCES), st.lists(children, max_size=4), attributes).map(
            lambda drawn: Node(drawn[0], tuple(drawn[1]), (), drawn[2] if drawn[0] in WITH_ATTRIBUTES else ())
        )
        pairs = st.builds(Node, st.sampled_from(PAIRS), st.tuples(children, children))
        things = st.builds(Node, st.just("Thing"), st.lists(children, max_size=3).map(tuple))
        return st.one_of(mappings, sequences, pairs, *([things] if opaque else []))

    return st.recursive(chosen, extend, max_leaves=max_leaves)


def made(plan: Any) -> Any:
    """Return the tree of a plan: the same one every time."""
    return plan.make(Numbers())


def state_trees(**options: Any) -> st.SearchStrategy[Any]:
    """Trees of any containers and any leaves (see ``tree_plans``)."""
    return tree_plans(**options).map(made)


def tied_plans(**options: Any) -> st.SearchStrategy[Any]:
    """Plans of trees whose leaves are views that overlap in a few storages, among others."""
    leaves = st.one_of(view_plans(), view_plans(), st.builds(TensorPlan), st.builds(Value, plain_values()))
    return tree_plans(leaves, **options)


def tied_trees(**options: Any) -> st.SearchStrategy[Any]:
    """Trees whose leaves are views that overlap in a few storages, among others."""
    return tied_plans(**options).map(made)
