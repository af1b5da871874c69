"""Silent faults of gathers: of functions that every rank calls with a state, and that return whole tensors on all."""

from typing import Any

import torch
import torch.distributed as dist

from statetree.testing.silent_faults import GATHER, FaultTable

FAULTS = FaultTable(GATHER)


@FAULTS.add("Shards of different sizes come together in their places.")
def uneven_shards(gather: Any) -> None:
    """Every rank is taken to hold as much as the first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(2.0 * (2 * dist.get_world_size() - 1)).view(-1, 2)
    result = gather({"w": distribute_tensor(rows, mesh, [Shard(0)]), "n": 3})
    assert result["w"].tolist() == rows.tolist(), result
    assert result["n"] == 3, result


@FAULTS.add("Empty shards are nothing.")
def empty_shards(gather: Any) -> None:
    """A rank without elements hangs, or adds some."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    result = gather({"w": distribute_tensor(torch.arange(1.0, 2.0), mesh, [Shard(0)])})
    assert result["w"].tolist() == [1.0], result


@FAULTS.add("Shards of any dim come together along it.")
def shards_of_another_dim(gather: Any) -> None:
    """Shards are put one below the other, whichever dim was cut."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(12.0).view(3, 4)
    result = gather({"w": distribute_tensor(whole, mesh, [Shard(1)])})
    assert result["w"].tolist() == whole.tolist(), result


@FAULTS.add("Partial sums are added up.")
def partial_sums(gather: Any) -> None:
    """A summand is taken for the sum."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = torch.full((2,), float(dist.get_rank() + 1))
    result = gather({"w": DTensor.from_local(part, mesh, [Partial()], run_check=False)})
    total = sum(range(1, dist.get_world_size() + 1))
    assert result["w"].tolist() == [total, total], result


@FAULTS.add("Shards that are not contiguous are sent as they read.")
def shards_that_are_not_contiguous(gather: Any) -> None:
    """Bytes are sent in the order of memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(12.0 * dist.get_world_size()).view(-1, 4)
    own = whole.chunk(dist.get_world_size())[dist.get_rank()].t().contiguous().t()
    result = gather({"w": DTensor.from_local(own, mesh, [Shard(0)], run_check=False)})
    assert result["w"].tolist() == whole.tolist(), result


@FAULTS.add("Every dtype is gathered bit for bit.")
def dtypes_without_arithmetic(gather: Any) -> None:
    """Backends do not know eight-bit floats, and some add where they should copy."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(1, 4 * dist.get_world_size() + 1, dtype=torch.uint8)
    own = whole.chunk(dist.get_world_size())[dist.get_rank()].clone().view(torch.float8_e4m3fn)
    result = gather({"w": DTensor.from_local(own, mesh, [Shard(0)], run_check=False)})
    assert result["w"].view(torch.uint8).tolist() == whole.tolist(), result


@FAULTS.add("Dicts in another order on each rank do no harm.")
def order_of_keys(gather: Any) -> None:
    """Ranks call collectives in the order of their dicts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    size = 2 * dist.get_world_size()
    state = {name: distribute_tensor(torch.arange(size) + at, mesh, [Shard(0)]) for at, name in enumerate("abc")}
    if dist.get_rank() % 2:
        state = dict(reversed(state.items()))
    result = gather(state)
    for at, name in enumerate("abc"):
        assert result[name].tolist() == list(range(at, at + size)), (name, result[name])


@FAULTS.add("What a collective has not finished is waited for.")
def collective_in_flight(gather: Any) -> None:
    """A tensor that stands for the result of a collective is read before that is there."""
    from torch.distributed._functional_collectives import all_reduce

    world: Any = dist.group.WORLD
    reduced = all_reduce(torch.full((3,), 1.0), "sum", world)
    result = gather({"w": reduced})
    assert reduced.tolist() == [float(dist.get_world_size())] * 3, "it is waited for, whatever was gathered"
    assert result["w"].tolist() == [float(dist.get_world_size())] * 3, result
