"""The strategy of conversions: rules with two states that they take to each other, made by plain torch.

Blocks of elements are drawn first. Each side of a rule is then a way to lay them out: axes in any order in any dims,
dims of one element, blocks one after the other in a dim, or an axis along the leaves.
"""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from hypothesis import note
from hypothesis import strategies as st

from statetree.transforms.conversions.rule_set import Conversion

if TYPE_CHECKING:
    from collections.abc import Sequence


#: Among the axes of a tensor: where its blocks lie one after the other.
_OWN = "+"


class DrawnConversion(NamedTuple):
    """A conversion with what it takes to what.

    Attributes:
        rules: The rules of the conversion.
        sizes: The sizes of axes.
        left: A state.
        right: What the conversion makes of it.
        patterns: The pattern of each rule that has one, with axes along leaves as first dims, the tensors of both sides
            in order, stacked along these, and the sizes.
    """

    rules: list[tuple[Any, ...]]
    sizes: dict[str, int]
    left: dict[str, Any]
    right: dict[str, Any]
    patterns: list[tuple[str, list[torch.Tensor], list[torch.Tensor], dict[str, int]]]

    @property
    def conversion(self) -> Conversion:
        """The conversion."""
        return Conversion(self.rules, sizes=self.sizes)


@st.composite
def conversions(draw: st.DrawFn, *, max_rules: int = 3) -> DrawnConversion:
    """Conversions with random factorizations, sums, permutations, captures and tied names, and states for them.

    Args:
        draw: Given by hypothesis.
        max_rules: How many rules a conversion has at most.
    """
    found = DrawnConversion([], {}, {}, {}, [])
    for number in range(draw(st.integers(1, max_rules))):
        kind = draw(st.sampled_from(["pattern", "pattern", "pattern", "names", "tied"]))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        layers = draw(st.integers(1, 2))
        if kind == "pattern":
            _Pattern(draw, f"r{number}", dtype, layers).add_to(found)
            continue
        names = [f"b{number}.{{i}}.x", f"t{number}.{{i}}.y"][: 2 if kind == "tied" else 1]
        found.rules.append((f"a{number}.{{i}}.w", names if kind == "tied" else names[0]))
        for layer in range(layers):
            leaf = _elements((2, 3), dtype, 100 * number + 10 * layer)
            found.left[f"a{number}.{layer}.w"] = leaf
            found.right.update({name.format(i=layer): leaf for name in names})
    note(f"{found.rules}, sizes={found.sizes}")
    return found


def _elements(shape: Sequence[int], dtype: torch.dtype, first: int) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    bits = torch.arange(first, first + count).to({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    return bits.view(shape).view(dtype)  # of floats these are subnormals, which arithmetic may lose


class _Pattern:
    """A rule with a pattern, and what it does to a state.

    A tensor has some of the blocks, and its dims: lists of axes. One of these is ``_OWN``, along which its blocks lie
    one after the other, each with its own axes. The first dim is the axis along the leaves, where there is one.
    """

    def __init__(self, draw: st.DrawFn, name: str, dtype: torch.dtype, layers: int) -> None:
        self._draw = draw
        self._common = [f"{name}{letter}" for letter in "abc"[: draw(st.integers(1, 3))]]
        parts = draw(st.lists(st.sampled_from([(), ("x",), ("y",), ("x", "y")]), min_size=1, max_size=3))
        self._own = [[f"{name}{letter}" for letter in part] for part in parts]
        along = [draw(st.sampled_from([None, None, *self._common])) for _ in range(2)]
        if along[0] == along[1]:
            along[0] = None
        self._sizes = {
            axis: draw(st.sampled_from([1, 2, 3] if axis in along else [1, 2, 3, 1, 2, 3, 0]))  # there are leaves
            for axis in (*self._common, *sorted({*chain.from_iterable(self._own)}))
        }
        self._name, self._dtype, self._layers, self._along = name, dtype, layers, along
        self._sides = list(map(self._side, along))

    def add_to(self, found: DrawnConversion) -> None:
        """Add the rule to a conversion, and to its states what the rule takes to each other."""
        stacked = [list(map(self._text, side)) for side in self._sides]
        texts, names = [], []
        for letter, axis, own in zip("lr", self._along, stacked, strict=True):
            texts.append(", ".join(text.removeprefix(f"{axis} ") for text in own))
            names.append([f"{self._name}{letter}{n}.{{i}}" + (f".{{{axis}}}" if axis else "") for n in range(len(own))])
        found.rules.append((*(own[0] if len(own) == 1 else own for own in names), " -> ".join(texts)))
        found.sizes.update(self._sizes)
        for layer in range(self._layers):
            shapes = [[self._sizes[axis] for axis in (*self._common, *own)] for own in self._own]
            blocks = [_elements(shape, self._dtype, 1000 * layer + 100 * n) for n, shape in enumerate(shapes)]
            left, right = ([self._laid_out(*tensor, blocks) for tensor in side] for side in self._sides)
            found.patterns.append((" -> ".join(map(", ".join, stacked)), left, right, self._sizes))
            whole = zip((found.left, found.right), self._along, names, (left, right), strict=True)
            for state, axis, paths, tensors in whole:
                for path, tensor in zip(paths, tensors, strict=True):
                    leaves = [({}, tensor)] if axis is None else [({axis: n}, leaf) for n, leaf in enumerate(tensor)]
                    state.update({path.format(i=layer, **index): leaf.clone() for index, leaf in leaves})

    def _side(self, along: str | None) -> list[tuple[list[int], list[list[str]]]]:
        """Draw the tensors of a side."""
        groups = [[0]]
        for number in range(1, len(self._own)):
            groups = [*groups[:-1], [*groups[-1], number]] if self._draw(st.booleans()) else [*groups, [number]]
        first = [] if along is None else [[along]]
        axes = [_OWN, *(axis for axis in self._common if axis != along)]
        return [(blocks, first + self._dims(self._draw(st.permutations(axes)))) for blocks in groups]

    def _dims(self, axes: Sequence[str]) -> list[list[str]]:
        """Put axes into dims, some of which have none."""
        dims: list[list[str]] = []
        for axis in axes:
            shares: bool = self._draw(st.booleans())
            if dims and shares:
                dims[-1].append(axis)
            else:
                dims.append([axis])
        for _ in range(self._draw(st.sampled_from([0, 0, 0, 1, 2]))):
            dims.insert(self._draw(st.integers(0, len(dims))), [])
        return dims

    def _text(self, tensor: tuple[list[int], list[list[str]]]) -> str:
        blocks, dims = tensor
        own = _grouped([_grouped(self._own[number]) for number in blocks], " + ")
        return " ".join(_grouped([own if axis == _OWN else axis for axis in dim]) for dim in dims)

    def _laid_out(self, numbers: list[int], dims: list[list[str]], blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        order = list(chain.from_iterable(dims))
        parts = []
        for number in numbers:
            places = [self._own[number] if axis == _OWN else [axis] for axis in order]
            axes = [*self._common, *self._own[number]]
            block = blocks[number].permute([axes.index(axis) for axis in chain.from_iterable(places)])
            parts.append(block.reshape([prod(self._sizes[axis] for axis in place) for place in places]))
        whole = torch.cat(parts, dim=order.index(_OWN))
        sizes = dict(zip(order, whole.shape, strict=True))
        return whole.reshape([prod(sizes[axis] for axis in dim) for dim in dims])


def _grouped(texts: Sequence[str], between: str = " ") -> str:
    """Write what stands in one place of a pattern."""
    return f"({between.join(texts)})" if len(texts) > 1 else texts[0] if texts else "1"
