"""The law of independence: what happens to a source later happens to no result, and the other way round."""

from collections import deque

from hypothesis import example, given
from hypothesis import strategies as hyp

from statetree.testing import assert_trees_equal
from statetree.testing.plan_strategies import tied_plans, tree_plans
from statetree.testing.plans import Node, Value, build, samples
from statetree.testing.walk import walk
from tests.contract.verbs import VERBS
from tests.laws.table import Table
from tests.memory import scribble
from tests.trees.optimizers import optimizer_plans

copies = hyp.sampled_from([verb for verb in VERBS if verb.fresh and verb.copies and verb.prepare is None])
fresh = hyp.sampled_from([verb for verb in VERBS if verb.fresh and verb.prepare is None])
OFFLOAD = next(verb for verb in VERBS if verb.name == "offload")
plans = hyp.one_of(tree_plans(), tied_plans(), optimizer_plans())

laws = Table()


@laws
def a_result_survives_its_source(plan, first):
    tree = build(plan)
    result = first.apply(tree)
    scribble(tree)
    assert_trees_equal(result, build(plan), storages=not first.slabs)


@given(plan=hyp.one_of(tree_plans(opaque=False), tied_plans(opaque=False)), verb=copies)
@example(plan=Node("OrderedDict", attributes=(("_metadata", Node("dict", (Value(1),), ("version",))),)), verb=OFFLOAD)
def test_a_result_survives_what_happens_to_containers(plan, verb):
    tree = build(plan)
    result = verb.apply(tree)
    for value in list(walk(tree)):
        _empty(value)
    assert_trees_equal(result, build(plan), storages=not verb.slabs)


def _empty(value):
    """Take out of a container, and off an object, what can be taken."""
    if isinstance(value, dict | list | deque):
        value.clear()
    if isinstance(value, samples.SlottedPair | samples.AttrsPair):
        value.first = value.second = None
    getattr(value, "__dict__", {}).clear()


@laws
def a_source_survives_its_result(plan, verb):
    tree = build(plan)
    scribble(verb.apply(tree))
    assert_trees_equal(tree, build(plan))


@given(plan=plans, verb=fresh, first=copies)
def test_of_one_tree(**drawn):
    laws.check(**drawn)
