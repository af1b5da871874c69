"""What a piece is written from is told to lie in a file, or not to."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from statetree.dcp.piece_sources import PieceSource
from statetree.files.ranges import OpenFiles

BLOCKS = torch.arange(400_000)  # more than is read at a time


def stored(path, data):
    with path.open("wb") as file:
        file.write(b"before")
        piece = PieceSource(data).write(file, "a", (0,))
        file.write(b"behind")
    return OpenFiles().open(path), piece


def test_memory_of_any_length_is_found(tmp_path):
    """Though parts of an archive are as long."""
    for nbytes in (*range(200), 4096, 4097):
        data = torch.arange(nbytes).to(torch.uint8)
        file, piece = stored(tmp_path / "file", data)
        assert PieceSource(data.clone()).is_in(file, piece), nbytes
        assert not nbytes or not PieceSource(data + 1).is_in(file, piece)


@pytest.mark.parametrize("position", [0, 131_071, 131_072, 399_999])
def test_every_block_is_compared(position, tmp_path):
    file, piece = stored(tmp_path / "file", BLOCKS)
    assert PieceSource(BLOCKS.clone()).is_in(file, piece)
    changed = BLOCKS.clone()
    changed[position] ^= 1
    assert not PieceSource(changed).is_in(file, piece)


@pytest.mark.parametrize(
    "other",
    [
        torch.arange(6.0).to(torch.complex64).conj(),
        torch.arange(6.0).to(torch.complex64).view(2, 3),
        torch.arange(6.0).to(torch.complex64).view(torch.float64),
        torch.arange(6.0).to(torch.complex64).view(2, 3).T,
        torch.arange(6.0).to(torch.complex64)[1:],
        memoryview(bytearray(48)),
    ],
    ids=["conj", "shape", "dtype", "strides", "offset", "value"],
)
def test_the_same_memory_read_in_another_way_is_another_source(other, tmp_path):
    file, piece = stored(tmp_path / "file", torch.arange(6.0).to(torch.complex64))
    assert not PieceSource(other).is_in(file, piece)
    file, piece = stored(tmp_path / "other", other)
    assert PieceSource(other).is_in(file, piece)


def test_what_torch_raises_is_no_interrupt_that_came_before(tmp_path, monkeypatch):
    def fail(*_args):
        raise RuntimeError("planted")

    monkeypatch.setattr(torch, "save", fail)
    try:
        raise KeyboardInterrupt  # noqa: TRY301 - as a user who saves after one
    except KeyboardInterrupt:
        with pytest.raises(RuntimeError, match=r"planted"):
            stored(tmp_path / "file", torch.zeros(2))


def interrupted_as_the_archive_is_closed(path):
    def interrupt(*_args):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization._open_zipfile_writer_buffer, "__exit__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stored(path, torch.zeros(2))
    gc.collect()


def test_a_writer_that_is_freed_after_its_file_is_closed_does_not_end_the_process(tmp_path):
    pid = os.fork()
    if not pid:
        interrupted_as_the_archive_is_closed(tmp_path / "file")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
