"""Torch files that are damaged or hostile: nothing in them runs, little memory is taken, and the fault is named."""

from __future__ import annotations

import os
import struct
import time
from collections import OrderedDict
from zipfile import ZipFile, ZipInfo

import numpy as np
import pytest
import torch

import statetree as st
from tests.cli.hostile import Raw, Storage, archive, bomb, pickle_of, tensor
from tests.cli.states import nested_state, write
from tests.pace import units

DATA = {"0": bytes(16)}


def refused(ran, *messages):
    assert ran.status == 2, ran.out + ran.err
    assert ran.out == ""
    assert ran.err.startswith("error: read: ")
    for message in messages:
        assert message in ran.err, ran.err


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "statetree_was_here"


@pytest.mark.parametrize("command", ["show", "convert", "diff"])
@pytest.mark.parametrize("function", [os.mkdir, os.system, eval, exec, getattr, print, pickle_of])
def test_code_does_not_run(function, command, marker, tmp_path, statetree):
    argument = str(marker) if function is os.mkdir else f"__import__('os').mkdir({str(marker)!r})"
    evil = Raw(function, f"mkdir {marker}" if function is os.system else argument)
    path = archive(tmp_path / "a.pt", pickle_of({"w": tensor(), "evil": evil}), DATA)
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        torch.load(path, weights_only=True)
    if command == "convert":
        ran = statetree("convert", path, tmp_path / "b.pt")
        assert ran.status == 2
        assert not (tmp_path / "b.pt").exists()
        assert statetree("convert", "--drop-values", path, tmp_path / "b.pt").status == 0
        assert list(torch.load(tmp_path / "b.pt", weights_only=True)) == ["w"]
    else:
        ran = statetree(command, *[path] * (2 if command == "diff" else 1))
        assert ran.status == (2 if command == "diff" else 0)  # whether what is not loaded is the same cannot be told
    assert f".{function.__name__}" in ran.err
    assert "not loaded" in ran.err
    assert not marker.exists()


def test_code_in_the_state_of_an_object_does_not_run(marker, tmp_path, statetree):
    evil = OrderedDict()
    evil.__dict__["x"] = Raw(os.mkdir, str(marker))
    ran = statetree("show", archive(tmp_path / "a.pt", pickle_of(evil)))
    assert ran.status == 0
    assert "mkdir" in ran.err
    assert not marker.exists()


def test_classes_cannot_be_changed(tmp_path, statetree):
    for name in (b"torch\nTensor", b"collections\nOrderedDict", b"torch\nSize"):
        data = b"\x80\x02c" + name + b"\n(N}X\x06\x00\x00\x00forgedK\x01stb."
        statetree("show", archive(tmp_path / "a.pt", data))
    data = b"\x80\x02ccollections\nOrderedDict\n)R}X\x0c\x00\x00\x00__setstate__K\x01sb."
    refused(statetree("show", archive(tmp_path / "a.pt", data)), "attributes that are no plain ones")
    assert not any(hasattr(cls, "forged") for cls in (torch.Tensor, OrderedDict, torch.Size))


