"""The law of purity, of functions of two trees."""

import contextlib

from hypothesis import given
from hypothesis import strategies as hyp

import statetree as st
from statetree.testing.plan_strategies import tied_plans, tree_plans
from statetree.testing.plans import build
from statetree.testing.watch import Watch


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
