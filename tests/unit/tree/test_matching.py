"""Which structures match: mappings by keys, everything else by kind and position."""

import itertools
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import attrs
import pytest
import torch

import statetree as st
from statetree.tree.matching import matched
from tests.trees import TREES
from tests.trees.containers import (
    BarePoint,
    CountingUp,
    DequeWithAttributes,
    DictWithAttributes,
    HostileDict,
    ListWithAttributes,
    Point,
    PointWithAttributes,
    TupleWithAttributes,
    TypedPoint,
    hostile_dict,
)
from tests.trees.fields import Defined, Derived, Frozen, KnownToOptree, Numbered, Registered, SameKeys, Slotted, State


def match(left, right):
    """Return the pairs of leaves that match, and the differences as (path, kind)."""
    left_leaves, left_spec = st.flatten(left)
    right_leaves, right_spec = st.flatten(right)
    order, differences = matched(left_spec, left_leaves, right_spec, right_leaves)
    found = [(str(difference.path), difference.kind) for difference in differences]
    if found:
        return None, found
    order = range(len(left_leaves)) if order is None else order
    assert sorted(order) == list(range(len(right_leaves)))
    return [(a, right_leaves[index]) for a, index in zip(left_leaves, order, strict=True)], []


def matches(left, right):
    there, back = match(left, right), match(right, left)
    assert (there[0] is None) == (back[0] is None), "matching is not symmetric"
    return there[0] is not None


MAPPINGS = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda items: defaultdict(list, items),
    "Counter": Counter,
    "Counter_subclass": CountingUp,
    "dict_subclass": DictWithAttributes,
    "hostile": lambda items: hostile_dict(HostileDict, items),
}


@pytest.mark.parametrize(("left", "right"), list(itertools.product(MAPPINGS, MAPPINGS)))
def test_any_two_mappings_match_by_their_keys_in_any_order(left, right):
    one, other = MAPPINGS[left]({"a": 1, "b": 2, "c": 3}), MAPPINGS[right]({"c": 30, "a": 10, "b": 20})
    assert match(one, other) == ([(1, 10), (2, 20), (3, 30)], [])
    assert match({"x": [one, 5]}, {"x": [other, 50]}) == ([(1, 10), (2, 20), (3, 30), (5, 50)], [])


#: Families of containers: those in one match each other, those in different ones do not.
FAMILIES = [
    [{}, OrderedDict(), DictWithAttributes()],
    [[], ListWithAttributes()],
    [(), TupleWithAttributes()],
    [deque(), DequeWithAttributes(), deque(maxlen=3)],
    [Point(1, 2)],
    [TypedPoint(1, 2)],
    [BarePoint(1, 2)],
    [namedtuple("Point", ["x", "y"])(1, 2)],  # of the same name, and another class
    [State(1, 2, 3)],
    [Derived(1, 2, 3)],
    [Frozen(1)],
    [Slotted(1)],
    [Defined(1)],
    [attrs.make_class("Defined", ["weight"])(1)],
    [Registered(1, 2, "note")],
    [Numbered(1, 2)],
    [torch.max(torch.zeros(1, 1), dim=0)],
    [torch.min(torch.zeros(1, 1), dim=0)],
    [1, None, "leaf"],
]


def test_containers_match_within_their_family_only():
    placed = [(number, value) for number, family in enumerate(FAMILIES) for value in family]
    for (a, left), (b, right) in itertools.product(placed, placed):
        assert matches(left, right) == (a == b), (left, right)
        assert matches({"x": [left, 1]}, {"x": [right, 1]}) == (a == b), (left, right)


LOOKALIKES = [
    0,
    False,
    0.0,
    -0.0,
    "0",
    None,
    float("nan"),
    (0,),
    (False,),
    (0.0,),
    ("0",),
    frozenset({0}),
    frozenset({False}),
    frozenset({"0"}),
    Point(0, 1),
    Point(False, 1),
    (0, 1),
]


@pytest.mark.parametrize("more", [[], ["x", "y"]], ids=["alone", "with_others_in_another_order"])
def test_keys_match_only_if_they_agree_in_type(more):
    for left, right in itertools.product(LOOKALIKES, LOOKALIKES):
        one = {left: 1, **dict.fromkeys(more, 2)}
        other = {**dict.fromkeys(reversed(more), 2), right: 1}
        assert matches(one, other) == (left is right), (left, right)


def test_nan_keys_match_each_other():
    assert match({float("nan"): 1, "a": 2}, {"a": 20, float("nan"): 10}) == ([(1, 10), (2, 20)], [])
    assert match({(float("nan"), 1): 1}, {(float("nan"), 1): 10}) == ([(1, 10)], [])
    assert match({float("nan"): 1, float("nan") * 1: 2}, {float("nan"): 10, float("nan") * 1: 20})[0] is not None
    assert not matches({float("nan"): 1, float("nan") * 1: 2}, {float("nan"): 10})


def test_keys_that_registered_containers_give_several_times():
    assert match(SameKeys(1, 2, 3), SameKeys(10, 20, 30)) == ([(1, 10), (2, 20), (3, 30)], [])
    assert not matches(SameKeys(1, 2, 3), SameKeys(1, 2))


