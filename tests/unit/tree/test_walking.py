"""``TreeSpec``'s own way about: its paths, its children, every place in it, and how it prints."""

import itertools
import pickle
import re
from collections import OrderedDict, deque

import pytest
import torch

import statetree as st
from statetree.tree.spec import TreeSpec, Visit
from statetree.tree.traversal import Frozen, freeze
from tests.judge import assert_trees_equal
from tests.trees import TREES
from tests.trees.containers import DictWithAttributes, ListWithAttributes, Point
from tests.trees.fields import Registered

every_tree = pytest.mark.parametrize("tree", TREES, ids=str)


def spec_of(tree):
    return st.flatten(tree)[1]


# Unflatten


@every_tree
def test_a_spec_unflattens_as_the_function_does(tree):
    leaves, spec = st.flatten(tree.make())
    assert_trees_equal(spec.unflatten(leaves), st.unflatten(spec, leaves))
    assert_trees_equal(spec.unflatten(iter(leaves)), st.unflatten(spec, leaves))


def test_a_spec_refuses_a_wrong_number_of_leaves():
    with pytest.raises(st.TreeMismatch, match=r"unflatten: the number of leaves does not fit .*: expected 2, got 3"):
        spec_of([1, 2]).unflatten([1, 2, 3])


# Children


@every_tree
def test_children_are_the_structures_of_the_roots_children(tree):
    made = tree.make()
    inner = st.flatten(made, is_leaf=lambda value: value is not made)[0]
    children = spec_of(made).children()
    if spec_of(made).nodes:
        assert children == [spec_of(child) for child in inner]
    else:
        assert children == []


def test_children_of_a_leaf_and_of_an_empty_container():
    assert spec_of(1).children() == []
    assert spec_of([]).children() == []
    assert spec_of([[], 1]).children() == [spec_of([]), spec_of(1)]


@pytest.mark.parametrize("shape", list(itertools.product(range(3), repeat=3)), ids=str)
def test_children_with_leaves_before_between_and_behind_them(shape):
    before, between, behind = (list(range(count)) for count in shape)
    tree = [*before, [*before, {"x": [1]}, *behind], *between, (), [[2]], *behind]
    children = spec_of(tree).children()
    assert children == list(map(spec_of, tree))
    leaves = st.flatten(tree)[0]
    for child, part in zip(children, tree, strict=True):
        own, leaves = leaves[: child.num_leaves], leaves[child.num_leaves :]
        assert child.unflatten(own) == part
    assert not leaves


def test_children_of_children():
    spec = spec_of({"a": [1, {"b": (2, [3])}], "c": 4})
    (_, inner), last = spec.children()[0].children(), spec.children()[1]
    assert str(inner.paths()[1]) == "b.1.0"
    assert last == spec_of(0)
    assert list(map(len, spec.children())) == [3, 1]


# Walk


@every_tree
def test_a_walk_comes_by_every_place_once(tree):
    spec = spec_of(tree.make())
    visits = list(spec.walk())
    leaves = [visit for visit in visits if visit.cls is None]
    assert [visit.leaf for visit in leaves] == list(range(spec.num_leaves))
    assert [visit.path for visit in leaves] == spec.paths()
    assert all(visit.keys == () for visit in leaves)
    nodes = [visit for visit in visits if visit.cls is not None]
    assert len(nodes) == len(spec.nodes)
    assert all(visit.leaf == -1 for visit in nodes)
    assert visits[0].path == st.Path()


@every_tree
def test_a_walk_comes_by_parents_before_their_children(tree):
    waiting = [st.Path()]
    for visit in spec_of(tree.make()).walk():
        assert visit.path == waiting.pop()
        waiting += [st.Path((*visit.path, key)) for key in reversed(visit.keys)]
    assert not waiting


