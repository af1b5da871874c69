"""Globs, paths and predicates: which leaves they mean."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch

import statetree as st
from statetree.key_paths import literal
from statetree.tree.selection import selected, selected_in

FLAT = {"a.b.w": 0, "a.c.w": 1, "a.w": 2, "w": 3, "b": 4}
NESTED = {"a": {"b": {"w": 0}, "c": {"w": 1}, "w": 2}, "w": 3, "b": 4}


def chosen(tree, where, **options):
    leaves, spec = st.flatten(tree)
    mask = selected(where, spec, leaves, verb="select", **options)
    return [leaf for leaf, stays in zip(leaves, mask, strict=True) if stays]


@pytest.mark.parametrize("tree", [FLAT, NESTED], ids=["flat", "nested"])
@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("w", [3]),
        ("*", [3, 4]),
        ("**", [0, 1, 2, 3, 4]),
        ("a.*", [2]),
        ("a.*.w", [0, 1]),
        ("a.**", [0, 1, 2]),
        ("**.w", [0, 1, 2, 3]),
        ("a.**.w", [0, 1, 2]),
        ("**.**.b.**", [0, 4]),
        ("**.**", [0, 1, 2, 3, 4]),
        ("a.**.**", [0, 1, 2]),
        ("*.**.**", [0, 1, 2, 3, 4]),
        ("a.*.**.**", [0, 1, 2]),
        ("**.c.*", [1]),
        ("**w", [0, 1, 2, 3]),
        ("a.[bc].w", []),
        ("a.?.w", []),
        (["b", "*.w"], [2, 4]),
        ("!a.**", [3, 4]),
        ("!**.w", [4]),
        ("!zzz", [0, 1, 2, 3, 4]),
        ("!**", []),
        (["!a.**", "a.w"], [2, 3, 4]),
        ("a!", []),
        ([], []),
    ],
    ids=str,
)
def test_globs_read_flat_and_nested_trees_alike(tree, glob, expected):
    assert chosen(tree, glob, missing_ok=True) == expected


def test_a_glob_is_matched_against_the_whole_path():
    assert chosen({"weight": 1, "weight_scale": 2, "my": {"weight": 3}}, "weight") == [1]


def test_paths_are_typed_and_name_leaves_or_containers():
    tree = {0: 1, "0": 2, "a.b": 3, "a": {"b": 4, "c": [5, 6]}}
    assert chosen(tree, st.Path((0,))) == [1]
    assert chosen(tree, st.Path(("0",))) == [2]
    assert chosen(tree, st.Path(("a.b",))) == [3]
    assert chosen(tree, st.Path(("a",))) == [4, 5, 6]
    assert chosen(tree, [st.Path(("a", "c")), "0"]) == [1, 2, 5, 6]
    assert chosen(tree, st.Path()) == [1, 2, 3, 4, 5, 6]


def test_a_glob_means_all_paths_that_read_as_it_does():
    assert st.select({"a": {"b": 1}, "a.b": 2, "c": 3}, "a.b") == {"a": {"b": 1}, "a.b": 2}
    assert chosen({"a": {0: 1, "0": 2}, "b": 3}, "a.*") == [1, 2]


def test_keys_that_are_equal_and_read_differently_are_told_apart():
    for key, glob in [(1, "1"), (True, "True"), (1.0, "1.0"), (1, "1")]:
        assert chosen({key: 1, 2: 2}, glob) == [1]
        assert chosen({key: 1, 2: 2}, ["1", "2"], missing_ok=True) == ([1, 2] if glob == "1" else [2])


def test_a_glob_reads_two_trees_alike():
    src, dst = {"a": {0: torch.ones(2)}}, {"a": {0: torch.zeros(2), "0": torch.zeros(2)}}
    st.copy_into(src, dst, where="a.*", strict=False)
    assert dst["a"][0].tolist() == [1, 1]
    assert dst["a"]["0"].tolist() == [0, 0]


@pytest.mark.parametrize("key", ["*", "a*b", "**", "[0]", "\\", "a\\*", "{i}", "!a", "!", "?", "\n", "", "a..b", "."])
def test_escaped_keys_match_themselves_alone(key):
    tree = {key: 1, "other": 2, "a-b": 3, "aXb": 4}
    assert chosen(tree, literal(key)) == [1]


def test_a_predicate_sees_path_and_leaf_but_no_hole():
    seen = []

    def asked(path, leaf):
        seen.append((path, leaf))
        return torch.tensor(leaf > 1)

    assert chosen({"a": 1, "b": st.HOLE, "c": 2}, asked) == [2]
    assert seen == [(st.Path(("a",)), 1), (st.Path(("c",)), 2)]
    assert chosen({"a": 1}, lambda *_: False) == []


def test_what_a_predicate_raises_names_the_path():
    with pytest.raises(AttributeError, match="requires_grad") as caught:
        chosen({"a": {"b": 1}}, lambda _, leaf: leaf.requires_grad)
    assert any("at a.b" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("glob", "suggestion"),
    [
        ("model.layers.0", r"is a container: did you mean 'model\.layers\.0\.\*\*'\?"),
        (["**.wq", "zzz"], r"no path matches 'zzz'\. Give"),
        ("!**.attn.*", r"no path matches '!\*\*\.attn\.\*'\. Give"),
        (st.Path(("model", "layers", "0", "attn", "wq")), r"no path matches 'model\.layers\.0\.attn\.wq'\. Give"),
    ],
    ids=["container", "nothing near", "all but those that there are", "path of another type"],
)
def test_a_glob_that_matches_nothing_is_refused(glob, suggestion):
    tree = {"model": {"layers": [{"attn": {"wq": 1, "wk": 2}}]}}
    with pytest.raises(st.TreeMismatch, match=suggestion):
        chosen(tree, glob)
    assert chosen(tree, glob, missing_ok=True) in ([], [1])


def test_in_several_trees_a_glob_need_match_one():
    trees = [([1], st.flatten({"a": 1})[1]), ([2], st.flatten({"b": 2})[1])]
    trees = [(spec, leaves) for leaves, spec in trees]
    assert selected_in(["a", "b"], trees, verb="copy_into") == [[True], [True]]
    with pytest.raises(st.TreeMismatch, match="copy_into: no path matches 'c'"):
        selected_in(["a", "c"], trees, verb="copy_into")


@pytest.mark.parametrize("where", [3, None, [3], b"a", {"a": 1}], ids=str)
def test_what_says_no_leaves_is_refused(where):
    with pytest.raises(TypeError, match="which leaves are meant cannot be told"):
        chosen({"a": 1}, where)


def test_there_is_one_hole():
    assert pickle.loads(pickle.dumps(st.HOLE)) is st.HOLE
    assert copy.deepcopy([st.HOLE])[0] is st.HOLE
    assert repr(st.HOLE) == "HOLE"


def test_holes_are_passed_on():
    tree = OrderedDict(a=st.HOLE, b=torch.arange(3.0))
    assert st.offload(tree)["a"] is st.HOLE
    assert st.allocate_like(tree)["a"] is st.HOLE
    with st.Stager() as stager:
        assert stager.stage(tree)["a"] is st.HOLE
    assert st.similarity(tree, tree, values=True)
