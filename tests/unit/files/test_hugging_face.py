"""Folders of Hugging Face and indices of several files, of torch and of safetensors."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import statetree as st
from tests.cli.states import bits
from tests.judge import assert_trees_equal

STATE = {"a.w": bits(4, 3), "b.w": bits(5), "c.w": bits(2)}
SHARDS = {"a.w": "one.bin", "b.w": "two.bin", "c.w": "one.bin"}


def sharded(folder, weights=SHARDS, **held):
    folder.mkdir()
    for name in dict.fromkeys(weights.values()):
        torch.save(held.get(name[:3], {key: STATE[key] for key, of in weights.items() if of == name}), folder / name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weights}))
    return folder


@pytest.mark.parametrize("name", ["", "pytorch_model.bin.index.json"])
def test_torch_files_with_an_index_are_one_tree(name, tmp_path):
    found = st.files.opened(sharded(tmp_path / "m") / name)
    assert list(found.tree) == list(STATE)
    assert_trees_equal(st.offload(found.tree), STATE)
    assert_trees_equal(st.load(tmp_path / "m", st.allocate_like(STATE)), STATE)
    assert found.verify() > 8


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("pytorch_model.bin", "model.safetensors"),
        ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"),
        ("adapter_model.bin", "adapter_model.safetensors"),
    ],
)
def test_a_folder_with_a_torch_file_is_opened_and_safetensors_go_first(name, first, tmp_path):
    torch.save(STATE, tmp_path / name)
    assert_trees_equal(st.offload(st.files.open(tmp_path)), STATE)
    st.save({"other": bits(2)}, tmp_path / first)
    assert list(st.files.open(tmp_path)) == ["other"]


FAULTS = {
    "two": ({"two": {"b.w": bits(5), "more": bits(1)}}, "it holds 'more', which the index"),
    "one": ({"one": {"a.w": bits(4, 3)}}, "'c.w' is in one.bin, which does not hold it"),
    "list": ({"one": [bits(4)]}, "it holds no mapping"),
    "foreign": ({"two": {"b.w": torch.nn.ReLU()}}, r"not loaded \(torch.nn.modules.activation.ReLU\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_the_index_does_not_describe_are_refused(fault, tmp_path):
    held, message = FAULTS[fault]
    with pytest.raises(st.CheckpointError, match=message):
        st.files.open(sharded(tmp_path / "m", **held))


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/secret.bin", "missing.bin"])
def test_names_stay_in_the_folder(name, tmp_path):
    folder = sharded(tmp_path / "m")
    torch.save(STATE, tmp_path / "secret.bin")
    index = json.dumps({"weight_map": dict.fromkeys(STATE, name)})
    (folder / "pytorch_model.bin.index.json").write_text(index)
    with pytest.raises(st.CheckpointError, match=r"leads out of its directory|is missing"):
        st.files.open(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_shards_of_ranks_are_not_taken_for_tensors(is_sharded, tmp_path):
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=is_sharded)
    dcp.save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)
    for path in (tmp_path, *tmp_path.iterdir()):
        if not is_sharded:
            assert st.load(path)["w"].tolist() == [1, 1, 1, 1]
            continue
        with pytest.raises(st.CheckpointError, match=r"one rank's shards of tensors.*consolidate|it has no .metadata"):
            st.load(path)


def test_a_shard_by_any_name_is_none(tmp_path):
    place = '{"w": {"saved_offsets": [3]}}'
    st.save({"w": torch.ones(4)}, tmp_path / "a.safetensors", metadata={"DCP_SHARDING_INFO": place})
    with pytest.raises(st.CheckpointError, match="one rank's shards of tensors"):
        st.load(tmp_path / "a.safetensors")


def test_a_folder_of_files_without_an_index_is_refused(tmp_path):
    for number in range(2):
        st.save({f"w{number}": torch.ones(2)}, tmp_path / f"shard-{number}.safetensors")
    with pytest.raises(st.CheckpointError, match=r"it has no .metadata"):
        st.load(tmp_path)
    assert list(st.load(tmp_path / "shard-1.safetensors")) == ["w1"]
