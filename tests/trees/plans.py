"""Plans of trees, for tests that build a tree twice, change a part of it, or send it to ranks.

A plan is the source of a tree, as ``statetree.testing`` draws it, or what such a source is made of, by its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from statetree.testing import sources, state_trees, tied_trees
from statetree.testing.elements import DTYPES, ELEMENTS
from statetree.testing.sources import GEOMETRIES, OBJECTS, USUAL_WRAPS
from statetree.testing.strategies import shapes, sources_of


@dataclass(frozen=True)
class Value:
    """A plain value as a leaf."""

    value: Any

    def source(self) -> sources.Source:
        return sources.value(self.value)


@dataclass(frozen=True)
class Again:
    """One of some objects: wherever it is in a tree, it is the same."""

    index: int = 0

    def source(self) -> sources.Source:
        return sources.again(OBJECTS[self.index % len(OBJECTS)])


@dataclass(frozen=True)
class TensorPlan:
    """A tensor."""

    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float32
    geometry: str = "contiguous"
    wrap: str = "tensor"
    elements: str = "counted"

    def source(self) -> sources.Source:
        return sources.tensor(self.shape, self.dtype, self.geometry, self.wrap, self.elements)


@dataclass(frozen=True)
class ViewPlan:
    """A view of a storage that others share."""

    base: int = 0
    kind: str = "whole"
    start: int = 0
    stop: int = 24

    def source(self) -> sources.Source:
        return sources.view(self.base, self.kind, self.start, self.stop)


@dataclass(frozen=True)
class Node:
    """A container, or an opaque ``Thing``, of its children, their keys, and named attributes."""

    kind: str
    children: tuple[Any, ...] = ()
    keys: tuple[Any, ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()

    def source(self) -> sources.Source:
        named = {name: source_of(held) for name, held in self.attributes}
        return sources.node(self.kind, list(map(source_of, self.children)), self.keys, **named)


def source_of(plan: Any) -> sources.Source:
    """Return the source of a plan."""
    if isinstance(plan, (Value, Again, TensorPlan, ViewPlan, Node)):
        return plan.source()
    return plan if isinstance(plan, sources.Source) else sources.value(plan)


def build(plan: Any) -> Any:
    """Make the tree of a plan."""
    return plan.build() if hasattr(plan, "build") else sources.build(source_of(plan))


def tensor_plans(
    dtypes: Any = DTYPES, max_dims: int = 3, geometries: Any = GEOMETRIES, wraps: Any = USUAL_WRAPS
) -> st.SearchStrategy[Any]:
    """Plans of what ``tensors`` draws."""
    choices = map(st.sampled_from, (dtypes, geometries, wraps, ELEMENTS))
    return st.builds(TensorPlan, shapes(max_dims=max_dims), *choices)


def tree_plans(leaves: st.SearchStrategy[Any] | None = None, **options: Any) -> st.SearchStrategy[Any]:
    """Plans of what ``state_trees`` draws."""
    return sources_of(state_trees(None if leaves is None else leaves.map(source_of), **options))


def tied_plans(**options: Any) -> st.SearchStrategy[Any]:
    """Plans of what ``tied_trees`` draws."""
    return sources_of(tied_trees(**options))
