"""Plans: descriptions of trees that can be drawn, pickled and replaced in part, and the code that makes the trees.

Not public. ``build`` runs the code of a plan: it makes an equal tree on new memory every time, and what a test shows of
a tree is how it was made.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import math
import struct
from typing import TYPE_CHECKING, Any

import torch

from statetree.testing import samples
from statetree.testing.elements import DIFFERENTIABLE, numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

#: How a tensor may lie in its storage. What a dtype or a shape cannot be is contiguous.
GEOMETRIES = (
    *("contiguous", "transposed", "gaps", "inside", "expanded"),
    *("channels_last", "conjugated", "negated", "meta"),
)
#: What class a tensor may be of, and what else it may have.
WRAPS = {
    "tensor": "{}",
    "requires_grad": "{}.requires_grad_()",
    "parameter": "torch.nn.Parameter({})",
    "frozen": "torch.nn.Parameter({}, requires_grad=False)",
    "buffer": "torch.nn.Buffer({})",
    "subclass": "torch.Tensor._make_subclass(samples.TensorSubclass, {})",
    "attribute": 'samples.having({}, note=["note", {note}])',
    "computed": "{}.requires_grad_()[...]",
}
_WITHOUT_GRADIENT = {"requires_grad": "{}", "parameter": WRAPS["frozen"], "computed": "{}[...]"}
#: What is drawn if nothing else is asked for: leaves of autograd, as transforms return them.
USUAL_WRAPS = tuple(wrap for wrap in WRAPS if wrap != "computed")
#: How a view may look at a storage of 24 numbers.
VIEWS: dict[str, Callable[[str, int, int], str]] = {
    "whole": lambda base, *_: base,
    "alias": lambda base, *_: f"{base}.view(24)",
    "slice": lambda base, start, stop: f"{base}.view(24)[{start}:{stop}]",
    "steps": lambda base, start, stop: f"{base}.view(24)[{start}:{stop}:3]",
    "transposed": lambda base, *_: f"{base}.t()",
    "rows": lambda base, start, stop: f"{base}[{start // 6}:{stop // 6}]",
    "columns": lambda base, start, stop: f"{base}[:, {start // 4}:{stop // 4}]",
    "element": lambda base, start, _: f"{base}.view(24)[{min(start, 23)}]",
    "expanded": lambda base, start, stop: f"{base}.view(24)[{start}:{stop}].expand(2, {stop - start})",
    "overlapping": lambda base, start, _: f"{base}.as_strided((3, 3), (1, 2), {min(start, 16)})",
    "bytes": lambda base, start, stop: f"{base}.view(24).view(torch.uint8)[{start}:{stop + 3}]",
    "complex": lambda base, *_: f"torch.view_as_complex({base}.view(12, 2)).conj()",
    "parameter": lambda base, start, stop: f"torch.nn.Parameter({base}.view(24)[{start}:{stop}])",
    "detached": lambda base, *_: f"torch.nn.Parameter({base}).detach()",
    "storage": lambda base, *_: f"{base}.untyped_storage()",
}
MAPPINGS = {
    "dict": "{{{}}}",
    "OrderedDict": "collections.OrderedDict({{{}}})",
    "defaultdict": "collections.defaultdict(samples.a_factory, {{{}}})",
    "Counter": "collections.Counter({{{}}})",
    "DictSubclass": "samples.DictSubclass({{{}}})",
}
SEQUENCES = {
    "list": "[{}]",
    "tuple": "({})",
    "ListSubclass": "samples.ListSubclass([{}])",
    "TupleSubclass": "samples.TupleSubclass([{}])",
    "deque": "collections.deque([{}])",
    "bounded": "collections.deque([{}], maxlen=5)",
}
PAIRS = {
    "NamedPair": "samples.NamedPair({})",
    "Pair": "samples.Pair({})",
    "FrozenPair": "samples.FrozenPair({})",
    "SlottedPair": 'samples.having(samples.SlottedPair({}), sum="sum")',
    "return_type": "torch.return_types.max([{}])",
}
WITH_ATTRIBUTES = ("OrderedDict", "DictSubclass", "ListSubclass", "TupleSubclass")
_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.Size)


class Plan:
    """Says how a tree is made."""

    def build(self) -> Any:
        """Make the tree."""
        return code_of(self).run()


@dataclasses.dataclass(frozen=True)
class Value(Plan):
    """A plain value as a leaf."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Node(Plan):
    """A container, or an opaque ``Thing``, of its children, their keys, and named attributes."""

    kind: str
    children: tuple[Any, ...] = ()
    keys: tuple[Any, ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Again(Plan):
    """The same object once more: which of the containers and tensors before it, modulo their number, or ``None``."""

    index: int = 0


@dataclasses.dataclass(frozen=True)
class TensorPlan(Plan):
    """A tensor: a geometry of ``GEOMETRIES`` (``channels_last`` adds a dim), one of ``WRAPS``, and of ``ELEMENTS``."""

    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float32
    geometry: str = "contiguous"
    wrap: str = "tensor"
    elements: str = "counted"


@dataclasses.dataclass(frozen=True)
class ViewPlan(Plan):
    """One of ``VIEWS`` of a storage of 24 numbers that others share, from a start to a stop."""

    base: int = 0
    kind: str = "whole"
    start: int = 0
    stop: int = 24


class Code:
    """The body of a function without arguments that makes what a plan does.

    Args:
        plan: A plan.
        named: Which of the containers and tensors get a name, since they come again.

    Attributes:
        lines: The lines of the body.
        objects: What has no code, by the names that stand for it there.
        again: Which of the containers and tensors come again.
    """

    def __init__(self, plan: Any, named: Collection[int] = ()) -> None:
        self.lines: list[str] = []
        self.objects: dict[str, Any] = {}
        self.again: set[int] = set()
        self._named = named
        self._made = 0
        self._next = 1  # the number of the next element
        self._bases: dict[int, str] = {}
        self.lines.append(f"return {self._written(plan)}")

    def run(self) -> Any:
        """Make the value."""
        names = {"torch": torch, "samples": samples, "collections": collections, **self.objects}
        exec(_compiled("\n ".join(["def state():", *self.lines])), names)
        return names["state"]()

    def source(self, *names: str) -> str:
        """Return the function, with what it imports, and with further names of ``statetree.testing``."""
        values = [f"{name} = {value!r}" for name, value in self.objects.items() if not isinstance(value, type)]
        body = "\n    ".join(["def state():", *values, *self.lines])
        ours = sorted([*names, *(name for name in ("Layout", "samples") if f"{name}." in body or f"{name}(" in body)])
        imports = [f"import {name}" for name in ("collections", "torch") if f"{name}." in body]
        imports += [f"from statetree.testing import {', '.join(ours)}"] if ours else []
        return "\n".join([*imports, "", "", body])

    def _written(self, plan: Any) -> str:
        """Return an expression for a plan, after lines that it needs before it."""
        if isinstance(plan, Value):
            return self._value(plan.value)
        if isinstance(plan, Again):
            if not self._made:
                return "None"
            self.again.add(plan.index % self._made)
            return f"part{plan.index % self._made}"
        if isinstance(plan, Node):
            expression = self._container(plan)
        elif isinstance(plan, TensorPlan):
            wraps = WRAPS if plan.dtype in DIFFERENTIABLE else {**WRAPS, **_WITHOUT_GRADIENT}
            tensor = self._tensor(plan)
            note = self._numbers((2,), torch.float32) if plan.wrap == "attribute" else ""
            expression = wraps[plan.wrap].format(tensor, note=note)
        elif isinstance(plan, ViewPlan):
            expression = VIEWS[plan.kind](self._base(plan.base), *sorted((plan.start, plan.stop)))
        else:  # a layout, or a plan of somebody else's
            self.objects[type(plan).__name__] = type(plan)
            expression = f"{plan!r}.build()"
        self._made += 1
        return f"(part{self._made - 1} := {expression})" if self._made - 1 in self._named else expression

    def _container(self, plan: Node) -> str:
        children = list(map(self._written, plan.children))
        attributes = [f"{name}={self._written(held)}" for name, held in plan.attributes]
        if plan.kind == "Thing":
            attributes += [f"attribute{index}={child}" for index, child in enumerate(children)]
            expression = "samples.Thing()"
        elif plan.kind in MAPPINGS:
            items = zip(map(self._value, plan.keys), children, strict=True)
            expression = MAPPINGS[plan.kind].format(", ".join(f"{key}: {child}" for key, child in items))
        else:
            comma = "," if plan.kind == "tuple" and len(children) == 1 else ""
            expression = {**SEQUENCES, **PAIRS}[plan.kind].format(", ".join(children) + comma)
        return f"samples.having({', '.join([expression, *attributes])})" if attributes else expression

    def _value(self, value: Any) -> str:
        text = code(value)
        if text is None:
            text = f"value{len(self.objects)}"
            self.objects[text] = value
        return text

    def _numbers(self, shape: tuple[int, ...], dtype: torch.dtype, elements: str = "counted") -> str:
        first, self._next = self._next, self._next + math.prod(shape)
        return numbered(shape, dtype, first, elements)

    def _base(self, index: int) -> str:
        if index not in self._bases:
            self._bases[index] = f"base{index}" if index else "base"
            self.lines.append(f"{self._bases[index]} = {self._numbers((4, 6), torch.float32)}")
        return self._bases[index]

    def _tensor(self, plan: TensorPlan) -> str:
        shape, dtype, geometry, dims = plan.shape, plan.dtype, plan.geometry, len(plan.shape)
        numbers = functools.partial(self._numbers, dtype=dtype, elements=plan.elements)
        if geometry == "channels_last" and dims == 3:
            return f"{numbers((1, *shape))}.to(memory_format=torch.channels_last)"
        if geometry in ("channels_last", "transposed") and dims > 1:
            order = tuple(range(dims))[::-1]
            return numbers(shape[::-1]) + (".t()" if dims == 2 else f".permute{order}")
        if geometry == "gaps" and dims:
            return f"{numbers(tuple(2 * side for side in shape))}[{', '.join(['1::2'] * dims)}]"
        if geometry == "inside":
            return f"{numbers((math.prod(shape) + 8,))}[5:-3].view({shape})"
        if geometry == "expanded" and dims:
            return f"{numbers((1, *shape[1:]))}.expand({shape})"
        if geometry == "conjugated":
            return f"{numbers(shape)}.conj()"
        if geometry == "negated" and dtype in DIFFERENTIABLE:
            if dtype.itemsize == 2:  # torch negates these by way of float32, which changes NaNs that are near
                numbers = functools.partial(numbers, elements="counted")
            return f"torch._neg_view({numbers(shape)})"
        if geometry == "meta":
            return f'torch.empty({shape}, dtype={dtype}, device="meta")'
        return numbers(shape)


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> Any:
    return compile(source, "<state>", "exec")


def code(value: Any) -> str | None:
    """Return an expression for a plain value; ``None`` if there is none."""
    cls: type = type(value)
    if cls is float:
        bits = struct.unpack("<q", struct.pack("<d", value))[0]
        return repr(value) if math.isfinite(value) else f"torch.tensor({bits}).view(torch.float64).item()"
    if cls is complex:
        return f"complex({code(value.real)}, {code(value.imag)})"
    if cls is tuple:
        items = [code(item) for item in value]
        return None if None in items else f"({', '.join(map(str, items))}{',' if len(items) == 1 else ''})"
    if cls is str and value.isprintable() and not set(value) & set("\"'\\"):
        return f'"{value}"'
    if getattr(value, "__module__", "") == samples.__name__:
        return f"samples.{cls.__name__}.{value.name}" if isinstance(value, enum.Enum) else f"samples.{value.__name__}"
    return f"torch.{value!r}" if cls is torch.device else repr(value) if cls in _PLAIN else None


def code_of(plan: Any) -> Code:
    """Return the code of a plan."""
    found = Code(plan)
    return Code(plan, found.again) if found.again else found


def build(plan: Any) -> Any:
    """Return the tree of a plan. What is no plan is returned as it is."""
    return plan.build() if isinstance(plan, Plan) else plan
