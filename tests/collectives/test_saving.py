"""One file saved by several ranks: by the first one where they say so, and else published once for its readers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import statetree as st
from statetree.testing import run_ranks

NUMEL = 300_000


def state(number):
    return {"a": torch.arange(NUMEL) + number, "b": torch.arange(NUMEL) - number}


def saved_by_each_and_read_at_once(paths):
    """The ranks end their saves at different moments: one reads while another may still write."""
    for number in range(6):
        for path in paths:
            dist.barrier()
            st.save(state(number), path, shard_bytes=NUMEL * 8 if path.endswith("safetensors") else None)
            opened = path if path.endswith(".pt") else f"{path}.index.json"
            for _ in range(3):
                loaded = st.load(opened)
                assert torch.equal(loaded["a"], state(number)["a"])
                assert torch.equal(loaded["b"], state(number)["b"])


def test_ranks_that_all_save_a_plain_tree_may_read_it_at_once(tmp_path):
    run_ranks(2, saved_by_each_and_read_at_once, [str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.pt",
        "b-00001-of-00002.safetensors",
        "b-00002-of-00002.safetensors",
        "b.safetensors.index.json",
    ]


def saved_by_one(path):
    if dist.get_rank() == 1:
        st.save(state(1), path)
    dist.barrier()
    assert torch.equal(st.load(path)["a"], state(1)["a"])


def test_one_rank_alone_saves_a_plain_tree(tmp_path):
    run_ranks(2, saved_by_one, str(tmp_path / "a.pt"))


def saved_by_the_first_of(path):
    st.save(state(dist.get_rank()), path, group=dist.group.WORLD)
    assert torch.equal(st.load(path)["a"], state(0)["a"])


def test_the_first_rank_of_a_group_writes_for_all(tmp_path):
    run_ranks(2, saved_by_the_first_of, str(tmp_path / "a.pt"))


def saved_to_different_paths(folder, name):
    mesh = init_device_mesh("cpu", (2,))
    tree = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    path = f"{folder}/{dist.get_rank()}{name}"
    with pytest.raises(st.RankMismatch, match=rf"save\(path='.*1{name}'\)"):
        st.save(tree, path)
    wrong = f"{folder}/a.xyz" if dist.get_rank() else f"{folder}/a{name}"
    with pytest.raises((st.RankMismatch, st.CheckpointError), match="suffix"):
        st.save(tree, wrong)
    st.save(tree, f"{folder}/same{name}")  # the group stays usable


@pytest.mark.parametrize("name", [".pt", ".safetensors", ""])
def test_ranks_that_save_together_name_one_path(name, tmp_path):
    run_ranks(2, saved_to_different_paths, str(tmp_path), name)
    assert [path.name for path in tmp_path.iterdir()] == [f"same{name}"]
