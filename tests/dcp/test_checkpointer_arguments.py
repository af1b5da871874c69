"""What a ``Checkpointer`` takes for a directory, a step and a template, and what it says of what it does not take."""

from __future__ import annotations

import os
import pathlib
import threading

import numpy as np
import pytest
import torch

import statetree as st
from statetree import dcp
from statetree.dcp import Checkpointer


@pytest.mark.parametrize("convert", [str, pathlib.Path], ids=["text", "Path"])
@pytest.mark.parametrize("url", ["s3://bucket/run", "hf://org/model", "memory://a", "simplecache::s3://bucket/run"])
def test_urls_are_refused(url, convert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        st.CheckpointError, match=r"Checkpointer: .* is no path: expected a local one, got a URL\. Pass"
    ):
        Checkpointer(convert(url))
    with pytest.raises(st.CheckpointError, match=r"async_save: .* got a URL\. Save to a local"):
        dcp.async_save({"a": 1}, checkpoint_id=convert(url)).result()
    assert os.listdir() == []


@pytest.mark.parametrize("name", ["run:1", "a:b/c", "./s3:/run"])
def test_paths_with_colons_are_paths(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpointer(name) as saved:
        saved.save(1, {"a": 1})
    assert Checkpointer(tmp_path / name).steps() == [1]


STEPS = {"numpy": np.int64, "numpy small": np.uint8, "torch": torch.tensor}


@pytest.mark.parametrize("whole", STEPS.values(), ids=list(STEPS))
def test_whole_numbers_of_other_libraries_are_steps(whole, tmp_path):
    with Checkpointer(tmp_path) as saved:
        saved.save(whole(3), {"a": 1})
        saved.async_save(whole(4), {"a": 2}).result()
        assert saved.steps() == [3, 4]
        assert saved.restore(step=whole(3)) == {"a": 1}
        assert type(saved.latest_step()) is int


def test_a_step_to_restore_may_be_the_second_argument(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"at": step})
        assert checkpointer.restore(None, 1) == checkpointer.restore({"at": 0}, 1) == {"at": 1}


@pytest.mark.parametrize("step", [1.0, True, "1", torch.tensor(1.5), np.float32(1), -1, np.int64(-1)], ids=str)
def test_what_is_no_whole_number_is_no_step(step, tmp_path):
    with Checkpointer(tmp_path) as saved:
        for call in (
            lambda: saved.save(step, {}),
            lambda: saved.async_save(step, {}),
            lambda: saved.restore(step=step),
        ):
            with pytest.raises(ValueError, match="step must be a number that is not negative"):
                call()


@pytest.fixture
def saved(tmp_path):
    state = {"a": torch.arange(3.0), "n": 1}
    with Checkpointer(tmp_path / "series") as saved:
        saved.save(1, state)
        st.save({"a": state["a"]}, tmp_path / "m.safetensors")
        yield {
            "restore": saved.restore,
            "dcp.load": lambda like: st.load(tmp_path / "series" / "step-00000001", {**like, "n": 0}, in_place=True),
            "st.load": lambda like: st.load(tmp_path / "m.safetensors", like),
        }


@pytest.mark.parametrize("verb", ["restore", "dcp.load", "st.load"])
def test_a_template_of_another_dtype_or_with_more_keys_is_told_of_the_options(verb, saved):
    with pytest.raises(st.TreeMismatch, match=r"dtype differs at a: .*With cast=True, dtypes are converted\.") as other:
        saved[verb]({"a": torch.zeros(3, dtype=torch.bfloat16)})
    assert "strict" not in str(other.value)
    with pytest.raises(st.TreeMismatch, match=r"missing at more: .*With strict=False, what one side lacks") as other:
        saved[verb]({"a": torch.zeros(3), "more": torch.zeros(3)})
    assert "cast" not in str(other.value)
    with pytest.raises(st.TreeMismatch, match="dtype differs at a") as other:  # which cast does not convert
        saved[verb]({"a": torch.zeros(3, dtype=torch.int32)})
    assert "cast" not in str(other.value)


class Loader:
    def __init__(self):
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    "value", [(number for number in range(3)), threading.Lock(), threading.RLock()], ids=["generator", "lock", "rlock"]
)
def test_what_can_never_be_copied_is_to_be_left_out_or_an_atom(value):
    with pytest.raises(st.UnsupportedLeaf, match=r"the leaf at loader .* Leave it out of the state, or .*as an atom"):
        st.offload({"loader": value})


def test_an_object_that_holds_a_lock_is_to_be_left_out_or_registered():
    with pytest.raises(
        st.UnsupportedLeaf, match=r"Leave it out of the state, or register Loader as a container .*atom"
    ):
        st.offload({"loader": Loader()})
