"""Parts of a range of bytes are compared with checksums without the rest of it."""

from __future__ import annotations

import random
import zlib

import pytest
import torch

import statetree as st
from statetree.errors import CheckpointError
from statetree.files import ranges
from statetree.files.block_checksums import RunningChecksum, block_bytes
from statetree.files.formats import opened
from statetree.files.ranges import OpenFiles

STEP = 128 << 10
LENGTHS = (0, 1, STEP - 1, STEP, STEP + 1, 3 * STEP, 3 * STEP + 5, 128 * STEP + 1)


def some_bytes(length):
    return random.Random(length).randbytes(length)


def summed(data, pieces=(1, 700, STEP, 5 * STEP + 3)):
    running, rest, number = RunningChecksum(len(data)), memoryview(data), 0
    while rest:
        piece = pieces[number % len(pieces)]
        running.add(rest[:piece])
        rest, number = rest[piece:], number + 1
    return running


def checked(path, data, expected=None, **changed):
    """Return a range of a file with other bytes around it, which is compared with what is expected."""
    path.write_bytes(b"before" + data + b"after")
    found = summed(data if expected is None else expected)
    named = {"checksum": found.value, "marks": found.marks, **changed}
    return lambda: OpenFiles().open(path).part(6, len(data), "the bytes").checked("it", *named.values())


@pytest.mark.parametrize("length", LENGTHS)
def test_the_numbers_are_the_checksums_up_to_where_blocks_end(length):
    data = some_bytes(length)
    found, step = summed(data), block_bytes(length)
    assert found.value == zlib.crc32(data)
    ends = range(step, length, step)
    assert found.marks == "".join(f"{zlib.crc32(data[:end]):08x}" for end in ends)
    assert summed(data, (length + 1,)).marks == found.marks


