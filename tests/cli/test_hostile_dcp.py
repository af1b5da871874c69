"""DCP directories that are damaged or hostile."""

from __future__ import annotations

import io
import json
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from statetree.dcp.file_manifest import MANIFEST
from tests.cli.hostile import Raw, bomb
from tests.cli.states import bits, write
from tests.cli.test_hostile_torch import nested_keys


def refused(ran, *messages):
    assert ran.status == 2, ran.out + ran.err
    assert ran.err.startswith(("error: read: ", "error: load: "))
    for message in messages:
        assert message in ran.err, ran.err


@pytest.fixture
def directory(tmp_path):
    return write({"w": bits(6, 4), "v": {"a": bits(3), "b": "text"}}, tmp_path / "a")


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


def replace_bytes(directory, key, data):
    """Let an entry lie at the end of the file, with other bytes."""
    file = directory / "__0_0.distcp"
    start = file.stat().st_size
    with file.open("ab") as target:
        target.write(data)

    def edit(metadata):
        place = info(metadata, key)
        place.offset, place.length = start, len(data)

    change(directory, edit)


@pytest.mark.parametrize("where", ["root", "entry", "planner_data"])
def test_code_in_the_metadata_does_not_run(where, directory, tmp_path, statetree):
    evil = Raw(os.mkdir, str(tmp_path / "statetree_was_here"))
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    if where == "root":
        metadata = evil
    elif where == "entry":
        metadata.state_dict_metadata["w"] = evil
    else:
        metadata.planner_data = evil
    path.write_bytes(pickle.dumps(metadata))
    refused(statetree("show", directory), "posix.mkdir", "was not executed")
    assert not (tmp_path / "statetree_was_here").exists()


@pytest.mark.slow
def test_deep_metadata_cannot_crash_the_process(directory, statetree):
    (directory / ".metadata").write_bytes(nested_keys(1_000_000))
    refused(statetree("show", directory))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", "link", "", "a\0b", "missing"])
def test_names_stay_inside(name, directory, statetree):
    (directory.parent / "outside").write_bytes(bytes(10_000))
    (directory / "link").symlink_to(directory.parent / "outside")
    change(directory, lambda metadata: setattr(info(metadata), "relative_path", name))
    refused(statetree("show", directory), str(directory))


@pytest.mark.parametrize("goal", ["../elsewhere", "inside"])
def test_the_metadata_lie_inside(goal, directory, statetree):
    (directory / ".metadata").rename(directory / goal)
    (directory / ".metadata").symlink_to(goal)
    ran = statetree("show", "--follow-links", directory)
    assert ran.status == (0 if goal == "inside" else 2)
    assert (".metadata is a link" in ran.err) is (ran.status == 2)


def pieces(metadata, *boxes):
    """Make a tensor consist of boxes, each given by offsets and sizes."""
    place = info(metadata)
    for index in [index for index in metadata.storage_data if index.fqn == "w"]:
        del metadata.storage_data[index]
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    metadata.state_dict_metadata["w"].chunks = chunks
    for chunk in chunks:
        metadata.storage_data[MetadataIndex("w", chunk.offsets)] = place


