"""What some laws need drawn: pairs of trees that differ in one place, and trees in which containers appear twice."""

from typing import Any

from hypothesis import strategies as hyp

from statetree.testing import sources, state_trees, tied_trees
from statetree.testing.strategies import sources_of
from tests.trees.plans import TensorPlan, Value, source_of, tensor_plans

LEAVES = hyp.one_of(tensor_plans(), hyp.builds(TensorPlan), hyp.builds(Value, hyp.integers()))
#: What stands where two trees differ.
HERE = "<here>"


@hyp.composite
def near(draw: hyp.DrawFn, max_leaves: int = 8) -> tuple[Any, Any]:
    """Two plans of trees, one of which has another leaf or subtree in one place.

    Two trees drawn apart seldom have more in common than their type, and two tensors seldom their shape: half of the
    tensors that replace others are only of another dtype, geometry or class.
    """
    tree = draw(sources_of(draw(hyp.sampled_from([state_trees, tied_trees]))(max_leaves=max_leaves)))
    one, other = draw(LEAVES), draw(LEAVES)
    if isinstance(one, TensorPlan) and isinstance(other, TensorPlan) and draw(hyp.booleans()):
        other = TensorPlan(one.shape, other.dtype, other.geometry, other.wrap, other.elements)
    subtree = draw(sources_of(state_trees(max_leaves=2)))
    shared = sources.node("list", draw(hyp.permutations([tree, HERE]))) if draw(hyp.booleans()) else HERE
    for kind in draw(hyp.lists(hyp.sampled_from(["list", "OrderedDict", "Pair"]), max_size=2)):
        shared = sources.node(kind, [shared, "0"][: 2 if kind == "Pair" else 1], "a" if kind == "OrderedDict" else ())
    pair = [source_of(one), draw(hyp.sampled_from([source_of(other), subtree]))]
    first, second = [sources.Source(shared.replace(HERE, each)) for each in draw(hyp.permutations(pair))]
    return first, second


def with_shared_containers(plans: hyp.SearchStrategy[Any]) -> hyp.SearchStrategy[Any]:
    """Those of some plans whose containers can stay one where they are one.

    Attributes and opaque objects share containers with nothing around them (docs/limits.md).
    """
    return plans.filter(lambda plan: "Thing(" not in plan and "having(" not in plan)
