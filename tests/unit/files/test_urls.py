"""What is a URL and what a path, also where a ``Path`` of a URL has lost a slash."""

from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import statetree as st
from statetree.cli import app
from statetree.errors import CheckpointError
from statetree.files.remote import located

URLS = ["nowhere://bucket/run/model.pt", "nowhere://org/model", " nowhere://bucket/run"]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "verb",
    [st.files.open, lambda url: st.load(url, {}), lambda url: st.save({"w": torch.ones(2)}, url)],
    ids=["open", "load", "save"],
)
def test_urls_make_no_folder(verb, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (url, Path(url)):
        with pytest.raises(CheckpointError, match=r"nowhere://.*: cannot be reached"):
            verb(path)
    assert not list(tmp_path.iterdir())


def test_a_protocol_without_its_archive_cannot_be_reached():
    for verb in (st.files.open, lambda url: st.save({"w": torch.ones(2)}, url)):
        with pytest.raises(CheckpointError, match=r"zip://x: cannot be reached"):
            verb("zip://x")


def test_a_url_of_a_local_file_is_read_and_written(tmp_path):
    for url in (f"file://{tmp_path}/a.pt", Path(f"file://{tmp_path}/b.pt")):
        st.save({"w": torch.arange(3)}, url)
        assert st.load(url)["w"].tolist() == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt"]


@pytest.mark.parametrize("protected", [Path, str, "file://{}".format])
@pytest.mark.parametrize("name", [str, "file://{}".format, Path])
def test_what_is_protected_is_not_replaced_under_any_name(name, protected, tmp_path):
    path = tmp_path / "a.pt"
    st.save({"a": torch.ones(2), "b": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match="which is being read, and lose"):
        st.save({"a": torch.zeros(2)}, name(path), protected=[protected(path)])
    assert set(st.load(path)) == {"a", "b"}


@pytest.mark.parametrize("names", [("{}", "file://{}"), ("file://{}", "{}"), ("file://{}", "local://{}")])
def test_the_command_never_replaces_its_source(names, tmp_path):
    path = tmp_path / "a.pt"
    st.save({"a": torch.ones(2), "b": torch.ones(3)}, path)
    source, destination = (name.format(path) for name in names)
    assert app.main(["convert", "--match", "a", "--force", source, destination]) == 2
    assert set(st.load(path)) == {"a", "b"}


def test_a_url_of_a_local_file_may_be_relative_and_its_folders_are_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    st.save({"w": torch.arange(3)}, "file://new/folder/a.pt")
    for url in ("file://new/folder/a.pt", "local://./new/folder/a.pt", f"file://{tmp_path}/new/folder/a.pt"):
        assert st.load(url)["w"].tolist() == [0, 1, 2]


def test_a_url_without_an_authority_is_asked_for_as_it_is():
    assert str(located("memory:///a/b").path) == "/a/b"
    with pytest.raises(CheckpointError, match=r"nowhere:///user/x\.pt: cannot be reached"):
        st.load("nowhere:///user/x.pt")


def test_a_colon_alone_makes_no_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a:b.pt", "step:3.safetensors"):
        st.save({"w": torch.arange(3)}, name)
        assert st.offload(st.files.open(name))["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("cache", ["simplecache", "filecache"])
@pytest.mark.parametrize("name", ["a.pt", "a"])
def test_nothing_is_saved_behind_a_cache_which_would_keep_what_was_there(name, cache, tmp_path):
    st.save({"w": torch.ones(2)}, tmp_path / name)
    url = f"{cache}::file://{tmp_path}/{name}"
    assert st.load(url)["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"save: .* is read through a cache"):
        st.save({"w": torch.zeros(2)}, url)
    assert st.load(tmp_path / name)["w"].tolist() == [1, 1]


def test_a_file_without_a_suffix_is_read_whatever_a_server_says_of_what_lies_in_it(monkeypatch):
    with fsspec.open("memory://files/42", "wb") as file:
        torch.save({"w": torch.ones(2)}, file)
    info = MemoryFileSystem.info

    def answer(self, path, **options):
        if "/.metadata" in path:
            raise OSError("500")
        return info(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "info", answer)
    assert st.load("memory://files/42")["w"].tolist() == [1, 1]
