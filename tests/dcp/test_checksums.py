"""Flipped bits in the files of a checkpoint: each is an error, or changes nothing that is loaded."""

from __future__ import annotations

import io
import random
import re

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import statetree
from statetree import dcp
from statetree.dcp import data_files
from statetree.dcp.data_files import DataFiles, check_entry
from statetree.dcp.file_manifest import read_manifest
from statetree.files import ranges
from statetree.files.ranges import OpenFiles
from statetree.testing import run_ranks
from tests.judge import assert_trees_equal

DATA = "__0_0.distcp"


def make_state():
    return {
        "model": {"weight": torch.arange(35.0).reshape(5, 7), "flags": torch.arange(9) % 2 == 0},
        "half": torch.arange(6).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5.5),
        "step": 12,
        "rates": (0.5, [1e-3, "x"]),
    }


def empty_state():
    return statetree.map_leaves(
        lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else None, make_state()
    )


@pytest.fixture(params=[1 << 20, 0], ids=["read at once", "read in parts"])
def size_of_small_entries(request, monkeypatch):
    monkeypatch.setattr(data_files, "_SMALL_BYTES", request.param)


@pytest.fixture
def checkpoint(tmp_path):
    with dcp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, make_state())
    return tmp_path / "step-00000003"


def flip(data, bit):
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def bits_of(data, count):
    """Return bits spread over data: some in all parts of zip archives, and one in every stretch of equal length."""
    chosen = random.Random(0)
    size = 8 * len(data)
    spread = [chosen.randrange(size * at // count, size * (at + 1) // count) for at in range(count)]
    heads = [match.start() for match in re.finditer(rb"PK(\x01\x02|\x03\x04|\x05\x06|\x06\x06|\x06\x07)", data)]
    return spread + [8 * head + chosen.randrange(8 * 20) for head in heads for _ in range(2)]


@pytest.mark.usefixtures("size_of_small_entries")
@pytest.mark.parametrize("count", [40, pytest.param(350, marks=pytest.mark.slow)], ids="{} bits".format)
@pytest.mark.parametrize("how", ["load without a template", "load", "restore"])
def test_a_flipped_bit_is_an_error_or_changes_nothing(how, count, checkpoint):
    path = checkpoint / DATA
    intact = path.read_bytes()
    expected, template, refused = make_state(), empty_state(), 0
    checkpointer = dcp.Checkpointer(checkpoint.parent)
    bits = bits_of(intact, count)
    for bit in bits:
        path.write_bytes(flip(intact, bit))
        try:
            if how == "restore":
                loaded = checkpointer.restore()
            else:
                loaded = statetree.load(checkpoint, template if how == "load" else None, in_place=True)
        except statetree.CheckpointError as error:
            assert re.match(r"(read|load): .*(__0_0\.distcp|plain value at )", str(error)), error
            refused += 1
        else:
            assert_trees_equal(loaded, expected, storages=False)
    assert len(bits) // 4 < refused < len(bits)


def entry(value):
    """What DCP writes of a tensor or a plain value."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def check(data, folder):
    (folder / DATA).write_bytes(data)
    check_entry(OpenFiles().open(folder / DATA))


@pytest.mark.parametrize(
    ("value", "step"),
    [
        pytest.param([torch.arange(5.0)], 7, id="one storage, a bit of each byte"),  # another one each time
        pytest.param([torch.arange(5.0)], 1, id="one storage", marks=pytest.mark.slow),
        pytest.param([torch.arange(3), torch.arange(3) + 7, "x"], 1, id="two storages", marks=pytest.mark.slow),
    ],
)
def test_every_bit_of_an_entry(value, step, tmp_path):
    intact = entry(value)
    check(intact, tmp_path)
    passed = 0
    for bit in range(0, 8 * len(intact), step):
        damaged = flip(intact, bit)
        try:
            check(damaged, tmp_path)
        except statetree.CheckpointError as error:
            assert str(error).startswith(f"read: {tmp_path / DATA}: "), error
            continue
        try:
            found = torch.load(io.BytesIO(damaged), weights_only=True)
        except Exception:  # whatever torch raises: load makes a CheckpointError of it
            continue
        passed += 1
        assert_trees_equal(found, value, storages=False)
    assert passed


def test_the_error_says_where_the_damage_is(checkpoint):
    path = checkpoint / DATA
    intact = path.read_bytes()
    weight = make_state()["model"]["weight"].numpy().tobytes()
    path.write_bytes(flip(intact, 8 * intact.index(weight) + 77))
    message = (
        r"read: .*__0_0\.distcp: the entry 'model\.weight': the member 'archive/data/0' has the "
        r"checksum [0-9a-f]{8}: expected [0-9a-f]{8}\. .*get another copy\."
    )
    with pytest.raises(statetree.CheckpointError, match=message):
        statetree.load(checkpoint, empty_state(), in_place=True)
    with pytest.raises(statetree.CheckpointError, match=message), dcp.Checkpointer(checkpoint.parent) as checkpointer:
        checkpointer.restore()


def test_only_what_is_read_is_verified(checkpoint):
    path = checkpoint / DATA
    intact = path.read_bytes()
    weight = make_state()["model"]["weight"].numpy().tobytes()
    path.write_bytes(flip(intact, 8 * intact.index(weight) + 77))
    template = {"half": torch.zeros(6, dtype=torch.bfloat16), "step": None}
    loaded = statetree.load(checkpoint, template, in_place=True, strict=False)
    assert_trees_equal(loaded, {key: make_state()[key] for key in template}, storages=False)


def test_verify_false_reads_what_is_there(checkpoint):
    path = checkpoint / DATA
    intact = path.read_bytes()
    expected = make_state()
    data = expected["model"]["weight"].numpy().tobytes()
    path.write_bytes(flip(intact, 8 * intact.index(data) + 77))
    expected["model"]["weight"] = torch.frombuffer(bytearray(flip(data, 77)), dtype=torch.float32).reshape(5, 7)
    loaded = statetree.load(checkpoint, verify=False)
    assert_trees_equal(loaded, expected, storages=False)
    with dcp.Checkpointer(checkpoint.parent) as checkpointer:
        assert_trees_equal(checkpointer.restore(verify=False), expected, storages=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_without_checksums(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch_dcp.save(make_state(), checkpoint_id=tmp_path)
    finally:
        torch.serialization.set_crc32_options(before)
    with pytest.raises(statetree.CheckpointError, match=r"has no checksums: expected those .* Pass verify=False"):
        statetree.load(tmp_path)
    assert_trees_equal(statetree.load(tmp_path, verify=False), make_state(), storages=False)


@pytest.mark.usefixtures("size_of_small_entries")
@pytest.mark.parametrize("cut", [0, 1, 21, 22, 100])
def test_an_entry_that_is_cut_off(cut, tmp_path):
    data = entry(torch.arange(5.0))
    for part in (data[:cut], data[: len(data) - cut - 1]):
        with pytest.raises(statetree.CheckpointError, match=r"__0_0\.distcp: "):
            check(part, tmp_path)


def test_a_tensor_of_many_chunks(monkeypatch, tmp_path):
    """Checksums go on from chunk to chunk."""
    monkeypatch.setattr("statetree.files.ranges.CHUNK_BYTES", 100)
    state = {"w": torch.arange(1000.0)}
    statetree.save(state, tmp_path)
    assert_trees_equal(statetree.load(tmp_path), state, storages=False)
    path = tmp_path / DATA
    intact = path.read_bytes()
    begin = 8 * intact.index(state["w"].numpy().tobytes())
    for bit in (0, 3 * 800 + 5, 32_000 - 1):
        path.write_bytes(flip(intact, begin + bit))
        with pytest.raises(
            statetree.CheckpointError, match=r"__0_0\.distcp: the entry 'w': the member 'archive/data/0' has"
        ):
            statetree.load(tmp_path)


def restore_damaged(directory):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(200.0)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)])}
    path = directory / "step-00000001" / "__1_0.distcp"
    with dcp.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state)
        if mesh.get_rank() == 1:
            intact = path.read_bytes()
            path.write_bytes(flip(intact, 8 * intact.index(whole[100:].numpy().tobytes()) + 77))
        torch.distributed.barrier()
        try:
            checkpointer.restore({"w": distribute_tensor(torch.zeros(200), mesh, [Shard(0)])})
        except statetree.CheckpointError as error:
            return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "nothing was raised"


def test_every_rank_is_told_of_damage_that_one_rank_reads(tmp_path):
    for told in run_ranks(2, restore_damaged, tmp_path):
        assert re.search(
            r"(?s)read: .*__1_0\.distcp: the entry 'w': the member 'archive/data/0' has .*raised on rank 1", told
        ), told
        assert "rank 0" not in told


def test_a_small_entry_is_read_once(tmp_path, monkeypatch):
    state = {str(number): torch.arange(8.0) + number for number in range(10)}
    statetree.save(state, tmp_path)
    target, reads, preadv = statetree.map_leaves(torch.zeros_like, state), [], ranges.os.preadv
    monkeypatch.setattr(ranges.os, "preadv", lambda *args: reads.append(args) or preadv(*args))
    statetree.load(tmp_path, target, in_place=True)
    assert_trees_equal(target, state)
    entries = [args for args in reads if len(args[1][0]) > 32]  # the rest looks at files as a whole
    assert len(entries) <= len(state) + 3  # the structure, the metadata and the manifest


def test_boxes_of_one_small_entry_are_verified_and_read_once(tmp_path):
    statetree.save({"a": torch.arange(4.0), "b": torch.arange(2.0)}, tmp_path)
    data = DataFiles(tmp_path)
    first, other = data.tensor("a", verify=True), data.tensor("b", verify=True)
    assert first.read((slice(0, 2),)).tolist() == [0, 1]
    read = data.files.nbytes_read
    assert first.read((slice(2, 4),)).tolist() == [2, 3]
    assert data.files.nbytes_read == read
    assert other.read().tolist() == [0, 1]  # which takes its place in memory
    assert first.read().tolist() == [0, 1, 2, 3]
    assert data.files.nbytes_read > read


def counted_load(path, like, monkeypatch):
    counts, preadv = [], ranges.os.preadv
    with monkeypatch.context() as patch:
        patch.setattr(ranges.os, "preadv", lambda *args: counts.append(preadv(*args)) or counts[-1])
        statetree.load(path, like, in_place=True)
    return sum(counts)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("writer", ["statetree", "torch"])
def test_whole_pieces_are_read_once(writer, tmp_path, monkeypatch):
    state = {"w": torch.arange(1 << 20), "x": torch.arange(600_000.0), "empty": torch.empty(0, 2)}
    if writer == "torch":
        torch_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    else:
        statetree.save(state, tmp_path)
    target = statetree.map_leaves(torch.zeros_like, state)
    read = counted_load(tmp_path, target, monkeypatch)
    assert_trees_equal(target, state)
    assert read < sum(file.stat().st_size for file in tmp_path.iterdir()) + 2000


@pytest.mark.parametrize("at", [0, 77, (1 << 20) - 1])
def test_a_part_of_a_piece_is_read_when_its_block_is_right(at, tmp_path):
    state = {"w": torch.arange(1 << 20).view(1024, 1024)}
    statetree.save(state, tmp_path)
    stored = DataFiles(tmp_path).tensor("w", verify=True)
    for rows in (slice(5, 9), slice(1020, 1024)):
        assert torch.equal(stored.read((rows,)), state["w"][rows])
    path = tmp_path / DATA
    data = path.read_bytes()
    path.write_bytes(flip(data, 8 * data.index(state["w"].numpy().tobytes()) + 64 * at))
    stored = DataFiles(tmp_path).tensor("w", verify=True)
    row = at // 1024
    own = (slice(max(0, row - 3), row + 1),)
    assert torch.equal(stored.read((slice(512, 516),)), state["w"][512:516])
    for read in (lambda: stored.read(own), stored.tensor, lambda: stored.read()):
        for _ in range(2):  # what was wrong once is not taken to be right
            with pytest.raises(statetree.CheckpointError, match=r"entry 'w': the member 'archive/data/0' has the"):
                read()


def test_a_piece_in_the_place_of_another_is_told(tmp_path):
    """Both are whole archives of the same size."""
    state = {"a": torch.arange(1000.0), "b": torch.arange(1000.0) + 1}
    statetree.save(state, tmp_path)
    path = tmp_path / DATA
    data = path.read_bytes()
    a, b = (piece for index, piece in read_manifest(tmp_path).files[DATA].pieces.items() if index.key in "ab")
    assert a.length == b.length
    path.write_bytes(data[: b.offset] + data[a.offset : a.offset + a.length] + data[b.offset + b.length :])
    with pytest.raises(statetree.CheckpointError, match=r"the entry 'b': it is damaged: expected the checksum"):
        statetree.load(tmp_path, state, in_place=True)


def test_an_error_of_a_plain_value_names_one_remedy(tmp_path):
    statetree.save({"a": torch.ones(3), "v": "some text"}, tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[0] ^= 1  # of the value, which comes first
    file.write_bytes(data)
    with pytest.raises(statetree.CheckpointError, match=r"the value cannot be read: .* is not where") as found:
        statetree.load(tmp_path / "a", verify=False)
    assert str(found.value).count("get another copy.") == 1
    assert ".." not in str(found.value)


def test_what_has_no_checksums_is_compared_with_none(tmp_path):
    state = {"w": torch.arange(4.0), "n": 3}
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "torch.pt")
        for name in ("a.pt", "a"):
            statetree.save(state, tmp_path / name)
    finally:
        torch.serialization.set_crc32_options(before)
    for name in ("torch.pt", "a.pt", "a"):
        for verify in (True, False):
            assert statetree.similarity(statetree.load(tmp_path / name, verify=verify), state)
