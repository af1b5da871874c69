"""``copy_into`` and ``similarity`` over a part of two trees: ``where``, ``strict=False`` and ``on_missing``."""

from collections import OrderedDict

import pytest
import torch

import statetree as st


def numbers(start, count=4):
    return torch.arange(start, start + count, dtype=torch.float32)


def test_where_copies_what_matches_and_nothing_else():
    src = {"a": numbers(0), "l": [numbers(10), numbers(20)], "step": 1}
    dst = {"a": numbers(50), "l": [numbers(60), numbers(70)], "step": 2}
    a, first, second = dst["a"], *dst["l"]
    result = st.copy_into(src, dst, where="l.1")
    assert result["l"][1] is second
    assert torch.equal(second, numbers(20))
    assert torch.equal(a, numbers(50))
    assert torch.equal(first, numbers(60))
    assert result["a"] is a
    assert result["step"] == 2
    assert st.copy_into(src, dst, where="step")["step"] == 1


def test_where_a_predicate_decides_by_the_destination():
    src = {"a": numbers(0), "b": numbers(4).requires_grad_()}
    dst = {"a": numbers(50).requires_grad_(), "b": numbers(60)}
    st.copy_into(src, dst, where=lambda _, leaf: leaf.requires_grad)
    assert torch.equal(dst["a"], numbers(0))
    assert torch.equal(dst["b"], numbers(60))


def test_what_differs_elsewhere_does_not_count():
    src = {"a": numbers(0), "b": numbers(0, 3), "c": [1], "only": numbers(1), "d": (1, 2)}
    dst = {"a": numbers(50), "b": numbers(0, 9), "c": {"x": 1}, "other": 3, "d": (1,)}
    st.copy_into(src, dst, where="a")
    assert torch.equal(dst["a"], numbers(0))
    assert st.similarity(src, dst, where="a", values=True)
    for where, kind in [
        ("b", "shape"),
        ("c.**", "structure"),
        ("only", "missing"),
        ("other", "missing"),
        ("d.0", "length"),
    ]:
        assert [found.kind for found in st.similarity(src, dst, where=where, values=False).differences] == [kind]
        with pytest.raises(st.TreeMismatch, match=f"{kind}|unexpected"):
            st.copy_into(src, dst, where=["a", where])


def test_a_glob_must_match_in_one_of_the_trees():
    with pytest.raises(st.TreeMismatch, match=r"copy_into: no path matches 'x'\. Give a glob over whole paths\.$"):
        st.copy_into({"a": 1}, {"a": 1}, where="x")
    with pytest.raises(st.TreeMismatch, match="similarity: no path matches 'x'"):
        st.similarity({"a": 1}, {"a": 1}, where="x", values=False)


def test_what_both_have_is_copied_and_the_rest_reported():
    src = {"a": numbers(0), "new": {"x": numbers(1), "y": [2]}, "n": 1}
    dst = OrderedDict(n=9, old=numbers(70), e={}, a=numbers(50))
    old, a = dst["old"], dst["a"]
    missing = []
    result = st.copy_into(src, dst, strict=False, on_missing=missing.append)
    assert list(result) == ["n", "old", "e", "a"]
    assert type(result) is OrderedDict
    assert (result["n"], result["old"], result["a"]) == (1, old, a)
    assert torch.equal(a, numbers(0))
    assert torch.equal(old, numbers(70))
    told = {(str(found.path), found.left, found.right) for found in missing}
    assert told == {
        ("new.x", "a leaf (Tensor)", "absent"),
        ("new.y.0", "a leaf (int)", "absent"),
        ("old", "absent", "a leaf (Tensor)"),
        ("e", "absent", "dict of 0"),
    }
    assert {found.kind for found in missing} == {"missing"}
    with pytest.raises(st.TreeMismatch, match="the trees differ in 3 places"):
        st.copy_into(src, dst)


def test_only_what_is_meant_is_reported():
    missing = []
    st.copy_into({"a": {"b": 1, "c": 2}}, {"d": 3}, where="a.c", strict=False, on_missing=missing.append)
    assert [str(found.path) for found in missing] == ["a.c"]


def test_other_differences_are_refused_even_so():
    dst = {"a": numbers(50), "b": [1, 2]}
    for src, kind in [
        ({"a": numbers(0, 3)}, "shape"),
        ({"a": numbers(0), "b": [1]}, "length"),
        ({"b": (1, 2)}, "structure"),
    ]:
        with pytest.raises(st.TreeMismatch, match=f"{kind} differs"):
            st.copy_into(src, dst, strict=False)
    assert torch.equal(dst["a"], numbers(50))


def test_holes_are_leaves_that_are_not_there():
    src = {"l": [numbers(0), numbers(10)], "n": 1}
    dst = {"l": [numbers(50), numbers(60)], "n": 2}
    part, _ = st.partition(src, "l.1")
    missing = []
    result = st.copy_into(part, dst, strict=False, on_missing=missing.append)
    assert torch.equal(dst["l"][0], numbers(50))
    assert torch.equal(dst["l"][1], numbers(10))
    assert result["n"] == 2
    assert [(str(found.path), found.left) for found in missing] == [("l.0", "absent"), ("n", "absent")]
    rest, _ = st.partition(dst, "l.0")
    assert st.copy_into(src, rest, strict=False)["l"][1] is st.HOLE
    with pytest.raises(st.TreeMismatch, match=r"leaf type differs at l\.0"):
        st.copy_into(part, dst)


def test_nothing_is_written_if_the_report_fails():
    dst = {"a": numbers(50), "b": 1}

    def fail(found):
        raise KeyError(found.path)

    with pytest.raises(KeyError, match="b"):
        st.copy_into({"a": numbers(0)}, dst, strict=False, on_missing=fail)
    assert torch.equal(dst["a"], numbers(50))


def test_a_selection_copied_back_touches_what_matched():
    tree = {"m": OrderedDict(w=numbers(0), b=numbers(4)), "o": {0: {"avg": numbers(8)}, 1: {"avg": numbers(12)}}}
    whole = st.map_leaves(lambda leaf: leaf + 100, tree)
    st.copy_into(st.select(tree, ["m.w", "o.1.*"]), whole, strict=False)
    expected = st.update(st.map_leaves(lambda leaf: leaf + 100, tree), ["m.w", "o.1.*"], lambda leaf: leaf - 100)
    assert st.similarity(whole, expected, values=True)


def test_a_shortened_list_is_refused_rather_than_matched_by_position():
    tree = {"l": [numbers(0), numbers(4)]}
    with pytest.raises(st.TreeMismatch, match="length differs at l"):
        st.copy_into(st.select(tree, "l.1"), {"l": [numbers(50), numbers(60)]}, strict=False)
