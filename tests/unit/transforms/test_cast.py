"""``cast``: what is converted, what is kept, and what is refused."""

import threading

import pytest
import torch
from torch import nn

import statetree as st
from tests.trees.distributed import dtensors, sharded_tensors
from tests.trees.tensors import Ramp


def numbers(start, count=6):
    return torch.arange(start, start + count, dtype=torch.float32) / 3


def test_only_floating_point_tensors_change():
    tree = {"w": numbers(1), "n": torch.arange(3), "c": torch.ones(2, dtype=torch.complex64), "s": 1.5, "o": [None]}
    found = st.cast(tree, torch.bfloat16)
    assert torch.equal(found["w"], tree["w"].bfloat16())
    assert found["w"].dtype == torch.bfloat16
    assert all(found[key] is tree[key] for key in "ncs")
    assert tree["w"].dtype == torch.float32
    assert st.cast(tree, torch.float32)["w"] is tree["w"]


def test_where_says_which():
    tree = {"a": numbers(0), "b": [numbers(1)]}
    found = st.cast(tree, torch.float64, where="b.**")
    assert found["a"] is tree["a"]
    assert torch.equal(found["b"][0], tree["b"][0].double())
    with pytest.raises(st.TreeMismatch, match="cast: no path matches 'c'"):
        st.cast(tree, torch.float64, where="c")


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.view(2, 3).T,
        lambda base: base[::2],
        lambda base: base[1:2].expand(4, 1),
        lambda base: base[2:2],
        lambda base: base[3],
        lambda base: torch._neg_view(base[1:]),
        lambda base: nn.Parameter(base[1:3]),
        lambda base: nn.Buffer(base[1:3]),
    ],
    ids=["transposed", "strided", "expanded", "empty", "scalar", "negative", "parameter", "buffer"],
)
def test_geometry_and_identity_are_kept(view):
    leaf = view(numbers(5))
    leaf.note = {"kept": 1}
    found = st.cast({"x": leaf}, torch.float16)["x"]
    assert torch.equal(found, leaf.detach().to(torch.float16))
    assert (found.dtype, found.shape, found.stride()) == (torch.float16, leaf.shape, leaf.stride())
    assert (type(found), found.requires_grad, found.is_neg()) == (type(leaf), leaf.requires_grad, leaf.is_neg())
    assert found.note == {"kept": 1}
    assert found.is_leaf


def test_ties_are_kept():
    w = nn.Parameter(numbers(0))
    base = numbers(10, 8)
    tree = {"a": w, "b": w, "c": w.detach()[1:], "d": base[:5], "e": base[3:], "f": numbers(20)}
    found = st.cast(tree, torch.float64)
    assert found["a"] is found["b"]
    assert found["c"].data_ptr() == found["a"].data_ptr() + 8
    assert found["e"].data_ptr() == found["d"].data_ptr() + 24
    assert all(torch.equal(found[key], tree[key].double()) for key in tree)
    with torch.no_grad():
        found["d"].fill_(7)
    assert torch.equal(found["e"][:2], torch.full((2,), 7.0, dtype=torch.float64))
    assert torch.equal(tree["d"], base[:5])


def test_a_small_view_of_a_large_storage_costs_what_the_view_does():
    found = st.cast([numbers(0, 100_000)[50:60]], torch.float64)[0]
    assert found.untyped_storage().nbytes() == 80


def test_a_tie_that_would_be_cut_is_refused():
    base = numbers(0, 8)
    with pytest.raises(st.TreeMismatch, match="ties at a: another dtype cannot go into one tied to b"):
        st.cast({"a": base[:5], "b": base[4:]}, torch.float64, where="a")
    with pytest.raises(st.TreeMismatch, match="Convert all leaves that share memory"):
        st.cast({"a": base, "b": base.view(torch.int32)}, torch.float64)
    with pytest.raises(st.TreeMismatch, match="ties at a"):
        st.cast({"a": base, "b": base}, torch.float64, where="a")
    side_by_side = st.cast({"a": base[:4], "b": base[4:]}, torch.float64, where="a")
    assert torch.equal(side_by_side["a"], base[:4].double())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e8m0fnu], ids=str)
