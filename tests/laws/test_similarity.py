"""The laws of ``similarity``: total, symmetric, reflexive, and if it is true then ``copy_into`` succeeds."""

from hypothesis import given
from hypothesis import strategies as hyp

import statetree as st
from statetree.testing import laws as of_transforms
from tests.judge import tree_differences
from tests.laws.drawn import near
from tests.laws.table import Table
from tests.trees.plans import build, tied_plans, tree_plans

plans = hyp.one_of(tree_plans(max_leaves=8), tied_plans(max_leaves=8))
pairs = hyp.one_of(near(), hyp.tuples(plans, plans))

laws = Table()


@laws
def pure(pair, values):
    of_transforms.pure(lambda trees: st.similarity(*trees, values=values), lambda: list(map(build, pair)))


@laws
def symmetric(pair, values):
    a, b = map(build, pair)
    there, back = st.similarity(a, b, values=values), st.similarity(b, a, values=values)
    assert bool(there) == bool(back)
    assert there.count == back.count
    assert {(d.path, d.kind) for d in there.differences} == {(d.path, d.kind) for d in back.differences}


@laws
def reflexive(pair):
    plan, _ = pair
    tree = build(plan)
    assert st.similarity(tree, tree, values=True)
    assert st.similarity(tree, build(plan), values=True)


@laws
def copies_are_similar(pair):
    tree = build(pair[0])
    assert st.similarity(tree, st.offload(tree), values=True)
    assert st.similarity(st.offload(tree), tree, values=False)


@laws
def what_is_similar_in_values_is_similar(pair):
    a, b = map(build, pair)
    if st.similarity(a, b, values=True):
        assert st.similarity(a, b, values=False)


@laws
def where_it_is_true_copy_into_succeeds(pair):
    a, b = map(build, pair)
    for source, target in ((a, b), (a, build(pair[0])), (b, build(pair[1]))):
        if not st.similarity(source, target, values=False):
            continue
        try:
            st.copy_into(source, target)
        except st.TreeMismatch as error:
            assert "overlaps itself" in str(error)


@laws
def where_copy_into_succeeds_types_aside_it_was_true(pair):
    a, b = map(build, pair)
    similar = st.similarity(a, b, values=False)
    try:
        st.copy_into(a, b)
    except st.TreeMismatch:
        return
    # copy_into takes plain values from the source, whatever the destination has, and one side's ties do it no harm.
    assert {difference.kind for difference in similar.differences} <= {"type", "ties", "parts"}


@laws
def trees_that_a_strict_judge_calls_the_same_are_similar(pair):
    a, b = map(build, pair)
    if not tree_differences(a, b):
        assert st.similarity(a, b, values=True)


@given(pair=pairs, values=hyp.booleans())
def test_of_two_trees(**drawn):
    laws.check(**drawn)
