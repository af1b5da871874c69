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
    patterns: Sequence[tuple[str, Sequence[torch.Tensor], Sequence[torch.Tensor], dict[str, int]]]

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
    rules: list[Any] = []
    sizes: dict[str, int] = {}
    left: dict[str, Any] = {}
    right: dict[str, Any] = {}
    patterns: list[Any] = []
    for number in range(draw(st.integers(1, max_rules))):
        kind = draw(st.sampled_from(["pattern", "pattern", "pattern", "names", "tied"]))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        layers = draw(st.integers(1, 2))
        if kind == "pattern":
            drawn = _Pattern(draw, f"r{number}", dtype, layers)
            rules.append(drawn.rule)
            sizes |= drawn.sizes
            left |= drawn.states[0]
            right |= drawn.states[1]
            patterns += drawn.rows
            continue
        names = [f"b{number}.{{i}}.x", f"t{number}.{{i}}.y"] if kind == "tied" else [f"b{number}.{{i}}.x"]
        rules.append((f"a{number}.{{i}}.w", names) if kind == "tied" else (f"a{number}.{{i}}.w", names[0]))
        for layer in range(layers):
            leaf = _elements((2, 3), dtype, 100 * number + 10 * layer)
            left[f"a{number}.{layer}.w"] = leaf
            right |= {name.format(i=layer): leaf for name in names}
    note(f"{rules}, sizes={sizes}")
    return DrawnConversion(rules, sizes, left, right, patterns)


def _elements(shape: Sequence[int], dtype: torch.dtype, first: int) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    bits = torch.arange(first, first + count).to({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    return bits.view(shape).view(dtype)  # of floats these are subnormals, which arithmetic may lose


def _flat(dims: Sequence[Sequence[str]]) -> list[str]:
    return list(chain.from_iterable(dims))


class _Pattern:
    """A rule with a pattern, and what it does to a state."""

    def __init__(self, draw: st.DrawFn, name: str, dtype: torch.dtype, layers: int) -> None:
        self._draw = draw
        common = [f"{name}{letter}" for letter in "abc"[: draw(st.integers(1, 3))]]
        parts = draw(st.lists(st.sampled_from([(), ("x",), ("y",), ("x", "y")]), min_size=1, max_size=3))
        self._own = [[f"{name}{letter}" for letter in part] for part in parts]
        along = [draw(st.sampled_from([None, None, *common])) for _ in range(2)]
        if along[0] == along[1]:
            along[0] = None
        self.sizes = {
            axis: draw(st.sampled_from([1, 2, 3] if axis in along else [1, 2, 3, 1, 2, 3, 0]))  # there are leaves
            for axis in (*common, *sorted({*_flat(self._own)}))
        }
        self._common, self._along = common, along
        sides = [self._side(axis) for axis in along]
        texts = [", ".join(self._text(tensor) for tensor in side) for side in sides]
        names = [[f"{name}{'lr'[s]}{n}.{{i}}" + (f".{{{along[s]}}}" if along[s] else "") for n in range(len(side))]
                 for s, side in enumerate(sides)]  # fmt: skip
        self.rule = (*(own[0] if len(own) == 1 else own for own in names), " -> ".join(texts))
        self.states: list[dict[str, Any]] = [{}, {}]
        self.rows: list[Any] = []
        stacked = [
            ", ".join(" ".join(filter(None, (axis, self._text(t)))) for t in side)
            for side, axis in zip(sides, along, strict=True)
        ]
        for layer in range(layers):
            blocks = [self._block(own, dtype, 1000 * layer + 100 * n) for n, own in enumerate(self._own)]
            whole = [
                [self._laid_out(tensor, axis, blocks) for tensor in side]
                for side, axis in zip(sides, along, strict=True)
            ]
            self.rows.append((" -> ".join(stacked), *whole, self.sizes))
            for s, axis in enumerate(along):
                for path, tensor in zip(names[s], whole[s], strict=True):
                    if axis is None:
                        self.states[s][path.format(i=layer)] = tensor
                        continue
                    for index, leaf in enumerate(tensor.unbind()):
                        self.states[s][path.format(**{"i": layer, axis: index})] = leaf.clone()

    def _block(self, own: Sequence[str], dtype: torch.dtype, first: int) -> torch.Tensor:
        """Return a block, whose dims are the common axes and its own ones."""
        return _elements(self._shape([*self._common, *own]), dtype, first)

    def _side(self, along: str | None) -> list[Any]:
        """Draw the tensors of a side: for each its blocks, the dims before theirs, what theirs has, the dims behind."""
        axes = [axis for axis in self._common if axis != along]
        tensors = []
        groups = [[0]]
        for number in range(1, len(self._own)):
            groups = [*groups[:-1], [*groups[-1], number]] if self._draw(st.booleans()) else [*groups, [number]]
        for blocks in groups:
            order = self._draw(st.permutations(axes))
            cuts = sorted(self._draw(st.lists(st.integers(0, len(order)), min_size=2, max_size=2)))
            low = self._draw(st.integers(0, cuts[0]))
            high = self._draw(st.integers(cuts[0], len(order)))
            inside = order[low : cuts[0]], order[cuts[0] : high]
            tensors.append((blocks, self._dims(order[:low]), inside, self._dims(order[high:])))
        return tensors

    def _dims(self, axes: Sequence[str]) -> list[list[str]]:
        """Put axes into dims, some of which have none."""
        dims: list[list[str]] = []
        for axis in axes:
            shares: bool = self._draw(st.booleans())
            if dims and shares:
                dims[-1].append(axis)
            else:
                dims.append([axis])
        if self._draw(st.integers(0, 4)) == 0:
            dims.append([])
        return dims

    def _text(self, tensor: Any) -> str:
        blocks, before, (outer, inner), behind = tensor
        parts = [self._own[number] or ["1"] for number in blocks]
        middle = [f"({' '.join(part)})" if len(part) > 1 else part[0] for part in parts]
        own = f"({' + '.join(middle)})" if len(middle) > 1 else middle[0]
        dims = [*before, [*outer, own, *inner], *behind]
        return " ".join(f"({' '.join(dim)})" if len(dim) > 1 else dim[0] if dim else "1" for dim in dims)

    def _laid_out(self, tensor: Any, along: str | None, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        numbers, before, (outer, inner), behind = tensor
        lead = [along] if along else []
        parts = []
        for number in numbers:
            names = [*self._common, *self._own[number]]
            order = [*lead, *_flat(before), *outer, *self._own[number], *inner, *_flat(behind)]
            block = blocks[number].permute([names.index(axis) for axis in order])
            sizes = (*lead, *_flat(before), *outer), self._own[number], (*inner, *_flat(behind))
            shape = [self._shape(axes) for axes in sizes]
            parts.append(block.reshape(*shape[0], prod(shape[1]), *shape[2]))
        whole = torch.cat(parts, dim=len(lead) + len(_flat(before)) + len(outer))
        width = sum(prod(self._shape(self._own[number])) for number in numbers) * prod(self._shape([*outer, *inner]))
        around = [[prod(self._shape(dim)) for dim in dims] for dims in (before, behind)]
        return whole.reshape(*self._shape(lead), *around[0], width, *around[1])

    def _shape(self, axes: Sequence[str]) -> list[int]:
        return [self.sizes[axis] for axis in axes]
