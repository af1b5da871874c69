"""Checkpoints that are hostile or damaged: nothing in them runs, and every one is refused."""

from __future__ import annotations

import io
import math
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

import statetree
from statetree.chunks.boxes import Box, is_covered
from statetree.dcp import file_manifest, metadata, metadata_pickle, state_entries
from statetree.dcp.file_manifest import MANIFEST
from statetree.dcp.saved_structure import read_structure
from tests.pace import units

pytestmark = pytest.mark.filterwarnings("ignore:save. what restore does not make")


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "checkpoint"
    statetree.save({"w": torch.arange(1000.0), "v": [1, "x"]}, directory)
    return directory


def refused(directory, message, template=None):
    with pytest.raises(statetree.CheckpointError, match=rf"(?s)(load|read): .*{message}"):
        statetree.load(directory, template, in_place=True)


class Evil:
    """Pickles as a call of a function."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


MARK = "statetree_was_here"


def touch(directory):
    return Evil(os.mkdir, str(directory / MARK))


@pytest.mark.parametrize("where", ["root", "entry", "planner_data", "storage_meta", "key"])
def test_code_in_the_metadata_does_not_run(where, checkpoint):
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    evil = touch(checkpoint)
    if where == "root":
        metadata = evil
    elif where == "entry":
        metadata.state_dict_metadata["w"] = evil
    elif where == "planner_data":
        metadata.planner_data = evil
    elif where == "storage_meta":
        metadata.storage_meta = evil
    else:
        metadata.storage_data[MetadataIndex("x", index=evil)] = _StorageInfo("a", 0, 1)
    path.write_bytes(pickle.dumps(metadata))
    refused(checkpoint, "refers to posix.mkdir.*was not executed")
    assert not (checkpoint / MARK).exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.serialization\nload\n(S'x'\ntR.",
        b"cbuiltins\ngetattr\n(ctorch\nSize\nS'mro'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
        # Setting an attribute of a class, by the state of an object.
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(NN(S'x'\nI1\ndtb.",
        b"",
        b"garbage",
        b"\x80\x04K\x01.",
    ],
)
def test_other_pickles_are_refused(pickled, checkpoint):
    (checkpoint / ".metadata").write_bytes(pickled)
    refused(checkpoint, "metadata of the checkpoint")
    assert not hasattr(Metadata, "x")


CLASSES = [known for known in metadata_pickle._KNOWN.values() if isinstance(known, type)]


def test_classes_cannot_be_changed(checkpoint):
    before = [{**vars(cls)} for cls in CLASSES]
    forged = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dS'forged'\nI1\nstb."
    (checkpoint / ".metadata").write_bytes(forged)
    refused(checkpoint, "metadata of the checkpoint")
    assert not hasattr(Metadata, "forged")
    for name in metadata_pickle._KNOWN:
        module, _, own = name.rpartition(".")
        (checkpoint / ".metadata").write_bytes(f"c{module}\n{own}\n(N(dS'forged'\nI1\nstb.".encode())
        refused(checkpoint, "metadata of the checkpoint")
    assert [{**vars(cls)} for cls in CLASSES] == before


def shared(levels):
    """A list of two lists that are one, and so on: small, with 2 ** levels leaves."""
    return b"\x80\x04]\x94" + b"".join(b"](h%ch%ce\x94" % (level, level) for level in range(levels)) + b"."


APART = """
import resource, sys
import statetree, statetree.dcp.stored_directory, statetree.files.loading

in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), -1))
for checkpoint in sys.argv[1:]:
    try:
        statetree.load(checkpoint, {"v": None})
    except statetree.CheckpointError as error:
        print(f"{checkpoint}: {str(error)!r}")
