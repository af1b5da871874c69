"""Checkpoints whose files belong to two saves, or that were copied in part, are refused before anything is loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import statetree
from statetree import dcp
from statetree.dcp import metadata
from statetree.dcp.file_manifest import MANIFEST, read_manifest
from tests.judge import assert_trees_equal

DATA = "__0_0.distcp"


def state_of(step):
    return {"w": torch.arange(50.0) + step, "step": step, "name": f"step {step}"}


@pytest.fixture
def steps(tmp_path):
    with dcp.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
    return tmp_path / "step-00000001", tmp_path / "step-00000002"


def test_a_manifest_lists_what_was_written(steps):
    found = read_manifest(steps[0])
    assert re.fullmatch("[0-9a-f]{32}", found.save)
    assert found.metadata == (
        (steps[0] / ".metadata").stat().st_size,
        zlib.crc32((steps[0] / ".metadata").read_bytes()),
    )
    assert set(found.files) == {DATA}
    data = (steps[0] / DATA).read_bytes()
    assert found.files[DATA].nbytes == len(data)
    pieces = found.files[DATA].pieces
    assert {index.key for index in pieces} == {"w", "step", "name", "<statetree structure>"}
    assert all(zlib.crc32(data[piece.offset :][: piece.length]) == piece.checksum for piece in pieces.values())


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", [".metadata", MANIFEST, DATA])
def test_files_of_two_checkpoints_are_not_taken_for_one(name, verify, steps):
    old, new = steps
    shutil.copyfile(old / name, new / name)
    template = state_of(0)
    with pytest.raises(statetree.CheckpointError, match=r"(load|read): .*(mixture of two|two checkpoints are mixed)"):
        statetree.load(new, template, in_place=True, verify=verify)
    assert_trees_equal(template, state_of(0))


@pytest.mark.parametrize("name", [".metadata", MANIFEST, DATA])
def test_trees_of_files_are_not_of_two_checkpoints(name, steps):
    old, new = steps
    shutil.copyfile(old / name, new / name)
    with pytest.raises(statetree.CheckpointError, match=r"mixture of two|two checkpoints are mixed"):
        statetree.load(new, state_of(0))


def test_trees_of_files_have_the_size_that_was_written(steps):
    os.truncate(steps[0] / DATA, (steps[0] / DATA).stat().st_size - 1)
    with pytest.raises(statetree.CheckpointError, match=r"__0_0\.distcp: it is damaged: expected \d+ bytes, got \d+"):
        statetree.files.open(steps[0])


def test_values_in_trees_of_files_have_their_checksums(steps):
    path = steps[0] / DATA
    data = path.read_bytes()
    assert data.count(b"step 1") == 1
    path.write_bytes(data.replace(b"step 1", b"step 3"))
    with pytest.raises(statetree.CheckpointError, match=r"__0_0\.distcp: .*has the checksum"):
        statetree.files.open(steps[0])


@pytest.mark.parametrize("names", [(".metadata", MANIFEST), (MANIFEST, DATA), (".metadata", DATA)], ids=", ".join)
def test_two_files_of_another_checkpoint(names, steps):
    old, new = steps
    for name in names:
        shutil.copyfile(old / name, new / name)
    with pytest.raises(statetree.CheckpointError, match=r"(load|read): .*(mixture of two|two checkpoints are mixed)"):
        statetree.load(new)


def test_a_checkpoint_that_was_copied_in_part(steps, tmp_path):
    (steps[0] / MANIFEST).unlink()
    with pytest.raises(statetree.CheckpointError, match=r"it has no \.statetree_manifest file.*copied in part.*verify"):
        statetree.load(steps[0])
    assert_trees_equal(statetree.load(steps[0], verify=False), state_of(1))


def test_a_file_that_was_copied_in_part(steps):
    os.truncate(steps[0] / DATA, (steps[0] / DATA).stat().st_size - 1)
    with pytest.raises(statetree.CheckpointError, match=r"__0_0\.distcp: it is damaged: expected \d+ bytes, got \d+"):
        statetree.load(steps[0])


def test_damage_to_the_metadata_that_leaves_them_valid(steps):
    path = steps[0] / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"checkpoint_id", b"checkpoint_ie"))
    with pytest.raises(statetree.CheckpointError, match=r"\.metadata is damaged: expected \d+ bytes with the checksum"):
        statetree.load(steps[0])
    assert_trees_equal(statetree.load(steps[0], verify=False), state_of(1))


def test_metadata_that_name_no_save_any_more_are_damaged(steps):
    """They read as DCP's own, which have no manifest."""
    path = steps[0] / ".metadata"
    intact = path.read_bytes()
    begin = intact.index(b"statetree:")
    for bit in range(8 * begin, 8 * (begin + len(b"statetree:"))):
        damaged = bytearray(intact)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(statetree.CheckpointError, match=r"(load|read): .*metadata"):
            statetree.load(steps[0])
    path.write_bytes(intact.replace(b"statetree:", b"rtatetree:"))
    assert_trees_equal(statetree.load(steps[0], verify=False), state_of(1))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data[:-1], "its checksum differs"),
        (lambda data: data.replace(b'"w"', b'"v"'), "its checksum differs"),
        (lambda data: b"", "its checksum differs"),
        (lambda data: signed(b"[]"), "unknown version"),
        (lambda data: signed(b"[" * 100_000), "unknown version"),
        (lambda data: changed(data, version=2), "unknown version"),
        (lambda data: changed(data, save="x"), "unknown version"),
        (lambda data: changed(data, metadata=[-1, 0]), "unknown version"),
        (lambda data: changed(data, files={"a.distcp": ["0" * 32, 1, [[1, None, 0, 0, 0, ""]]]}), "unknown version"),
        *[
            (lambda data, row=row: changed(data, files={"a.distcp": ["0" * 32, 1, [["w", [0], 0, 0, 0, *row]]]}), "unk")
            for row in (["0000000X"], [5], [None], ["", ""])
        ],
        (lambda data: changed(data, files={"a": ["0" * 32, 1, []]}), "unknown version"),
        (lambda data: changed(data, files={"../step-00000002/__0_0.distcp": ["0" * 32, 1, []]}), "unknown version"),
    ],
)
def test_a_damaged_manifest_is_refused(edit, message, steps):
    path = steps[0] / MANIFEST
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(statetree.CheckpointError, match=rf"(load|read): .*{message}.*pass verify=False"):
        statetree.load(steps[0])
    assert_trees_equal(statetree.load(steps[0], verify=False), state_of(1))


