"""What ``torch.save`` raises is what the system said."""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
import threading
from collections import deque

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import statetree as st
from statetree.files.torch_format import save_as


def test_what_torch_raises_is_no_interrupt_that_came_before(tmp_path, monkeypatch):
    def fail(*_args):
        raise RuntimeError("planted")

    monkeypatch.setattr(torch, "save", fail)
    try:
        raise KeyboardInterrupt  # noqa: TRY301 - as a user who saves after one
    except KeyboardInterrupt:
        with pytest.raises(RuntimeError, match=r"planted"):
            save_as(torch.zeros(2), tmp_path / "file")


def interrupted_as_the_archive_is_closed(path):
    def interrupt(*_args):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization._open_zipfile_writer_buffer, "__exit__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_as(torch.zeros(2), path)
    gc.collect()


def test_a_writer_that_is_freed_after_its_file_is_closed_does_not_end_the_process(tmp_path):
    pid = os.fork()
    if not pid:
        interrupted_as_the_archive_is_closed(tmp_path / "file")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("value", [torch.Generator(), threading.Lock()], ids=["rng", "lock"])
def test_what_cannot_be_saved_is_named_by_its_path(value, tmp_path):
    with pytest.raises(st.CheckpointError, match=r"leaf at train\.odd \("):
        st.save({"w": torch.ones(2), "train": {"odd": value, "step": 3}}, tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []


@dataclasses.dataclass
class Admitted:
    weight: object


def test_what_torch_alone_reads_is_warned_of(tmp_path):
    with torch.serialization.safe_globals([Admitted]):
        with pytest.warns(UserWarning, match=r"load makes no objects of what the torch file holds \(.*Admitted\)"):
            st.save({"a": Admitted(torch.ones(2))}, tmp_path / "a.pt")
        assert torch.load(tmp_path / "a.pt")["a"].weight.tolist() == [1, 1]
        with pytest.raises(st.CheckpointError, match=r"a torch file, read with torch\.load"):
            st.load(tmp_path / "a.pt")
        st.save({"a": torch.ones(2)}, tmp_path / "b.pt")  # without a warning, which would be an error here


def test_a_jagged_tensor_is_warned_of(tmp_path):
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    torch.save({"a": jagged}, tmp_path / "plain.pt")
    if torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "plain.pt"):  # from torch 2.15 on
        with pytest.raises(st.CheckpointError, match=r"save: the leaf at a \(NestedTensor\) holds what torch\.load"):
            st.save({"a": jagged}, tmp_path / "a.pt")
        return
    with pytest.warns(UserWarning, match=r"load makes no objects of what the torch file holds \(.*NestedTensor"):
        st.save({"a": jagged}, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt")["a"].values(), jagged.values())


def test_a_container_that_torch_does_not_load_is_named_with_its_path(tmp_path):
    state = {"a": [{"w": torch.ones(2), "queue": deque([torch.ones(2)])}]}
    with pytest.raises(st.CheckpointError, match=r"save: the deque at a\.0\.queue holds what .* collections\.deque"):
        st.save(state, tmp_path / "a.pt")


@pytest.mark.parametrize(
    "others", [{}, {"w": torch.ones(2), "d": collections.defaultdict(list)}], ids=["alone", "more"]
)
def test_a_leaf_is_named_before_the_containers_around_it(others, tmp_path):
    """An optimizer's pickle names dict and defaultdict, too."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(
        st.CheckpointError, match=r"save: the leaf at a\.m \(SGD\) holds what .* torch\.optim\.sgd\.SGD"
    ):
        st.save({"a": {"m": optimizer}, **others}, tmp_path / "a.pt")


def test_a_container_is_named_before_the_builtin_ones_around_it(tmp_path):
    state = {"a": [collections.UserDict(b=deque([1])), collections.defaultdict(dict, b={"w": torch.ones(2)})]}
    with pytest.raises(st.CheckpointError, match=r"save: the leaf at a\.0 \(UserDict\) holds what"):
        st.save(state, tmp_path / "a.pt")
    with pytest.raises(st.CheckpointError, match=r"save: the defaultdict at a\.0 holds what .*builtins\.dict"):
        st.save({"a": state["a"][1:]}, tmp_path / "a.pt")


@pytest.mark.filterwarnings("ignore:.*(quantized|TypedStorage)")
def test_numbers_of_less_than_a_byte_are_refused_with_their_path(tmp_path):
    scales, zeros = torch.rand(4), torch.zeros(4)
    packed = torch.quantize_per_channel(torch.arange(24.0).view(4, 6), scales, zeros, 0, torch.quint4x2)
    for name in ("a.pt", "a"):
        with pytest.raises(
            st.UnsupportedLeaf, match=r"save: the leaf at a\.q has the dtype torch\.quint4x2, which packs"
        ):
            st.save({"a": {"q": packed}, "w": torch.ones(2)}, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a"])
@pytest.mark.parametrize("cls", [torch.Tensor, torch.nn.Parameter])
def test_more_dims_than_are_read_are_refused_with_their_path(name, cls, tmp_path):
    def state(num_dims):
        return {"a": {"x": torch.arange(2.0).view([1] * (num_dims - 1) + [2]).as_subclass(cls)}}

    with pytest.raises(st.StateTreeError, match=r"(?s)save: .*\ba\.x: .* of 65 dims: at most 64 are read"):
        st.save(state(65), tmp_path / name)
    st.save(state(64), tmp_path / name)
    assert st.load(tmp_path / name, state(64))["a"]["x"].flatten().tolist() == [0, 1]


def test_strides_may_have_any_product(tmp_path):
    """Each is the product of the sizes after it: theirs is far larger than the tensor."""
    tensor = torch.arange(4096.0).view([2] * 12)
    st.save({"x": tensor, "meta": tensor.to("meta")}, tmp_path / "a.pt")
    stored = st.files.open(tmp_path / "a.pt")
    assert torch.equal(stored["x"].read(), tensor)
    assert stored["meta"].shape == tensor.shape


def test_a_sparse_tensor_of_more_dims_than_are_read_is_refused(tmp_path):
    with pytest.raises(st.UnsupportedLeaf, match=r"save: .* at a\.x: .* of 65 dims: at most 64 are read"):
        st.save({"a": {"x": torch.ones([1] * 65).to_sparse()}}, tmp_path / "a.pt")


def freed():
    tensor = torch.arange(100.0)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("make", [freed, lambda: torch.nn.Parameter(freed()), lambda: TwoTensor(freed(), freed())])
def test_a_tensor_without_its_storage_is_refused_with_its_path(make, tmp_path):
    with pytest.raises(st.UnsupportedLeaf, match=r"save: .* at a\.w: .* freed or resized to 0 bytes"):
        st.save({"a": {"w": make(), "x": torch.ones(2)}}, tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()


def test_a_tensor_inside_a_function_of_torch_func_is_refused_with_its_path(tmp_path):
    def save(value):
        with pytest.raises(st.UnsupportedLeaf, match=r"save: .* at a\.w: .* inside a function of torch"):
            st.save({"a": {"w": value}}, tmp_path / "a.pt")
        return value

    torch.func.vmap(save)(torch.ones(2, 3))
