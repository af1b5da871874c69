"""The device over which ranks communicate: one type for all of them, and where their tensors lie."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import statetree as st
from statetree.exchange import group as groups
from statetree.exchange.group import Group, group_of
from statetree.leaves.types.dtensor import DTensorType
from statetree.testing import run_ranks
from tests.collectives.checks import check_in_step
from tests.kept_calls import of_one_call

NEEDS_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each of two ranks")


def pretend(chosen):
    """Have groups communicate from another type of device, too (in truth host memory), and note what is chosen."""
    taken = Group.device

    def device(self, kind):
        chosen.append(kind)
        return taken(self, "cpu")

    Group.devices = ["cpu", "xpu"]
    Group.device = device


def own_device(kind):
    """Have distributed tensors say that they lie on a type of device, and those of other ranks on another."""
    described = DTensorType.local_chunks
    DTensorType.local_chunks = lambda self, value, ranks: described(self, value, ranks)._replace(device=kind)


def shards():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.arange(4.0) + 4 * dist.get_rank()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def moves_over_one_device(verb, kinds):
    chosen = []
    own_device(kinds[dist.get_rank()])
    pretend(chosen)
    tree = {"w": shards()}
    for _ in range(2):  # the second plan is known
        chosen.clear()
        if verb == "gather":
            found = st.gather(tree, device="cpu")
        else:
            like = {"w": torch.empty(8)}
            found = st.reshard(tree, like, in_place=True)
        assert torch.equal(found["w"], torch.arange(8.0))
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, "xpu" in chosen)
        assert told == ["xpu" in kinds] * 2
    check_in_step()


@of_one_call
@pytest.mark.parametrize("kinds", [["xpu", "cpu"], ["cpu", "xpu"], ["xpu", "xpu"], ["cpu", "cpu"]], ids="-".join)
@pytest.mark.parametrize("verb", ["gather", "reshard"])
def test_all_ranks_communicate_over_the_device_that_one_of_them_needs(verb, kinds):
    run_ranks(2, moves_over_one_device, verb, kinds, fresh=True)


def distributes_over_one_device(kinds):
    chosen = []
    own_device(kinds[dist.get_rank()])
    pretend(chosen)
    like = {"w": shards()}
    full = {"w": torch.arange(8.0) * 3} if dist.get_rank() == 0 else None
    found = st.distribute(full, like, src=0, in_place=True)
    assert torch.equal(found["w"].to_local(), (torch.arange(8.0) * 3).chunk(2)[dist.get_rank()])
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, "xpu" in chosen)
    assert told == [True, True]
    check_in_step()


@pytest.mark.parametrize("kinds", [["xpu", "cpu"], ["cpu", "xpu"]], ids="-".join)
def test_the_source_communicates_over_the_device_of_the_destination(kinds):
    run_ranks(2, distributes_over_one_device, kinds, fresh=True)


def test_a_group_communicates_from_where_tensors_lie(monkeypatch):
    group = group_of("gather", None, None)
    monkeypatch.setattr(Group, "devices", ["cpu", "cuda"])
    group.settle_on(torch.device("cuda", 3))
    group.settle_on(torch.device("cuda", 1))
    assert group.device("cuda") == torch.device("cuda", 3)
    assert group.device("cpu") == torch.device("cpu")
    assert group.number_of(["cpu", "meta", ""]) == 0
    assert group.number_of(["cpu", "cuda"]) == 1


def test_a_group_waits_no_longer_than_it_is_told_before_it_is_checked():
    assert group_of("gather", None, 5).timeout == timedelta(seconds=5)
    wrong = group_of("gather", None, -1)  # the others are told of it before this rank raises
    assert wrong.timeout is None
    with pytest.raises(ValueError, match="the timeout must be positive"):
        wrong.check_usable()


def devices_of_gloo():
    return [group_of("gather", group, None).devices for group in (None, dist.new_group(backend="cpu:gloo,cuda:gloo"))]


def test_gloo_sends_from_host_memory_alone():
    assert run_ranks(2, devices_of_gloo) == [[["cpu"], ["cpu"]]] * 2


class Backends:
    """A process group of which nothing is asked but that it is one."""


def test_all_ranks_use_a_device_once_before_some_do(monkeypatch):
    class Done:
        def wait(self):
            pass

    started = []
    monkeypatch.setattr(Group, "devices", ["cpu", "meta"])
    monkeypatch.setattr(
        groups, "start_all_reduce", lambda group, data, _: started.append((group, data.device.type)) or Done()
    )
    one, other = Backends(), Backends()
    for _ in range(2):  # a call has a Group of its own
        for backends in (one, other):
            group = Group(backends, 0, [0, 1], "gather")
            group.open(torch.device("cpu"))  # which the ranks agreed over
            group.open(torch.device("meta"))
    assert started == [(one, "meta"), (other, "meta")]


def gathers_where_a_rank_holds_nothing():
    torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh("cuda", (2,))
    rows = 1 if dist.get_rank() == 0 else 0
    local = torch.arange(4.0, device="cuda").view(1, 4)[:rows]
    tree = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(1, 4), stride=(4, 1))}
    if dist.get_rank() == 1:
        own_device("cpu")
    both = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert torch.equal(st.gather(tree, device="cpu", group=both)["w"], torch.arange(4.0).view(1, 4))


@NEEDS_TWO_GPUS
def test_two_backends_where_one_rank_has_nothing_on_the_accelerator():
    run_ranks(2, gathers_where_a_rank_holds_nothing, fresh=True)
