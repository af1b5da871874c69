"""The law of order: what a transform does does not depend on the order in which mappings hold their items."""

import copy

from hypothesis import given
from hypothesis import strategies as hyp

import statetree as st
from statetree.tree.matching import matched
from tests.contract.verbs import VERBS
from tests.judge import assert_trees_equal
from tests.laws.table import Table
from tests.trees.plans import build, tree_plans

plans = tree_plans(opaque=False)
randoms = hyp.randoms(use_true_random=False)
copying = hyp.sampled_from([verb for verb in VERBS if verb.copies and verb.prepare is None])


laws = Table()


@laws
def sorted_paths_do_not_depend_on_the_order_of_mappings(plan, random):
    one, other = st.paths(build(plan)), st.paths(shuffled(build(plan), random))
    assert sorted(map(st.Path.sort_key, one)) == sorted(map(st.Path.sort_key, other))
    ordered = sorted(one, key=st.Path.sort_key)
    assert ordered == sorted(other, key=st.Path.sort_key)


@laws
def trees_match_whatever_the_order_of_mappings(plan, random):
    tree, other = build(plan), shuffled(build(plan), random)
    (leaves, spec), (others, other_spec) = st.flatten(tree), st.flatten(other)
    order, found = matched(spec, leaves, other_spec, others)
    assert found == []
    other_paths = other_spec.paths()
    for index, path in zip(range(len(leaves)) if order is None else order, spec.paths(), strict=True):
        assert other_paths[index] == path


@laws
def a_transform_of_a_reordered_tree_is_the_reordered_result(plan, verb, random):
    tree = build(plan)
    other = shuffled(tree, random)
    one, two = verb.apply(tree), verb.apply(other)
    assert st.similarity(one, two, values=True)
    assert_trees_equal(two, other, ties=False)


@laws
def copy_into_finds_its_keys(plan, random):
    source = build(plan)
    target = st.offload(shuffled(source, random))
    try:
        result = st.copy_into(source, target)
    except st.TreeMismatch as error:
        assert {difference.kind for difference in error.differences} <= {"overlap"}
    else:
        assert st.similarity(result, source, values=True)


@laws
def streams_come_in_one_order(plan, random):
    tree = build(plan)
    one = [(path, leaf) for path, leaf in st.stream(tree, st.offload)]
    other = [(path, leaf) for path, leaf in st.stream(shuffled(tree, random), st.offload)]
    assert [path for path, _ in one] == [path for path, _ in other]
    assert_trees_equal([leaf for _, leaf in one], [leaf for _, leaf in other], ties=False)


@given(plan=plans, verb=copying, random=randoms)
def test_of_one_tree(**drawn):
    laws.check(**drawn)


def shuffled(tree, random):
    """Return a tree of the same leaves with the items of its mappings in another order."""
    if isinstance(tree, dict):
        items = [(key, shuffled(tree[key], random)) for key in tree]
        random.shuffle(items)
        result = copy.copy(tree)  # its type, factory and attributes
        result.clear()
        for key, value in items:
            result[key] = value
        return result
    if type(tree) in (list, tuple):
        return type(tree)(shuffled(item, random) for item in tree)
    return tree
