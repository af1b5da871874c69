"""What a ``Checkpointer`` takes for a directory, a step and a template, and what it says of what it does not take."""

from __future__ import annotations

import os
import pathlib
import signal
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

import statetree as st
from statetree import dcp
from statetree.dcp import Checkpointer
from statetree.dcp.series import Series
from statetree.testing import run_ranks


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


def test_a_relative_directory_is_where_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpointer("run") as saved:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        saved.save(1, {"a": 1})
        assert saved.restore() == {"a": 1}
    assert Checkpointer(tmp_path / "run").steps() == [1]
    assert os.listdir() == []


@pytest.mark.parametrize("given", ["SIGTERM", None, 1.5, True, [signal.SIGUSR1]])
def test_what_is_no_signal_is_refused(given, tmp_path):
    with Checkpointer(tmp_path) as saved, pytest.raises(TypeError, match="save_on: expected signals, such as"):
        saved.save_on(given)


def test_signals_that_nobody_handles_are_refused(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    with Checkpointer(tmp_path) as saved:
        for never in (signal.SIGKILL, 9999):
            with pytest.raises(ValueError, match=f"save_on: nobody can handle signal {int(never)}:"):
                saved.save_on(signal.SIGUSR1, never)
        assert signal.getsignal(signal.SIGUSR1) == before
        saved.save_on(np.int64(signal.SIGUSR1))
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_metric_that_no_float_holds_is_refused(tmp_path):
    with Checkpointer(tmp_path) as saved, pytest.raises(TypeError, match="save: metric must be a number"):
        saved.save(1, {"a": 1}, metric=10**400)


def test_a_best_step_among_metrics_that_cannot_be_read_is_doubted(tmp_path):
    with Checkpointer(tmp_path) as saved:
        for step, metric in ((1, 0.9), (2, 0.1), (3, 0.5)):
            saved.save(step, {"a": step}, metric=metric)
        assert saved.best_step() == 2
        (saved.path(2) / ".statetree_manifest").write_bytes(b"damaged")
        with pytest.warns(UserWarning, match=r"best_step: .* cannot be read \(steps: 2\): one may be better"):
            assert saved.best_step() == 3


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """A run of two steps, of which this user may not enter the second."""
    with Checkpointer(tmp_path) as saved:
        saved.save(1, {"a": 1}, metric=1.0)
        saved.save(2, {"a": 2}, metric=0.5)
    inside, stat, open_ = f"{saved.path(2)}/", os.stat, os.open

    def refusing(call):
        def refuse(path, *args, **options):
            if not isinstance(path, int) and os.fspath(path).startswith(inside):
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return call(path, *args, **options)

        return refuse

    monkeypatch.setattr(os, "stat", refusing(stat))
    monkeypatch.setattr(os, "open", refusing(open_))
    return tmp_path


def test_a_step_that_this_user_may_not_enter_hides_no_other(locked):
    with Checkpointer(locked) as saved:
        assert (saved.steps(), saved.latest_step()) == ([1, 2], 2)
        assert saved.restore(step=1) == {"a": 1}
        for ask in (saved.restore, saved.metadata):
            with pytest.raises(st.CheckpointError, match="Permission denied"):
                ask()
        with pytest.warns(UserWarning, match="took the checkpoint of step 1"):
            assert saved.restore(fallback=True) == {"a": 1}
        with pytest.warns(UserWarning, match="best_step"):
            assert saved.best_step() == 1
        saved.save(3, {"a": 3})
        assert saved.restore() == {"a": 3}


def test_a_directory_that_this_user_may_not_read_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    with Checkpointer(tmp_path) as saved:
        saved.save(1, {"a": 1})
        monkeypatch.setattr(os, "scandir", refuse)
        for ask in (saved.steps, saved.latest_step, saved.best_step, saved.path, saved.metadata, saved.restore):
            with pytest.raises(st.CheckpointError, match=f"Checkpointer: {tmp_path} cannot be read: .*denied"):
                ask()
        with pytest.raises(st.CheckpointError, match="denied"):
            saved.save(2, {"a": 2})


def save_with_what_one_refuses(folder, options):
    with Checkpointer(folder) as saved:
        for save in (saved.save, lambda *given, **named: saved.async_save(*given, **named).result()):
            failing = dist.get_rank() == 1
            with pytest.raises(TypeError if failing else st.CheckpointError, match="must be a"):
                save(1, {"a": 1}, **(options if failing else {}))
            assert saved.steps() == []
        saved.save(1, {"a": 1}, **({} if failing else {"metric": 2, "metadata": {"b": 3}}))
        assert (saved.metadata(1), saved.best_step()) == ({"b": 3}, 1)


@pytest.mark.parametrize(
    "options", [{"metric": "low"}, {"metadata": {"config": pathlib.Path("a")}}], ids=["metric", "metadata"]
)
def test_what_one_rank_may_not_say_of_a_step_is_told_to_all(options, tmp_path):
    run_ranks(2, save_with_what_one_refuses, str(tmp_path), options)


def save_where_the_first_cannot_look(folder):
    with pytest.MonkeyPatch.context() as patch, Checkpointer(folder) as saved:
        saved.save(1, {"a": 1})
        if dist.get_rank() == 0:

            def refuse(_):
                raise OSError(5, "Input/output error")

            patch.setattr(Series, "all", refuse)
        found = []
        for save in (saved.save, lambda *given: saved.async_save(*given).result()):
            try:
                save(2, {"a": 2})
            except st.CheckpointError as error:
                found.append(str(error))
    return found


def test_where_the_first_rank_cannot_look_into_the_directory_all_hear_of_it(tmp_path):
    for found in run_ranks(2, save_where_the_first_cannot_look, str(tmp_path)):
        assert len(found) == 2
        assert all("Input/output error" in text for text in found)
