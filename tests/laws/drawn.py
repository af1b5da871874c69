"""What some laws need drawn: pairs of trees that differ in one place, and trees in which containers appear twice."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import strategies as hyp

from statetree.testing.plans import Node, TensorPlan, Value
from tests.trees.plans import tensor_plans

#: Where something is in a plan: the numbers of children, from the root on.
Place = tuple[int, ...]
LEAVES = hyp.one_of(tensor_plans(), hyp.builds(TensorPlan), hyp.builds(Value, hyp.integers()))


def _places(plan: Any, at: Place = ()) -> Iterator[Place]:
    yield at
    if isinstance(plan, Node):
        for index, child in enumerate(plan.children):
            yield from _places(child, (*at, index))


def _at(plan: Any, place: Place) -> Any:
    return _at(plan.children[place[0]], place[1:]) if place else plan


def _replaced(plan: Any, place: Place, new: Any) -> Any:
    if not place:
        return new
    index, *rest = place
    children = list(plan.children)
    children[index] = _replaced(children[index], tuple(rest), new)
    return Node(plan.kind, tuple(children), plan.keys, plan.attributes)


@hyp.composite
def near(draw: hyp.DrawFn, plans: hyp.SearchStrategy[Any]) -> tuple[Any, Any]:
    """A plan, and another one in which a leaf or a subtree is replaced, in either order.

    Two trees drawn apart seldom have more in common than their type, and two tensors seldom their shape: half of the
    tensors that replace others are only of another dtype, geometry or class.
    """
    plan = draw(plans)
    place = draw(hyp.sampled_from(list(_places(plan))))
    old, new = _at(plan, place), draw(LEAVES)
    if isinstance(old, TensorPlan) and isinstance(new, TensorPlan) and draw(hyp.booleans()):
        new = replace(new, shape=old.shape)
    other = _replaced(plan, place, new)
    return (other, plan) if draw(hyp.booleans()) else (plan, other)


def with_shared_containers(plans: hyp.SearchStrategy[Any]) -> hyp.SearchStrategy[Any]:
    """Those of some plans whose containers can stay one where they are one.

    Attributes and opaque objects share containers with nothing around them (docs/limits.md).
    """
    return plans.filter(_has_no_insides)


def _has_no_insides(plan: Any) -> bool:
    if not isinstance(plan, Node):
        return True
    return plan.kind != "Thing" and not plan.attributes and all(map(_has_no_insides, plan.children))