GEOMETRY = {
    "beyond the end": (tensor(size=(5,)), "would end at byte 20: expected at most 16"),
    "by its offset": (tensor(offset=1), "would end at byte 20"),
    "by its strides": (tensor(size=(2, 2), stride=(3, 1)), "would end at byte 20"),
    "huge": (tensor(size=(2**40,)), "would end at byte"),
    "impossible": (tensor(size=(2**40, 2**40)), "the impossible size"),
    "of many dims": (tensor(size=(1,) * 65, stride=(1,) * 65), "something else where a size"),
    "negative": (tensor(size=(-1,)), "a size of (-1,)"),
    "of negative strides": (tensor(stride=(-1,)), "strides of (-1,)"),
    "of negative offset": (tensor(offset=-1), "an offset of [-1]"),
    "of no numbers": (tensor(size=("4",)), "a size of ('4',)"),
    "of fractions": (tensor(size=(2.0,)), "a size of (2.0,)"),
    "of booleans": (tensor(size=(True,)), "a size of (True,)"),
    "of too few strides": (tensor(size=(2, 2)), "more dims than strides"),
    "of a text": (tensor(size="4"), "something else where a size"),
    "on nothing": (Raw(torch._utils._rebuild_tensor_v2, None, 0, (1,), (1,), False, {}), "no storage"),
    "on a missing storage": (tensor(key="1"), "on the storage '1', which the archive does not hold"),
    "on another file": (tensor(key="../../secret"), "which the archive does not hold"),
    "on a storage that lies": (tensor(numel=5), "says that the storage 'archive/data/0' has 20 bytes: it has 16"),
    "on a storage of negative size": (tensor(numel=-4), "a number of elements"),
    "on a storage without a class": (
        Raw(torch._utils._rebuild_tensor_v2, Storage("0", 4, "FloatStorage"), 0, (1,), (1,), False, {}),
        "without a class or a key",
    ),
    "of too many arguments": (Raw(torch._utils._rebuild_tensor_v2, *range(20)), "no storage"),
    "of too few arguments": (Raw(torch._utils._rebuild_tensor_v2, 1), "damaged (TypeError"),
    "a parameter of nothing": (
        Raw(torch._utils._rebuild_parameter, 1, True, {}),
        "makes a parameter of what is no tensor",
    ),
    "of a layout": (Raw(torch._utils._rebuild_sparse_tensor, torch.float32, (1, 2, 3)), "an unknown layout"),
    "a device": (Raw(torch.device, "x" * 100), "makes a device of something else"),
    "a size": (Raw(torch.Size, (2**63,)), "makes a Size of something else"),
    "a bytearray": (Raw(bytearray, 2**40), "makes bytes of something else"),
    "a complex": (Raw(complex, "1" * 100, 2), "damaged (TypeError"),
    "by its class": (Raw(torch.nn.Parameter, tensor()), "makes a torch.nn.parameter.Parameter in an unknown way"),
    "of no dtype": (
        Raw(torch._utils._rebuild_tensor_v3, Storage("0", 4), 0, (4,), (1,), False, {}, "f"),
        "a tensor without a dtype",
    ),
    "of impossible strides on meta": (
        Raw(torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (2,) * 30, (2**62,) * 30, False),
        "a tensor of impossible strides",
    ),
    "of no dtype on meta": (
        Raw(torch._utils._rebuild_meta_tensor_no_storage, "f", (4,), (1,), False),
        "a tensor without a dtype",
    ),
    "with attributes, made by a number": (Raw(torch._tensor._rebuild_from_type_v2, 1, torch.Tensor, (), {}), "unknown"),
    "attributes of a size": (
        Raw(torch._tensor._rebuild_from_type_v2, torch.Size, torch.Tensor, ((1,),), {}),
        "attributes of something that is no tensor",
    ),
    "quantized somehow": (
        Raw(torch._utils._rebuild_qtensor, Storage("0", 16, torch.QInt8Storage), 0, (4,), (1,), "scheme", False, {}),
        "a quantized tensor of an unknown scheme",
    ),
    "quantized on nothing": (
        Raw(torch._utils._rebuild_qtensor, None, 0, (4,), (1,), (torch.per_tensor_affine, 1.0, 0), False, {}),
        "a tensor on something that is no storage",
    ),
    "nested of numbers": (Raw(torch._utils._rebuild_nested_tensor, tensor(), 1, 2, 3), "whose parts are no tensors"),
}


@pytest.mark.parametrize("name", GEOMETRY)
def test_impossible_tensors_are_refused(name, tmp_path, statetree):
    evil, message = GEOMETRY[name]
    path = archive(tmp_path / "a.pt", pickle_of({"w": evil}), DATA)
    refused(statetree("show", path), str(path), "data.pkl", message)


def test_tensors_that_were_on_other_devices_are_refused(tmp_path, statetree):
    moved = Raw(torch._utils._rebuild_device_tensor_from_cpu_tensor, tensor(), torch.float32, "xla:0", True)
    path = archive(tmp_path / "a.pt", pickle_of({"w": moved}), DATA)
    assert "_rebuild_device_tensor_from_cpu_tensor" in statetree("show", path).err
    with pytest.raises(st.CheckpointError, match="_rebuild_device_tensor_from_cpu_tensor"):
        st.files.open(path)


