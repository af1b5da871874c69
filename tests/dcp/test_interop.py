"""Ours and DCP's own checkpoints are read by each other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import statetree
from tests.judge import assert_trees_equal

# DCP warns wherever there is no process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def trained():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(6.0).reshape(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "splits": [[1, 2], (3,)]}


def emptied(state):
    return statetree.map_leaves(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else None, state)


def flat_keys(directory):
    return set(torch_dcp.FileSystemReader(directory).read_metadata().state_dict_metadata)


def test_dcp_reads_ours(tmp_path):
    state = trained()
    statetree.save(state, tmp_path)
    template = emptied(state)
    torch_dcp.load(template, checkpoint_id=tmp_path)
    # A list that DCP goes down into has to be there already.
    assert template["optimizer"]["param_groups"][0]["betas"] == state["optimizer"]["param_groups"][0]["betas"]
    assert_trees_equal(template["model"], state["model"], ties=False)
    assert_trees_equal(template["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


def test_the_keys_are_those_of_dcp(tmp_path):
    state = trained()
    statetree.save(state, tmp_path / "ours")
    torch_dcp.save(state, checkpoint_id=tmp_path / "theirs")
    assert flat_keys(tmp_path / "ours") - {"<statetree structure>"} == flat_keys(tmp_path / "theirs")


def test_tools_of_dcp_nest_ours(tmp_path):
    state = trained()
    statetree.save(state, tmp_path / "ours")
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt")
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])
    assert loaded["optimizer"]["param_groups"][0]["lr"] == state["optimizer"]["param_groups"][0]["lr"]


@pytest.mark.parametrize("inner", [{1: torch.ones(2), "1": torch.zeros(2)}, {1: {"w": torch.ones(2)}, "1": [3]}])
def test_tools_of_dcp_read_ours_where_paths_do_not_tell_entries_apart(inner, tmp_path):
    statetree.save({"b": inner, "c": {"d": torch.ones(3)}}, tmp_path / "ours")
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt")
    assert torch.equal(loaded["c"]["d"], torch.ones(3))
    wanted = [leaf for leaf in statetree.flatten(inner)[0] if isinstance(leaf, torch.Tensor)]
    found = [leaf for leaf in statetree.flatten(loaded)[0] if isinstance(leaf, torch.Tensor) and leaf.numel() == 2]
    assert_trees_equal(found, wanted, ties=False)


def test_ours_reads_dcps_with_a_template(tmp_path):
    state = trained()
    torch_dcp.save(state, checkpoint_id=tmp_path)
    assert_trees_equal(statetree.load(tmp_path, emptied(state), in_place=True), state, ties=False)


def test_ours_reads_dcps_without_as_dcp_nests_them(tmp_path):
    state = trained()
    torch_dcp.save(state, checkpoint_id=tmp_path)
    loaded = statetree.load(tmp_path)
    assert_trees_equal(loaded["model"], dict(state["model"]), ties=False)
    assert torch.equal(loaded["optimizer"]["state"]["0"]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"a": {}}, r"unexpected at a\.b: expected nothing"),
        ({"l": [torch.ones(1)]}, r"unexpected at l\.1: expected nothing"),
        ({"l": []}, r"missing at l: .*(\n.*)*unexpected at l\.0"),
        ({"z": torch.ones(1)}, "(missing|unexpected) at z: expected"),
        ({}, "length differs at <root>: expected an empty container"),
        (torch.ones(1), r"structure differs at <root>: expected one \(Tensor\), got several entries"),
    ],
    ids=["empty", "length", "empty list", "missing", "root", "leaf"],
)
def test_misfits_with_dcps_are_named(template, message, tmp_path):
    state = {"a": {"b": 1}, "l": [torch.ones(1), torch.ones(1)], "t": (torch.ones(1), 1)}
    torch_dcp.save(state, checkpoint_id=tmp_path)
    with pytest.raises(statetree.TreeMismatch, match=message):
        statetree.load(tmp_path, template, in_place=True)


def test_tuples_that_dcp_pickles_whole_are_loaded(tmp_path):
    torch_dcp.save({"t": (torch.arange(2.0), 1)}, checkpoint_id=tmp_path)
    loaded = statetree.load(tmp_path, {"t": (torch.zeros(2), 0)})
    assert_trees_equal(loaded, {"t": (torch.arange(2.0), 1)})


def test_unknown_urls_are_named():
    with pytest.raises(statetree.CheckpointError, match=r"nowhere://bucket: cannot be reached"):
        statetree.load("nowhere://bucket")


def test_what_is_equal_in_the_metadata_of_entries_is_there_once(tmp_path):
    statetree.save({str(index): torch.zeros(3, 4) for index in range(100)}, tmp_path)
    found = torch_dcp.FileSystemReader(tmp_path).read_metadata()
    tensors = [entry for key, entry in found.state_dict_metadata.items() if key.isdigit()]
    assert len(tensors) == 100
    assert {id(entry.properties) for entry in tensors} == {id(tensors[0].properties)}
    assert {id(size) for entry in tensors for size in (entry.size, entry.chunks[0].sizes)} == {id(tensors[0].size)}
    assert len({id(entry) for entry in tensors} | {id(entry.chunks[0]) for entry in tensors}) == 200