"""

BOMBS = {
    "a deep key": (lambda: b"\x80\x04}(" + b")" + b"\x85" * 3_000_000 + b"K\x01u.", "expected a Metadata, got a dict"),
    "a deep value": (lambda: b"\x80\x04" + b")" + b"\x85" * 500_000 + b".", "expected a Metadata, got a tuple"),
    "a huge text": (lambda: b"\x80\x04X\xff\xff\xff\xff.", "at byte 2, which metadata do not need"),
    "shared lists": (lambda: shared(60), "expected a Metadata, got a list"),
    "long sizes": (
        lambda: b"\x80\x04ctorch\nSize\n\x94(" + b"K\x01" * 100_000 + b"t\x85\x94" + b"h\x00h\x01R" * 50_000 + b".",
        "expected a Metadata, got a tuple",
    ),
}


BOMBS |= {
    f"the instruction {code}": (partial(b"\x80\x04%b.".__mod__, code), "at byte 2, which metadata do not need")
    for code in (
        b"r\xff\xff\xff\x7f",
        b"\x96" + b"\xff" * 4 + b"\0" * 4,
        b"p3000000000\n",
        b"B\xff\xff\xff\x7f",
        b"\x82\x01",
        b"P1\n",
    )
}


ONE = b"\x80\x04ctorch\nSize\n\x94X%b%b\x94" % ((20_000).to_bytes(4, "little"), b"a" * 20_000)
MANY = b"ctorch.distributed.checkpoint.metadata\nMetadata\n\x94}\x94(" + b"".join(
    b"M%bN" % number.to_bytes(2, "little") for number in range(20_000)
)
HIDDEN = b"Nr\0\0\0\x7f."
SMUGGLED = b"X\x0a\0\0\0AAAAA" + b"AAAAA" + b"X%b%b." % (len(HIDDEN).to_bytes(4, "little"), HIDDEN)
BOMBS |= {
    "instructions that begin in another frame": (
        lambda: b"\x80\x04\x95" + (10).to_bytes(8, "little") + SMUGGLED,
        "expected a Metadata, got a str",
    ),
    "copies of one text": (
        lambda: ONE + b"(" + b"h\x00h\x01\x85R" * 50_000 + b"t.",
        "expected a Metadata, got a tuple",
    ),
    "copies of one state": (
        lambda: b"\x80\x04" + MANY + b"u(" + b"h\x00)\x81h\x01b" * 50_000 + b"t.",
        "expected a Metadata, got a tuple",
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_any_protocol_are_read(protocol, tmp_path):
    before = threading.stack_size()
    state = {f"{'long' * 100}.{index}": torch.tensor([index]) for index in range(300)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()), protocol))
    assert statetree.similarity(statetree.load(tmp_path), state)
    path.write_bytes(path.read_bytes() + b"\n\0 what comes after the end")
    assert statetree.similarity(statetree.load(tmp_path), state)
    assert threading.stack_size() == before


QUICK_BOMBS = ["a deep key", "shared lists"]  # in one process, which takes longer to start than to load


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's way to tell how much memory is in use")
@pytest.mark.parametrize(
    "names",
    [QUICK_BOMBS, *(pytest.param([name], marks=pytest.mark.slow) for name in BOMBS if name not in QUICK_BOMBS)],
    ids=", ".join,
)
def test_metadata_cannot_crash_or_fill_the_process(names, checkpoint, tmp_path):
    paths = [shutil.copytree(checkpoint, tmp_path / "damaged" / name) for name in names]
    for path in paths:
        (path / ".metadata").write_bytes(BOMBS[path.name][0]())
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}  # an arena reserves 64 MiB for a thread
    done = subprocess.run(
        [sys.executable, "-c", APART, *paths], env=env, capture_output=True, text=True, timeout=units(60), check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for path in paths:
        assert [BOMBS[path.name][1] in line for line in lines if line.startswith(f"{path}: ")] == [True], lines


def test_what_dcp_itself_writes_is_read(checkpoint):
    """Objects that are passed over, or shared, and values that a planner may leave."""

    def edit(metadata):
        metadata.planner_data = {
            "paths": [("w",), ("v", 0)],
            "sets": {"a", "b"},
            "bytes": b"x",
            "number": 2**80,
            5: 0.5,
        }
        metadata.planner_data["again"] = metadata.planner_data["paths"]
        metadata.storage_meta.checkpoint_id = Path("/", *"abcdefghijklmnopqrstuvwxyz")

    change(checkpoint, edit)
    assert statetree.load(checkpoint)["v"] == [1, "x"]


@pytest.mark.parametrize("name", ["offset", "length"])
def test_what_is_shared_often_is_not_shown_in_full(name, checkpoint):
    deep = [1]
    for _ in range(60):
        deep = [deep, deep]
    change(checkpoint, lambda metadata: setattr(info(metadata), name, deep))
    refused(checkpoint, r"expected an offset or a length, got \[\[")


def change(directory, edit):
    """Change the metadata, as of a checkpoint that DCP alone wrote: without a manifest."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_meta.save_id = "another"
    (directory / MANIFEST).unlink(missing_ok=True)
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def info(metadata, key="w"):
    return next(value for index, value in metadata.storage_data.items() if index.fqn == key)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/../../outside", "..\\outside", "", ".", "link", "a\0b"]
)
def test_file_names_stay_inside(name, checkpoint):
    (checkpoint.parent / "outside").write_bytes(b"x" * 10_000)
    (checkpoint / "link").symlink_to(checkpoint.parent / "outside")
    change(checkpoint, lambda metadata: setattr(info(metadata), "relative_path", name))
    refused(checkpoint, "is damaged")


