"""``load``: a checkpoint read into the layout of another tree."""

from __future__ import annotations

import gc
import os
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
import torch

import statetree as st
from statetree.errors import TreeMismatch
from statetree.files import filling, loading
from statetree.files.ranges import OpenFiles
from tests.cli.states import bits, flat_state, nested_state, tied_state, write
from tests.judge import assert_trees_equal

NAMES = ["a.pt", "a.safetensors", "a"]
Point = namedtuple("Point", "x y")


@dataclass
class Settings:
    rate: float
    sizes: tuple = (1, 2)


class Listing(list):
    """A list of another class."""


@pytest.mark.parametrize("name", NAMES)
def test_whole_states_come_back(name, tmp_path):
    path = write(flat_state(), tmp_path / name)
    like = st.map_leaves(lambda leaf: torch.empty_like(leaf, device="meta"), flat_state())
    assert_trees_equal(st.load(path, like), flat_state(), ties=False)


@pytest.mark.parametrize("name", ["a.pt", "a"])
def test_nested_states_come_back_with_their_values(name, tmp_path):
    path = write(nested_state(), tmp_path / name)
    loaded = st.load(path, nested_state())
    assert_trees_equal(loaded, nested_state(), ties=False)


@pytest.mark.filterwarnings("ignore:save. what restore does not make")
@pytest.mark.parametrize(
    "inner",
    [
        Listing(),
        Point(1, 2),
        Settings(0.1),
        Settings(0.1, (Point(3, 4), ())),
        Listing([1, (2,)]),
        {"k": Point(1, (2,))},
    ],
)
@pytest.mark.parametrize("wrap", [lambda v: (v,), lambda v: [v], lambda v: ((v, (1, 2)),), lambda v: [(v, []), (1,)]])
def test_plain_values_of_any_class_come_back_from_inside_of_tuples_and_lists(wrap, inner, tmp_path):
    state = {"values": wrap(inner), "alone": inner, "w": torch.ones(2)}
    st.save(state, tmp_path / "a")
    loaded = st.load(tmp_path / "a", state)
    assert_trees_equal(loaded, state)
    assert repr(loaded["values"]) == repr(state["values"])


@pytest.mark.filterwarnings("ignore:save. what restore does not make")
def test_what_stands_for_an_unknown_class_is_loaded_into_a_dict(tmp_path):
    st.save({"x": (Settings(0.1),), "y": [Settings(0.2)], "z": ([Settings(0.3), Listing()],)}, tmp_path / "a")
    other = {"rate": 0, "sizes": 0}
    loaded = st.load(tmp_path / "a", {"x": (other,), "y": [other], "z": ([other, 0],)}, strict=False)
    assert loaded["x"] == ({"rate": 0.1, "sizes": (1, 2)},)
    assert loaded["y"] == [{"rate": 0.2, "sizes": (1, 2)}]


def test_flat_files_fill_nested_states(tmp_path):
    path = write({"model.layers.0.w": bits(3), "model.layers.1.w": bits(4)}, tmp_path / "a.safetensors")
    like = {"model": {"layers": [{"w": torch.empty(3)}, {"w": torch.empty(4)}]}}
    expected = {"model": {"layers": [{"w": bits(3)}, {"w": bits(4)}]}}
    assert_trees_equal(st.load(path, like), expected)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_holes_are_left_alone_without_strict(name, in_place, tmp_path):
    state = {"a": bits(2), "b": {"c": bits(3), "d": bits(1)}}
    path = tmp_path / name
    st.save(state, path)
    like = st.partition(st.allocate_like(state), "a")[0]
    assert_trees_equal(st.load(path, like, strict=False, in_place=in_place), st.partition(state, "a")[0])
    with pytest.raises(TreeMismatch, match="leaf type differs"):
        st.load(path, like, in_place=in_place)


