"""Safetensors files, and indices of them, that are damaged or hostile."""

from __future__ import annotations

import json

import pytest

from tests.cli.hostile import safetensors
from tests.cli.states import bits, flat_state, write


def refused(ran, *messages):
    assert ran.status == 2, ran.out + ran.err
    assert ran.err.startswith("error: read: ")
    for message in messages:
        assert message in ran.err, ran.err


def entry(begin=0, stop=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, stop]}


HEADERS = {
    "no object": ([], "no JSON object"),
    "no JSON": (b"{", "no JSON"),
    "deep": (b"[" * 200_000, "no JSON"),
    "UTF-16": (json.dumps({"a": entry()}).encode("utf-16"), "no JSON"),
    "UTF-16 without a mark": (json.dumps({"a": entry()}).encode("utf-16-le"), "no JSON"),
    "UTF-32": (json.dumps({"a": entry()}).encode("utf-32-be"), "no JSON"),
    "mark": (json.dumps({"a": entry()}).encode("utf-8-sig"), "no JSON"),
    "no texts": (b'{"\xff": 1}', "no JSON"),
    "twice": (b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}", "'a' twice"),
    "gap": ({"a": entry(4, 20)}, "leaves a gap"),
    "hole": ({"a": entry(0, 4, (1,)), "b": entry(8, 16, (2,))}, "leaves a gap"),
    "overlap": ({"a": entry(), "b": entry()}, "overlaps another"),
    "partial overlap": ({"a": entry(0, 12, (3,)), "b": entry(8, 16, (2,))}, "overlaps another"),
    "rest": ({"a": entry(0, 12, (3,))}, "accounts for 12 bytes of data: the file has 16"),
    "beyond": ({"a": entry(0, 20, (5,))}, "accounts for 20 bytes of data: the file has 16"),
    "shape": ({"a": entry(shape=(5,))}, "has 16 bytes: expected 20"),
    "huge": ({"a": entry(shape=(2**62, 4))}, "has 16 bytes: expected"),
    "overflow": ({"a": entry(shape=(2**63, 2))}, "has 16 bytes: expected"),
    "overflow to zero": ({"a": entry(0, 0, (2**64, 0)), "b": entry()}, "impossible shape or offset"),
    "strides that overflow": ({"a": entry(0, 0, (0, 2**62, 2**62)), "b": entry()}, "impossible shape or offset"),
    "negative shape": ({"a": entry(shape=(-4,))}, "impossible shape or offset"),
    "negative offset": ({"a": entry(-16, 0)}, "impossible shape or offset"),
    "fraction": ({"a": entry(shape=(4.0,))}, "impossible shape or offset"),
    "boolean": ({"a": entry(shape=(4, True))}, "impossible shape or offset"),
    "text": ({"a": {**entry(), "shape": "4"}}, "impossible shape or offset"),
    "dims": ({"a": entry(shape=(4, *[1] * 100))}, "impossible shape or offset"),
    "dtype": ({"a": entry(dtype="F33")}, "dtype 'F33', which torch does not have"),
    "no dtype": ({"a": {"shape": [4], "data_offsets": [0, 16]}}, "is damaged"),
    "dtype of a list": ({"a": {**entry(), "dtype": ["F32"]}}, "is damaged"),
    "one place": ({"a": {**entry(), "data_offsets": [0]}}, "is damaged"),
    "a number": ({"a": 1}, "is damaged"),
    "metadata": ({"__metadata__": {"a": 1}, "a": entry()}, "metadata that are no texts"),
    "half a character": (b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", "names or metadata that are no texts"),
    "half a character in metadata": ({"__metadata__": {"a": "\udc00"}, "a": entry()}, "metadata that are no texts"),
    "metadata list": ({"__metadata__": [1], "a": entry()}, "metadata that are no texts"),
    "long number": (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,16]}}', "no JSON"),
    "odd halves": ({"a": entry(shape=(31,), dtype="F4")}, "odd number"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_bad_headers_are_refused(name, tmp_path, statetree):
    header, message = HEADERS[name]
    path = safetensors(tmp_path / "a.safetensors", header, bytes(16))
    refused(statetree("show", path), str(path), message)


def test_what_is_said_of_long_names_is_short(tmp_path, statetree):
    path = safetensors(tmp_path / "a.safetensors", {"k" * 100_000: entry(dtype="F33")}, bytes(16))
    ran = statetree("show", path)
    refused(ran, str(path), "the tensor 'kkk")
    assert "has the dtype 'F33', which torch does not have" in ran.err
    assert len(ran.err) < 2000


@pytest.mark.parametrize("size", [0, 1, 10**8 + 1, 2**63, 2**64 - 1])
def test_lying_sizes_are_refused(size, tmp_path, statetree):
    path = safetensors(tmp_path / "a.safetensors", {"a": entry()}, bytes(16), size=size)
    refused(statetree("show", path), str(path))


def test_truncated_files_are_refused_wherever_they_end(tmp_path, statetree):
    data = write({"a": bits(3), "b": bits(2)}, tmp_path / "good.safetensors").read_bytes()
    path = tmp_path / "a.safetensors"
    for end in range(len(data)):
        path.write_bytes(data[:end])
        refused(statetree("show", path), str(path))
    path.write_bytes(data + b"x")
    refused(statetree("show", path), "the file has")


@pytest.mark.slow
def test_many_keys_are_shown(tmp_path, statetree):
    count = 30_000
    header = {f"k{index}": entry(index, index + 1, (1,), "U8") for index in range(count)}
    ran = statetree("show", "--json", safetensors(tmp_path / "a.safetensors", header, bytes(count)))
    assert ran.status == 0
    assert len(ran.json["entries"]) == count


@pytest.fixture
def index(tmp_path, statetree):
    write(flat_state(), tmp_path / "good.safetensors")
    assert (
        statetree("convert", "--shard-bytes", 200, tmp_path / "good.safetensors", tmp_path / "m.safetensors").status
        == 0
    )
    return tmp_path / "m.safetensors.index.json"


@pytest.mark.parametrize(
    "name",
    [
        *("../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "..\\outside", "", "."),
        *("link.safetensors", "a\0b", "missing.safetensors", "C:x", "folder", 7, None),
    ],
)
def test_names_stay_inside(name, index, statetree):
    (index.parent.parent / "outside.safetensors").write_bytes((index.parent / "good.safetensors").read_bytes())
    (index.parent / "link.safetensors").symlink_to(index.parent.parent / "outside.safetensors")
    (index.parent / "folder").mkdir()
    table = json.loads(index.read_text())
    table["weight_map"]["scalar"] = name
    index.write_text(json.dumps(table))
    refused(statetree("show", index), index.name)
    (index.parent.parent / "outside.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table["weight_map"].pop("scalar"), "holds 'scalar', which the index"),
        (lambda table: table["weight_map"].update(more=table["weight_map"]["scalar"]), "says that 'more' is in"),
        (lambda table: table.pop("weight_map"), "no weight_map"),
        (lambda table: table.update(weight_map=[]), "no weight_map"),
    ],
)
def test_indices_that_do_not_fit_are_refused(change, message, index, statetree):
    table = json.loads(index.read_text())
    change(table)
    index.write_text(json.dumps(table))
    refused(statetree("show", index), message)


@pytest.mark.parametrize("text", ["", "[]", "1", "{", '{"weight_map": {"a": "b"}, "weight_map": {}}', "[" * 100_000])
def test_other_indices_are_refused(text, index, statetree):
    index.write_text(text)
    refused(statetree("show", index), index.name)
