"""``is_leaf``: containers that are to be leaves."""

import pytest
import torch

import statetree as st
from tests.judge import assert_trees_equal
from tests.trees import TREES
from tests.trees.containers import ListWithAttributes

every_tree = pytest.mark.parametrize("tree", TREES, ids=str)


def is_pair(value):
    return type(value) is tuple and len(value) == 2


PAIRS = {"a": (1, 2), "b": [(3, 4), {"c": (5, 6, (7, 8))}], "d": 9}


def test_containers_of_which_it_is_true_are_leaves():
    leaves, spec = st.flatten(PAIRS, is_leaf=is_pair)
    assert leaves == [(1, 2), (3, 4), 5, 6, (7, 8), 9]
    assert leaves[0] is PAIRS["a"]
    assert [str(path) for path in spec.paths()] == ["a", "b.0", "b.1.c.0", "b.1.c.1", "b.1.c.2", "d"]
    assert_trees_equal(st.unflatten(spec, leaves), PAIRS)


def test_every_function_takes_it():
    expected = [str(path) for path in st.flatten(PAIRS, is_leaf=is_pair)[1].paths()]
    assert [str(path) for path in st.paths(PAIRS, is_leaf=is_pair)] == expected
    flat, spec = st.to_flat(PAIRS, is_leaf=is_pair)
    assert list(flat) == expected
    assert_trees_equal(st.from_flat(flat, spec), PAIRS)
    swapped = st.map_leaves(lambda leaf: leaf[::-1] if is_pair(leaf) else leaf, PAIRS, is_leaf=is_pair)
    assert swapped == {"a": (2, 1), "b": [(4, 3), {"c": (5, 6, (8, 7))}], "d": 9}


def test_map_leaves_asks_it_about_all_trees():
    other = {"a": (10, 20), "b": 5}
    assert st.map_leaves(lambda x, y: (x, y), {"a": (1, 2), "b": 3}, other, is_leaf=is_pair) == {
        "a": ((1, 2), (10, 20)),
        "b": (3, 5),
    }
    with pytest.raises(st.TreeMismatch, match="structure differs at a"):
        st.map_leaves(lambda x, y: (x, y), {"a": (1, 2)}, {"a": (1, 2, 3)}, is_leaf=is_pair)


def test_it_is_asked_about_every_container_once_and_about_no_leaf():
    inner, listed = (1,), [2, (3,)]
    tree, asked = {"a": inner, "b": listed, "c": torch.ones(1), "d": None}, []
    st.flatten(tree, is_leaf=lambda value: asked.append(value))
    assert [id(value) for value in asked] == [id(tree), id(inner), id(listed), id(listed[1])]


def test_children_of_a_leaf_are_not_visited():
    loop = {"a": 1}
    loop["self"] = loop
    leaves, spec = st.flatten({"loop": loop}, is_leaf=lambda value: value is loop)
    assert leaves == [loop]
    assert spec.num_leaves == 1


def test_the_root_may_be_a_leaf():
    tree = {"a": [1]}
    leaves, spec = st.flatten(tree, is_leaf=lambda _: True)
    assert leaves[0] is tree
    assert spec == st.flatten(1)[1]
    assert st.unflatten(spec, leaves) is tree


def test_attributes_that_are_children_are_asked_about():
    tree = ListWithAttributes([1])
    tree.pair = (torch.ones(1), 2)
    tree.plain = (1, 2)  # a part of the structure
    leaves = st.flatten(tree, is_leaf=is_pair)[0]
    assert leaves == [1, tree.pair]


def test_empty_containers_are_asked_about():
    leaves, spec = st.flatten([[], {}], is_leaf=lambda value: value == [])
    assert leaves == [[]]
    assert st.unflatten(spec, [5]) == [5, {}]


def test_any_answer_counts_by_its_truth():
    assert st.flatten([[1]], is_leaf=lambda value: value if value == [1] else 0)[0] == [[1]]


def test_what_it_raises_comes_out_with_a_note_of_the_path():
    def is_leaf(value):
        if value == {"c": 1}:
            raise LookupError("no answer")

    with pytest.raises(LookupError, match="no answer") as caught:
        st.flatten({"a": [0, {"c": 1}]}, is_leaf=is_leaf)
    assert "a.1" in caught.value.__notes__[0]


@every_tree
def test_one_level_of_any_tree(tree):
    made = tree.make()
    leaves, spec = st.flatten(made, is_leaf=lambda value: value is not made)
    assert len(spec.nodes) <= 1
    assert_trees_equal(st.unflatten(spec, leaves), made)


@every_tree
def test_without_an_answer_nothing_changes(tree):
    made = tree.make()
    leaves, spec = st.flatten(made, is_leaf=lambda _: False)
    expected, same = st.flatten(made)
    assert all(one is other for one, other in zip(leaves, expected, strict=True))
    assert spec == same
