"""The union of structures: the keys of all, and where each leaf is in each of them."""

from collections import OrderedDict

import pytest

import statetree as st
from statetree.tree.union import united
from tests.trees.containers import ListWithAttributes, Point


def union(*trees):
    return united([st.flatten(tree)[1] for tree in trees])


def with_attributes(items, names):
    tree = OrderedDict(items)
    for number, name in enumerate(names):
        setattr(tree, name, {number})  # a set is a leaf
    return tree


def test_mappings_have_the_keys_of_all_in_the_order_of_their_paths():
    found = union({"x": {"b": 1, "c": 2}, "y": [3]}, {"x": {"a": 4, "b": 5}, "y": [6]})
    assert list(map(str, found.spec.paths())) == ["x.a", "x.b", "x.c", "y.0"]
    assert list(map(dict, found.leaves)) == [{1: 0}, {0: 0, 1: 1}, {0: 1}, {0: 2, 1: 2}]
    assert found.differences == []


def test_equal_keys_stay_in_their_order():
    found = union({"b": 1, "a": 2}, {"b": 3, "a": 4})
    assert list(map(str, found.spec.paths())) == ["b", "a"]


def test_attributes_keep_their_places_where_keys_differ():
    names = ["z", "b"]
    trees = with_attributes({"a": 1}, names), with_attributes({"c": 2}, names)
    found = union(*trees)
    held = [st.flatten(tree)[0] for tree in trees]
    made = found.spec.unflatten([[held[number][index] for number, index in leaf.items()] for leaf in found.leaves])
    assert made == {"a": [1], "c": [2]}
    assert vars(made) == {"z": [{0}, {0}], "b": [{1}, {1}]}


@pytest.mark.parametrize(
    ("left", "right", "path", "kind"),
    [
        ({"a": [1]}, {"a": 1}, "a", "structure"),
        ({"a": [1]}, {"a": (1,)}, "a", "structure"),
        ({"a": [1]}, {"a": [1, 2]}, "a", "length"),
        ({"a": Point(1, 2)}, {"a": [1, 2]}, "a", "structure"),
        (with_attributes({"a": 1}, ["z"]), with_attributes({"b": 1}, []), "", "structure"),
        (with_attributes({"a": 1}, ["z"]), with_attributes({"b": 1}, ["y"]), "", "structure"),
        (ListWithAttributes([1]), [1, 2], "", "length"),
    ],
)
def test_what_differs_in_more_than_keys_is_told(left, right, path, kind):
    assert [(str(found.path), found.kind) for found in union(left, right).differences] == [(path, kind)]
    assert [(str(found.path), found.kind) for found in union(right, left).differences] == [(path, kind)]


def test_deep_structures():
    tree, other = 1, 2
    for _ in range(900):
        tree, other = {"a": tree, "b": 0}, {"a": other, "c": 0}
    found = union(tree, other)
    assert len(found.leaves) == 1801
    assert dict(found.leaves[0]) == {0: 0, 1: 0}
