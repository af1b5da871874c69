"""What a reader found: views that overlap, metadata that are no texts, folders with two checkpoints."""

import os
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import statetree as st
from statetree import files
from statetree.errors import CheckpointError


@pytest.mark.parametrize(
    "view",
    [torch.arange(14.0).view(2, 7)[:, :5].unfold(1, 3, 2), torch.arange(10.0)[::2].unfold(0, 3, 1)],
    ids=["rows", "windows"],
)
def test_views_that_overlap_are_read_right(view, tmp_path):
    torch.save({"x": view}, tmp_path / "t.pt")
    like = {"x": torch.empty(view.shape)}
    assert torch.equal(st.load(tmp_path / "t.pt", like)["x"], view)
    assert torch.equal(files.open(tmp_path / "t.pt")["x"].read(), view)


def test_metadata_that_are_no_texts_are_refused(tmp_path):
    with pytest.raises(TypeError, match="metadata of safetensors must be texts"):
        st.save({"x": torch.ones(1)}, tmp_path / "t.safetensors", metadata={"epoch": 3})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_file_and_an_index_is_refused(tmp_path):
    state = {"a": torch.ones(4), "b": torch.ones(4)}
    st.save(state, tmp_path / "model.safetensors", shard_bytes=16)
    assert st.load(tmp_path, st.allocate_like(state))["a"].tolist() == [1.0] * 4
    other = tmp_path / "other"
    other.mkdir()
    st.save(state, other / "model.safetensors")
    (other / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(st.CheckpointError, match=r"which may differ\. Name one of them"):
        st.load(tmp_path, st.allocate_like(state))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # torch's own save says so
def test_pieces_that_read_otherwise_than_their_memory(tmp_path):
    values = torch.tensor([1 + 2j, 3 - 4j])
    torch_dcp.save({"c": values.conj()}, checkpoint_id=tmp_path, no_dist=True)
    template = {"c": torch.zeros(2, dtype=torch.complex64)}
    for loaded in (st.load(tmp_path, template), st.load(tmp_path, template, in_place=True)):
        assert loaded["c"].tolist() == values.conj().tolist()
    assert st.offload(st.files.open(tmp_path))["c"].tolist() == values.conj().tolist()


def test_numbers_of_16_bytes_that_begin_anywhere_are_read(tmp_path):
    for text in ("a" * count for count in range(16)):
        st.save({"s": text, "c": torch.ones(1, dtype=torch.complex128)}, tmp_path / text)
        stored = files.open(tmp_path / text)["c"]
        assert stored.tensor().data_ptr() % 16 == 0
        assert torch.equal(st.offload(stored), torch.ones(1, dtype=torch.complex128))


def test_members_that_begin_anywhere_are_copied(tmp_path):
    torch.save({"c": torch.ones(1, dtype=torch.complex128)}, tmp_path / "t.pt")
    with zipfile.ZipFile(tmp_path / "t.pt") as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    found = set()
    for count in range(1, 17):
        path = tmp_path / f"{count}.pt"
        with zipfile.ZipFile(path, "w") as moved:
            for name, data in members.items():
                moved.writestr(f"{'a' * count}/{name.partition('/')[2]}", data)
        stored = files.open(path)["c"]
        found.add(stored.tensor().data_ptr() % 16)
        assert torch.equal(st.offload(stored), torch.ones(1, dtype=torch.complex128))
    assert found == {0}


@pytest.mark.slow
def test_a_storage_is_read_when_its_file_is_opened(tmp_path):
    tensor = torch.zeros(400_000, dtype=torch.uint8)
    torch.save((tensor, tensor.untyped_storage()), tmp_path / "t.pt")
    _, storage = files.open(tmp_path / "t.pt")
    os.truncate(tmp_path / "t.pt", 100)  # reading what is mapped from here on would end the process
    assert bytes(storage.untyped()) == bytes(tensor.untyped_storage())


def test_attributes_that_hide_methods_are_refused(tmp_path):
    tensor = torch.nn.Parameter(torch.ones(2))
    tensor.stride = 1
    torch.save({"x": tensor}, tmp_path / "t.pt")
    with pytest.raises(CheckpointError, match="attributes that are no plain ones"):
        files.open(tmp_path / "t.pt")
