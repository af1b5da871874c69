"""Destinations appear whole or not at all, and nothing is overwritten by accident."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

import statetree as st
from tests.cli.states import bits, load, write

NAMES = ["b.pt", "b.safetensors", "b"]


@pytest.fixture
def source(tmp_path):
    return write({"w": bits(40), "x": bits(20, start=3)}, tmp_path / "a.pt")


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", NAMES)
def test_what_exists_is_refused(name, source, tmp_path, statetree):
    target = write({"old": bits(3)}, tmp_path / name)
    before = names(tmp_path)
    ran = statetree("convert", source, target)
    assert ran.status == 2
    assert f"cannot write {target}: it exists already. Choose another name (convert: or pass --force" in ran.err
    assert names(tmp_path) == before
    assert set(load(target)) == {"old"}


@pytest.mark.parametrize("name", NAMES)
def test_force_replaces(name, source, tmp_path, statetree):
    target = write({"old": bits(3)}, tmp_path / name)
    assert statetree("convert", "--force", source, target).status == 0
    assert set(load(target)) == {"w", "x"}
    assert [path for path in os.listdir(tmp_path) if path.startswith(".")] == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("is_there", [False, True])
def test_failures_leave_everything_as_it_was(is_there, error, name, source, tmp_path, statetree, monkeypatch):
    if is_there:
        write({"old": bits(3)}, tmp_path / name)
    before = names(tmp_path)
    for step in range(1, 100):
        calls = iter(range(step))

        def interrupted(*args, calls=calls, original=os.fsync):
            if next(calls, None) is None:
                raise error
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", interrupted)
            ran = statetree("convert", "--force", source, tmp_path / name)
        if ran.status == 0:
            break
        assert ran.status in (2, 130)
        if next(iter(load(tmp_path / name)), None) == "w" if (tmp_path / name).exists() else False:
            break  # it failed after the destination was there
        assert names(tmp_path) == before
    else:
        pytest.fail("it never succeeds")


@pytest.mark.parametrize("name", NAMES)
def test_failures_while_reading_leave_nothing(name, source, tmp_path, statetree, monkeypatch):
    before = names(tmp_path)

    def broken(*_):
        raise OSError("gone")

    monkeypatch.setattr("statetree.files.ranges.FileRange.fill", broken)
    ran = statetree("convert", source, tmp_path / name)
    assert ran.status == 2
    assert "gone" in ran.err
    assert names(tmp_path) == before


def test_a_directory_of_other_files_is_never_removed(source, tmp_path, statetree):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("x")
    ran = statetree("convert", "--force", source, tmp_path / "home")
    assert ran.status == 2
    assert "it holds 'precious', which is no part of a DCP checkpoint, and is not removed" in ran.err
    (tmp_path / "empty").mkdir()
    assert statetree("convert", source, tmp_path / "empty").status == 2
    assert statetree("convert", "--force", source, tmp_path / "empty").status == 0


OTHERS = {
    "a.pt": lambda path, source: shutil.copy(source, path),
    "folder": lambda path, _: path.mkdir(),
    "folder.distcp": lambda path, _: path.mkdir(),
    "link.distcp": lambda path, source: path.symlink_to(source),
    "notes": lambda path, _: path.touch(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_lies_in_the_directory_of_a_checkpoint_is_never_removed(name, source, tmp_path, statetree):
    assert statetree("convert", source, tmp_path / "b").status == 0
    assert statetree("convert", "--force", source, tmp_path / "b").status == 0
    OTHERS[name](tmp_path / "b" / name, source)
    before = names(tmp_path)
    ran = statetree("convert", "--force", tmp_path / "b" / name if name == "a.pt" else source, tmp_path / "b")
    assert ran.status == 2
    assert f"it holds {name!r}, which is no part of a DCP checkpoint" in ran.err
    assert names(tmp_path) == before


@pytest.mark.parametrize("destination", [".", "../b", ""])
def test_the_current_directory_may_be_replaced(destination, source, tmp_path, statetree, monkeypatch):
    assert statetree("convert", "--match", "w", source, tmp_path / "b").status == 0
    monkeypatch.chdir(tmp_path / "b")
    assert statetree("convert", source, destination).status == 2
    ran = statetree("convert", "--force", "../a.pt", destination)
    assert ran.status == 0, ran.err
    monkeypatch.chdir(tmp_path)
    assert set(load(tmp_path / "b")) == {"w", "x"}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("name", NAMES)
def test_names_may_be_long(name, source, tmp_path, statetree):
    place = tmp_path / f"{'n' * (248 - len(name))}{name}"  # and .sha256 beside it
    assert statetree("convert", source, place).status == 0
    assert statetree("convert", "--force", source, place).status == 0
    assert names(tmp_path)[0] == "a.pt"
    assert set(load(place)) == {"w", "x"}


def test_places_that_cannot_be_written(source, tmp_path, statetree):
    ran = statetree("convert", source, tmp_path / "no" / "b.pt")
    assert ran.status == 2
    assert "its directory does not exist" in ran.err
    os.mkfifo(tmp_path / "pipe.pt")
    assert statetree("convert", "--force", source, tmp_path / "pipe.pt").status == 2
    assert statetree("show", tmp_path / "pipe.pt").status == 2
    (tmp_path / "link.pt").symlink_to(tmp_path / "nowhere")
    assert statetree("convert", source, tmp_path / "link.pt").status == 2


def test_a_file_is_not_replaced_by_a_directory(source, tmp_path, statetree):
    (tmp_path / "b").write_text("precious")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for name in ("b", "link"):
        ran = statetree("convert", "--force", source, tmp_path / name)
        assert ran.status == 2
        assert "it is no directory. Choose another name." in ran.err
    assert (tmp_path / "b").read_text() == "precious"


STEPS = ("os.rename", "os.replace", "os.link", "os.unlink", "os.mkdir", "os.chmod", "os.fsync", "shutil.rmtree")


def failing_at(patch, step, is_done, error):
    """Have the N-th step of all that change names raise an error, before or after it is done."""
    count = iter(range(1, 10_000))
    raised = []
    for name in STEPS:
        module, _, function = name.partition(".")
        original = getattr({"os": os, "shutil": shutil}[module], function)

        def once(*args, original=original, **options):
            fails = next(count) == step
            if fails:
                raised.append(original.__name__)
            if fails and not is_done:
                raise error
            result = original(*args, **options)
            if fails:
                raise error
            return result

        patch.setattr(name, once)
    return raised


def published(folder):
    """The checkpoints in a folder, by what they hold."""
    found = {}
    for path in folder.iterdir():
        if path.name.endswith(".json"):
            shards = sorted(set(json.loads(path.read_text())["weight_map"].values()))
            found[path.name] = [key for shard in shards for key in load(folder / shard)]
        elif not path.name.startswith((".", "m-")) and (path.is_file() or (path / ".metadata").is_file()):
            found[path.name] = list(load(path))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("b.pt", []),
        ("b", []),
        ("m.safetensors", ["--shard-bytes", 100]),
    ],
)
def test_what_can_be_read_is_the_old_one_or_the_new_one(
    name, options, is_done, error, source, tmp_path, statetree, monkeypatch
):
    """Of shards, too, if one thing fails: what was begun when the index was taken away is ended."""
    folder = tmp_path / "to"
    folder.mkdir()
    old = write({"x": bits(40, start=5), "old": bits(30)}, tmp_path / "old.pt")
    command = ("convert", "--force", *options, source, folder / name)
    assert statetree("convert", *options, old, folder / name).status == 0
    before = names(folder)
    assert list(published(folder).values()) == [["x", "old"]]
    outcomes = set()
    for step in range(1, 200):
        with monkeypatch.context() as patch:
            raised = failing_at(patch, step, is_done, error)
            ran = statetree(*command)
        found = published(folder)
        keys = next(iter(found.values()), None)
        assert keys in (["w", "x"], ["x", "old"]), (step, raised)
        assert all(statetree("diff", "--values", folder / main, folder / main).status == 0 for main in found), (
            step,
            raised,
        )
        if not raised:
            assert ran.status == 0
            break
        outcomes.add(str(keys))
        assert ran.status in (0, 2, 130)
        assert ran.status or keys == ["w", "x"]
        if keys == ["x", "old"]:
            kept = [left for left in names(folder) if ".partial-" not in left]
            assert kept == before, (step, raised)
        is_swapped = name == "b" and keys == ["w", "x"]  # then the old one is what is removed
        may_stay = "rmtree" in raised or (is_swapped and "unlink" in raised)
        assert may_stay or not [left for left in names(folder) if ".partial-" in left], (step, raised)
        again = statetree(*command)  # whatever is left is no obstacle
        assert again.status == 0, (step, raised, again.err)
        assert list(published(folder).values()) == [["w", "x"]]
        shutil.rmtree(folder)
        folder.mkdir()
        assert statetree("convert", *options, old, folder / name).status == 0
    else:
        pytest.fail("it never succeeds")
    assert outcomes == {"['x', 'old']", "['w', 'x']"}


def test_shards_that_cannot_be_put_in_their_places_are_not_lost(source, tmp_path, statetree, monkeypatch):
    command = ("convert", "--force", "--shard-bytes", 100, source, tmp_path / "m.safetensors")
    assert statetree(*command).status == 0
    before, replace = os.listdir(tmp_path), Path.replace

    def fail(self, target):
        if self.name.startswith("m-00002"):
            raise OSError(errno.EIO, "Input/output error")
        return replace(self, target)

    monkeypatch.setattr("pathlib.Path.replace", fail)
    ran = statetree(*command)
    assert ran.status == 2
    (left,) = set(os.listdir(tmp_path)) - set(before)
    assert f"Then move the files of {left} beside it" in ran.err
    monkeypatch.undo()
    for file in (tmp_path / left).iterdir():
        file.replace(tmp_path / file.name)
    assert statetree("diff", source, tmp_path / "m.safetensors.index.json").status == 0


def test_errors_of_the_system_name_the_destination(source, tmp_path, statetree, monkeypatch):
    def refused(*args, **options):
        raise PermissionError(errno.EACCES, "Permission denied", "/tmp/.b.pt.partial-0")

    with monkeypatch.context() as patch:
        patch.setattr("os.mkdir", refused)
        ran = statetree("convert", source, tmp_path / "b.pt")
    place = f"error: save: cannot write {tmp_path / 'b.pt'}"
    assert ran.err == f"{place}: Permission denied. Check its permissions, and the disk.\n"
    with monkeypatch.context() as patch:
        patch.setattr("os.stat", refused)
        assert "error: read: " in statetree("show", source).err
    for target in ("b.safetensors",):
        with monkeypatch.context() as patch:
            patch.setattr("pathlib.Path.open", lambda *_: FullDisk())
            ran = statetree("convert", source, tmp_path / target)
        assert ran.err == f"error: save: cannot write {tmp_path / target}: No space left on device. Make room.\n"


class FullDisk(io.BytesIO):
    def write(self, _):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_shards_and_their_index_go_together(source, tmp_path, statetree):
    args = ("convert", "--shard-bytes", 100, source, tmp_path / "m.safetensors")
    assert statetree(*args).status == 0
    before = names(tmp_path)
    assert statetree(*args).status == 2
    (tmp_path / "m.safetensors.index.json").unlink()
    ran = statetree(*args)  # a shard is in the way
    assert ran.status == 2
    assert "m-00001-of-00002.safetensors: it exists already" in ran.err
    assert statetree("convert", "--force", *args[1:]).status == 0
    assert names(tmp_path) == before
    with suppress(FileNotFoundError):
        (tmp_path / "m.safetensors").unlink()
        pytest.fail("there must be no file under the plain name")


def test_shards_that_are_replaced_go(source, tmp_path, statetree):
    target = tmp_path / "m.safetensors"
    assert statetree("convert", "--shard-bytes", 100, source, target).status == 0
    (tmp_path / "m-00009-of-00009.safetensors").write_text("of somebody else")
    before = {name for name in names(tmp_path) if name.endswith("of-00002.safetensors")}
    assert len(before) == 2
    assert statetree("convert", "--force", "--shard-bytes", 1000, source, target).status == 0
    assert names(tmp_path) == [
        "a.pt",
        "m-00001-of-00001.safetensors",
        "m-00009-of-00009.safetensors",
        "m.safetensors.index.json",
    ]
    assert statetree("show", tmp_path / "m.safetensors.index.json").status == 0


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": {"w": 3}}', b'{"weight_map": {"w": "a.pt"}}'])
def test_what_an_index_of_others_names_stays(index, source, tmp_path, statetree):
    (tmp_path / "m.safetensors.index.json").write_bytes(index)
    assert statetree("convert", "--force", "--shard-bytes", 1000, source, tmp_path / "m.safetensors").status == 0
    assert names(tmp_path) == ["a.pt", "m-00001-of-00001.safetensors", "m.safetensors.index.json"]


def test_a_source_is_not_replaced_by_a_part_of_itself(source, tmp_path, statetree):
    """What is not selected would be lost."""
    before = source.read_bytes()
    ran = statetree("convert", "--match", "w", "--force", source, source)
    assert ran.status == 2
    assert "it would replace a.pt, which is being read, and lose what is not written. Choose another name." in ran.err
    (tmp_path / "link.pt").symlink_to(source)
    assert statetree("convert", "--match", "w", "--force", source, tmp_path / "link.pt").status == 2
    assert source.read_bytes() == before


@pytest.mark.parametrize("target", ["m.safetensors", "m.safetensors.index.json", "m-00001-of-00002.safetensors", "n"])
def test_a_source_in_shards_is_not_replaced_by_a_part_of_itself(target, source, tmp_path, statetree):
    """The index under the name that ``--shard-bytes`` makes of another one, or a shard."""
    folder = tmp_path / "model"
    folder.mkdir()
    assert statetree("convert", "--shard-bytes", 100, source, folder / "m.safetensors").status == 0
    if target == "n":  # an index of another name, whose shards have the names that the new ones get
        os.rename(folder / "m.safetensors.index.json", folder / "n.safetensors.index.json")
        target = "m.safetensors"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    index = next(folder.glob("*.index.json"))
    shards = ["--shard-bytes", 100] if "-of-" not in target else []
    ran = statetree("convert", *shards, "--match", "*", "--force", index, folder / target)
    assert ran.status == 2
    assert "which is being read, and lose what is not written" in ran.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_nothing_is_called_a_dash(source, tmp_path, statetree, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = statetree("convert", source, "-")
    assert ran.status == 2
    assert "cannot write '-': expected the name of a file or directory" in ran.err
    assert names(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_are_those_of_the_umask(umask, expected, name, source, tmp_path, statetree):
    before = os.umask(umask)
    try:
        assert statetree("convert", source, tmp_path / name).status == 0
    finally:
        os.umask(before)
    target = tmp_path / name
    files = [file for file in target.rglob("*") if file.is_file()] or [target]
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {oct(expected)}
    if target.is_dir():
        assert oct(target.stat().st_mode & 0o777) == oct(expected | (expected & 0o444) >> 2)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "other.txt"])
def test_what_is_no_page_is_not_replaced(name, tmp_path, statetree):
    path = write({"w": bits(3)}, tmp_path / name) if name != "other.txt" else tmp_path / name
    if name == "other.txt":
        path.write_text("notes")
    read, before = write({"w": bits(4)}, tmp_path / "read.pt"), path.read_bytes()
    with pytest.raises(st.CheckpointError, match=r"to_html: cannot write .*: a file of that name exists, which is no"):
        st.to_html({"w": bits(3)}, path)
    for command in (["show", read], ["diff", read, read], ["diff", "-q", read, read]):
        assert statetree(*command, "--html", path).status == 2
    assert path.read_bytes() == before
    empty = tmp_path / "empty.html"
    empty.touch()
    for _ in range(2):  # over nothing, and over a page
        assert statetree("show", read, "--html", empty).status == 0
        assert empty.read_text().startswith("<!doctype html>")


def test_what_cannot_be_read_is_taken_for_no_page(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    st.to_html({"w": bits(3)}, path)
    before = path.read_bytes()

    def refuse(*_args, **_options):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:  # root may read everything
        patch.setattr(type(path), "open", refuse)
        with pytest.raises(st.CheckpointError, match=r"Permission denied\. Check its permissions"):
            st.to_html({"w": bits(4)}, path)
    assert path.read_bytes() == before
