"""Ours and DCP's own checkpoints are read by each other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import statetree
from statetree import dcp
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
    dcp.save(state, checkpoint_id=tmp_path)
    template = emptied(state)
    torch_dcp.load(template, checkpoint_id=tmp_path)
    # A list that DCP goes down into has to be there already.
    assert template["optimizer"]["param_groups"][0]["betas"] == state["optimizer"]["param_groups"][0]["betas"]
    assert_trees_equal(template["model"], state["model"], ties=False)
    assert_trees_equal(template["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


def test_the_keys_are_those_of_dcp(tmp_path):
    state = trained()
    dcp.save(state, checkpoint_id=tmp_path / "ours")
    torch_dcp.save(state, checkpoint_id=tmp_path / "theirs")
    assert flat_keys(tmp_path / "ours") - {"<statetree structure>"} == flat_keys(tmp_path / "theirs")


def test_tools_of_dcp_nest_ours(tmp_path):
    state = trained()
    dcp.save(state, checkpoint_id=tmp_path / "ours")
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt")
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])
    assert loaded["optimizer"]["param_groups"][0]["lr"] == state["optimizer"]["param_groups"][0]["lr"]


@pytest.mark.parametrize("inner", [{1: torch.ones(2), "1": torch.zeros(2)}, {1: {"w": torch.ones(2)}, "1": [3]}])
def test_tools_of_dcp_read_ours_where_paths_do_not_tell_entries_apart(inner, tmp_path):
    dcp.save({"b": inner, "c": {"d": torch.ones(3)}}, checkpoint_id=tmp_path / "ours")
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt")
    assert torch.equal(loaded["c"]["d"], torch.ones(3))
    wanted = [leaf for leaf in statetree.flatten(inner)[0] if isinstance(leaf, torch.Tensor)]
    found = [leaf for leaf in statetree.flatten(loaded)[0] if isinstance(leaf, torch.Tensor) and leaf.numel() == 2]
    assert_trees_equal(found, wanted, ties=False)


def test_ours_reads_dcps_with_a_template(tmp_path):
    state = trained()
    torch_dcp.save(state, checkpoint_id=tmp_path)
    assert_trees_equal(dcp.load(emptied(state), checkpoint_id=tmp_path), state, ties=False)


def test_ours_reads_dcps_not_without(tmp_path):
    torch_dcp.save(trained(), checkpoint_id=tmp_path)
    with pytest.raises(statetree.TreeMismatch, match=r"does not say how its entries were nested.*Pass a template"):
        dcp.load(checkpoint_id=tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"a": {}}, r"length differs at a: expected dict of 0, got entries \(a\.…\)"),
        ({"l": [torch.ones(1)]}, "length differs at l: expected list of 1, got more than 1 items"),
        ({"l": []}, r"structure differs at l: expected list of 0, got several entries"),
        ({"t": (torch.ones(1), 1)}, "structure differs at t: expected tuple of 2, got one entry"),
        ({"z": torch.ones(1)}, "(missing|unexpected) at z: expected"),
        ({}, "length differs at <root>: expected dict of 0"),
        (torch.ones(1), "structure differs at <root>: expected a tensor, got several entries"),
    ],
    ids=["empty", "length", "empty list", "tuple", "missing", "root", "leaf"],
)
def test_misfits_with_dcps_are_named(template, message, tmp_path):
    state = {"a": {"b": 1}, "l": [torch.ones(1), torch.ones(1)], "t": (torch.ones(1), 1)}
    torch_dcp.save(state, checkpoint_id=tmp_path)
    with pytest.raises(statetree.TreeMismatch, match=message):
        dcp.load(template, checkpoint_id=tmp_path)


def test_given_readers_and_writers_are_used(tmp_path):
    state = {"a": torch.arange(3), "b": [1]}
    dcp.save(state, checkpoint_id=tmp_path, storage_writer=torch_dcp.FileSystemWriter("elsewhere"))
    loaded = dcp.load(checkpoint_id=tmp_path, storage_reader=torch_dcp.FileSystemReader("elsewhere"))
    assert_trees_equal(loaded, state)


def test_a_given_reader_fills_a_template(tmp_path):
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3), "c": [1, "x"]}
    dcp.save(state, checkpoint_id=tmp_path, storage_writer=torch_dcp.FileSystemWriter("elsewhere"))
    template = {"a": torch.zeros(3, 2, dtype=torch.float64).t(), "b": torch.zeros(3).long(), "c": None}
    loaded = dcp.load(
        template, checkpoint_id=tmp_path, storage_reader=torch_dcp.FileSystemReader("elsewhere"), cast=True
    )
    assert loaded["a"] is template["a"]
    assert torch.equal(loaded["a"], state["a"].double())
    assert loaded["b"].tolist() == [0, 1, 2]
    assert loaded["c"] == [1, "x"]


def test_urls_take_a_reader():
    with pytest.raises(statetree.CheckpointError, match=r"load: s3://bucket is no path: .*storage_reader"):
        dcp.load(checkpoint_id="s3://bucket")