def test_expanded_tensors_are_not_written_out(tmp_path, statetree):
    """A tensor of a terabyte on four bytes: torch files hold it as it is, others would have to hold the terabyte."""
    path = archive(tmp_path / "a.pt", pickle_of({"w": tensor(size=(2**38,), stride=(0,))}), DATA)
    ran = statetree("show", path)
    assert ran.status == 0
    assert "1.0 TiB" in ran.out
    assert statetree("convert", path, tmp_path / "b.pt").status == 0
    assert (tmp_path / "b.pt").stat().st_size < 2000
    for name in ("b.safetensors", "b"):
        ran = statetree("convert", path, tmp_path / name)
        assert ran.status == 2
        assert "a view that repeats its elements" in ran.err


PICKLES = {
    "empty": (b"", "cut off"),
    "cut off": (pickle_of({"w": 1, "text": "x" * 50})[:-20], "cut off"),
    "of protocol 9": (b"\x80\x09}.", "protocol: 9"),
    "with EXT": (b"\x82\x01.", "does not hold"),
    "with a text without end": (b"X\xff\xff\xff\xff.", "cut off"),
    "with an unknown number": (b"h\x05.", "does not hold"),
    "with an empty stack": (b"\x85.", "does not hold"),
    "with a mark too few": (b"t.", "does not hold"),
    "that calls a text": (b"X\x01\x00\x00\x00a)R.", "calls what is no name, but a str"),
    "that appends to a mapping": (b"}K\x01a.", "appends to a dict"),
    "that sets items of a text": (b"X\x01\x00\x00\x00aK\x01K\x01s.", "sets items of a str"),
    "that sets items of a tensor": (pickle_of(tensor())[:-1] + b"K\x01K\x01s.", "sets items of a Tensor"),
    "that sets the state of a tensor": (pickle_of(tensor())[:-1] + b"}b.", "sets the state of a Tensor"),
    "that sets the state of a list": (b"]}b.", "sets the state of a list"),
    "with a list as a key": (b"}]K\x01s.", "unhashable type: 'list'"),
    "with a mapping in a set": (b"c__builtin__\nset\n](}e\x85R.", "unhashable type: 'dict'"),
    "with another persistent id": (b"X\x01\x00\x00\x00aQ.", "something else than a storage"),
    "that holds itself": (b"]q\x00h\x00a.", "holds itself"),
    "with a name without end": (b"c" + b"x" * 2000, "cut off"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_bad_pickles_are_refused(name, tmp_path, statetree):
    data, message = PICKLES[name]
    refused(statetree("show", archive(tmp_path / "a.pt", data, DATA)), "data.pkl", message)


def nested_keys(depth):
    return b"\x80\x02}" + b")" + b"\x85" * depth + b"K\x01s."


@pytest.mark.timeout(units(60))
def test_keys_that_are_nested_deeply_are_refused(tmp_path, statetree):
    path = archive(tmp_path / "a.pt", nested_keys(1_000_000))
    begin = time.process_time()
    ran = statetree("show", path)
    assert ran.status == 2
    assert "data.pkl" in ran.err
    assert time.process_time() - begin < units(15)


def test_many_keys_are_shown(tmp_path, statetree):
    count = 30_000
    path = archive(tmp_path / "a.pt", pickle_of({f"key{index}": index for index in range(count)}))
    ran = statetree("show", "--depth", "1", path)
    assert ran.status == 0
    assert f"{count:,} values" in ran.out


def test_compressed_members_are_refused(tmp_path, statetree):
    path = bomb(tmp_path / "a.pt")
    assert path.stat().st_size < 3_000_000
    refused(statetree("show", path), "'archive/data/0' is compressed", "zip bomb")
    refused(statetree("convert", path, tmp_path / "b.pt"), "is compressed")


@pytest.fixture
def good(tmp_path):
    return write(nested_state(), tmp_path / "good.pt")


def listing(data):
    """Where the list of members begins, and where each member is listed."""
    (start,) = struct.unpack_from("<Q", data, data.rindex(b"PK\x06\x06") + 48)
    found, at = [], start
    while data[at : at + 4] == b"PK\x01\x02":
        found.append(at)
        name, extra, comment = struct.unpack_from("<3H", data, at + 28)
        at += 46 + name + extra + comment
    return start, found


def patched(data, at, form, *values):
    struct.pack_into(form, data, at, *values)
    return bytes(data)


ARCHIVES = {
    "overlapping": lambda data, rows: patched(data, rows[3] + 42, "<I", 0),
    "sized wrong": lambda data, rows: patched(data, rows[4] + 24, "<I", 2**31),
    "sized wrong twice": lambda data, rows: patched(data, rows[4] + 20, "<II", 2**31, 2**31),
    "encrypted": lambda data, rows: patched(data, rows[4] + 8, "<H", 0x801),
    "listed twice": lambda data, rows: bytes(data).replace(b"byteorder", b"data/0xyz").replace(b"data/1", b"data/0"),
    "another name": lambda data, rows: patched(data, rows[4] + 46, "<4s", b"evil"),
    "beyond the end": lambda data, rows: patched(data, rows[4] + 42, "<I", 2**31),
    "a list elsewhere": lambda data, rows: patched(data, data.rindex(b"PK\x06\x06") + 48, "<Q", 2**60),
    "a comment": lambda data, rows: patched(data, len(data) - 2, "<H", 3) + b"abc",
    "something after it": lambda data, rows: bytes(data) + b"x",
    "a name that is no text": lambda data, rows: patched(data, rows[4] + 46, "<4s", b"\xff\xfe\xff\xfe"),
    "compressed": lambda data, rows: patched(data, rows[4] + 10, "<H", 8),
    "a directory": lambda data, rows: patched(data, rows[4] + 38, "<I", 0x10),
    "no pickle": lambda data, rows: bytes(data).replace(b"data.pkl", b"data.xyz"),
    "two directories": lambda data, rows: bytes(data).replace(b"good/version", b"evil/version"),
    "big-endian": lambda data, rows: bytes(data).replace(b"little", b"bigbig"),
}


def zipped(path, **extra):
    """Pack an archive by other means than torch's, without the fields for sizes beyond 32 bits."""
    with ZipFile(path, "w") as file:
        for name, data in {"data.pkl": pickle_of({"w": tensor()}), "version": b"3\n", "data/0": DATA["0"]}.items():
            info = ZipInfo(f"archive/{name}")
            info.extra = extra.get("extra", b"")
            file.writestr(info, data)
    return bytearray(path.read_bytes())


def test_archives_of_other_programs_are_read(tmp_path, statetree):
    zipped(tmp_path / "a.pt", extra=struct.pack("<HH5s", 0xCAFE, 5, b"hello") + struct.pack("<HH2s", 0xBEEF, 2, b"yo"))
    ran = statetree("show", "--json", tmp_path / "a.pt")
    assert [entry["shape"] for entry in ran.json["entries"]] == [[4]]


def test_lists_of_members_that_do_not_add_up_are_refused(tmp_path, statetree):
    path = tmp_path / "a.pt"
    data = zipped(path)
    end = len(data) - 22
    size, start = struct.unpack_from("<2I", data, end + 12)
    faults = {
        "it is no zip archive": bytes(data[:end] + bytes(5)) + patched(data[end:], 12, "<2I", size + 5, start),
        "overlaps a member": patched(data[:], start + 20, "<2I", 2**32 - 1, 2**32 - 1),
    }
    for message, faulty in faults.items():
        path.write_bytes(faulty)
        refused(statetree("show", path), message)


def test_long_members_are_not_read_whole(tmp_path, statetree):
    path = archive(tmp_path / "a.pt", pickle_of({"w": tensor()}), DATA, byteorder=b"little" * 10)
    refused(statetree("show", path), "'archive/byteorder' has 60 bytes: expected at most 16")


@pytest.mark.parametrize("name", ARCHIVES)
def test_bad_archives_are_refused(name, good, tmp_path, statetree):
    data = bytearray(good.read_bytes())
    _, rows = listing(data)
    path = tmp_path / "a.pt"
    path.write_bytes(ARCHIVES[name](data, rows))
    assert path.read_bytes() != good.read_bytes()
    refused(statetree("show", path), str(path))


def test_truncated_files_are_refused_wherever_they_end(good, tmp_path, statetree):
    data = good.read_bytes()
    path = tmp_path / "a.pt"
    for end in [*range(0, 60, 7), *range(60, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:end])
        refused(statetree("show", path), str(path))


def test_flipped_bits_are_found_by_convert(good, tmp_path, statetree):
    """Every byte of a member is under its checksum; what lies between members says nothing."""
    data = good.read_bytes()
    path, target = tmp_path / "a.pt", tmp_path / "b.pt"
    expected = torch.load(good, weights_only=True)["model"]
    for place in range(0, len(data), 53):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        ran = statetree("convert", "--force", path, target)
        assert ran.status in (0, 2)
        if ran.status == 0:
            loaded = torch.load(target, weights_only=True)["model"]
            assert all(torch.equal(loaded[key], value) for key, value in expected.items())
        else:
            assert str(path) in ran.err


@pytest.mark.parametrize(
    "data", [b"", b"x", b"hello world" * 100, bytes(1000), b"PK\x05\x06" + bytes(18), b"PK\x03\x04" * 9]
)
def test_other_files_are_refused(data, tmp_path, statetree):
    (tmp_path / "a.pt").write_bytes(data)
    refused(statetree("show", tmp_path / "a.pt"), "a.pt")


def test_terminals_are_not_controlled(tmp_path, statetree):
    name = "\x1b]0;owned\x07\x1b[2Jred\r\n\u202eevil\u2028\x9b31m\ud800"
    path = archive(tmp_path / "a.pt", pickle_of({name: tensor(), "value": name, "evil": {name: Raw(print, "x")}}), DATA)
    for args in (
        ["show", path],
        ["show", "--json", path],
        ["diff", path, path],
        ["convert", path, tmp_path / "b.safetensors"],
    ):
        ran = statetree(*args)
        text = ran.out + ran.err
        assert all(char.isprintable() or char == "\n" for char in text)
        text.encode()
    assert "\\x1b]0;owned\\x07" in statetree("show", path).out
    (tmp_path / "\x1b[31m.pt").write_bytes(b"")
    assert "\x1b" not in statetree("show", tmp_path / "\x1b[31m.pt").err


def test_names_that_differ_in_case_only_are_refused(tmp_path, statetree):
    """Torch takes the first of them, whichever was asked for."""
    data = pickle_of({"w": tensor()})
    path = archive(tmp_path / "a.pt", data, DATA, **{"DATA.PKL": pickle_of({"other": 1})})
    refused(statetree("show", path), "two of its members have one name")


def test_sparse_indices_beyond_the_shape_are_refused_when_they_are_read(tmp_path, statetree):
    indices = Raw(torch._utils._rebuild_tensor_v2, Storage("1", 2, torch.LongStorage), 0, (1, 2), (2, 1), False, {})
    sparse = Raw(torch._utils._rebuild_sparse_tensor, torch.sparse_coo, (indices, tensor(size=(2,)), torch.Size([3])))
    data = {**DATA, "1": (7).to_bytes(8, "little") * 2}
    path = archive(tmp_path / "a.pt", pickle_of({"w": sparse}), data)
    if torch.__version__ < "2.15":  # which looks at the indices when it opens the file
        assert statetree("show", path).status == 0
    assert statetree("diff", "--values", path, path).status != 0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
        (b"<!DOCTYPE html><html></html>" * 9, "an HTML page"),
        (b"GGUF" + bytes(100), "a GGUF file"),
    ],
)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"])
def test_what_is_often_in_the_place_of_a_checkpoint_is_named(data, words, name, tmp_path, statetree):
    (tmp_path / name).write_bytes(data)
    refused(statetree("show", tmp_path / name), words)


def test_archives_of_numpy_are_named(tmp_path, statetree):
    np.savez(tmp_path / "a.npz", w=np.ones(3))
    refused(statetree("show", tmp_path / "a.npz"), "it is a NumPy archive (.npz)", "file_format.md")


def test_scripted_modules_are_named(tmp_path, statetree):
    archive(tmp_path / "a.pt", pickle_of({}), **{"constants.pkl": pickle_of(())})
    refused(statetree("show", tmp_path / "a.pt"), "it is a file of TorchScript", "torch.jit.load")


@pytest.mark.parametrize(
    "first", [{"w": torch.zeros(3)}, {"w": torch.zeros(1000)}, b"text"], ids=["same", "more", "no"]
)
def test_an_archive_behind_other_bytes_is_not_read(first, tmp_path, statetree):
    """Programs differ in which archive they take: torch refuses one of these, or reads the first."""
    path = tmp_path / "a.pt"
    with path.open("wb") as file:
        if isinstance(first, bytes):
            file.write(first)
        else:
            torch.save(first, file)
        torch.save({"w": torch.ones(3)}, file)
    message = "it is of no known format" if isinstance(first, bytes) else "bytes lie before its first member: something"
    refused(statetree("show", path), message)
