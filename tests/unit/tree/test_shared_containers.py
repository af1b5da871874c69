"""Trees in which a container lies in several places, taken apart once and shown everywhere."""

from collections import OrderedDict, namedtuple

import pytest

import statetree as st
from statetree.tree.flatten import flatten_for_copy, unshared

Pair = namedtuple("Pair", ["a", "b"])

inner = {"w": 1, "v": [2, 3]}
empty = {}
nested = {"one": inner, "two": [inner, 4]}

TREES = {
    "none": {"a": inner, "b": 5},
    "twice": {"a": inner, "b": inner},
    "inside": {"a": inner["v"], "b": inner, "c": 6},
    "first": [inner, 7, inner, inner],
    "nested": {"x": nested, "y": nested, "z": inner},
    "empty": [empty, 8, empty, {"e": empty}],
    "only": [inner, inner],
    "named": Pair(OrderedDict(a=inner), Pair(inner, nested)),
    "leaf": 9,
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_each_place_is_as_flatten_has_it(tree):
    leaves, spec = flatten_for_copy(tree, lambda _: False, shared=True)
    whole, places = unshared(spec, leaves, 1000)
    expected_leaves, expected = st.flatten(tree)
    assert [leaves[place] for place in places] == expected_leaves
    assert whole == expected
    assert whole.paths() == expected.paths()
    assert st.unflatten(whole, expected_leaves) == tree


def test_too_many_places_are_not_listed():
    leaves, spec = flatten_for_copy([inner] * 10, lambda _: False, shared=True)
    assert unshared(spec, leaves, 20) is None
