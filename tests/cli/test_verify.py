"""Checksums and digests."""

from __future__ import annotations

import subprocess

import pytest
import torch

from tests.cli.states import bits, write

NAMES = ["b.pt", "b.safetensors", "b", "b.safetensors.index.json"]


def files_of(path):
    if path.is_dir():
        return [file for file in path.iterdir() if file.name != ".sha256"]
    return [*path.parent.glob("b-*.safetensors"), path] if path.suffix == ".json" else [path]


def made(name, tmp_path, statetree, *options):
    source = write({"w": bits(40), "x": bits(20, start=3)}, tmp_path / "a.pt")
    shards = ["--shard-bytes", 100] if name.endswith("json") else []
    target = tmp_path / (name.replace(".index.json", ""))
    assert statetree("convert", *options, *shards, source, target).status == 0
    return tmp_path / name


@pytest.mark.parametrize("name", NAMES)
def test_digests_notice_every_changed_byte(name, tmp_path, statetree):
    path = made(name, tmp_path, statetree, "--digest")
    ran = statetree("show", "--verify", path)
    assert ran.status == 0, ran.err
    assert "digest" in ran.out
    assert "agree" in ran.out
    noticed = 0
    for file in files_of(path):
        data = file.read_bytes()
        for place in {0, 9, len(data) // 3, len(data) // 2, len(data) - 1}:
            file.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            ran = statetree("show", "--verify", path)
            assert ran.status == 2, (file, place)
            assert ran.err.startswith(("error: read: ", "error: load: "))
            noticed += 1
        file.write_bytes(data + b"x")
        assert statetree("show", "--verify", path).status == 2
        file.write_bytes(data)
    assert noticed >= 5
    assert statetree("show", "--verify", path).status == 0


@pytest.mark.parametrize("name", ["b.pt", "b.safetensors", "b", "b\n.pt"])
def test_sha256sum_checks_the_digests_too(name, tmp_path, statetree):
    path = made(name, tmp_path, statetree, "--digest")
    folder, digests = (path, ".sha256") if path.is_dir() else (tmp_path, f"{name}.sha256")
    ran = subprocess.run(["sha256sum", "--check", "--strict", digests], cwd=folder, timeout=60, check=False)
    assert ran.returncode == 0
    assert statetree("show", "--verify", path).status == 0


@pytest.mark.parametrize("name", ["a.pt", "a"])
def test_checksums_of_archives_are_checked_without_digests(name, tmp_path, statetree):
    path = write({"w": bits(40), "x": bits(20, start=3)}, tmp_path / name)
    ran = statetree("show", "--verify", path)
    assert ran.status == 0
    assert "checksums agree" in ran.out
    file = path / "__0_0.distcp" if path.is_dir() else path
    data = bytearray(file.read_bytes())
    at = data.rindex(bits(20, start=3).view(torch.uint8).numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert statetree("show", path).status == 0
    ran = statetree("show", "--verify", path)
    assert ran.status == 2
    assert "has the checksum" in ran.err
    assert path.name in ran.err
    ran = statetree("convert", path, tmp_path / "out.pt")
    assert ran.status == 2
    assert "has the checksum" in ran.err
    assert not (tmp_path / "out.pt").exists()


def test_that_there_is_nothing_to_check_is_said(tmp_path, statetree):
    ran = statetree("show", "--verify", write({"w": bits(1)}, tmp_path / "a.safetensors"))
    assert (ran.status, ran.out) == (2, "")
    assert "a.safetensors by: safetensors has no checksums, and there is no a.safetensors.sha256" in ran.err
    torch.save({"w": bits(1)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    ran = statetree("show", "--verify", tmp_path / "a.pt")
    assert ran.status == 2
    assert "a file of old torch has no checksums" in ran.err


@pytest.mark.parametrize("name", NAMES)
def test_digests_of_a_checkpoint_that_was_moved_say_so(name, tmp_path, statetree):
    path = made(name, tmp_path, statetree, "--digest")
    if path.is_dir():
        path.rename(tmp_path / "c")
        assert statetree("show", "--verify", tmp_path / "c").status == 0
        return
    if name.endswith("json"):
        return  # its shards keep their names
    moved = path.rename(tmp_path / f"c{path.suffix}")
    (tmp_path / f"{path.name}.sha256").rename(tmp_path / f"{moved.name}.sha256")
    ran = statetree("show", "--verify", moved)
    assert ran.status == 2
    assert f"the digests were written for another name ('{path.name}')" in ran.err


def test_replacing_a_checkpoint_removes_its_digests(tmp_path, statetree):
    path = made("b.pt", tmp_path, statetree, "--digest")
    digests = tmp_path / "b.pt.sha256"
    assert digests.exists()
    assert statetree("convert", "--force", tmp_path / "a.pt", path).status == 0
    assert not digests.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{}\n", "00  b.pt\n", "{digest}  ../a.pt\n", "{digest}  /etc/passwd\n", "{digest}\n", "{digest}  a.pt\n"],
)
def test_damaged_digests_are_refused(text, tmp_path, statetree):
    path = made("b.pt", tmp_path, statetree, "--digest")
    digests = tmp_path / "b.pt.sha256"
    digest = digests.read_text().split()[0]
    for start in ("", digests.read_text()):
        digests.write_text(start + text.replace("{digest}", digest))
        ran = statetree("show", "--verify", path)
        assert (ran.status == 2) is not (bool(start) and not text)
        assert ran.status == 0 or ran.err.startswith("error: read: ")
