"""Counter-examples as source code: what makes a state, in the words of torch, and a test to paste.

What has no short name in torch, such as an eight-bit float between gaps, is made of its plan.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from statetree.testing import laws
from statetree.testing.assertions import tree_differences
from statetree.testing.container_plan import Again, Node, Value
from statetree.testing.dtensor_layout import Layout
from statetree.testing.plans import build
from statetree.testing.source_code import code
from statetree.testing.tensor_plan import TensorPlan, ViewPlan

if TYPE_CHECKING:
    from collections.abc import Callable

#: How many lines a test has at most.
MAX_LINES = 15
_COUNTED = {
    torch.float32: "torch.arange({a}.0, {b}.0)",
    torch.int64: "torch.arange({a}, {b})",
    torch.complex64: "torch.complex(torch.arange({a}.0, {b}.0), torch.arange({a}.5, {b}.5))",
    torch.bool: "torch.arange({a}, {b}) % 2 == 1",
    torch.float16: "torch.arange({a}, {b}, dtype=torch.int16).view(torch.float16)",
    torch.bfloat16: "torch.arange({a}, {b}, dtype=torch.int16).view(torch.bfloat16)",
    **{
        dtype: f"torch.arange({{a}}, {{b}}, dtype={dtype})"
        for dtype in (torch.float64, torch.int32, torch.int16, torch.int8, torch.uint8)
    },
}
_WRAPPED = {
    "tensor": "{}",
    "requires_grad": "{}.requires_grad_()",
    "parameter": "torch.nn.Parameter({})",
    "frozen": "torch.nn.Parameter({}, requires_grad=False)",
    "buffer": "torch.nn.Buffer({})",
    "computed": "{}.requires_grad_()[...]",
    "subclass": "torch.Tensor._make_subclass(samples.TensorSubclass, {})",
}
_VIEWS = {
    "whole": "{base}",
    "alias": "{base}.view(24)",
    "slice": "{base}.view(24)[{start}:{stop}]",
    "steps": "{base}.view(24)[{start}:{stop}:3]",
    "transposed": "{base}.t()",
    "rows": "{base}[{start} // 6 : {stop} // 6]",
    "columns": "{base}[:, {start} // 4 : {stop} // 4]",
    "element": "{base}.view(24)[min({start}, 23)]",
    "bytes": "{base}.view(24).view(torch.uint8)[{start} : {stop} + 3]",
    "complex": "torch.view_as_complex({base}.view(12, 2)).conj()",
    "expanded": "{base}.view(24)[{start}:{stop}].expand(2, {stop} - {start})",
    "overlapping": "{base}.as_strided((3, 3), (1, 2), min({start}, 16))",
    "parameter": "torch.nn.Parameter({base}.view(24)[{start}:{stop}])",
    "detached": "torch.nn.Parameter({base}).detach()",
    "storage": "{base}.untyped_storage()",
}
_MAPPINGS = {
    "dict": "{}",
    "OrderedDict": "OrderedDict({})",
    "Counter": "Counter({})",
    "defaultdict": "defaultdict(samples.a_factory, {})",
    "DictSubclass": "samples.DictSubclass({})",
}
_SEQUENCES = {
    "list": "[{}]",
    "tuple": "({})",
    "deque": "deque([{}])",
    "bounded": "deque([{}], maxlen=5)",
    **{name: f"samples.{name}([{{}}])" for name in ("ListSubclass", "TupleSubclass")},
    **{name: f"samples.{name}({{}})" for name in ("NamedPair", "Pair", "FrozenPair", "AttrsPair")},
}


_COLLECTIONS = ("Counter", "OrderedDict", "defaultdict", "deque")


class _NoShortName(Exception):
    """Raised for what torch has no short name for."""


class _Noted:
    """Stands for the tensor that an attribute of another one holds."""


class _Writer:
    """Writes the body of a function that makes what a plan does."""

    def __init__(self, plan: Any) -> None:
        self.lines: list[str] = []
        self._next = 1
        self._bases: dict[int, str] = {}
        self._made: list[str] = []
        self._again = any(isinstance(part, Again) for part in _parts(plan))
        self.lines.append(f"return {self.write(plan)}")

    def write(self, plan: Any) -> str:
        """Return an expression for a plan, after lines that it needs before it."""
        if isinstance(plan, Value):
            return _quoted(plan.value)
        if isinstance(plan, Again):
            return self._made[plan.index % len(self._made)] if self._made else "None"
        if isinstance(plan, Layout):
            return f"{plan!r}.build()"
        if isinstance(plan, TensorPlan) and plan.wrap == "attribute":
            tensor = self._tensor(plan)
            return self._keep(tensor, (("note", Node("list", (Value("note"), _Noted()))),))
        if isinstance(plan, _Noted):
            return self._numbers((2,), torch.float32)
        if isinstance(plan, TensorPlan):
            return self._keep(_looked_up(_WRAPPED, plan.wrap).format(self._tensor(plan)))
        if isinstance(plan, ViewPlan):
            low, high = sorted((plan.start, plan.stop))
            return self._keep(_looked_up(_VIEWS, plan.kind).format(base=self._base(plan.base), start=low, stop=high))
        if isinstance(plan, Node) and plan.kind == "Thing":
            held = tuple((f"attribute{index}", child) for index, child in enumerate(plan.children))
            return self._keep("samples.Thing()", held)
        if isinstance(plan, Node):
            return self._keep(self._container(plan), plan.attributes)
        raise _NoShortName

    def _keep(self, expression: str, attributes: tuple[tuple[str, Any], ...] = ()) -> str:
        """Give what was made a name, if it has attributes or may appear again."""
        held = [(name, self.write(child)) for name, child in attributes]
        if held or self._again:
            name = f"part{len(self._made)}"
            self.lines.append(f"{name} = {expression}")
            self.lines += [f"{name}.{attribute} = {value}" for attribute, value in held]
            expression = name
        self._made.append(expression)
        return expression

    def _numbers(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        first, self._next = self._next, self._next + math.prod(shape)
        counted = _looked_up(_COUNTED, dtype).format(a=first, b=self._next)
        counted = f"({counted})" if "%" in counted else counted
        return counted if len(shape) == 1 else f"{counted}.reshape({shape})"

    def _base(self, index: int) -> str:
        if index not in self._bases:
            self._bases[index] = f"base{index}" if index else "base"
            self.lines.append(f"{self._bases[index]} = {self._numbers((4, 6), torch.float32)}")
        return self._bases[index]

    def _tensor(self, plan: TensorPlan) -> str:
        shape, dtype, dims = plan.shape, plan.dtype, len(plan.shape)
        if plan.geometry == "meta":
            return f'torch.empty({shape}, dtype={dtype}, device="meta")'
        if plan.geometry == "conjugated":
            return f"{self._numbers(shape, dtype)}.conj()"
        if plan.geometry == "negated" and dtype in (torch.float32, torch.complex64, torch.float64):
            return f"torch._neg_view({self._numbers(shape, dtype)})"
        if plan.geometry == "transposed" and dims == 2:
            return f"{self._numbers(shape[::-1], dtype)}.t()"
        if plan.geometry == "expanded" and dims:
            return f"{self._numbers((1, *shape[1:]), dtype)}.expand({shape})"
        if plan.geometry == "gaps" and dims:
            return f"{self._numbers(tuple(2 * side for side in shape), dtype)}[{', '.join(['1::2'] * dims)}]"
        if plan.geometry == "inside":
            return f"{self._numbers((math.prod(shape) + 8,), dtype)}[5:-3].view({shape})"
        if plan.geometry == "contiguous" or dims < 2:
            return self._numbers(shape, dtype)
        raise _NoShortName

    def _container(self, plan: Node) -> str:
        children = [self.write(child) for child in plan.children]
        if plan.kind in _MAPPINGS:
            items = [f"{_quoted(key)}: {child}" for key, child in zip(plan.keys, children, strict=True)]
            return _MAPPINGS[plan.kind].format(f"{{{', '.join(items)}}}")
        comma = "," if plan.kind == "tuple" and len(children) == 1 else ""
        return _looked_up(_SEQUENCES, plan.kind).format(", ".join(children) + comma)


def _quoted(value: Any) -> str:
    plain = type(value) is str and value.isprintable() and not set(value) & set("\"'\\")
    return f'"{value}"' if plain else code(value)


def _looked_up(table: dict[Any, str], name: Any) -> str:
    if name not in table:
        raise _NoShortName
    return table[name]


def _parts(plan: Any) -> list[Any]:
    if not isinstance(plan, Node):
        return [plan]
    return [plan, *(part for child in (*plan.children, *dict(plan.attributes).values()) for part in _parts(child))]


def snippet(law: laws.Law, transform: Callable[..., Any], plan: Any, world_size: int | None = None) -> str:
    """Return a test that fails because a law does not hold for the tree of a plan."""
    body = _body(plan)
    imports = {name for name in _COLLECTIONS if any(f"{name}(" in line for line in body)}
    lines = [f"from collections import {', '.join(sorted(imports))}"] if imports else []
    lines += ["import torch"] if any("torch." in line for line in body) else []
    needed, called = reference(transform)
    law_needed, law_called = _law_reference(law)
    own = {name for name in ("Layout",) if any(f"{name}(" in line for line in body)}
    own |= {"laws"} if law_called.startswith("laws.") else set()
    own |= {"samples"} if any("samples." in line for line in body) else set()
    own |= {"run_ranks"} if world_size else set()
    if any("build(" in line and ".build()" not in line for line in body):
        lines = ["from statetree.testing.plans import *"]
        own -= {"samples"}
    lines += [f"from statetree.testing import {', '.join(sorted(own, key=str.lower))}"] if own else []
    lines += [line for line in dict.fromkeys([*needed, *law_needed]) if line not in lines]
    made = ["", "", "def state():", *(f"    {line}" for line in body)]
    ranks = (
        f"run_ranks({world_size}, {law_called}, {called}, state)" if world_size else f"{law_called}({called}, state)"
    )
    name = "".join(letter if letter.isalnum() else "_" for letter in f"{called.rpartition('.')[2]}_{law.name}")
    return "\n".join([*lines, *made, "", "", f"def test_{name}():", f"    {ranks}", ""])


def _body(plan: Any) -> list[str]:
    """Return the lines of a function that makes what a plan does."""
    from_plan = [f"return build({plan!r})"]
    try:
        lines = _Writer(plan).lines
    except _NoShortName:
        return from_plan
    if any(isinstance(part, Layout) for part in _parts(plan)):  # needs ranks
        return lines
    return lines if len(lines) <= MAX_LINES - 11 and _makes(lines, plan) else from_plan


def _makes(lines: list[str], plan: Any) -> bool:
    """Whether lines make what a plan does."""
    names: dict[str, Any] = {}
    head = "from collections import *\nfrom statetree.testing.plans import *\ndef state():\n "
    try:
        exec(head + "\n ".join(lines), names)
        return not tree_differences(names["state"](), build(plan))
    except Exception:
        return False


def reference(function: Any) -> tuple[list[str], str]:
    """Return the imports that a function needs, and how it is called after them.

    What cannot be imported is called by its name, for whoever pastes the test next to it.
    """
    if isinstance(function, functools.partial):
        needed, called = reference(function.func)
        options = [*map(code, function.args), *(f"{name}={code(value)}" for name, value in function.keywords.items())]
        return ["from functools import partial", *needed], f"partial({', '.join([called, *options])})"
    name = getattr(function, "__qualname__", "")
    short = name.rpartition(".")[2]
    statetree = sys.modules["statetree"]
    if getattr(statetree, short, None) is function:
        return ["import statetree as st"], f"st.{short}"
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is not None and module.__name__ != "__main__" and getattr(module, name, None) is function:
        return [f"from {module.__name__} import {name}"], name
    return [], short if short.isidentifier() else "transform"


def _law_reference(law: laws.Law) -> tuple[list[str], str]:
    if getattr(laws, law.name, None) is law:
        return [], f"laws.{law.name}"
    check = law.check
    if isinstance(check, functools.partial) and check.func is laws._round_trip:
        needed, called = reference(check.args[0])
        return needed, f"laws.round_trip({called})"
    return reference(check)