def test_a_key_and_an_attribute_of_one_name_are_told_apart():
    def made(key, attribute):
        result = DictWithAttributes(name=key, other=0)
        result.name = [attribute, torch.zeros(1)]
        return result

    pairs, _ = match(made(1, 2), made(10, 20))
    assert pairs[:3] == [(1, 10), (0, 0), (2, 20)]
    plain = DictWithAttributes(other=0)
    plain.name = [2, torch.zeros(1)]
    assert match(plain, made(1, 2))[1] == [("name", "missing")]


def test_attributes_that_hold_tensors_must_be_there_on_both_sides():
    with_tensor, with_number = ListWithAttributes([1]), ListWithAttributes([1])
    with_tensor.extra, with_number.extra = torch.zeros(1), 1
    assert match(with_tensor, with_number)[1] == [("extra", "missing")]
    assert match([1], with_tensor)[1] == [("extra", "missing")]
    assert matches([1], with_number)
    assert match({"n": PointWithAttributes(1)}, {"n": PointWithAttributes(2)}) == ([(1, 2), (1, 2)], [])


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2], [1], [("", "length")]),
        ({"a": (1, 2)}, {"a": (1,)}, [("a", "length")]),
        (deque([1]), deque(), [("", "length")]),
        ({"a": 1}, {}, [("a", "missing")]),
        ({}, {"a": {"b": 1}}, [("a", "missing")]),
        ({"a": 1}, {"a": {}}, [("a", "structure")]),
        ({"a": [[]]}, {"a": [None]}, [("a.0", "structure")]),
        ({"a": []}, {"a": ()}, [("a", "structure")]),
        (1, [1], [("", "structure")]),
        ([1], 1, [("", "structure")]),
        (Numbered(1), Numbered(1, 2), [("", "metadata")]),
        (KnownToOptree(1), KnownToOptree(1, 2), [("", "length")]),
        (Registered(1, 2, "a"), Registered(1, 2, "b"), [("", "metadata")]),
        (Registered(1, [2], "a"), Registered(1, [2, 3], "a"), [("right", "length")]),
        (State(1, 2, [3]), State(1, 2, (3,)), [("nested", "structure")]),
        ({1: 1, "x": 2}, {True: 1, "x": 2}, [("1", "missing"), ("True", "missing")]),
    ],
)
def test_differences_are_named(left, right, expected):
    assert match(left, right)[1] == expected
    assert sorted(match(right, left)[1]) == sorted(expected)


def test_a_field_that_is_unset_on_one_side_is_missing():
    unset = Slotted(1, 2)
    del unset.inner
    assert match(unset, Slotted(1, 2))[1] == [("inner", "missing")]


def test_every_difference_is_found_in_the_order_of_the_tree():
    left = {"a": [1, {"x": 1}], "b": 2, "c": {"d": (1,), "e": 5}, "z": 9}
    right = {"a": [1, {"y": 1}], "b": [2], "c": {"d": [1], "e": 5}, "w": 9}
    assert match(left, right)[1] == [
        ("z", "missing"),
        ("w", "missing"),
        ("a.1.x", "missing"),
        ("a.1.y", "missing"),
        ("b", "structure"),
        ("c.d", "structure"),
    ]


def test_differences_say_what_is_on_either_side():
    leaves, spec = st.flatten({"a": [1], "b": 2})
    others, other = st.flatten({"a": 1})
    _, differences = matched(spec, leaves, other, others)
    assert [(str(found.path), found.left, found.right) for found in differences] == [
        ("b", "a leaf (int)", "absent"),
        ("a", "list of 1", "a leaf (int)"),
    ]


@pytest.mark.parametrize("tree", [tree for tree in TREES if not tree.keyed_by_identity], ids=str)
def test_trees_made_alike_match_leaf_by_leaf(tree):
    left_leaves, left = st.flatten(tree.make())
    right_leaves, right = st.flatten(tree.make())
    order, differences = matched(left, left_leaves, right, right_leaves)
    assert differences == []
    assert order is None or list(order) == list(range(len(left_leaves)))


def reversed_mappings(value):
    """Return a copy with every plain mapping in the other order."""
    if type(value) is dict:
        return {key: reversed_mappings(item) for key, item in reversed(value.items())}
    return [reversed_mappings(item) for item in value] if type(value) is list else value


@pytest.mark.parametrize(
    "tree", [tree for tree in TREES if not (tree.keyed_by_identity or tree.name.startswith("deep"))], ids=str
)
def test_the_order_of_mappings_does_not_matter(tree):
    made = tree.make()
    other = reversed_mappings(made)
    leaves, spec = st.flatten(made)
    other_leaves, other_spec = st.flatten(other)
    order, differences = matched(spec, leaves, other_spec, other_leaves)
    assert differences == []
    order = range(len(leaves)) if order is None else order
    if tree.name == "keys_several_nans":  # NaNs match in the order in which they come
        return
    assert all(leaf is other_leaves[index] for leaf, index in zip(leaves, order, strict=True))


@pytest.mark.parametrize("pair", list(itertools.pairwise(TREES)), ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_different_trees_are_compared_without_an_error_and_symmetrically(pair):
    matches(pair[0].make(), pair[1].make())
