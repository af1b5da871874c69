"""``digest`` and ``audit`` on ranks: the number does not depend on the layout, and a replica that drifted is found."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import statetree
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, check_in_step


def layouts(shape):
    world = tuple(range(dist.get_world_size()))
    yield Layout(shape, world, ("S0",))
    yield Layout(shape, world, ("S1",))
    yield Layout(shape, world, ("R",))
    yield Layout(shape, (0,), ("R",))


def digests_do_not_depend_on_the_layout():
    for shape in ((6, 3), (5, 1030), (1, 7), (64, 4096)):
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            found = []
            for layout in layouts(shape):
                full = layout.full().to(dtype)
                whole = statetree.digest({"w": full, "step": 3})
                tree = {"w": statetree.distribute({"w": full}, {"w": layout.build().to(dtype)})["w"], "step": 3}
                found += [whole, statetree.digest(tree), statetree.digest(statetree.gather(tree))]
            assert len(set(found)) == 1, (shape, dtype, found)
    check_in_step()


def digests_read_one_of_the_copies_on_meshes_of_each_rank():
    own = DeviceMesh("cpu", [dist.get_rank()])
    leaf = DTensor.from_local(torch.arange(4.0), own, [Replicate()], run_check=False)
    whole = torch.arange(4.0)
    assert statetree.digest({"a": leaf, "b": whole}) == statetree.digest({"a": whole, "b": whole})
    check_in_step()


def digests_tell_the_ranks_that_one_of_them_failed():
    layout = Layout((6, 3), tuple(range(dist.get_world_size())), ("S0",))
    tree = {"w": layout.build()}
    if dist.get_rank() == 1:
        tree["w"]._local_tensor.untyped_storage().resize_(0)
    name, message = attempt(lambda: statetree.digest(tree))
    assert name == ("UnsupportedLeaf" if dist.get_rank() == 1 else "RankMismatch"), message
    check_in_step()


def partial_tensors_are_refused():
    layout = Layout((6, 3), tuple(range(dist.get_world_size())), ("P",))
    for verb in (statetree.digest, statetree.audit):
        name, message = attempt(lambda verb=verb: verb({"w": layout.build()}))
        assert (name, "Partial" in message) == ("UnsupportedLeaf", True), message
    check_in_step()


def audits_find_the_rank_that_drifted():
    world = dist.get_world_size()
    replicated = Layout((6, 3), tuple(range(world)), ("R",)).build()
    tree = {"plain": torch.arange(4.0), "shared": replicated, "w": Layout((6, 3), tuple(range(world)), ("S0",)).build()}
    report = statetree.audit(tree)
    assert report, str(report)
    assert report.ranks == []
    if dist.get_rank() == world - 1:
        tree["plain"][2] = -0.0
        replicated._local_tensor[1, 1] = 7.5
    report = statetree.audit(tree)
    assert not report
    assert report.count == 2
    if world > 2:
        assert report.ranks == [world - 1]
    assert [(str(found.path), found.ranks[0][0]) for found in report.differences] == [("plain", 0), ("shared", 0)]
    assert "plain: rank" in str(report)
    check_in_step()


def audits_compare_chunks_within_their_replicas():
    if dist.get_world_size() != 4:
        return
    tree = {"w": Layout((8, 3), ((0, 1), (2, 3)), ("R", "S0")).build()}
    assert isinstance(tree["w"], DTensor)
    assert statetree.audit(tree)
    if dist.get_rank() == 3:
        tree["w"]._local_tensor[0, 0] += 1
    report = statetree.audit(tree)
    assert [(str(found.path), found.box.start, found.ranks) for found in report.differences] == [
        ("w", (4, 0), ((1,), (3,)))
    ]


def trees_that_differ_are_refused():
    shape = (6, 3) if dist.get_rank() else (6, 4)
    name, message = attempt(lambda: statetree.audit({"w": torch.zeros(shape)}))
    assert (name, "at w" in message) == ("RankMismatch", True), message
    check_in_step()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "check",
    [
        digests_do_not_depend_on_the_layout,
        digests_read_one_of_the_copies_on_meshes_of_each_rank,
        digests_tell_the_ranks_that_one_of_them_failed,
        partial_tensors_are_refused,
        audits_find_the_rank_that_drifted,
        audits_compare_chunks_within_their_replicas,
        trees_that_differ_are_refused,
    ],
)
def test_on_ranks(check, world_size):
    run_ranks(world_size, check)