def test_ties_of_like_are_kept_if_the_file_agrees(tmp_path):
    path = write(tied_state(), tmp_path / "a.pt")
    assert_trees_equal(st.load(path, tied_state()), tied_state())
    like = torch.empty(4)
    path = write({"a": bits(4), "b": bits(4), "c": bits(4, start=1)}, tmp_path / "b.safetensors")
    loaded = st.load(path, {"a": like, "b": like}, strict=False)
    assert loaded["a"] is loaded["b"]
    with pytest.raises(TreeMismatch, match="ties at c"):
        st.load(path, {"a": like, "c": like}, strict=False)


@pytest.mark.parametrize("name", NAMES)
def test_autograd_notices_that_what_it_keeps_was_loaded_over(name, tmp_path):
    weight = torch.nn.Parameter(torch.full((1000,), 2.0))
    path = write({"w": torch.full((1000,), 5.0)}, tmp_path / name)
    squared = (weight * weight).sum()
    st.load(path, {"w": weight}, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(6,), (4, 6), (300, 300)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float4_e2m1fn_x2])
def test_elements_that_torch_does_not_copy_are_saved_whatever_their_strides(dtype, shape, name, tmp_path):
    numbers = torch.arange(torch.Size(shape).numel()).remainder(251).to(torch.uint8).view(shape)
    for part in (numbers.t(), numbers[..., ::2]):
        st.save({"w": part.view(dtype)}, tmp_path / name)
        loaded = st.load(tmp_path / name)["w"]
        assert torch.equal(loaded.view(torch.uint8), part)
        made = st.copy_into({"w": part.view(dtype)}, {"w": torch.zeros(part.shape, dtype=torch.uint8).view(dtype)})
        assert torch.equal(made["w"].view(torch.uint8), part)


@pytest.mark.parametrize("name", ["a.pt", "a"])
def test_what_has_checksums_is_read_once(name, tmp_path, monkeypatch):
    state = {f"p{index}": torch.arange(500_000) + index for index in range(4)}
    st.save(state, tmp_path / name)
    opened = []
    original = OpenFiles.__init__
    monkeypatch.setattr(
        OpenFiles, "__init__", lambda self, **options: (opened.append(self), original(self, **options))[1]
    )
    loaded = st.load(tmp_path / name, state)
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    assert sum(files.nbytes_read for files in opened) < 1.01 * sum(value.nbytes for value in state.values())


def test_what_does_not_fit_is_named(tmp_path):
    path = write({"a": bits(4), "b": bits(4), "more": bits(1)}, tmp_path / "a.safetensors")
    with pytest.raises(TreeMismatch, match=r"(?s)2 places.*missing|missing"):
        st.load(path, {"a": torch.empty(4), "c": torch.empty(4), "b": torch.empty(4)})
    with pytest.raises(TreeMismatch, match=r"shape differs at a: expected \(5,\), got \(4,\)|shape"):
        st.load(path, {"a": torch.empty(5)}, strict=False)
    with pytest.raises(TreeMismatch, match="dtype"):
        st.load(path, {"a": torch.empty(4, dtype=torch.float64)}, strict=False)
    loaded = st.load(path, {"a": torch.empty(4, dtype=torch.float64)}, strict=False, cast=True)
    assert torch.equal(loaded["a"], bits(4).double())


@pytest.mark.parametrize("name", NAMES)
def test_what_overlaps_itself_is_filled_if_the_file_agrees(name, tmp_path):
    like = {"a": torch.zeros(3).expand(2, 3)}
    path = write({"a": bits(3).expand(2, 3).contiguous()}, tmp_path / name)
    assert_trees_equal(st.load(path, like), {"a": bits(3).expand(2, 3)})
    path = write({"a": bits(2, 3)}, tmp_path / f"other-{name}")
    for other in (like, {"a": torch.zeros(4).as_strided((2, 3), (1, 1))}):
        with pytest.raises(TreeMismatch, match=r"load: overlap at a: .* overlaps itself"):
            st.load(path, other)


