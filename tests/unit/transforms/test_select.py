"""``select``, ``partition``, ``merge`` and ``update``."""

import itertools
import operator
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from functools import partial

import pytest
import torch

import statetree as st

Pair = namedtuple("Pair", "left right")


@dataclass
class Config:
    w: object
    b: object


def with_attribute():
    state = OrderedDict(a=1, b=2)
    state.extra = torch.arange(2.0)
    state._metadata = {"": {"version": 1}}
    return state


def test_select_prunes_and_numbers_anew():
    tree = {"l": [1, {"x": 2, "y": 3}, (4, 5)], "d": deque([6, 7], maxlen=9), "e": {}, "z": [[8]]}
    found = st.select(tree, ["l.1.y", "l.2.1", "d.1"])
    assert found == {"l": [{"y": 3}, (5,)], "d": deque([7])}
    assert found["d"].maxlen == 9
    assert list(tree) == ["l", "d", "e", "z"]


@pytest.mark.parametrize(
    "tree",
    [OrderedDict(a=1, b=2), defaultdict(list, a=1, b=2), Counter(a=1, b=2), {"a": 1, "b": 2}],
    ids=lambda tree: type(tree).__name__,
)
def test_select_keeps_the_class_of_mappings(tree):
    found = st.select(tree, "b")
    assert type(found) is type(tree)
    assert dict(found) == {"b": 2}
    assert getattr(found, "default_factory", None) is getattr(tree, "default_factory", None)


def test_select_keeps_plain_attributes_and_drops_tensors_in_them():
    found = st.select(with_attribute(), "b")
    assert found._metadata == {"": {"version": 1}}
    assert not hasattr(found, "extra")
    assert torch.equal(st.select(with_attribute(), ["a", "extra"]).extra, torch.arange(2.0))


def test_select_drops_a_default_factory_that_holds_a_tensor_and_was_not_selected():
    factory = partial(torch.mul, torch.arange(2.0))
    found = st.select(defaultdict(factory, a=1, b=2), "b")
    assert type(found) is defaultdict
    assert (found, found.default_factory) == ({"b": 2}, None)
    kept = st.select(defaultdict(factory, a=1, b=2), ["b", "default_factory"])
    assert torch.equal(kept.default_factory(torch.ones(2)), torch.arange(2.0))


@pytest.mark.parametrize("tree", [Pair(1, 2), Config(1, 2)], ids=["namedtuple", "dataclass"])
def test_select_refuses_what_cannot_lack_a_child(tree):
    first = next(iter(st.to_flat(tree)[0]))
    with pytest.raises(st.TreeMismatch, match=rf"select: a {type(tree).__name__} cannot lack a child at x\.0\.\w+:"):
        st.select({"x": [tree]}, f"x.0.{first}")
    assert st.select({"x": [tree], "y": 3}, "y") == {"y": 3}
    assert st.select({"x": [tree], "y": 3}, "x.**") == {"x": [tree]}
    with pytest.raises(st.TreeMismatch, match=r": expected all or none of the leaves in <root>\."):
        st.select(tree, lambda *_: False)


def test_empty_containers_stay_where_all_beside_them_do():
    tree = {"a": {"e": [], "w": 1}, "b": {"e": {}, "w": 2, "v": 3}, "c": Pair((), 4), "d": {}}
    found = st.select(tree, ["a.w", "b.w", "c.right"])
    assert found == {"a": {"e": [], "w": 1}, "b": {"w": 2}, "c": Pair((), 4), "d": {}}
    assert st.select(tree, "b.w") == {"b": {"w": 2}}
    assert st.select(tree, "**") == tree


def test_select_of_nothing():
    assert st.select({"a": [1]}, "b", missing_ok=True) == {}
    assert st.select([1], "b", missing_ok=True) == []
    assert st.select(1, "b", missing_ok=True) is st.HOLE
    assert st.select({}, []) == {}
    with pytest.raises(st.TreeMismatch, match="select: no path matches 'b'"):
        st.select({"a": 1}, "b")


def test_partition_keeps_structure_and_merge_fills_it():
    tree = {"p": Pair(1, [2, Config(3, 4)]), "s": with_attribute(), "e": [], "n": None}
    left, right = st.partition(tree, ["p.right.**", "s.a", "s.extra"])
    assert left["p"] == Pair(st.HOLE, [2, Config(3, 4)])
    assert right["p"] == Pair(1, [st.HOLE, Config(st.HOLE, st.HOLE)])
    assert (left["n"], right["n"]) == (st.HOLE, None)
    assert left["s"].extra is tree["s"].extra
    for merged in (st.merge(left, right), st.merge(right, left)):
        assert st.flatten(merged)[1] == st.flatten(tree)[1]
        assert all(a is b for a, b in zip(st.flatten(merged)[0], st.flatten(tree)[0], strict=True))


def test_a_tie_that_partition_cuts_is_there_again_after_merge():
    w = torch.nn.Parameter(torch.arange(4.0))
    left, right = st.partition({"a": w, "b": w, "c": w.detach()[1:]}, "a")
    assert left["a"] is w
    assert right["b"] is w
    merged = st.merge(st.offload(left), right)
    assert merged["b"] is w
    assert st.merge(left, right)["a"] is st.merge(left, right)["b"]


