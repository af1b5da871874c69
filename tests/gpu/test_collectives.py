"""Collectives of tensors on an accelerator: over NCCL with one rank, and over gloo with two that share a device."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import statetree as st
from statetree.testing import run_ranks
from tests.gpu import DEVICE

pytestmark = pytest.mark.gpu
ROWS = 7


def whole(device):
    return torch.arange(ROWS * 4, dtype=torch.float32, device=device).view(ROWS, 4)


def group_of(backend):
    """Return a group of all ranks over a backend, or over the default one where there is no accelerator."""
    return dist.group.WORLD if backend == "gloo" or DEVICE.type == "cpu" else dist.new_group(backend=backend)


def sharded(group):
    """Return a tree with a tensor split over a group's ranks, one that all have, and an ordinary one."""
    mesh = DeviceMesh.from_group(group, DEVICE.type)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    local = whole(DEVICE).chunk(size)[rank].clone()
    shape = {"shape": torch.Size((ROWS, 4)), "stride": (4, 1)}
    return {
        "split": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **shape),
        "whole": DTensor.from_local(whole(DEVICE), mesh, [Replicate()], run_check=False),
        "plain": torch.arange(5, device=DEVICE),
        "step": 1,
    }


def expected(device):
    return {"split": whole(device), "whole": whole(device), "plain": torch.arange(5, device=device), "step": 1}


def moved_there_and_back(backend):
    """Gather a tree, distribute it, broadcast and compare: what a rank found wrong."""
    group = group_of(backend)
    tree = sharded(group)
    full = st.gather(tree, group=group)
    wrong = [] if st.similarity(st.offload(full), expected("cpu"), values=True) else ["gather"]
    here = st.gather(tree, dst=0, group=group, device="cpu")
    if dist.get_rank(group) == 0 and not st.similarity(here, {**expected("cpu"), "plain": tree["plain"]}, values=True):
        wrong.append("gather to the host")
    target = sharded(group)
    target["split"].to_local().zero_()
    target["whole"].to_local().zero_()
    st.distribute(full, target, group=group, in_place=True)
    wrong += [] if st.similarity(target, tree, values=True) else ["distribute"]
    target["split"].to_local().zero_()
    st.reshard(tree, target, group=group, in_place=True)
    wrong += [] if st.similarity(target, tree, values=True) else ["reshard"]
    sent = st.broadcast(expected(DEVICE) if dist.get_rank(group) == 0 else None, group=group)
    wrong += [] if st.similarity(st.offload(sent), expected("cpu"), values=True) else ["broadcast"]
    wrong += [] if st.audit(tree, group=group) else ["audit"]
    return wrong


@pytest.mark.parametrize(("backend", "world_size"), [("gloo", 2), ("nccl", 1)], ids=["gloo", "nccl"])
def test_trees_are_moved_there_and_back(backend, world_size):
    assert run_ranks(world_size, moved_there_and_back, backend) == [[]] * world_size
