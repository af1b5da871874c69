"""Handles of files."""

import errno
import os

import pytest
import torch

import statetree as st
from statetree.errors import CheckpointError
from statetree.files.publishing import _Lock
from statetree.files.ranges import OpenFiles, _Handle


@pytest.mark.parametrize("kind", [_Handle, _Lock])
def test_one_whose_making_was_interrupted_is_dropped_in_silence(kind):
    handle = kind.__new__(kind)  # an unraisable exception is a warning, and warnings are errors
    del handle


def test_the_error_for_what_is_no_file_keeps_nothing_open(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="no regular file") as caught:
        OpenFiles().open(tmp_path)
    assert set(os.listdir("/proc/self/fd")) <= before
    assert caught.value


def test_a_file_that_is_closed_by_another_thread_is_still_the_one_that_is_read(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"abc")
    files, view = OpenFiles(), bytearray(3)
    file = files.open(tmp_path / "a")
    for name in ("fstat", "preadv"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, call=call: (files._handles.clear(), call(*given))[1])
    files.check(tmp_path / "a")
    files.fill(file, memoryview(view), 0)
    assert view == b"abc"


@pytest.mark.parametrize("number", [0, 1, 4, 6])
def test_what_the_system_does_not_tell_of_a_file_is_an_error_of_the_checkpoint(number, tmp_path, monkeypatch):
    st.save({"w": torch.ones(3)}, tmp_path / "a")
    fstat, calls = os.fstat, []

    def stale(handle):
        calls.append(handle)
        if len(calls) > number:
            raise OSError(errno.ESTALE, "Stale file handle")
        return fstat(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", stale)
        with pytest.raises(CheckpointError, match=r"cannot be (read|opened): .*Stale file handle"):
            st.load(tmp_path / "a")
