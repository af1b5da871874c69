"""Handles of files."""

import os

import pytest

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