def test_the_metadata_lie_inside(checkpoint):
    (checkpoint / ".metadata").rename(checkpoint.parent / "outside")
    (checkpoint / ".metadata").symlink_to("../outside")
    refused(checkpoint, "lie outside of it")


def test_the_manifest_lies_inside(checkpoint):
    (checkpoint / MANIFEST).rename(checkpoint.parent / "outside")
    (checkpoint / MANIFEST).symlink_to("../outside")
    refused(checkpoint, f"{MANIFEST} is a link that leads out of the directory")


@pytest.mark.parametrize("name", [".metadata", MANIFEST, "__0_0.distcp"])
def test_a_link_to_itself_is_damage(name, checkpoint):
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to(name)
    refused(checkpoint, re.escape(name))


def pieces(metadata, *boxes):
    """Make w consist of pieces, each given by its offset and its length."""
    place = info(metadata)
    for index in [index for index in metadata.storage_data if index.fqn == "w"]:
        del metadata.storage_data[index]
    chunks = [ChunkStorageMetadata(torch.Size([offset]), torch.Size([size])) for offset, size in boxes]
    metadata.state_dict_metadata["w"].chunks = chunks
    metadata.storage_data.update({MetadataIndex("w", chunk.offsets): place for chunk in chunks})


class TensorAsValue:
    """Pickled as a value, with what would make it a tensor that nobody has checked."""

    def __init__(self, *given):
        self.given = given

    def __reduce__(self):
        return BytesStorageMetadata, self.given


EDITS = {
    "value with a name": (lambda m: m.state_dict_metadata.update(v=TensorAsValue("x")), "cannot be read"),
    "value with a shape": (
        lambda m: m.state_dict_metadata.update(v=TensorAsValue(torch.float32, (-4,), ())),
        "cannot be read",
    ),
    "offset": (lambda m: setattr(info(m), "offset", -1), "expected an offset or a length, got -1"),
    "past the end": (lambda m: setattr(info(m), "offset", 10**6), "is truncated: expected"),
    "length": (lambda m: setattr(info(m), "length", 10), "stored in 10 bytes: expected 4000 or more"),
    "huge": (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([2**62])), "impossible size"),
    "big": (
        lambda m: (
            setattr(m.state_dict_metadata["w"], "size", torch.Size([2**40])),
            setattr(m.state_dict_metadata["w"].chunks[0], "sizes", torch.Size([2**40])),
        ),
        "expected 4398046511104 or more",
    ),
    "outside": (
        lambda m: setattr(m.state_dict_metadata["w"].chunks[0], "sizes", torch.Size([1001])),
        r"a piece of w lies at \(0,\) with the size \(1001,\)",
    ),
    "hole": (lambda m: m.state_dict_metadata["w"].chunks.clear(), "holds 0 of the 1000 elements of 'w'"),
    "overlap and hole": (lambda m: pieces(m, (0, 600), (200, 400)), r"the pieces of 'w' overlap in __0_0\.distcp"),
    "missing": (lambda m: m.storage_data.clear(), "does not say where"),
    "swapped": (lambda m: m.state_dict_metadata.__setitem__("w", BytesStorageMetadata()), "does not"),
    "absent": (lambda m: m.state_dict_metadata.pop("w"), "structure names 'w', which it does not hold"),
    "dtype": (
        lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.int32),
        "the entry 'w': it holds something else: expected a tensor of torch.int32",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_impossible_metadata_is_refused(name, checkpoint):
    edit, message = EDITS[name]
    change(checkpoint, edit)
    refused(checkpoint, message)


