"""``rename`` keeps the types of keys that it moves, so that the inverse gives them back."""

import pytest

import statetree as st
from tests.unit.transforms.test_rename import there_and_back


def exactly(tree):
    """Return a tree as text, in which 0, "0" and False differ."""
    return repr(tree)


@pytest.mark.parametrize(
    ("tree", "rules", "expected"),
    [
        ({"state": {0: {"m": 1}, 1: {"m": 3}}}, {"state.{i}.{n}": "{n}.{i}"}, {"m": {0: 1, 1: 3}}),
        ({"m": {0: 1, 1: 3}}, {"{n}.{i}": "state.{i}.{n}"}, {"state": {0: {"m": 1}, 1: {"m": 3}}}),
        ({"k": {0: 1}}, {"{a}.{b}": "{b}.{a}"}, {0: {"k": 1}}),
        ({"k": {"0": 1}}, {"{a}.{b}": "{b}.{a}"}, {"0": {"k": 1}}),
        ({0: {"1": 1}}, {"{a}.{b}": "{b}.{a}"}, {"1": {0: 1}}),
        ({"a": {0: {1: {"w": 5}}}}, {"a.**.w": "z.w.**"}, {"z": {"w": {0: {1: 5}}}}),
        ({"k": {None: 1, True: 2}}, {"k.*": "m.n.*"}, {"m": {"n": {None: 1, True: 2}}}),
        ({"a.0.w": 1}, {"a.{i}.w": "{i}.w"}, {"0.w": 1}),
        ({"a": {0: 1}}, {"a.{i}": "a.x{i}"}, {"a": {"x0": 1}}),
    ],
    ids=str,
)
def test_keys_keep_their_types(tree, rules, expected):
    assert exactly(st.rename(tree, rules)) == exactly(expected)


@pytest.mark.parametrize(
    ("tree", "rules"),
    [
        ({"state": {0: {"m": 1}, 1: {"m": 3}}}, {"state.{i}.{n}": "{n}.{i}"}),
        ({"k": {0: 1, "a": 2}}, {"{a}.{b}": "{b}.{a}"}),
        ({0: 1, 1: 2}, {"{i}": "x.{i}"}),
        ({0: {"1": 1}}, {"{a}.{b}": "{b}.{a}"}),
        ({"a": {0: {1: {"w": 5}}}}, {"a.**.w": "z.w.**"}),
        ({"k": {None: 1, True: 2}}, {"k.*": "m.n.*"}),
    ],
    ids=str,
)
def test_the_inverse_gives_them_back(tree, rules):
    there_and_back(tree, rules)


def test_a_list_whose_items_lie_apart_comes_back_as_a_dict_of_its_indices():
    tree = {"state": [{"m": 1, "v": 2}, {"m": 3, "v": 4}]}
    rules = st.Renaming({"state.{i}.{n}": "{n}.{i}"})
    moved = st.rename(tree, rules)
    assert exactly(moved) == exactly({"m": [1, 3], "v": [2, 4]})
    assert exactly(st.rename(moved, rules.inverse)) == exactly({"state": {0: {"m": 1, "v": 2}, 1: {"m": 3, "v": 4}}})


def test_keys_that_read_alike_do_not_meet():
    with pytest.raises(st.TreeMismatch, match="read alike"):
        st.rename({"a": {0: 1}, "b": {"0": {"x": 2}}}, {"a.{i}": "b.{i}.y"})
