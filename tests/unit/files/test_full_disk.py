"""What the system says of a file that cannot be written is what the user is told."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

import statetree as st
from statetree.errors import CheckpointError
from tests.cli.states import write

NAMES = ["a.pt", "a.safetensors", "a"]
PROGRAM = """
import resource, signal, sys, torch
import statetree as st

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    st.save({"w": torch.arange(float(sys.argv[2]))}, sys.argv[1])
except st.CheckpointError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_that_is_too_large_for_the_system(is_there, name, tmp_path):
    place = tmp_path / name
    if is_there:
        write({"old": torch.arange(5)}, place)
    before = sorted(tmp_path.rglob("*"))
    # A tensor that is smaller than the buffer of a file is written only when that is closed.
    for count in (1_000_000, 25_000):
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, place, str(count)], capture_output=True, text=True, check=False
        )
        assert ran.stdout == f"save: cannot write {place}: File too large. Make room.\n", ran.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("name", "call"), [*((name, "os.fsync") for name in NAMES), ("a", "os.pwritev")])
def test_a_disk_that_is_full(name, call, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(call, full)
        with pytest.raises(
            CheckpointError, match=f"save: cannot write {tmp_path / name}: No space left on device. Make"
        ):
            st.save({"w": torch.arange(9.0)}, tmp_path / name)
    assert not os.listdir(tmp_path)


def save_step(tree, path):
    with st.Checkpointer(path) as saved:
        saved.save(1, tree)


@pytest.mark.parametrize(("name", "save"), [*((name, st.save) for name in NAMES), ("a", save_step)])
def test_all_that_is_written_is_synced_and_each_failure_of_that_is_told(name, save, tmp_path, monkeypatch):
    sync, synced = os.fsync, []

    def count(handle, fails_at=None):
        synced.append(os.fstat(handle).st_ino)
        if len(synced) - 1 == fails_at:  # this one alone
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr("os.fsync", count)
    save({"w": torch.arange(9.0), "v": 1 + torch.arange(9)}, tmp_path / name)
    written = [tmp_path, *tmp_path.rglob("*")]
    assert {path.stat().st_ino for path in written} <= {*synced}
    for number in range(len(synced)):
        synced.clear()
        monkeypatch.setattr("os.fsync", partial(count, fails_at=number))
        with pytest.raises(CheckpointError, match=r"save: .*No space left on device"):
            save({"w": torch.arange(9.0)}, tmp_path / f"{number}{name}")


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "pytorch_model.bin"])
def test_an_empty_file_is_said_to_be_empty(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"read: {tmp_path / name}: it is empty. Its writing broke off") as told:
        st.files.open(tmp_path / name)
    assert "hostile" not in str(told.value)
