"""Sources: trees as source code, which is evaluated as often as an equal tree is needed, and shown to be pasted.

Not public. Strategies compose the sources of leaves and containers into one. Its numbers are not known while it is a
part, so that characters that no literal holds stand for them, until ``code`` writes the body of a function.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import enum
import functools
import math
import pickle
import re
import warnings
from typing import TYPE_CHECKING, Any

import torch

from statetree.testing import samples
from statetree.testing.dtensor_layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Marks: the first of some new numbers, the number behind them, and what several places share, by its name.
_FIRST, _BEHIND, _SHARED = "\x01", "\x02", "\x03"
_MARKS = re.compile(f"{_FIRST}\\d+;|{_BEHIND}|{_SHARED}\\w+;")
#: How a tensor may lie in its storage. What a dtype or a shape cannot be is contiguous.
GEOMETRIES = (
    *("contiguous", "transposed", "gaps", "inside", "expanded"),
    *("channels_last", "conjugated", "negated", "meta"),
)
_TWO_NUMBERS = f"torch.arange({_FIRST}2;.0, {_BEHIND}.0)"
_BASE = f"torch.arange({_FIRST}24;.0, {_BEHIND}.0).reshape((4, 6))"
#: What may be in several places of a tree: storages that views look at, and objects.
SHARED = {
    **dict.fromkeys(("base0", "base1", "base2"), _BASE),
    "one_tensor": _TWO_NUMBERS,
    "one_parameter": f"torch.nn.Parameter({_TWO_NUMBERS})",
    "one_dict": f'{{"a": {_TWO_NUMBERS}}}',
    "one_list": f"[{_TWO_NUMBERS}, []]",
}
OBJECTS = tuple([name for name, expression in SHARED.items() if expression is not _BASE])
#: What class a tensor may be of, and what else it may have.
WRAPS = {
    "tensor": "{}",
    "requires_grad": "{}.requires_grad_()",
    "parameter": "torch.nn.Parameter({})",
    "frozen": "torch.nn.Parameter({}, requires_grad=False)",
    "buffer": "torch.nn.Buffer({})",
    "subclass": "torch.Tensor._make_subclass(samples.TensorSubclass, {})",
    "attribute": f'samples.having({{}}, note=["note", {_TWO_NUMBERS}])',
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
#: What may be smaller, or stand for what it is a part of.
_PARTS = (ast.Call, ast.Dict, ast.List, ast.Tuple, ast.Subscript)
#: How many states are tried to make one smaller.
MOST_TRIED = 200
_LITERALS = (type(None), bool, int, bytes)


class Source(str):
    """An expression that makes a tree, with marks."""

    __slots__ = ()


def value(leaf: Any) -> Source:
    """Return the source of a plain value, of a layout, or of anything that can be pickled."""
    return Source(f"{leaf!r}.build()" if isinstance(leaf, Layout) else literal(leaf))


def literal(leaf: Any) -> str:
    """Return an expression for a value that can be pickled. It may need torch, pickle, or ``samples``."""
    cls: type = type(leaf)
    if cls in _LITERALS or (cls is float and math.isfinite(leaf)):
        return repr(leaf)
    if cls is complex and math.isfinite(leaf.real) and math.isfinite(leaf.imag):
        return f"complex({leaf.real}, {leaf.imag})"
    if cls is str and leaf.isprintable() and not set(leaf) & set("\"'\\"):
        return f'"{leaf}"'
    if cls is tuple:
        return f"({', '.join(map(literal, leaf))}{',' if len(leaf) == 1 else ''})"
    if cls in (torch.dtype, torch.device, torch.Size):
        return f"torch.{repr(leaf).removeprefix('torch.')}"
    if getattr(leaf, "__module__", "") == samples.__name__:
        return f"samples.{cls.__name__}.{leaf.name}" if isinstance(leaf, enum.Enum) else f"samples.{leaf.__name__}"
    return repr(leaf) if cls is str else f"pickle.loads({pickle.dumps(leaf)!r})"


def again(name: str = "one_tensor") -> Source:
    """Return the source of one of ``OBJECTS``: wherever it is in a tree, it is the same object."""
    return Source(f"{_SHARED}{name};")


def tensor(
    shape: tuple[int, ...] = (2,),
    dtype: torch.dtype = torch.float32,
    geometry: str = "contiguous",
    wrap: str = "tensor",
    elements: str = "counted",
) -> Source:
    """Return the source of a tensor: of ``GEOMETRIES`` (``channels_last`` adds a dim), ``WRAPS`` and ``ELEMENTS``."""
    if dtype is torch.float4_e2m1fn_x2:
        shape = shape or (1,)  # torch cannot print one without dims, and a failure would be that one
    has_gradient = dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex)
    wraps = WRAPS if has_gradient else {**WRAPS, **_WITHOUT_GRADIENT}
    if geometry == "negated" and not has_gradient:
        geometry = "contiguous"
    if geometry == "negated" and dtype.itemsize == 2:  # torch negates these by way of float32, which changes NaNs
        elements = "counted"
    made = _laid_out(shape, geometry, functools.partial(_numbered, dtype=dtype, elements=elements), dtype)
    return Source(wraps[wrap].format(made))


def _laid_out(shape: tuple[int, ...], geometry: str, numbers: Callable[..., str], dtype: torch.dtype) -> str:
    dims = len(shape)
    if geometry == "channels_last" and dims == 3:
        return f"{numbers((1, *shape))}.to(memory_format=torch.channels_last)"
    if geometry in ("channels_last", "transposed") and dims > 1:
        return numbers(shape[::-1]) + (".t()" if dims == 2 else f".permute{tuple(range(dims))[::-1]}")
    if geometry == "gaps" and dims:
        return f"{numbers(tuple([2 * side for side in shape]))}[{', '.join(['1::2'] * dims)}]"
    if geometry == "inside":
        return f"{numbers((math.prod(shape) + 8,))}[5:-3].view({shape})"
    if geometry == "expanded" and dims:
        return f"{numbers((1, *shape[1:]))}.expand({shape})"
    if geometry == "conjugated":
        return f"{numbers(shape)}.conj()"
    if geometry == "negated":
        return f"torch._neg_view({numbers(shape)})"
    return f'torch.empty({shape}, dtype={dtype}, device="meta")' if geometry == "meta" else numbers(shape)


def _numbered(shape: tuple[int, ...], dtype: torch.dtype, elements: str) -> str:
    first = f"{_FIRST}{math.prod(shape)};"
    if dtype is not torch.float32 or elements != "counted":
        return f"samples.numbered({first}, {shape}, {dtype}" + (")" if elements == "counted" else f', "{elements}")')
    flat = f"torch.arange({first}.0, {_BEHIND}.0)"  # what one would write, and equal to what `numbered` returns
    return flat if len(shape) == 1 else f"{flat}.reshape({shape})"


def view(base: int = 0, kind: str = "whole", start: int = 0, stop: int = 24) -> Source:
    """Return the source of one of ``VIEWS`` of a storage of 24 numbers that others share, from a start to a stop."""
    return Source(VIEWS[kind](f"{_SHARED}base{base};", *sorted((start, stop))))


def node(kind: str, children: Sequence[str] = (), keys: Sequence[Any] = (), **attributes: str) -> Source:
    """Return the source of a container, or of an opaque ``Thing``, of its children, their keys, and attributes."""
    if kind == "Thing":
        attributes |= {f"attribute{index}": child for index, child in enumerate(children)}
        expression = "samples.Thing()"
    elif kind in MAPPINGS:
        items = [f"{literal(key)}: {child}" for key, child in zip(keys, children, strict=True)]
        expression = MAPPINGS[kind].format(", ".join(items))
    else:
        comma = "," if kind == "tuple" and len(children) == 1 else ""
        expression = {**SEQUENCES, **PAIRS}[kind].format(", ".join(children) + comma)
    if attributes:
        named = ", ".join(f"{name}={held}" for name, held in attributes.items())
        expression = f"samples.having({expression}, {named})"
    return Source(expression)


def code(source: str) -> str:
    """Return the body of a function that makes the tree of a source."""
    shared: dict[str, str] = {}
    number = 1

    def written(mark: re.Match[str]) -> str:
        nonlocal number
        kind, named, first = mark[0][0], mark[0][1:-1], str(number)
        if kind == _FIRST:
            number += int(named)
        elif kind == _SHARED and named not in shared:
            shared[named] = _MARKS.sub(written, SHARED[named])
        return named if kind == _SHARED else first

    returned = _MARKS.sub(written, source)
    return "\n".join([*(f"{name} = {made}" for name, made in shared.items()), f"return {returned}"])


def run(body: str) -> Any:
    """Make the tree of a body."""
    names: dict[str, Any] = {each.__name__: each for each in (torch, collections, pickle, Layout)}
    names["samples"] = samples
    exec(_compiled(body), names)
    return names["state"]()


def build(source: str) -> Any:
    """Make the tree of a source."""
    return run(code(source))


@functools.lru_cache(maxsize=1024)
def _compiled(body: str) -> Any:
    return compile(_function(body), "<state>", "exec")


def _function(body: str) -> str:
    return "\n    ".join(["def state():", *body.splitlines()])


def module(body: str, *names: str) -> str:
    """Return the function, with what it imports, and with further names of ``statetree.testing``."""
    ours = sorted([*names, *(name for name in ("Layout", "samples") if f"{name}." in body or f"{name}(" in body)])
    imports = [f"import {name}" for name in ("collections", "pickle", "torch") if f"{name}." in body]
    imports += [f"from statetree.testing import {', '.join(ours)}"] if ours else []
    return "\n".join([*imports, "", "", _function(body)])


def size(body: str) -> tuple[bool, int]:
    """Return what is less for what is read more easily, by transforms that take containers alone, too."""
    return body.rpartition("return ")[2][:1] not in ("{", "["), len(body)


def _smaller(body: str) -> Iterator[str]:
    """Yield bodies that are simpler in one place: an item goes, or a part of what stands there does for it.

    Some make no tree at all.
    """
    *lines, returned = body.encode().splitlines()  # columns of `ast` are bytes

    def changed(start: int, stop: int, new: bytes = b"") -> str:
        text = returned[:start] + new + returned[stop:]
        return b"\n".join([*(line for line in lines if line.split()[0] in text), text]).decode()

    parts: list[Any] = [
        each for each in ast.walk(ast.parse(returned)) if isinstance(each, _PARTS) or getattr(each, "id", "") in SHARED
    ]
    for part in parts:
        start, stop = part.col_offset, part.end_col_offset
        inner = [other for other in parts if start <= other.col_offset < other.end_col_offset <= stop]
        texts = {b"None", b"torch.arange(2.0)", *(returned[each.col_offset : each.end_col_offset] for each in inner)}
        yield from (changed(start, stop, text) for text in sorted(texts))
        items: Sequence[ast.expr] = getattr(part, "elts", getattr(part, "values", ()))
        begins = [key.col_offset for key in getattr(part, "keys", items)]
        ends = [item.end_col_offset or 0 for item in items]
        for at, item in enumerate(items):
            before = ends[at - 1] if at and item is items[-1] else begins[at]
            yield changed(before, ends[at] if item is items[-1] else begins[at + 1])


def smallest(body: str, fails: Callable[[str], bool]) -> str:
    """Return a smaller body that fails as the given one does, as far as that can be found soon.

    Hypothesis makes smaller only what it draws: to draw such a tree anew and shrink it takes half a minute.
    """
    tried = {body}
    while len(tried) < MOST_TRIED:
        untried = [each for each in _smaller(body) if size(each) < size(body) and each not in tried]
        if not untried:
            break
        candidate = min(untried, key=size)
        tried.add(candidate)
        # What a body raises that makes no tree, and what Python says of it before.
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            run(candidate)
            body = candidate if fails(candidate) else body
    return body
