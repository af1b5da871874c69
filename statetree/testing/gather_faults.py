"""Silent faults of gathers: of functions that every rank calls with a state, and that return whole tensors on all."""

from typing import Any

import torch
import torch.distributed as dist


def _sharded(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return a tensor sharded over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(dim)])


def _made_of(part: torch.Tensor, *, summed: bool = False) -> torch.Tensor:
    """Return the tensor of which every rank holds a part: rows of it, or a partial."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(part, mesh, [Partial() if summed else Shard(0)], run_check=False)


def uneven_shards(gather: Any) -> None:
    """Shards of different sizes come together in their places."""
    rows = torch.arange(2.0 * (2 * dist.get_world_size() - 1)).view(-1, 2)
    result = gather({"w": _sharded(rows), "n": 3})
    assert result["w"].tolist() == rows.tolist(), result
    assert result["n"] == 3, result


def empty_shards(gather: Any) -> None:
    """Empty shards are nothing."""
    result = gather({"w": _sharded(torch.arange(1.0, 2.0))})
    assert result["w"].tolist() == [1.0], result


def shards_of_another_dim(gather: Any) -> None:
    """Shards of any dim come together along it."""
    whole = torch.arange(12.0).view(3, 4)
    result = gather({"w": _sharded(whole, 1)})
    assert result["w"].tolist() == whole.tolist(), result


def partial_sums(gather: Any) -> None:
    """Partial sums are added up."""
    part = torch.full((2,), float(dist.get_rank() + 1))
    result = gather({"w": _made_of(part, summed=True)})
    total = sum(range(1, dist.get_world_size() + 1))
    assert result["w"].tolist() == [total, total], result


def shards_that_are_not_contiguous(gather: Any) -> None:
    """Shards that are not contiguous are sent as they read."""
    whole = torch.arange(12.0 * dist.get_world_size()).view(-1, 4)
    own = whole.chunk(dist.get_world_size())[dist.get_rank()].t().contiguous().t()
    result = gather({"w": _made_of(own)})
    assert result["w"].tolist() == whole.tolist(), result


def dtypes_without_arithmetic(gather: Any) -> None:
    """Every dtype is gathered bit for bit."""
    whole = torch.arange(1, 4 * dist.get_world_size() + 1, dtype=torch.uint8)
    own = whole.chunk(dist.get_world_size())[dist.get_rank()].clone().view(torch.float8_e4m3fn)
    result = gather({"w": _made_of(own)})
    assert result["w"].view(torch.uint8).tolist() == whole.tolist(), result


def order_of_keys(gather: Any) -> None:
    """Dicts in another order on each rank do no harm."""
    size = 2 * dist.get_world_size()
    state = {name: _sharded(torch.arange(size) + at) for at, name in enumerate("abc")}
    if dist.get_rank() % 2:
        state = dict(reversed(state.items()))
    result = gather(state)
    for at, name in enumerate("abc"):
        assert result[name].tolist() == list(range(at, at + size)), (name, result[name])


def collective_in_flight(gather: Any) -> None:
    """What a collective has not finished is waited for."""
    from torch.distributed._functional_collectives import all_reduce

    world: Any = dist.group.WORLD
    reduced = all_reduce(torch.full((3,), 1.0), "sum", world)
    result = gather({"w": reduced})
    assert reduced.tolist() == [float(dist.get_world_size())] * 3, "it is waited for, whatever was gathered"
    assert result["w"].tolist() == [float(dist.get_world_size())] * 3, result
