"""Folders of checkpoints are removed, whatever interrupts that."""

from __future__ import annotations

import os

import fsspec
import pytest
import torch

import statetree as st
from statetree.files.publishing import remove_folder


@pytest.fixture
def folder(tmp_path):
    """A folder with folders in it, and links, that lead to what stays."""
    kept = tmp_path / "kept"
    (kept / "inside").mkdir(parents=True)
    (kept / "file").touch()
    made = tmp_path / "folder"
    (made / "a" / "b").mkdir(parents=True)
    for name in ("x", "a/y", "a/b/z"):
        (made / name).write_bytes(b"abc")
    (made / "link").symlink_to(kept)
    (made / "a" / "link").symlink_to(kept / "file")
    (made / "a" / "nowhere").symlink_to("nowhere")
    yield made
    assert sorted(os.listdir(kept)) == ["file", "inside"]


def interrupted(patch, at, after):
    """Have the call of a system's function that has a number be interrupted, before or after it."""
    done = 0
    for name in ("unlink", "rmdir"):
        call = getattr(os, name)

        def interrupt(*given, call=call, **options):
            nonlocal done
            done += 1
            if done == at and not after:
                raise KeyboardInterrupt
            try:
                call(*given, **options)
            finally:
                if done == at:
                    raise KeyboardInterrupt

        patch.setattr(os, name, interrupt)
    return lambda: done


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(1, 13))
def test_an_interrupt_comes_when_all_is_removed(at, after, folder):
    with pytest.MonkeyPatch.context() as patch:
        count = interrupted(patch, at, after)
        if at < 12:
            with pytest.raises(KeyboardInterrupt):
                remove_folder(folder)
        else:
            remove_folder(str(folder))
            assert count() == 11  # folders are asked for a second time, as links might be
    assert not folder.exists()


def test_what_is_not_there_is_removed(tmp_path):
    remove_folder(tmp_path / "nothing")


def test_what_a_link_leads_to_stays(folder, tmp_path):
    (tmp_path / "other").symlink_to(folder)
    remove_folder(tmp_path / "other")
    assert sorted(os.listdir(folder)) == ["a", "link", "x"]


def test_an_interrupt_of_a_save_over_another_leaves_one_of_them_and_nothing_else(tmp_path):
    held = []
    for at in range(1, 8):
        st.save({"w": torch.tensor([-1])}, tmp_path / "a", overwrite=True)
        with pytest.MonkeyPatch.context() as patch:
            interrupted(patch, at, after=True)
            with pytest.raises(KeyboardInterrupt):
                st.save({"w": torch.tensor([at])}, tmp_path / "a", overwrite=True)
        assert os.listdir(tmp_path) == ["a"]
        held.append(st.load(tmp_path / "a")["w"].item())
    assert all(found in (-1, at) for at, found in enumerate(held, 1))
    assert {*held} > {-1, 7}  # while the new one is written, and while the old one is removed


@pytest.mark.parametrize("name", ["x" * 300 + ".pt", "x" * 300 + ".safetensors", "x" * 300, "a\0b.pt"])
def test_names_that_cannot_be_are_refused_by_name(name, tmp_path):
    with pytest.raises(st.CheckpointError, match=r"(?s)^save: cannot write .*x{20}|a.*b"):
        st.save({"w": torch.ones(2)}, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["m.pt", "step"])
def test_what_an_object_store_refuses_is_named(name, monkeypatch):
    def refuse(*_, **__):
        raise OSError("503 Slow Down")

    monkeypatch.setattr(fsspec.filesystem("memory"), "put_file", refuse)
    with pytest.raises(st.CheckpointError, match=rf"save: cannot write memory://run/{name}: 503 Slow Down"):
        st.save({"w": torch.ones(2)}, f"memory://run/{name}")


@pytest.mark.parametrize("options", [{}, {"shard_bytes": 8}], ids=str)
def test_nothing_stays_of_what_is_new_and_fails(options, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises(st.CheckpointError, match=r"Permission denied\. Check its permissions, and the disk\.$"):
        st.save({"w": torch.ones(2), "v": torch.ones(2)}, tmp_path / "a.safetensors", **options)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_container_is_no_fault_of_the_place(tmp_path):
    class Own:
        pass

    def refuse(_):
        raise PermissionError(13, "Permission denied", "/secrets")

    st.register_container(Own, refuse, lambda *_: Own())
    with pytest.raises(PermissionError, match="/secrets"):
        st.save({"own": Own()}, tmp_path / "a.pt")


@pytest.mark.parametrize(
    "name", ["\u65e5" * 75 + ".pt", "\u65e5" * 75 + ".safetensors", "\u65e5" * 80, "a" * 240 + ".pt"]
)
def test_a_name_may_be_as_long_as_the_system_takes_it(name, tmp_path):
    st.save({"w": torch.ones(3)}, tmp_path / name)
    st.save({"w": torch.zeros(3)}, tmp_path / name, overwrite=True)
    assert st.load(tmp_path / name)["w"].tolist() == [0] * 3
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["llama3:8b", "a\\b"])
def test_names_that_no_index_may_hold_are_refused(name, tmp_path):
    tree = {"w": torch.ones(3), "v": torch.ones(4)}
    st.save(tree, tmp_path / f"{name}.safetensors")
    assert set(st.load(tmp_path / f"{name}.safetensors")) == {"w", "v"}
    (tmp_path / f"{name}.safetensors").unlink()
    with pytest.raises(
        st.CheckpointError, match=r"save: the name '.*' may not stand in an index .* Choose another name"
    ):
        st.save(tree, tmp_path / f"{name}.safetensors", shard_bytes=16, overwrite=True)


@pytest.mark.parametrize("folder", ["", "memory://other-form"], ids=["here", "far"])
def test_safetensors_in_the_other_form_are_not_left_to_be_taken_for_what_is_saved(folder, tmp_path):
    tree, path = {"a": torch.zeros(4), "b": torch.zeros(4)}, f"{folder or tmp_path}/model.safetensors"
    st.save(tree, path)
    with pytest.raises(
        st.CheckpointError, match=r"json: model\.safetensors lies beside it, which would be taken for it"
    ):
        st.save({"a": torch.ones(4)}, path, shard_bytes=16)
    assert st.load(folder or tmp_path)["a"].tolist() == [0] * 4
    path = f"{folder or tmp_path}/adapter_model.safetensors"
    st.save(tree, path, shard_bytes=16)
    with pytest.raises(st.CheckpointError, match=r"rs: adapter_model\.safetensors\.index\.json lies beside it"):
        st.save({"a": torch.ones(4)}, path)
    st.save(tree, path, shard_bytes=32)
