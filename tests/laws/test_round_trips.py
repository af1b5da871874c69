"""The law of the tree engine: what is taken apart and put together again is the same."""

import operator
import pickle

import torch
from hypothesis import example, given
from hypothesis import strategies as hyp

import statetree as st
from statetree.matching import matched
from tests.oracle import assert_independent, assert_same, differences
from tests.repack import repacked
from tests.strategies import Node, TensorPlan, Value, ViewPlan, made, tied_plans, tree_plans

any_plan = given(plan=hyp.one_of(tree_plans(), tied_plans()))


@any_plan
def test_unflatten_inverts_flatten(plan):
    tree = made(plan)
    leaves, spec = st.flatten(tree)
    assert len(leaves) == spec.num_leaves
    assert_same(st.unflatten(spec, leaves), tree)
    assert_same(tree, made(plan), containers=True)  # nothing was changed


@given(plan=hyp.one_of(tree_plans(), tied_plans()), random=hyp.randoms(use_true_random=False))
def test_from_flat_inverts_to_flat_in_any_order(plan, random):
    tree = made(plan)
    flat, spec = st.to_flat(tree)
    assert len(flat) == spec.num_leaves
    items = list(flat.items())
    random.shuffle(items)
    assert_same(st.from_flat(dict(items), spec), tree)


class Box:
    """Stands for a leaf. (A number would be taken into the structure where it is an attribute of a container.)"""

    def __init__(self, *content):
        self.content = content


@any_plan
def test_a_tree_is_made_of_its_leaves_in_order(plan):
    leaves, spec = st.flatten(made(plan))
    boxes = [Box(leaf) for leaf in leaves]
    again, same = st.flatten(st.unflatten(spec, boxes))
    assert all(map(operator.is_, boxes, again))
    assert len(again) == len(boxes)
    assert same == spec
    assert same.paths() == spec.paths()


@any_plan
def test_mapping_twice_is_mapping_once(plan):
    tree = made(plan)
    twice = st.map_leaves(lambda box: Box(2, *box.content), st.map_leaves(lambda leaf: Box(id(leaf)), tree))
    assert_same(twice, st.map_leaves(lambda leaf: Box(2, id(leaf)), tree))


@any_plan
def test_what_was_mapped_matches_what_it_was_mapped_from(plan):
    tree = made(plan)
    boxed = st.map_leaves(Box, tree)
    assert_same(st.map_leaves(lambda leaf, box: box.content[0], tree, boxed), tree)


@any_plan
def test_leaf_types_invert_themselves(plan):
    tree = made(plan)
    again = repacked(tree)
    assert_same(again, tree)
    assert_independent(tree, again, containers=False)
    assert_same(tree, made(plan), containers=True)


@any_plan
def test_specs_are_carried_by_pickle(plan):
    tree = made(plan)
    leaves, spec = st.flatten(tree)
    loaded = pickle.loads(pickle.dumps(spec))
    assert loaded == spec
    assert hash(loaded) == hash(spec)
    assert_same(st.unflatten(loaded, leaves), tree)


@given(one=tree_plans(max_leaves=4), other=tree_plans(max_leaves=4))
@example(one=Node("dict", (Value(0),), (True,)), other=Node("dict", (Value(0),), (1,)))
@example(one=Node("dict", (Value(0),), (0.0,)), other=Node("dict", (Value(0),), (-0.0,)))
@example(
    one=Node("OrderedDict", attributes=(("_metadata", Value(1)),)),
    other=Node("OrderedDict", attributes=(("_metadata", Value(True)),)),
)
def test_specs_are_equal_exactly_if_they_rebuild_the_same(one, other):
    first, second = st.flatten(made(one))[1], st.flatten(made(other))[1]
    same = first.num_leaves == second.num_leaves and not differences(
        st.unflatten(first, range(first.num_leaves)), st.unflatten(second, range(second.num_leaves))
    )
    assert (first == second) == same
    assert first != second or hash(first) == hash(second)


@any_plan
def test_a_plan_gives_one_spec(plan):
    one, other = st.flatten(made(plan))[1], st.flatten(made(plan))[1]
    assert one == other
    assert hash(one) == hash(other)
    assert one.flat_keys() == other.flat_keys()


@given(one=tree_plans(max_leaves=5), other=tree_plans(max_leaves=5))
def test_matching_is_symmetric(one, other):
    (left_leaves, left), (right_leaves, right) = st.flatten(made(one)), st.flatten(made(other))
    there, differ = matched(left, left_leaves, right, right_leaves)
    back, differ_back = matched(right, right_leaves, left, left_leaves)
    assert sorted((str(found.path), found.kind) for found in differ) == sorted(
        (str(found.path), found.kind) for found in differ_back
    )
    if not differ:
        there = list(range(left.num_leaves)) if there is None else there
        back = list(range(left.num_leaves)) if back is None else back
        assert [back[index] for index in there] == list(range(left.num_leaves))


def reordered(plan, random):
    """Return a plan of the same tree with the items of its mappings in another order."""
    if not isinstance(plan, Node):
        return plan
    children = [reordered(child, random) for child in plan.children]
    keys = list(plan.keys)
    if keys and plan.kind in {"dict", "OrderedDict", "defaultdict", "Counter", "Mapping"}:
        items = list(zip(keys, children, strict=True))
        random.shuffle(items)
        keys, children = [key for key, _ in items], [child for _, child in items]
    attributes = tuple((name, reordered(child, random)) for name, child in plan.attributes)
    return Node(plan.kind, tuple(children), tuple(keys), attributes)


@given(plan=tree_plans(opaque=False), random=hyp.randoms(use_true_random=False))
def test_sorted_paths_do_not_depend_on_the_order_of_mappings(plan, random):
    one, other = st.paths(made(plan)), st.paths(made(reordered(plan, random)))
    assert sorted(map(st.Path.sort_key, one)) == sorted(map(st.Path.sort_key, other))
    ordered = sorted(one, key=st.Path.sort_key)
    assert ordered == sorted(other, key=st.Path.sort_key)


@given(plan=tree_plans(opaque=False), random=hyp.randoms(use_true_random=False))
def test_trees_match_whatever_the_order_of_mappings(plan, random):
    tree, other = made(plan), made(reordered(plan, random))
    paths = st.map_with_path(lambda path, leaf: st.Path(path), tree)
    assert paths is not None
    (leaves, spec), (others, other_spec) = st.flatten(tree), st.flatten(other)
    order, found = matched(spec, leaves, other_spec, others)
    assert found == []
    other_paths = other_spec.paths()
    for index, path in zip(range(len(leaves)) if order is None else order, spec.paths(), strict=True):
        assert other_paths[index] == path


@given(plan=tied_plans())
@example(plan=Node("list", (ViewPlan(kind="storage"), ViewPlan(kind="slice", start=3, stop=9))))
@example(plan=Node("list", (ViewPlan(kind="complex"), ViewPlan(kind="bytes"), ViewPlan(kind="detached"))))
@example(plan=Node("Thing", (ViewPlan(kind="parameter"), ViewPlan(kind="whole"))))
@example(plan=Node("list", (TensorPlan(geometry="meta", wrap="attribute"), ViewPlan(kind="rows", start=24))))
def test_ties_are_kept_by_leaf_types(plan):
    tree = made(plan)
    assert_same(repacked(tree), tree)
    assert torch.is_grad_enabled()
