"""Patterns of axes, in the notation of einops and einx: how the elements of tensors go over into those of others.

A side of a pattern names the dims of tensors: axes (``a``), products of axes that lie in one dim (``(a b)``, the last
one varies fastest), sums (``(a + b)``, one after the other), ``1``; commas stand between tensors. Written out, the sums
of a side are *blocks* without sums. The blocks of both sides pair in the order written, and each pair has the same
axes: so a pattern takes every element to one place, and the way back is the pattern with its sides swapped.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_TOKEN: Final = re.compile(r"->|[A-Za-z_][A-Za-z0-9_]*|[0-9]+|\S")


class Product(NamedTuple):
    """What lies in one dim, the last factor varying fastest: an axis (its name), a sum, or a product."""

    factors: tuple[Expression, ...]


class Sum(NamedTuple):
    """What lies in one dim one after the other."""

    terms: tuple[Product, ...]


Expression = str | Sum | Product
#: The dims of a tensor.
Dims = tuple[Expression, ...]


class Strand(NamedTuple):
    """The axes of a block that lie in one dim of a tensor: element ``i, j, …`` is at ``offset + i * step + …``."""

    offset: int
    steps: tuple[tuple[str, int], ...]


class Equation(NamedTuple):
    """What a dim says of its axes: the products of the sizes of these axes, added up, are the size."""

    terms: Sequence[Sequence[str]]  # products of axes
    size: int
    label: str  # whose dim it is


def parse_pattern(text: str) -> tuple[list[Dims], list[Dims]]:
    """Return the tensors of both sides of a pattern (``ValueError`` if it is none)."""
    sides = [_parse_side(text, part) for part in _split(_TOKEN.findall(text), "->")]
    if len(sides) != 2:
        raise _no_pattern(text, "one ->", f"{len(sides) - 1}")
    for block in [block for side in sides for block in _block_names(side)]:
        twice = {name for name in block if block.count(name) > 1}
        if twice:
            raise _no_pattern(text, "each axis once in what is no sum", f"{min(twice)} twice")
    return sides[0], sides[1]


def _no_pattern(text: str, expected: str, got: str) -> ValueError:
    return ValueError(f"Conversion: {text!r} is not a pattern: expected {expected}, got {got}. See einops and einx.")


def _split(tokens: Sequence[str], between: str) -> Iterator[Sequence[str]]:
    start = 0
    for index, token in enumerate(tokens):
        if token == between:
            yield tokens[start:index]
            start = index + 1
    yield tokens[start:]


def _parse_side(text: str, tokens: Sequence[str]) -> list[Dims]:
    tensors: list[Dims] = []
    for part in _split(tokens, ","):
        pending = list(part)
        tensors.append(_parse_product(text, pending).factors)
        if pending:
            raise _no_pattern(text, "sums in parentheses" if pending[0] == "+" else "an axis", repr(pending[0]))
    return tensors


def _parse_product(text: str, pending: list[str]) -> Product:
    """Take factors off the beginning of a list of tokens, up to what is none."""
    factors: list[Expression] = []
    while pending and pending[0] not in ("+", ")"):
        token = pending.pop(0)
        if token == "(":
            terms = [_parse_product(text, pending)]
            while pending and pending[0] == "+":
                del pending[0]
                terms.append(_parse_product(text, pending))
            if not pending:
                raise _no_pattern(text, "a ) for each (", "fewer")
            if len(terms) > 1 and not all(term.factors for term in terms):
                raise _no_pattern(text, "summands", "an empty one")
            del pending[0]
            factors.append(terms[0] if len(terms) == 1 else Sum(tuple(terms)))
        elif token == "1":
            factors.append(Product(()))
        elif token.isidentifier():
            factors.append(token)
        else:
            raise _no_pattern(text, "names of axes, 1, +, parentheses, commas and one ->", repr(token))
    return Product(tuple(factors))


def _strands(expression: Expression, sizes: Mapping[str, int]) -> tuple[list[Strand], int]:
    """Return the blocks of one dim, and its size."""
    if isinstance(expression, str):
        return [Strand(0, ((expression, 1),))], sizes[expression]
    found: list[Strand] = []
    if isinstance(expression, Sum):
        begin = 0
        for term in expression.terms:
            inner, size = _strands(term, sizes)
            found += [Strand(begin + offset, steps) for offset, steps in inner]
            begin += size
        return found, begin
    found, width = [Strand(0, ())], 1
    for factor in reversed(expression.factors):  # each is as wide as what lies behind it
        inner, size = _strands(factor, sizes)
        found = [
            Strand(one.offset * width + other.offset, (*((n, step * width) for n, step in one.steps), *other.steps))
            for one, other in product(inner, found)
        ]
        width *= size
    return found, width


def _block_names(tensors: Sequence[Dims]) -> list[list[str]]:
    return [
        [name for strand in strands for name, _ in strand.steps]
        for dims in tensors
        for strands in product(*[_strands(dim, defaultdict(lambda: 1))[0] for dim in dims])
    ]


def block_axes(tensors: Sequence[Dims]) -> list[list[frozenset[str]]]:
    """Return the axes of each block of each tensor."""
    return [[frozenset(names) for names in _block_names([dims])] for dims in tensors]


def written_out(dims: Dims, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], list[Sequence[Strand]]]:
    """Return the shape of a tensor, and its blocks: for each the axes that lie in each dim."""
    rows = [_strands(dim, sizes) for dim in dims]
    return tuple([size for _, size in rows]), list(product(*[strands for strands, _ in rows]))


def equations(dims: Dims, shape: Sequence[int], label: str) -> list[Equation]:
    """Return what a shape says of the axes of a tensor with as many dims."""
    return [
        Equation(
            [[name for name, _ in strand.steps] for strand in _strands(dim, defaultdict(lambda: 1))[0]], size, label
        )
        for dim, size in zip(dims, shape, strict=True)
    ]


def solve(given: Sequence[Equation], sizes: Mapping[str, int]) -> tuple[dict[str, int], list[Equation]]:
    """Return the sizes of axes that follow from equations and known sizes, and the equations that do not hold then."""
    known, wrong, pending = dict(sizes), list[Equation](), list(given)
    while pending:
        later: list[Equation] = []
        for equation in pending:
            unknown = {name for term in equation.terms for name in term if name not in known}
            if len(unknown) > 1:
                later.append(equation)
                continue
            # All terms are known up to one axis: so many times its size, and so many elements without it.
            (axis,) = unknown or {""}
            times = rest = 0
            for term in equation.terms:
                size = prod(known[name] for name in term if name != axis)
                times, rest = (times + size, rest) if axis in term else (times, rest + size)
            left = equation.size - rest
            if not unknown and left == 0:
                continue
            if unknown and times and left >= 0 and left % times == 0:
                known[axis] = left // times
            elif unknown and not times and left == 0:
                later.append(equation)  # no elements: the axis may be of any size
            else:
                wrong.append(equation)
        if len(later) == len(pending):
            break
        pending = later
    return known, wrong


def shown_dims(dims: Dims) -> str:
    """Return the dims of a tensor in the notation."""
    return " ".join(map(_shown, dims)) or "()"


def _shown(expression: Expression) -> str:
    if isinstance(expression, str):
        return expression
    if isinstance(expression, Sum):
        return f"({' + '.join(shown_dims(term.factors) for term in expression.terms)})"
    return f"({' '.join(map(_shown, expression.factors))})" if expression.factors else "1"