@pytest.mark.parametrize("bits", [torch._neg_view, torch.conj], ids=["neg", "conj"])
def test_a_negated_or_conjugated_tensor_that_overlaps_itself_is_filled(bits, tmp_path):
    windows = torch.tensor([[0, 1, 2], [1, 2, 3]], dtype=torch.complex64) * (1 + 2j)
    st.save({"a": windows}, tmp_path / "a.pt")
    target = bits(torch.zeros(4, dtype=torch.complex64).as_strided((2, 3), (1, 1)))
    st.load(tmp_path / "a.pt", {"a": target}, in_place=True)
    assert torch.equal(target, windows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", NAMES)
def test_windows_that_overlap_are_filled_if_the_file_agrees(name, dtype, tmp_path):
    def window(memory):
        return {"a": memory.to(dtype).as_strided((5, 4), (2, 1), 3)}

    if dtype is torch.complex128 and name.endswith("safetensors"):
        pytest.skip("safetensors has no complex128")
    saved = window(torch.arange(1.0, 20.0))
    path = write({"a": saved["a"].clone(memory_format=torch.contiguous_format)}, tmp_path / name)
    like = window(torch.zeros(19))
    assert st.load(path, like, in_place=True)["a"] is like["a"]
    assert st.similarity(like, saved)
    memory = like["a"].as_strided((19,), (1,), 0)
    assert not memory[:3].to(torch.complex128).any()
    assert not memory[15:].to(torch.complex128).any()


def test_a_pickle_is_compared_with_its_checksum(tmp_path):
    path = write({"step": 1000}, tmp_path / "a.pt")
    damaged = path.read_bytes().replace(b"M\xe8\x03", b"M\xe9\x03")
    path.write_bytes(damaged)
    with pytest.raises(st.CheckpointError, match=r"data\.pkl' has the checksum"):
        st.load(path)
    with pytest.raises(st.CheckpointError, match=r"data\.pkl' has the checksum"):
        st.load(path, {"step": 0})
    assert st.load(path, verify=False) == {"step": 1001}


def test_a_part_is_loaded_and_the_rest_left_alone(tmp_path):
    path = write({"a": {"x": bits(4), "y": bits(3)}, "b": bits(4)}, tmp_path / "a.pt")
    like = {"a": {"x": torch.zeros(4), "y": torch.zeros(3)}, "b": torch.zeros(4)}
    loaded = st.load(path, like, where="a.*")
    assert torch.equal(loaded["a"]["x"], bits(4))
    assert loaded["b"] is like["b"]
    assert not like["a"]["x"].any()
    loaded = st.load(path, like, where=lambda path, _leaf: str(path) == "b")
    assert loaded["a"]["x"] is like["a"]["x"]


def test_other_kinds_of_tensors_are_loaded(tmp_path):
    state = {"sparse": torch.eye(3).to_sparse(), "conj": bits(3, dtype=torch.complex64).conj(), "step": 3}
    path = write(state, tmp_path / "a.pt")
    like = {"sparse": (2 * torch.eye(3)).to_sparse(), "conj": torch.zeros(3, dtype=torch.complex64), "step": 0}
    loaded = st.load(path, like)
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(loaded["conj"], state["conj"])
    assert loaded["step"] == 3


@pytest.mark.parametrize("empty", [[], (), {}], ids=repr)
def test_what_is_empty_needs_no_entry_in_a_file_of_names(empty, tmp_path):
    tree = {"w": torch.ones(2), "e": empty, "inner": [{"x": empty}]}
    st.save(tree, tmp_path / "a.safetensors")
    found = st.load(tmp_path / "a.safetensors", like=tree)
    assert found == {"w": found["w"], "e": empty, "inner": [{"x": empty}]}
    assert empty == () or found["e"] is not empty
    st.save({"e.0": torch.ones(1), "w": torch.ones(2)}, tmp_path / "b.safetensors")
    with pytest.raises(st.TreeMismatch, match="at e"):
        st.load(tmp_path / "b.safetensors", like={"w": torch.ones(2), "e": empty})


@pytest.mark.parametrize("empty", [[], ()], ids=repr)
def test_what_is_empty_takes_nothing_from_others_whose_names_begin_alike(empty, tmp_path):
    tree = {"m": {"a": empty}, "m.a.w": torch.ones(1)}
    st.save(tree, tmp_path / "a.safetensors")
    assert st.similarity(st.load(tmp_path / "a.safetensors", like=tree), tree)


class Refusing(torch.Tensor):
    """A tensor that answers nothing."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise IndexError("boom")


@pytest.mark.parametrize("make", [torch.nn.UninitializedParameter, lambda: torch.ones(2).as_subclass(Refusing)])
def test_a_tensor_that_says_nothing_is_refused_with_its_path(make, tmp_path):
    tree = {"a": {"b": make()}}
    with pytest.raises(
        st.CheckpointError, match=r"save: safetensors files hold only tensors.*\n.*a\.b: a .*torch says"
    ):
        st.save(tree, tmp_path / "a.safetensors")
    st.to_html(tree, tmp_path / "a.html")
    assert type(tree["a"]["b"]).__qualname__ in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a"])
def test_what_was_read_from_is_let_go_of_without_the_garbage_collector(name, tmp_path):
    st.save({"t": torch.ones(1000)}, tmp_path / name)
    st.load(tmp_path / name)
    gc.collect()
    gc.disable()
    try:
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(3):
            st.load(tmp_path / name)
            st.offload(st.files.open(tmp_path / name))
        assert sorted(os.listdir("/proc/self/fd")) == before
        assert str(tmp_path / name) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_damaged_leaf_is_named_by_its_path(in_place, tmp_path):
    weights = torch.arange(100.0)
    st.save({"model": {"w": weights}}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(weights.numpy().tobytes()) + 50] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(st.CheckpointError, match=r"^load: the leaf at model\.w cannot be read: .* has the checksum"):
        st.load(tmp_path / "a.pt", {"model": {"w": torch.zeros(100)}}, in_place=in_place)


def test_small_tensors_are_read_without_collections_and_large_ones_with(tmp_path, monkeypatch):
    state = {str(index): torch.full((3,), float(index)) for index in range(10)}
    st.save(state, tmp_path / "a")
    seen, read = [], filling.Target.read
    monkeypatch.setattr(filling.Target, "read", lambda *args: [seen.append(gc.isenabled()), read(*args)][1])
    for limit in (13, 12):
        monkeypatch.setattr(filling, "_LARGE_BYTES", limit)
        assert st.similarity(st.load(tmp_path / "a", state), state)
        assert (seen, gc.isenabled()) == ([limit == 12] * 10, True)
        seen.clear()
    monkeypatch.setattr(filling, "_LARGE_BYTES", 13)
    st.save(state, "memory://run/a")
    assert st.similarity(st.load("memory://run/a", state), state)  # which takes long, for each of them
    assert seen == [True] * 10
    fsspec.filesystem("memory").store.clear()


def test_what_takes_long_is_done_with_collections(tmp_path, monkeypatch):
    st.save({"w": bits(5)}, tmp_path / "a")
    seen, replicated = [], loading.replicated
    monkeypatch.setattr(loading, "replicated", lambda *a, **o: [seen.append(gc.isenabled()), replicated(*a, **o)][1])
    st.load(tmp_path / "a")
    assert seen == [True]
    st.save({"w": bits(5)}, "memory://run/a.safetensors")
    stored, system = st.files.open("memory://run/a.safetensors"), fsspec.filesystem("memory")
    cat_file = system.cat_file
    monkeypatch.setattr(system, "cat_file", lambda *a, **o: [seen.append(gc.isenabled()), cat_file(*a, **o)][1])
    st.save(stored, tmp_path / "b")  # which fetches it first
    assert len(seen) > 1
    assert all(seen)
    system.store.clear()
