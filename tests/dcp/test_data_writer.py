"""What a piece is written from is told to lie in a file, or not to."""

from __future__ import annotations

import gc
import io
import os
import shutil
import threading
import time
import zlib

import pytest
import torch
import torch.distributed.checkpoint

import statetree as st
from statetree.dcp import data_writer
from statetree.dcp.data_writer import FileEnd, PieceSource
from statetree.dcp.file_manifest import Stored
from statetree.files import publishing, strided_reading
from statetree.files.ranges import OpenFiles
from statetree.files.stored import StoredTensor

BLOCKS = torch.arange(400_000)  # more than is read at a time


def stored(path, data):
    source = PieceSource(data)
    with path.open("wb") as file:
        end = FileEnd(file.fileno(), 6)
        checksum, _ = source.write(end)
        end.write()
        assert end.at == 6 + source.length
    path.write_bytes(path.read_bytes() + b"behind")
    piece = Stored("file", 6, source.length, checksum)
    assert zlib.crc32(path.read_bytes()[6:-6]) == checksum
    return OpenFiles().open(path), piece


def as_torch_writes(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("tensor", "written"),
    [
        pytest.param(torch.arange(12.0).view(3, 4).T, torch.arange(12.0).view(3, 4).T.contiguous(), id="transposed"),
        pytest.param(torch.arange(12.0)[4:8], torch.arange(4.0, 8), id="a part of a storage"),
        pytest.param(torch.arange(12).view(3, 4)[:, 1:3], torch.tensor([[1, 2], [5, 6], [9, 10]]), id="columns"),
        pytest.param(torch.arange(2).expand(3, 2), torch.tensor([[0, 1]] * 3), id="expanded"),
        pytest.param(torch.tensor([1j, 2]).conj(), torch.tensor([1j, 2]).conj_physical(), id="conjugated"),
        pytest.param(torch.tensor(5), None, id="a scalar"),
        pytest.param(torch.empty(0, 3), None, id="empty"),
        pytest.param(torch.ones(2, requires_grad=True), torch.ones(2), id="with a gradient"),
        pytest.param(BLOCKS, None, id="several blocks"),
    ],
)
def test_what_is_written_is_what_torch_writes(tensor, written, tmp_path, monkeypatch):
    monkeypatch.setattr(strided_reading, "BUCKET_BYTES", 16)
    file, piece = stored(tmp_path / "file", tensor)
    assert file.read(6, piece.length, "it") == as_torch_writes(tensor if written is None else written)
    assert PieceSource(tensor).is_in(file, piece)


def test_without_checksums_torch_itself_writes(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        file, piece = stored(tmp_path / "file", torch.arange(9)[2:5])
        assert file.read(6, piece.length, "it") == as_torch_writes(torch.arange(2, 5))
        assert PieceSource(torch.arange(2, 5)).is_in(file, piece)
    finally:
        torch.serialization.set_crc32_options(before)


def test_what_the_system_writes_in_part_is_written_whole(tmp_path, monkeypatch):
    pwritev = os.pwritev

    def in_part(handle, parts, at):
        return pwritev(handle, [memoryview(b"".join(parts))[:7]], at)

    monkeypatch.setattr(os, "pwritev", in_part)
    file, piece = stored(tmp_path / "file", torch.arange(50.0))
    assert file.read(6, piece.length, "it") == as_torch_writes(torch.arange(50.0))


def test_small_pieces_are_written_together_and_held_until_then(tmp_path, monkeypatch):
    calls, pwritev = [], os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda handle, parts, at: calls.append(len(parts)) or pwritev(handle, parts, at))
    monkeypatch.setattr(data_writer, "_MOST_PARTS", 30)
    with (tmp_path / "file").open("wb") as file:
        end = FileEnd(file.fileno())
        for number in range(40):  # of which nobody else holds any
            PieceSource(torch.full((1000,), float(number)).view(10, 100).t()).write(end)
        end.write()
    assert calls == [30, 30, 30, 30]
    expected = [torch.full((1000,), float(number)).view(10, 100).t().contiguous() for number in range(40)]
    assert (tmp_path / "file").read_bytes() == b"".join(map(as_torch_writes, expected))


@pytest.mark.slow
def test_a_tensor_of_more_than_4_gib(tmp_path):
    """Whose archive has sizes of 64 bits."""
    if shutil.disk_usage(tmp_path).free < 12 << 30:
        pytest.skip("there is no room")
    tensor = torch.zeros((4 << 30) + 5, dtype=torch.uint8)
    tensor[-1] = 7
    with (tmp_path / "file").open("wb") as file:
        end = FileEnd(file.fileno())
        PieceSource(tensor).write(end)
        end.write()
    assert torch.equal(torch.load(tmp_path / "file", mmap=True, weights_only=True), tensor)
    with (tmp_path / "file").open("rb") as ours, (tmp_path / "torch").open("w+b") as theirs:
        torch.save(tensor, theirs)
        theirs.seek(0)
        while block := ours.read(1 << 24):
            assert block == theirs.read(1 << 24)
        assert not theirs.read(1)


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