def test_what_copy_into_refuses_is_refused(dtype):
    with pytest.raises(st.TreeMismatch, match=r"dtype differs at x\.0: expected torch"):
        st.cast({"x": [numbers(0)]}, dtype)
    with pytest.raises(st.TreeMismatch, match="dtype differs"):
        st.copy_into(
            numbers(0),
            torch.zeros(6, dtype=torch.uint8).to(dtype)
            if dtype != torch.float8_e8m0fnu
            else torch.zeros(6, dtype=torch.uint8).view(dtype),
            cast=True,
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("large", [1e6, -1e6])
def test_values_that_are_too_large_are_refused(dtype, large):
    leaf = torch.tensor([1.0, large, 2.0, float("nan"), large])
    tree = {"x": [numbers(0), leaf]}
    with pytest.raises(st.TreeMismatch, match=rf"range differs at x\.1: .*{large:.0f}.* and 1 more"):
        st.cast(tree, dtype)
    with pytest.raises(st.TreeMismatch, match=r"range differs at x\.1"):
        st.copy_into(tree, st.map_leaves(lambda held: torch.zeros(held.shape).to(dtype), tree), cast=True)
    assert torch.equal(leaf.nan_to_num(3), torch.tensor([1.0, large, 2.0, 3.0, large]))


def test_values_at_the_limit_and_infinities_pass():
    limit = {"w": torch.tensor([65504.0, 65519.0, -65504.0, float("inf"), -float("inf")])}
    assert st.cast(limit, torch.float16)["w"].tolist() == [65504, 65504, -65504, float("inf"), -float("inf")]
    assert st.cast({"w": torch.tensor([448.0, 463.0])}, torch.float8_e4m3fn)["w"].float().tolist() == [448, 448]
    with pytest.raises(st.TreeMismatch, match=r"range differs at w: .*inf\. Choose a dtype with a larger range"):
        st.cast({"w": torch.tensor([float("inf")])}, torch.float8_e4m3fn)


def test_what_lies_between_views_is_not_looked_at():
    base = torch.tensor([1.0, 1e6, 2.0, 1e6])
    assert st.cast({"w": base[::2]}, torch.float16)["w"].tolist() == [1, 2]


def test_a_leaf_made_of_several_is_refused_by_its_path():
    tree = {"s": torch.eye(3).to_sparse(), "w": numbers(0)}
    with pytest.raises(st.UnsupportedLeaf, match="cast: cannot convert the leaf at s"):
        st.cast(tree, torch.float64)
    assert st.cast(tree, torch.float64, where="w")["s"] is tree["s"]


def test_meta_tensors_stay_meta():
    w = torch.empty(2**40, device="meta")
    found = st.cast({"a": w, "b": w, "c": w[5:]}, torch.bfloat16)
    assert found["a"] is found["b"]
    assert (found["a"].is_meta, found["a"].dtype, found["a"].shape) == (True, torch.bfloat16, w.shape)
    assert found["c"].shape == w[5:].shape


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("make", [dtensors, sharded_tensors], ids=lambda make: make.__name__)
def test_distributed_leaves_keep_their_layout(make):
    tree = make(Ramp())
    tree.pop("wrapped", None)
    found = st.cast(tree, torch.float64)
    for key, leaf in tree.items():
        assert type(found[key]) is type(leaf)
        assert found[key].dtype == torch.float64
        assert getattr(found[key], "placements", None) == getattr(leaf, "placements", None)
    assert st.similarity(st.cast(found, torch.float32), tree, values=True)


def test_a_name_is_no_dtype():
    with pytest.raises(TypeError, match=r"cast: dtype is no torch\.dtype: expected one such as .*, got 'bfloat16'"):
        st.cast({"w": torch.zeros(3)}, "bfloat16")


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD([p]), lambda p: torch.nn.ParameterList([p[1:].detach()])])
def test_what_an_object_holds_of_a_leaf_is_a_tie_too(make):
    """The optimizer of a model that was converted would train the old parameters."""
    p = torch.nn.Parameter(torch.ones(3))
    tree = {"p": p, "held": make(p)}
    with pytest.raises(st.TreeMismatch, match="cast: ties at p: another dtype cannot go into one tied to held"):
        st.cast(tree, torch.bfloat16)
    with_lock = {"w": torch.ones(2), "lock": threading.Lock()}
    assert st.cast(with_lock, torch.bfloat16)["lock"] is with_lock["lock"]