def signed(line):
    return line + f"\n{zlib.crc32(line):08x}\n".encode()


def changed(data, **values):
    return signed(json.dumps({**json.loads(data.splitlines()[0]), **values}).encode())


def test_what_the_manifest_tells_is_not_unpickled(steps, monkeypatch):
    monkeypatch.setattr(metadata, "read_metadata", None)
    assert_trees_equal(statetree.load(steps[0]), state_of(1))


@pytest.mark.parametrize(
    "entry",
    [
        None,
        5,
        [],
        ["torch.float32"],
        ["torch.float99", [50]],
        ["torch.float32", [5000]],
        ["torch.float32", [-50]],
        ["torch.float32", [True]],
        ["torch.float32", [1 << 62, 4]],
        ["torch.float32", [50], [[0], [50, 1]]],
        ["torch.float32", [50], [[40], [50]]],
        ["torch.float32", [50], [[1], [49]]],
        ["torch.float32", [50], 7],
    ],
    ids=str,
)
def test_entries_of_a_manifest_that_cannot_be_are_refused(entry, steps):
    path = steps[0] / MANIFEST
    data = path.read_bytes()
    entries = json.loads(data.splitlines()[0])["entries"]
    path.write_bytes(changed(data, entries={**entries, "w": entry}))
    with pytest.raises(statetree.CheckpointError, match=r"load: .*\.statetree_manifest does not list what \.metadata"):
        statetree.load(steps[0])
    assert_trees_equal(statetree.load(steps[0], verify=False), state_of(1))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")
def test_what_dcp_saves_over_a_checkpoint_is_its_own(steps):
    """The manifest that lies there is of the save before."""
    torch_dcp.save({"w": torch.arange(3.0)}, checkpoint_id=steps[0], no_dist=True)
    assert (steps[0] / MANIFEST).exists()
    assert_trees_equal(statetree.load(steps[0], {"w": torch.zeros(3)}, in_place=True), {"w": torch.arange(3.0)})


def test_a_save_over_a_checkpoint_does_not_write_into_its_files(tmp_path):
    statetree.save(state_of(1), tmp_path / "a")
    os.link(tmp_path / "a" / DATA, tmp_path / "linked")
    before = (tmp_path / "linked").read_bytes()
    statetree.save(state_of(2), tmp_path / "a")
    assert_trees_equal(statetree.load(tmp_path / "a"), state_of(2))
    assert (tmp_path / "linked").read_bytes() == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")
def test_dcp_reads_what_has_a_manifest(steps):
    template = {"w": torch.zeros(50), "step": 0}
    torch_dcp.load(template, checkpoint_id=steps[1], no_dist=True)
    assert_trees_equal(template, {"w": torch.arange(50.0) + 2, "step": 2})


def test_a_manifest_without_checksums_of_blocks_is_read(tmp_path):
    """As the first ones were: what is read of a tensor is compared with all of it."""
    tensor = torch.arange(1 << 19).view(512, -1)
    statetree.save({"w": tensor}, tmp_path / "a")
    place = tmp_path / "a" / MANIFEST
    files = json.loads(place.read_bytes().partition(b"\n")[0])["files"]
    assert [len(row) for row in files[DATA][2]] == [5, 6]
    files[DATA][2] = [row[:5] for row in files[DATA][2]]
    place.write_bytes(changed(place.read_bytes(), files=files))
    stored = statetree.files.opened(tmp_path / "a", verify=True).tree["w"]
    assert torch.equal(stored.read((slice(5, 9),)), tensor[5:9])
    assert torch.equal(statetree.load(tmp_path / "a")["w"], tensor)
    data = bytearray((tmp_path / "a" / DATA).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a" / DATA).write_bytes(data)
    with pytest.raises(statetree.CheckpointError, match=r"archive/data/0' has the checksum"):
        statetree.files.opened(tmp_path / "a", verify=True).tree["w"].read((slice(5, 9),))