def test_merge_refuses_two_leaves_in_one_place():
    with pytest.raises(st.TreeMismatch, match=r"leaf differs at a\.0: expected one \(int\), got another \(int\)"):
        st.merge({"a": [1]}, {"a": [2]})
    same = torch.arange(2)
    assert st.merge({"a": same}, {"a": same})["a"] is same
    assert st.merge({"a": st.HOLE}, {"a": st.HOLE}) == {"a": st.HOLE}
    with pytest.raises(st.TreeMismatch, match="merge: unexpected at b"):
        st.merge({"a": 1}, {"a": st.HOLE, "b": 2})
    with pytest.raises(TypeError, match="at least one tree"):
        st.merge()


def test_update_replaces_what_matches():
    tree = {"a": 1, "b": [2, 3]}
    assert st.update(tree, "b.*", 0) == {"a": 1, "b": [0, 0]}
    assert st.update(tree, ["a", "b.1"], lambda leaf: -leaf) == {"a": -1, "b": [2, -3]}
    assert tree == {"a": 1, "b": [2, 3]}
    assert st.update({"a": st.HOLE}, "a", 1) == {"a": st.HOLE}
    with pytest.raises(st.TreeMismatch, match=r"update: no path matches 'c\.0'"):
        st.update(tree, "c.0", 0)
    assert st.update(tree, "c.0", 0, missing_ok=True) == tree


def test_update_keeps_ties_and_names_the_path_of_what_fails():
    w = torch.arange(4.0)
    found = st.update({"a": w, "b": w, "c": w}, ["a", "b"], torch.neg)
    assert found["a"] is found["b"]
    assert found["c"] is w
    with pytest.raises(ZeroDivisionError, match="division") as caught:
        st.update({"a": {"b": 0}}, "a.b", lambda leaf: 1 // leaf)
    assert any("at a.b" in note for note in caught.value.__notes__)


def test_update_calls_a_function_once_for_each_memory():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(2, 3, bias=False)
            self.b = torch.nn.Linear(2, 3, bias=False)
            self.b.weight = self.a.weight

    state = Tied().state_dict()
    assert state["a.weight"] is not state["b.weight"]
    expected = state["a.weight"] * 2
    found = st.update(state, "**", lambda leaf: leaf.mul_(2))
    assert found["a.weight"].equal(expected)
    assert found["a.weight"] is state["a.weight"]
    assert found["b.weight"] is state["b.weight"]
    found = st.update(state, "**", torch.neg)
    assert found["a.weight"] is found["b.weight"]
    assert found["a.weight"].equal(-expected)
    parameter = torch.nn.Parameter(torch.arange(3.0))
    found = st.update([parameter, parameter], "*", lambda leaf: leaf.detach().add_(1))
    assert found[0] is found[1]
    assert parameter.tolist() == [1, 2, 3]
    flat = torch.arange(6.0)
    found = st.update([flat[:3], flat[3:]], "*", lambda leaf: leaf.mul_(2))
    assert flat.tolist() == [0, 2, 4, 6, 8, 10]
    # What holds no memory is told by the object alone.
    empty = [torch.empty(3, device="meta"), torch.empty(3, device="meta"), torch.empty(0), torch.empty(0)]
    assert len(set(map(id, st.update(empty, "*", lambda leaf: leaf.clone())))) == 4


@pytest.mark.parametrize(
    "other",
    [
        lambda w: w.view(2, 3),
        lambda w: w[1:],
        lambda w: w.view(torch.int32),
        torch.nn.Parameter,
        lambda w: w.as_subclass(type("Plain", (torch.Tensor,), {})),
        lambda w: torch.sparse_coo_tensor(torch.arange(6).view(1, 6), w, (9,)),
    ],
    ids=["shape", "part", "dtype", "parameter", "subclass", "inside a sparse tensor"],
)
def test_update_calls_no_function_twice_for_the_same_elements(other):
    w = torch.arange(6.0)
    for tree in ([w, other(w)], [other(w), w]):
        for fn in (lambda leaf: leaf.detach().mul_(2), lambda leaf: leaf.detach().clone(), lambda leaf: 5):
            with pytest.raises(st.TreeMismatch, match=r"at 0: .* elements that it shares with 1\. It was given a copy"):
                st.update(tree, "*", fn)
        assert w.tolist() == list(range(6))
        assert list(map(operator.is_, st.update(tree, "*", lambda leaf: leaf), tree)) == [True, True]
        assert st.update(tree, "0", lambda leaf: 5) == [5, tree[1]]
        assert st.update(tree, "*", 5) == [5, 5]


@pytest.mark.parametrize("order", sorted(set(itertools.permutations([0, 0, 1]))), ids=str)
def test_update_gives_no_function_one_of_several_alike_views_that_another_one_overlaps(order, tmp_path):
    m = torch.arange(6.0)
    tree = {f"k{place}": (m, m[1:])[which] for place, which in enumerate(order)}
    with pytest.raises(st.TreeMismatch, match="It was given a copy: nothing was written"):
        st.update(tree, "**", lambda leaf: leaf.mul_(2))
    assert m.tolist() == list(range(6))
    st.save(tree, tmp_path / "tied.pt")
    read = st.update(st.files.open(tmp_path / "tied.pt"), "**", lambda leaf: leaf)
    assert len({leaf.untyped_storage().data_ptr() for leaf in read.values()}) == 1
    assert st.similarity(read, tree)


def test_they_read_no_element():
    tree = {"a": torch.empty(2**40, device="meta"), "b": torch.empty(3, device="meta")}
    left, right = st.partition(tree, "a")
    assert st.merge(left, right)["a"] is tree["a"]
    assert st.select(tree, "b")["b"] is tree["b"]
