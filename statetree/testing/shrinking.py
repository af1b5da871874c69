"""Smaller plans: what a counter-example becomes before it is shown.

Hypothesis makes smaller only what it draws, and to draw trees anew takes seconds for each law.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from statetree.testing.dtensor_layout import Layout
from statetree.testing.plans import MAPPINGS, PAIRS, Again, Node, TensorPlan, Value, ViewPlan, children_of, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: How many smaller plans are tried for one counter-example.
ATTEMPTS = 300
_KEYS = ("a", "b", "c", "d", "e", "f")


def smallest(plan: Any, fails: Callable[[Any], bool]) -> Any:
    """Return a plan that fails as the given one does, and of which nothing can be left out, as far as was tried."""
    tried = {repr(plan)}
    left, is_container = ATTEMPTS, isinstance(plan, Node)  # many transforms take containers alone
    progress = True
    while progress:
        progress = False
        for smaller in sorted(_smaller(plan), key=size):
            if size(smaller) >= size(plan) or repr(smaller) in tried or isinstance(smaller, Node) < is_container:
                continue
            if not left:
                return plan
            tried.add(repr(smaller))
            left -= 1
            if fails(smaller):
                plan, progress = smaller, True
                break
    return plan


def _smaller(plan: Any) -> Iterator[Any]:
    """Yield plans that are one step simpler: in themselves, or in one of their children."""
    replace = dataclasses.replace
    if isinstance(plan, Node):
        yield Value(None)
        yield from children_of(plan)
        yield replace(plan, attributes=())
        usual = "dict" if plan.kind in MAPPINGS else "list"
        yield replace(plan, kind=usual, attributes=())
        yield replace(plan, keys=_KEYS[: len(plan.keys)])
        for at in range(len(plan.children)):
            rest = plan.children[:at] + plan.children[at + 1 :]
            if plan.kind not in PAIRS:
                yield replace(plan, children=rest, keys=plan.keys[:at] + plan.keys[at + 1 :])
            for child in _smaller(plan.children[at]):
                yield replace(plan, children=(*plan.children[:at], child, *plan.children[at + 1 :]))
        for at, (name, held) in enumerate(plan.attributes):
            yield replace(plan, attributes=(*plan.attributes[:at], *plan.attributes[at + 1 :]))
            for child in _smaller(held):
                yield replace(plan, attributes=(*plan.attributes[:at], (name, child), *plan.attributes[at + 1 :]))
    elif isinstance(plan, (TensorPlan, ViewPlan, Again)):
        yield Value(None)
        for field in dataclasses.fields(plan):
            yield replace(plan, **{field.name: field.default})
        if isinstance(plan, TensorPlan):
            for at in range(len(plan.shape)):
                yield replace(plan, shape=plan.shape[:at] + plan.shape[at + 1 :])
                yield replace(plan, shape=(*plan.shape[:at], 2, *plan.shape[at + 1 :]))
    elif isinstance(plan, Layout):
        yield Value(None)
        yield replace(plan, geometry="contiguous")
        yield replace(plan, shape=tuple(min(side, 3) for side in plan.shape))
    elif isinstance(plan, Value):
        yield from (Value(None), Value(1))
