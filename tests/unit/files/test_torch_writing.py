"""What ``torch.save`` raises is what the system said."""

from __future__ import annotations

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