def test_a_walk_says_what_is_where():
    spec = spec_of({"a": [5, ()], "p": Point(6, 7)})
    assert list(spec.walk()) == [
        Visit(st.Path(), dict, ("a", "p"), -1),
        Visit(st.Path(("a",)), list, (0, 1), -1),
        Visit(st.Path(("a", 0)), None, (), 0),
        Visit(st.Path(("a", 1)), tuple, (), -1),
        Visit(st.Path(("p",)), Point, ("x", "y"), -1),
        Visit(st.Path(("p", "x")), None, (), 1),
        Visit(st.Path(("p", "y")), None, (), 2),
    ]
    assert list(spec_of(5).walk()) == [Visit(st.Path(), None, (), 0)]


# Print


def test_a_spec_prints_as_a_tree():
    tree = OrderedDict([("w", 1), ("0", [2, ()]), (0, None)])
    tree.mean = torch.ones(1)
    assert str(spec_of({"model": tree, "steps": deque([1])})).split("\n") == [
        "dict of 2",
        "  model: OrderedDict of 4",
        "    w: *",
        "    '0': list of 2",
        "      0: *",
        "      1: tuple of 0",
        "    0: *",
        "    mean: *",
        "  steps: deque of 1",
        "    0: *",
    ]
    assert str(spec_of(1)) == "*"


def test_a_long_one_is_cut():
    lines = str(spec_of(list(range(1000)))).split("\n")
    assert len(lines) == 201
    assert lines[-2:] == ["  198: *", "…"]
    whole = str(spec_of(list(range(199)))).split("\n")
    assert (len(whole), whole[-1]) == (200, "  198: *")


@every_tree
def test_every_spec_prints(tree):
    spec = spec_of(tree.make())
    assert len(str(spec).split("\n")) == min(spec.num_leaves + len(spec.nodes), 201)


# Attributes that are a part of the structure


@pytest.mark.parametrize(
    "value",
    [
        1,
        {"a": {"version": 1}, "b": {"version": 2}},
        OrderedDict([("", {"version": 1})]),
        [1, (2.0, {"x": None})],
        Point(1, [2]),
        deque([1, 2], 3),
        {"registered": Registered(1, [2], "note")},
    ],
    ids=lambda value: type(value).__name__,
)
def test_frozen_values_are_pickled(value):
    frozen = freeze(value)
    loaded = pickle.loads(pickle.dumps(frozen))
    assert isinstance(loaded, Frozen)
    assert_trees_equal(loaded.thaw(), frozen.thaw())
    assert st.flatten(loaded.thaw())[1] == st.flatten(value)[1]
    assert st.flatten(loaded.thaw())[0] == st.flatten(value)[0]


def test_specs_with_frozen_attributes_are_pickled():
    tree = OrderedDict(w=1)
    tree._metadata = OrderedDict([("", {"version": 1})])
    tree.nested = ListWithAttributes([1])
    tree.nested.point = Point(2, deque([3], 4))
    tree.tensor = torch.ones(1)
    leaves, spec = st.flatten({"model": tree, "more": DictWithAttributes(a=1)})
    loaded = pickle.loads(pickle.dumps(spec))
    assert loaded == spec
    assert_trees_equal(loaded.unflatten(leaves), spec.unflatten(leaves))
    assert loaded.unflatten(leaves)["model"].nested.point == Point(2, deque([3], 4))


class Gone(list):
    pass


def test_a_class_that_is_no_container_where_it_is_loaded_is_refused():
    tree = DictWithAttributes(a=1)
    tree.gone = Gone([1])
    for tree_of_it in (Gone([1]), tree):
        data = pickle.dumps(spec_of(tree_of_it))
        assert pickle.loads(data) == spec_of(tree_of_it)
    data = [pickle.dumps(spec_of(tree_of_it)) for tree_of_it in (Gone([1]), tree)]
    st.register_leaf_type(Gone, None)
    for stored in data:
        with pytest.raises(ValueError, match=re.escape("expected Gone to be a container. Register it")):
            pickle.loads(stored)


def test_a_loaded_spec_walks_and_prints_as_it_did():
    spec = spec_of({"a": [1, Point(2, {"b": 3})]})
    loaded = pickle.loads(pickle.dumps(spec))
    assert isinstance(loaded, TreeSpec)
    assert (str(loaded), list(loaded.walk()), loaded.children()) == (str(spec), list(spec.walk()), spec.children())