@pytest.mark.parametrize("nbytes", [1, STEP, 64 * STEP, 128 * STEP, 128 * STEP + 1, 1 << 30, 3 << 30])
def test_there_are_few_blocks_of_a_length_that_is_a_power_of_two(nbytes):
    step = block_bytes(nbytes)
    assert step & (step - 1) == 0
    assert step >= STEP
    assert 64 <= nbytes / step <= 128 or step == STEP


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_any_part_is_filled_and_no_more_blocks_are_read_than_it_touches(length, tmp_path):
    data, draw, step = some_bytes(length), random.Random(7), block_bytes(length)
    made = checked(tmp_path / "a", data)
    for _ in range(30):
        near = [draw.choice((0, step, 2 * step, length, draw.randrange(length))) + draw.randint(-1, 1) for _ in "ab"]
        start, stop = sorted(min(max(at, 0), length) for at in near)
        start = min(start, length - 1)
        stop = max(stop, start + 1)
        file, view = made(), bytearray(stop - start)
        file.fill(memoryview(view), start)
        assert view == data[start:stop]
        blocks = min(length, -(-stop // step) * step) - start // step * step
        assert file.files.nbytes_read == blocks
        file.fill(memoryview(view), start)
        assert view == data[start:stop]


def test_a_wrong_byte_is_an_error_where_its_block_is_read_and_only_there(tmp_path):
    data = some_bytes(5 * STEP + 9)
    draw = random.Random(3)
    for _ in range(40):
        at = draw.randrange(len(data))
        wrong = bytearray(data)
        wrong[at] ^= 1 << draw.randrange(8)
        file = checked(tmp_path / "a", bytes(wrong), data)()
        start, stop = sorted(draw.sample(range(len(data) + 1), 2))
        view = memoryview(bytearray(stop - start))
        if start // STEP <= at // STEP <= (stop - 1) // STEP:
            with pytest.raises(CheckpointError, match="it has the checksum"):
                file.fill(view, start)
        else:
            file.fill(view, start)
            assert view == data[start:stop]
        with pytest.raises(CheckpointError, match="it has the checksum"):
            file.verify()


def test_rows_of_a_block_are_read_once(tmp_path):
    data = some_bytes(2 * STEP)
    file = checked(tmp_path / "a", data)()
    for start in range(0, 2 * STEP, 1 << 10):
        row = bytearray(100)
        file.fill(memoryview(row), start)
        assert row == data[start : start + 100]
        if start < STEP:
            assert file.files.nbytes_read == STEP
    assert file.files.nbytes_read == 2 * STEP + 127 * 100  # all of it was compared then


def test_a_block_that_was_let_go_is_not_compared_again(tmp_path):
    data, row = some_bytes(3 * STEP), bytearray(100)
    file = checked(tmp_path / "a", data)()
    for start in (0, STEP, 700):
        file.fill(memoryview(row), start)
        assert row == data[start : start + 100]
    assert file.files.nbytes_read == 2 * STEP + 100


def test_large_blocks_take_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "BUCKET_BYTES", STEP - 1)
    data, row = some_bytes(3 * STEP), bytearray(100)
    file = checked(tmp_path / "a", data)()
    for start in (STEP + 5, 2 * STEP + 5, STEP + 7):
        file.fill(memoryview(row), start)
        assert row == data[start : start + 100]
    assert file.files.nbytes_read == 2 * STEP + 100  # what is compared is not read again
    assert file.files.last_block is None
    wrong = data[: STEP + 1] + b"?" + data[STEP + 2 :]
    file = checked(tmp_path / "b", wrong, data)()
    file.fill(memoryview(row), 5)
    with pytest.raises(CheckpointError, match="it has the checksum"):
        file.fill(memoryview(row), STEP + 5)


def test_bytes_in_memory_of_one_name_are_not_taken_for_each_other():
    first, second = some_bytes(STEP), some_bytes(STEP + 1)[1:]
    for data in (first, second):
        file = ranges.FileRange.of(data, "the same").checked("it", zlib.crc32(data))
        view = bytearray(10)
        file.fill(memoryview(view), 5)
        assert view == data[5:15]


@pytest.mark.parametrize("marks", ["00000000", "0" * 24, "0"], ids=["one", "three", "a digit"])
def test_numbers_of_other_blocks_are_refused(marks, tmp_path):
    with pytest.raises(CheckpointError, match=r"has \d+ digits of checksums: expected 16"):
        checked(tmp_path / "a", some_bytes(3 * STEP), marks=marks)()


def test_a_range_with_one_checksum_is_compared_whole(tmp_path, monkeypatch):
    data = some_bytes(3 * STEP)
    for limit in (0, 16 << 20):  # in a scratch, or not
        monkeypatch.setattr(ranges, "BUCKET_BYTES", limit)
        file, view = checked(tmp_path / "a", data, marks="")(), bytearray(10)
        file.fill(memoryview(view), STEP + 1)
        assert view == data[STEP + 1 : STEP + 11]
        assert file.files.nbytes_read == 3 * STEP
        file = checked(tmp_path / "b", data[:-1] + b"?", data, marks="")()
        with pytest.raises(CheckpointError, match="it has the checksum"):
            file.fill(memoryview(view), 0)


LAYOUTS = {
    "contiguous": lambda: torch.arange(1 << 20),
    "transposed": lambda: torch.arange(1 << 20).view(512, -1).T,
    "bytes": lambda: torch.arange(1 << 20).to(torch.uint8),
    "of several buckets": lambda: torch.arange(5 << 20).view(-1, 2)[:, :1],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_a_saved_tensor_are_compared_alone(name, tmp_path):
    tensor = LAYOUTS[name]()
    st.save({"w": tensor}, tmp_path / "a")
    checkpoint = opened(tmp_path / "a", verify=True)
    half, before = (slice(0, len(tensor) // 2),), checkpoint.files.nbytes_read
    found = checkpoint.tree["w"].read(half)
    assert torch.equal(found, tensor[half])
    assert checkpoint.files.nbytes_read - before <= 1.05 * found.nbytes + 4096
    (file,) = (tmp_path / "a").glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = len(data) // 2 + (1 << 18)  # in the other half
    data[at] ^= 4
    file.write_bytes(data)
    assert torch.equal(opened(tmp_path / "a", verify=True).tree["w"].read(half), tensor[half])
    with pytest.raises(CheckpointError, match=r"archive/data/0' has the checksum"):
        opened(tmp_path / "a", verify=True).tree["w"].read((slice(len(tensor) // 2, None),))
    with pytest.raises(CheckpointError, match="checksum"):
        st.load(tmp_path / "a")
