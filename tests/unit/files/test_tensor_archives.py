"""Archives made from templates are, byte for byte, those of ``torch.save``."""

from __future__ import annotations

import io
import zlib

import pytest
import torch

from statetree.files import tensor_archives
from statetree.files.ranges import FileRange
from statetree.files.tensor_archives import TensorArchive, archive_of
from statetree.spans.layout import as_bytes

DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)


def written(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 4), (70_001,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, shape):
    try:
        tensor = torch.empty(shape, dtype=dtype)
        memory = as_bytes(tensor.untyped_storage(), 0, tensor.untyped_storage().nbytes())
        memory.copy_(torch.arange(len(memory)).remainder(251))
        data = written(tensor)
    except (KeyError, RuntimeError):
        pytest.skip("torch does not save it")
    archive, bytes_ = archive_of(tensor.dtype, tensor.shape), bytes(memory.tolist())
    checksum = zlib.crc32(bytes_)
    assert archive.head + bytes_ + archive.end(checksum) == data
    assert archive.length == len(data)
    assert archive.nbytes == len(bytes_)


def test_an_archive_states_the_checksum_of_its_memory():
    tensor = torch.arange(6.0).view(2, 3)
    archive, data = archive_of(tensor.dtype, tensor.shape), written(tensor)
    memory = tensor.numpy().tobytes()
    begin = data.index(memory)
    assert begin == len(archive.head)
    assert archive.stated(FileRange.of(data, "a")) == (zlib.crc32(memory), zlib.crc32(data))
    assert archive.stated(FileRange.of(data + b"0", "a")) is None
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        is_memory = begin <= bit // 8 < begin + len(memory)  # which is not looked at
        assert (archive.stated(FileRange.of(bytes(damaged), "a")) is not None) == is_memory, bit


def test_what_torch_computes_in_another_way_is_refused(monkeypatch):
    archive = archive_of(torch.int8, (77,))
    end = archive.end(0)
    monkeypatch.setattr(tensor_archives, "_combined", lambda before, crc: before ^ crc)
    with pytest.raises(ValueError, match=r"^$"):
        TensorArchive(archive.head, archive.nbytes, end, archive.stride)
    assert archive_of(torch.int8, (78,)) is None


def test_no_archive_without_checksums():
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        assert archive_of(torch.int8, (79,)) is None
    finally:
        torch.serialization.set_crc32_options(before)
    assert archive_of(torch.int8, (79,)) is not None
