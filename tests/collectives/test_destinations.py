"""Where gathered tensors arrive: devices, and ranks that hold nothing of a tensor."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import statetree
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, check_in_step, sent_by


def gather_to_devices():
    layout = Layout((6, 3), tuple(range(dist.get_world_size())), ("S0",))
    tree = {"w": layout.build(), "plain": torch.arange(3.0)}
    found, sent = sent_by(lambda: statetree.gather(tree))
    assert torch.equal(found["w"], layout.full())
    assert sent
    found, sent = sent_by(lambda: statetree.gather(tree, device="meta"))
    assert (found["w"].is_meta, found["plain"].is_meta, found["w"].shape) == (True, True, (6, 3))
    assert not sent  # nobody wants the elements
    name, message = attempt(lambda: statetree.gather(tree, device="meta" if dist.get_rank() else "cpu"))
    assert (name, "device='meta'" in message, "device='cpu'" in message) == ("RankMismatch", True, True), message
    check_in_step()


def gather_a_number_from_a_part_of_the_ranks():
    """torch gives ranks outside of a mesh one element of a tensor without dims, after any operation on it."""
    mesh = DeviceMesh("cpu", [0], _init_backend=False)
    number = DTensor.from_local(torch.tensor(3.0), mesh, [Replicate()], run_check=False)
    tree = {"step": number + 1}
    assert statetree.gather(tree)["step"].item() == 4
    assert statetree.reshard(tree, {"step": torch.zeros(())})["step"].item() == 4


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("check", [gather_to_devices, gather_a_number_from_a_part_of_the_ranks])
def test_what_arrives_where(check, world_size):
    run_ranks(world_size, check)