EDITS = {
    "hole": (lambda m: pieces(m, ((0, 0), (5, 4))), "holds 20 of the 24 elements of 'w'"),
    "nothing": (lambda m: pieces(m), "holds 0 of the 24"),
    "overlap and hole": (lambda m: pieces(m, ((0, 0), (3, 4)), ((2, 0), (3, 4))), "the pieces of 'w' overlap"),
    "overlap in columns": (lambda m: pieces(m, ((0, 0), (6, 3)), ((0, 2), (3, 2))), "overlap"),
    "outside": (lambda m: pieces(m, ((1, 0), (6, 4))), "not in"),
    "missing": (lambda m: m.storage_data.clear(), "does not say where"),
    "absent": (lambda m: m.state_dict_metadata.pop("w"), "names 'w', which it does not hold"),
    "of another sort": (lambda m: m.state_dict_metadata.update(w=BytesStorageMetadata()), "does not"),
    "beyond the end": (lambda m: setattr(info(m), "offset", 10**7), "is truncated"),
    "negative": (lambda m: setattr(info(m), "offset", -1), "expected an offset"),
    "elsewhere": (
        lambda m: m.storage_data.update({MetadataIndex("v.b"): _StorageInfo("__0_0.distcp", 5, 90)}),
        "__0_0.distcp: the entry 'v.b'",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_impossible_metadata_is_refused(name, directory, statetree):
    edit, message = EDITS[name]
    change(directory, edit)
    refused(statetree("show", directory), message)


def test_pieces_are_what_the_metadata_says(directory, tmp_path, statetree):
    change(directory, lambda metadata: setattr(metadata.state_dict_metadata["w"].properties, "dtype", torch.int32))
    ran = statetree("convert", directory, tmp_path / "b.pt")
    refused(ran, "__0_0.distcp: the entry 'w': it holds something else: expected a tensor of torch.int32 (6, 4)")
    assert not (tmp_path / "b.pt").exists()


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_code_in_values_does_not_run(directory, tmp_path, statetree):
    replace_bytes(directory, "v.b", saved(Raw(os.mkdir, str(tmp_path / "statetree_was_here"))))
    ran = statetree("show", directory)
    assert ran.status == 0
    assert "posix.mkdir" in ran.err
    assert statetree("convert", directory, tmp_path / "b.pt").status == 2
    assert not (tmp_path / "statetree_was_here").exists()


def test_code_in_pieces_of_tensors_does_not_run(directory, tmp_path, statetree):
    evil = {"x": Raw(os.mkdir, str(tmp_path / "statetree_was_here")), "w": bits(6, 4)}
    replace_bytes(directory, "w", saved(evil))
    refused(
        statetree("convert", directory, tmp_path / "b.pt"),
        "the entry 'w': it holds something else: expected a tensor",
    )
    assert not (tmp_path / "statetree_was_here").exists()


@pytest.mark.parametrize(
    "data", [b"", b"x" * 500, saved(1)[:-3], b"\x80\x02N."], ids=["empty", "other", "cut", "pickle"]
)
def test_damaged_values_are_named(data, directory, statetree):
    replace_bytes(directory, "v.b", data)
    refused(statetree("show", directory), "__0_0.distcp")


def test_bombs_in_values_are_refused(directory, tmp_path, statetree):
    replace_bytes(directory, "v.b", bomb(tmp_path / "bomb").read_bytes())
    refused(statetree("show", directory), "is compressed")


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 10_000, '{"version":2}', 7])
def test_damaged_structures_are_refused(text, directory, statetree):
    replace_bytes(directory, "<statetree structure>", saved(text))
    refused(statetree("show", directory), "structure")


def test_structures_of_other_entries_are_refused(directory, statetree):
    text = {"version": 1, "nodes": [["dict", "mapping", ["sx"], [0], None]], "entries": [["tensor", ["v.b"], ""]]}
    replace_bytes(directory, "<statetree structure>", saved(json.dumps(text)))
    refused(statetree("show", directory), "names 'v.b', which it does not hold")


def test_truncated_files_are_refused(directory, statetree):
    data = directory / "__0_0.distcp"
    whole = data.read_bytes()
    for end in range(0, len(whole), 301):
        data.write_bytes(whole[:end])
        refused(statetree("show", directory), "__0_0.distcp")
    data.unlink()
    refused(statetree("show", directory), "the file '__0_0.distcp' is missing")


def test_truncated_metadata_is_refused(directory, statetree):
    path = directory / ".metadata"
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        refused(statetree("show", directory), ".metadata")


def test_directories_that_are_none(tmp_path, statetree):
    refused(statetree("show", tmp_path / "nowhere"), "there is no such file or directory")
    refused(statetree("show", tmp_path), "no .metadata file")
    (tmp_path / "file").touch()
    refused(statetree("show", tmp_path / "file"), "it is empty")