def boxes_in(shape, count, draw):
    """Boxes that are anywhere, or what remains of the whole once it was cut time and again: these cover it."""
    whole = Box((0,) * len(shape), shape)
    if draw.random() < 0.5:
        corners = [[draw.sample(range(size + 1), 2) for size in shape] for _ in range(count)]
        return [Box(tuple(map(min, box)), tuple(map(max, box))) for box in corners]
    boxes = [whole]
    for _ in range(count):
        start, stop = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(shape))
        cut = draw.randint(start[dim], stop[dim])
        boxes.append(Box(start, (*stop[:dim], cut, *stop[dim + 1 :])))
        boxes.append(Box((*start[:dim], cut, *start[dim + 1 :]), stop))
    return boxes[draw.randrange(2) :]


def test_coverage_is_told_exactly():
    draw = random.Random(0)
    found = set()
    for _ in range(2000):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3)))
        boxes = boxes_in(shape, draw.randint(1, 12), draw)
        counts = torch.zeros(shape)
        for start, stop in boxes:
            counts[tuple(map(slice, start, stop))] += 1
        expected = bool((counts > 0).all())
        assert is_covered(Box((0,) * len(shape), shape), boxes) == expected, (shape, boxes)
        found.add((expected, bool((counts > 1).any()), int(counts.sum()) == math.prod(shape)))
    assert {(True, True, False), (True, False, True), (False, True, True)} <= found


def test_coverage_of_scalars_and_of_nothing():
    assert is_covered(Box((), ()), [Box((), ())])
    assert not is_covered(Box((), ()), [])
    assert is_covered(Box((0, 0), (3, 0)), [])


def test_coverage_by_many_boxes_takes_little():
    size, step = 20 * 4**5, 4**5
    boxes = [
        Box((row, column), (row + step, column + step))
        for row in range(0, size, step)
        for column in range(0, size, step)
    ]
    draw = random.Random(1)
    anywhere = [Box(*zip(*(sorted(draw.sample(range(1001), 2)) for _ in range(6)), strict=True)) for _ in range(300)]
    begin = time.process_time()
    assert is_covered(Box((0, 0), (size, size)), boxes)
    assert not is_covered(Box((0, 0), (size, size)), boxes[1:])
    assert not is_covered(Box((0,) * 6, (1000,) * 6), anywhere)
    assert time.process_time() - begin < units(5)


def test_code_in_values_does_not_run(checkpoint, tmp_path):
    directory = tmp_path / "evil"
    with pytest.warns(UserWarning, match=r"v \(Evil\): .*posix.mkdir"):
        statetree.save({"v": touch(tmp_path)}, directory)
    assert not (tmp_path / MARK).exists()
    refused(directory, "the plain value at v cannot be read: .*weights_only=False")
    refused(directory, "the plain value at v cannot be read", {"v": None})
    assert not (tmp_path / MARK).exists()


def test_empty_bytes_are_admitted_and_no_more(tmp_path):
    statetree.save({"v": b""}, tmp_path / "empty")
    assert statetree.load(tmp_path / "empty") == {"v": b""}
    with pytest.warns(UserWarning, match=r"v \(Evil\)"):
        statetree.save({"v": Evil(bytes, 1 << 30)}, tmp_path / "many")
    refused(tmp_path / "many", "the value cannot be read")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 10_000,
        '{"version":2}',
        '{"version":1,"nodes":[],"entries":[]}',
        '{"version":1,"nodes":[["dict","mapping",["sa"],[0],null]],"entries":[]}',
        '{"version":1,"nodes":[["dict","mapping",["sa"],[-1],null]],"entries":[]}',
        '{"version":1,"nodes":[["dict","mapping",["sa","sb"],[0,0],null]],"entries":[["value",["a"],""]]}',
        '{"version":1,"nodes":[["dict","mapping",["i!"],[0],null]],"entries":[["value",["a"],""]]}',
        '{"version":1,"nodes":[["dict","mapping",[1],[0],null]],"entries":[["value",["a"],""]]}',
        '{"version":1,"nodes":[["dict","mapping",["sa"],[0.5],null]],"entries":[["value",["a"],""]]}',
        '{"version":1,"nodes":[["OrderedDict","mapping",["sa"],[0],7]],"entries":[["value",["a"],""]]}',
        '{"version":1,"nodes":[],"entries":[["code",["a"],""]]}',
        '{"version":1,"nodes":[],"entries":[["value",["a","b"],""]]}',
    ],
)
def test_damaged_structures_are_refused(text):
    with pytest.raises(statetree.CheckpointError, match=r"(load|read): the checkpoint's structure is"):
        read_structure(text)


