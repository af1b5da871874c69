"""The law of purity: no transform changes anything about its input."""

import contextlib

from hypothesis import given
from hypothesis import strategies as hyp

import statetree as st
from statetree.testing.plan_strategies import tied_plans, tree_plans
from statetree.testing.plans import build
from statetree.testing.watch import Watch
from tests.contract.verbs import VERBS
from tests.trees.optimizers import optimizer_plans

plans = hyp.one_of(tree_plans(), tied_plans(), optimizer_plans())


@given(plan=plans, verb=hyp.sampled_from(VERBS))
def test_no_transform_changes_its_input(plan, verb):
    tree = build(plan)
    watch = Watch(tree)
    try:
        verb.ready(tree)()
    except st.TreeMismatch as error:  # a refusal is pure, too
        assert verb.prepare is not None, error
        assert {difference.kind for difference in error.differences} <= {"overlap", "writability"}, error
    watch.check()


@given(one=tree_plans(max_leaves=6), other=tree_plans(max_leaves=6), values=hyp.booleans())
def test_a_comparison_changes_neither_side(one, other, values):
    a, b = build(one), build(other)
    watches = Watch(a), Watch(b)
    st.similarity(a, b, values=values)
    for watch in watches:
        watch.check()


@given(plan=tied_plans())
def test_copying_changes_nothing_of_the_source(plan):
    source, target = build(plan), build(plan)
    watch = Watch(source)
    with contextlib.suppress(st.TreeMismatch):
        st.copy_into(source, target)
    watch.check()
