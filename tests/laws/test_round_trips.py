"""The law of the tree engine: what is taken apart and put together again is the same."""

import operator
import pickle
from collections import OrderedDict

import optree
import torch
from hypothesis import example, given
from hypothesis import strategies as hyp

import statetree as st
from statetree.tree.matching import matched
from statetree.tree.spec import TreeSpec
from tests.judge import assert_trees_equal, tree_differences
from tests.laws.table import Table
from tests.repack import repacked
from tests.trees.plans import Node, TensorPlan, Value, ViewPlan, build, tied_plans, tree_plans

laws = Table()


@laws
def from_flat_inverts_to_flat_in_any_order(plan, random):
    tree = build(plan)
    flat, spec = st.to_flat(tree)
    assert len(flat) == spec.num_leaves
    items = list(flat.items())
    random.shuffle(items)
    assert_trees_equal(st.from_flat(dict(items), spec), tree)


class Box:
    """Stands for a leaf. (A number would be taken into the structure where it is an attribute of a container.)"""

    def __init__(self, *content):
        self.content = content


@laws
def a_tree_is_made_of_its_leaves_in_order(plan):
    leaves, spec = st.flatten(build(plan))
    boxes = [Box(leaf) for leaf in leaves]
    again, same = st.flatten(st.unflatten(spec, boxes))
    assert all(map(operator.is_, boxes, again))
    assert len(again) == len(boxes)
    assert same == spec
    assert same.paths() == spec.paths()


@laws
def mapping_twice_is_mapping_once(plan):
    tree = build(plan)
    twice = st.map_leaves(lambda box: Box(2, *box.content), st.map_leaves(lambda leaf: Box(id(leaf)), tree))
    assert_trees_equal(twice, st.map_leaves(lambda leaf: Box(2, id(leaf)), tree))


@laws
def what_was_mapped_matches_what_it_was_mapped_from(plan):
    tree = build(plan)
    boxed = st.map_leaves(Box, tree)
    assert_trees_equal(st.map_leaves(lambda leaf, box: box.content[0], tree, boxed), tree)


@laws
def specs_are_carried_by_pickle(plan):
    tree = build(plan)
    leaves, spec = st.flatten(tree)
    loaded = pickle.loads(pickle.dumps(spec))
    assert loaded == spec
    assert hash(loaded) == hash(spec)
    assert_trees_equal(st.unflatten(loaded, leaves), tree)


@laws
def optree_sees_the_same_tree(plan):
    leaves, spec = st.flatten(build(plan))
    if any(node[0].cls is OrderedDict and node[2][1] is not None for node in spec.nodes):
        return  # it has attributes, which optree drops
    structure = spec.to_optree()
    assert TreeSpec.from_optree(structure) == spec
    with optree.dict_insertion_ordered(True, namespace="statetree"):
        found, same = optree.tree_flatten(st.unflatten(spec, leaves), none_is_leaf=True, namespace="statetree")
    assert list(map(id, found)) == list(map(id, leaves))
    assert same == structure


@given(one=tree_plans(max_leaves=4), other=tree_plans(max_leaves=4))
@example(one=Node("dict", (Value(0),), (True,)), other=Node("dict", (Value(0),), (1,)))
@example(one=Node("dict", (Value(0),), (0.0,)), other=Node("dict", (Value(0),), (-0.0,)))
@example(
    one=Node("OrderedDict", attributes=(("_metadata", Value(1)),)),
    other=Node("OrderedDict", attributes=(("_metadata", Value(True)),)),
)
def test_specs_are_equal_exactly_if_they_rebuild_the_same(one, other):
    first, second = st.flatten(build(one))[1], st.flatten(build(other))[1]
    same = first.num_leaves == second.num_leaves and not tree_differences(
        st.unflatten(first, range(first.num_leaves)), st.unflatten(second, range(second.num_leaves))
    )
    assert (first == second) == same
    assert first != second or hash(first) == hash(second)


@laws
def a_plan_gives_one_spec(plan):
    one, other = st.flatten(build(plan))[1], st.flatten(build(plan))[1]
    assert one == other
    assert hash(one) == hash(other)
    assert one.flat_keys() == other.flat_keys()


@given(plan=hyp.one_of(tree_plans(), tied_plans()), random=hyp.randoms(use_true_random=False))
def test_of_one_tree(**drawn):
    laws.check(**drawn)


@given(one=tree_plans(max_leaves=5), other=tree_plans(max_leaves=5))
def test_matching_is_symmetric(one, other):
    (left_leaves, left), (right_leaves, right) = st.flatten(build(one)), st.flatten(build(other))
    there, differ = matched(left, left_leaves, right, right_leaves)
    back, differ_back = matched(right, right_leaves, left, left_leaves)
    assert sorted((str(found.path), found.kind) for found in differ) == sorted(
        (str(found.path), found.kind) for found in differ_back
    )
    if not differ:
        there = list(range(left.num_leaves)) if there is None else there
        back = list(range(left.num_leaves)) if back is None else back
        assert [back[index] for index in there] == list(range(left.num_leaves))


@given(plan=tied_plans())
@example(plan=Node("list", (ViewPlan(kind="storage"), ViewPlan(kind="slice", start=3, stop=9))))
@example(plan=Node("list", (ViewPlan(kind="complex"), ViewPlan(kind="bytes"), ViewPlan(kind="detached"))))
@example(plan=Node("Thing", (ViewPlan(kind="parameter"), ViewPlan(kind="whole"))))
@example(plan=Node("list", (TensorPlan(geometry="meta", wrap="attribute"), ViewPlan(kind="rows", start=24))))
def test_ties_are_kept_by_leaf_types(plan):
    tree = build(plan)
    assert_trees_equal(repacked(tree), tree)
    assert torch.is_grad_enabled()