def made_of(path):
    """Return trees that are made of stored tensors where they are written: of each kind."""
    state = {"m": torch.arange(600.0).view(20, 30), "n": torch.arange(8).bfloat16(), "empty": torch.ones(0, 2)}
    state |= {"scalar": torch.tensor(2.5), "count": torch.tensor(3), "z": torch.tensor([1j, 2])}
    st.save(state, path / "a.pt")
    opened = st.files.open(path / "a.pt")
    turned = st.Conversion([("m", "m", "a b -> b a")])
    columns = st.Conversion([("m", "rows.{r}", "r c -> c")])
    return {
        "combined": st.combine(torch.add, opened, opened),
        "cast": st.cast(opened, torch.float16),
        "converted": columns(st.select(opened, "m")),
        "turned and combined": st.combine(torch.neg, turned(st.select(opened, "m"))),
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["combined", "cast", "converted", "turned and combined"])
def test_what_is_made_of_stored_tensors_is_made_a_bucket_at_a_time(kind, tmp_path, monkeypatch):
    tree = made_of(tmp_path)[kind]
    expected = st.offload(tree)
    monkeypatch.setattr(strided_reading, "BUCKET_BYTES", 64)
    taken, read = [], StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda self, *index: taken.append(read(self, *index)) or taken[-1])
    st.save(tree, tmp_path / "saved")
    assert max(tensor.nbytes for tensor in taken) <= 64 < max(leaf.nbytes for leaf in st.flatten(expected)[0])
    monkeypatch.undo()
    saved = st.load(tmp_path / "saved")
    assert st.similarity(saved, expected), st.similarity(saved, expected)
    plain = {key: torch.empty_like(leaf) for key, leaf in st.to_flat(expected)[0].items()}
    torch.distributed.checkpoint.load(plain, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert st.similarity(plain, st.to_flat(expected)[0])


def test_the_system_begins_to_write_each_large_block_at_once(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(data_writer, "begin_to_sync", lambda handle, start, stop: begun.append((start, stop)))
    tensor = torch.arange(1_000_000)
    file, piece = stored(tmp_path / "file", tensor)
    assert [start for start, _ in begun[1:]] == [stop for _, stop in begun[:-1]]
    assert begun[0][0] == 6
    assert begun[-1][1] > 6 + tensor.nbytes - (1 << 20)
    assert PieceSource(tensor).is_in(file, piece)


@pytest.mark.parametrize("call", [publishing._sync_file_range, None, lambda *_: -1])
def test_where_there_is_no_such_call_or_it_fails_nothing_happens(call, tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "_sync_file_range", call)
    with (tmp_path / "file").open("wb") as file:
        file.write(b"1" * 10_000)
        file.flush()
        publishing.begin_to_sync(file.fileno(), 0, 10_000)
    publishing.begin_to_sync(1 << 20, 0, 10_000)
    assert (tmp_path / "file").read_bytes() == b"1" * 10_000


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
class TestTwoFiles:
    """A state that is worth two threads is written into two files."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(data_writer, "_WORTH_BYTES", 64)
        monkeypatch.setattr(data_writer, "_LARGE_BYTES", 1)

    @pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (100, 1), (1, 100), (100,), (0, 0, 0), (1, 1, 0, 30)])
    @pytest.mark.parametrize("threads", [1, 2])
    def test_hold_what_plain_dcp_and_we_read(self, sizes, threads, tmp_path, own_threads):
        own_threads(threads)
        state = {f"w{number}": torch.arange(float(size)) + number for number, size in enumerate(sizes)}
        st.save({**state, "step": 3}, tmp_path / "a")
        files = sorted(path.name for path in (tmp_path / "a").glob("*.distcp"))
        assert files == [f"__0_{number}.distcp" for number in range(threads)]
        loaded = {name: torch.full_like(value, -1) for name, value in state.items()}
        torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
        assert bool(st.similarity(loaded, state))
        assert bool(st.similarity(st.load(tmp_path / "a"), {**state, "step": 3}))

    def test_an_error_in_one_ends_the_other_before_its_next_piece(self, tmp_path, monkeypatch, own_threads):
        own_threads(2)
        begun, released = [], threading.Event()
        write = PieceSource.write

        def failing(source, end):
            name = threading.current_thread().name
            begun.append(name)
            if name == "MainThread":
                released.wait(10)
                time.sleep(0.1)  # for what fails to be told, also on a busy machine
            elif begun.count(name) == 2:
                released.set()
                raise OSError(28, "No space left on device")
            return write(source, end)

        monkeypatch.setattr(PieceSource, "write", failing)
        with pytest.raises(st.StateTreeError, match="No space left"):
            st.save({str(number): torch.ones(4000) for number in range(40)}, tmp_path / "a")
        assert begun.count("MainThread") < 20
        assert not (tmp_path / "a").exists()


@pytest.fixture
def own_threads():
    """A function that says how many threads torch uses, until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("number", "is_collecting"), [(0, False), (1, False), (4, True)])
def test_small_pieces_are_written_by_one_thread_without_collections(number, is_collecting, tmp_path, monkeypatch):
    monkeypatch.setattr(data_writer, "_WORTH_BYTES", 1 << 20)
    state = {str(index): torch.zeros(512 << 10, dtype=torch.uint8) for index in range(number)}
    state |= {f"small {index}": torch.zeros(8 << 10, dtype=torch.uint8) for index in range(200)}
    seen, write = [], PieceSource.write

    def look(self, end):
        seen.append((gc.isenabled(), threading.current_thread() is threading.main_thread()))
        return write(self, end)

    monkeypatch.setattr(PieceSource, "write", look)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        st.save(state, tmp_path / "a")
    finally:
        torch.set_num_threads(threads)
    assert {collecting for collecting, _ in seen} == {is_collecting}
    assert is_collecting or all(is_main for _, is_main in seen)
    assert len([*(tmp_path / "a").glob("*.distcp")]) == 1 + is_collecting
    assert gc.isenabled()