def test_missing_directories_are_named(checkpoint, tmp_path):
    refused(tmp_path / "nowhere", "nowhere: there is no such directory")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "file: it is empty")
    (checkpoint / ".metadata").unlink()
    refused(checkpoint, "it has no .metadata file: .*incomplete")


def test_truncated_files_are_named(checkpoint):
    data = checkpoint / "__0_0.distcp"
    os.truncate(data, data.stat().st_size // 2)
    refused(checkpoint, "__0_0.distcp is truncated")
    data.unlink()
    refused(checkpoint, "the file '__0_0.distcp' is missing")


def test_metadata_that_are_no_file_are_refused(checkpoint):
    """Opening a pipe would wait for somebody who writes."""
    (checkpoint / ".metadata").unlink()
    os.mkfifo(checkpoint / ".metadata")
    refused(checkpoint, r"\.metadata is no regular file")


def test_a_manifest_that_is_no_file_is_refused(checkpoint):
    (checkpoint / MANIFEST).unlink()
    os.mkfifo(checkpoint / MANIFEST)
    refused(checkpoint, "is no regular file.*pass verify=False")


@pytest.mark.parametrize("name", [".metadata", MANIFEST])
def test_metadata_of_any_size_are_refused(name, checkpoint, monkeypatch):
    for module in (file_manifest, metadata):
        monkeypatch.setattr(module, "_MAX_BYTES", 10_000)
    os.truncate(checkpoint / name, 10_001)
    refused(checkpoint, f"{name} has 10001 bytes: expected at most 10000")


def test_one_piece_does_not_serve_many_entries(checkpoint):
    """Which would take any amount of memory."""

    def serve(metadata):
        entry = metadata.state_dict_metadata["w"]
        for number in range(3):
            metadata.state_dict_metadata[f"w{number}"] = entry
            metadata.storage_data[MetadataIndex(f"w{number}", torch.Size([0]))] = info(metadata)

    change(checkpoint, serve)
    refused(
        checkpoint,
        r"the pieces of '.*' and '.*' overlap in __0_0\.distcp",
        {"w0": torch.zeros(1000), "w1": torch.zeros(1000)},
    )


@pytest.mark.parametrize("name", ["./__0_0.distcp", "linked.distcp", "hard.distcp"])
def test_nor_does_it_under_several_names(name, checkpoint):
    (checkpoint / "linked.distcp").symlink_to("__0_0.distcp")
    os.link(checkpoint / "__0_0.distcp", checkpoint / "hard.distcp")

    def serve(metadata):
        metadata.state_dict_metadata["w2"] = metadata.state_dict_metadata["w"]
        place = info(metadata)
        index = MetadataIndex("w2", torch.Size([0]))
        metadata.storage_data[index] = _StorageInfo(name, place.offset, place.length)

    change(checkpoint, serve)
    refused(checkpoint, r"overlap in|is not a plain one", {"w": torch.zeros(1000), "w2": torch.zeros(1000)})


@pytest.mark.parametrize("verify", [True, False])
def test_pieces_are_not_unpacked(verify, tmp_path):
    """Few compressed bytes would take any amount of memory, whatever a manifest says of them."""
    statetree.save({"w": torch.zeros(10)}, tmp_path)
    packed = io.BytesIO()
    source = zipfile.ZipFile(archive_of(torch.zeros(1_000_000)[:10]))
    with source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    path, data = tmp_path / "__0_0.distcp", packed.getvalue()
    manifest, start = file_manifest.read_manifest(tmp_path), path.stat().st_size
    with path.open("ab") as file:
        file.write(data + file_manifest.TRAILER + manifest.save.encode())
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    place = info(metadata)
    place.offset, place.length = start, len(data)
    written = pickle.dumps(metadata)
    (tmp_path / ".metadata").write_bytes(written)
    piece = file_manifest.Stored("__0_0.distcp", start, len(data), zlib.crc32(data))
    listed = manifest.files["__0_0.distcp"]
    pieces = {**listed.pieces, file_manifest.Index("w", (0,)): piece}
    listed = listed._replace(nbytes=path.stat().st_size, pieces=pieces)
    forged = manifest._replace(metadata=(len(written), zlib.crc32(written)), files={"__0_0.distcp": listed})
    (tmp_path / MANIFEST).write_bytes(forged.to_bytes())
    with pytest.raises(statetree.CheckpointError, match=r"read: .*'archive/data.pkl' is compressed"):
        statetree.load(tmp_path, {"w": torch.zeros(10)}, in_place=True, verify=verify)


def archive_of(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file


def test_what_is_shared_without_end_is_not_shown(checkpoint):
    """An error of Python's own would render it."""
    deep = [1]
    for _ in range(60):
        deep = [deep, deep]

    def edit(metadata):
        metadata.state_dict_metadata = {"w": metadata.state_dict_metadata["w"]}
        metadata.state_dict_metadata["w"].properties = deep

    change(checkpoint, edit)
    refused(checkpoint, "expected a TensorProperties, got a list")


def test_names_do_not_reach_the_terminal_as_they_are(checkpoint):
    change(checkpoint, lambda metadata: setattr(info(metadata), "relative_path", "\x1b[2J/../x\n"))
    with pytest.raises(statetree.CheckpointError, match="leads out") as caught:
        statetree.load(checkpoint)
    assert "\x1b" not in str(caught.value)


def test_a_file_of_zeros_is_named(checkpoint):
    data = checkpoint / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    refused(
        checkpoint,
        r"__0_0\.distcp: the entry .*: it is no zip archive",
        {"v": None, "w": torch.zeros(1000)},
    )


@pytest.mark.parametrize("where", range(0, 100, 7))
def test_any_damaged_metadata_is_refused_or_harmless(where, checkpoint):
    path = Path(checkpoint / ".metadata")
    data = bytearray(path.read_bytes())
    data[len(data) * where // 100] ^= 0x55
    path.write_bytes(data)
    with suppress(statetree.StateTreeError):
        statetree.load(checkpoint, {"v": None, "w": torch.zeros(1000)}, in_place=True)


def coo(indices):
    return torch.sparse_coo_tensor(torch.tensor([indices]), torch.arange(1.0, 3), (4,), check_invariants=False)


def csr(rows, columns):
    rows, columns = torch.tensor(rows), torch.tensor(columns)
    return torch.sparse_csr_tensor(rows, columns, torch.arange(1.0, 3), (2, 3), check_invariants=False)


def jagged(offsets):
    return torch.nested.nested_tensor_from_jagged(torch.arange(6.0).reshape(6, 1), torch.tensor(offsets))


INDICES = {
    "coo": (coo([0, 9]), coo([1, 3])),
    "coo, negative": (coo([-1, 2]), coo([1, 3])),
    "csr, columns": (csr([0, 1, 2], [0, 9]), csr([0, 1, 2], [0, 1])),
    "csr, rows": (csr([0, 7, 2], [0, 1]), csr([0, 1, 2], [0, 1])),
    "jagged": (jagged([0, 2, 6]), jagged([0, 3, 6])),
}


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
@pytest.mark.parametrize("name", INDICES)
def test_indices_do_not_lead_outside(name, tmp_path, monkeypatch):
    wrong, template = INDICES[name]
    if name == "jagged":
        wrong._offsets[1] = 1000
    with monkeypatch.context() as patch:
        told = state_entries.facts(template)
        patch.setattr(state_entries, "facts", lambda _: told)
        statetree.save({"a": wrong}, tmp_path)
    before = [part.clone() for part in statetree.leaves.parts.unpack("test", [template], list).parts]
    with pytest.raises(statetree.CheckpointError, match=r"(load|read): the indices of the leaf at a are damaged: .*"):
        statetree.load(tmp_path, {"a": template}, in_place=True)
    after = statetree.leaves.parts.unpack("test", [template], list).parts
    assert all(map(torch.equal, after, before))


def test_one_name_imports_no_modules(checkpoint):
    """Torch imports some where a name of it is looked up."""
    (checkpoint / ".metadata").write_bytes(b"ctorch\n_dynamo\n.")
    refused(checkpoint, "refers to torch._dynamo")
