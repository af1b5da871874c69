"""Silent faults: what gathers of states got wrong in ways that no error tells, each a function of ``gather``.

They are made as those of ``faults`` are.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def _sharded(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return a tensor sharded over all ranks."""
    return distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(dim)])


def _made_of(part: torch.Tensor, reduced: str = "") -> torch.Tensor:
    """Return the tensor of which every rank holds a part: rows of it, or what is reduced."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(part, mesh, [Partial(reduced) if reduced else Shard(0)], run_check=False)


def uneven_shards(gather: Any) -> None:
    """Shards of different sizes, and empty ones, come together in their places."""
    rows = torch.arange(2.0 * (2 * dist.get_world_size() - 1)).view(-1, 2)
    result = gather({"w": _sharded(rows), "one": _sharded(torch.arange(1.0, 2.0)), "n": 3})
    assert (result["w"].tolist(), result["one"].tolist(), result["n"]) == (rows.tolist(), [1.0], 3), result


def shards_of_another_dim(gather: Any) -> None:
    """Shards of any dim come together along it."""
    size = 2 * dist.get_world_size()
    whole = [torch.arange(3.0 * size).view(3, size), torch.arange(3 * (size + 1)).view(3, size + 1)]
    result = gather({f"w{at}": _sharded(tensor, 1) for at, tensor in enumerate(whole)})
    for at, tensor in enumerate(whole):
        found = result[f"w{at}"]
        assert (found.dtype, found.tolist()) == (tensor.dtype, tensor.tolist()), found


def replicated_tensors(gather: Any) -> None:
    """What all ranks hold is gathered into memory of its own."""
    own, mesh = torch.arange(1.0, 5.0), init_device_mesh("cpu", (dist.get_world_size(),))
    result = gather({"w": DTensor.from_local(own, mesh, [Replicate()], run_check=False)})
    assert result["w"].tolist() == [1.0, 2.0, 3.0, 4.0], result
    result["w"].fill_(7.0)
    assert own.tolist() == [1.0, 2.0, 3.0, 4.0], "the result is the state's own memory"


def tied_shards(gather: Any) -> None:
    """One distributed tensor in two places is one tensor in the result."""
    held = _sharded(torch.arange(4.0))
    result = gather({"embed": held, "head": held})
    result["embed"].fill_(7.0)
    assert result["head"].tolist() == [7.0] * 4, result


def shards_changed(gather: Any) -> None:
    """The shards themselves are not changed."""
    own = torch.arange(4.0) + dist.get_rank()
    gather({"w": _made_of(own), "sum": _made_of(own, "sum")})
    assert own.tolist() == [float(at + dist.get_rank()) for at in range(4)], own


def partial_sums(gather: Any) -> None:
    """Partial sums are added up."""
    result = gather({"w": _made_of(torch.full((2,), float(dist.get_rank() + 1)), "sum")})
    total = sum(range(1, dist.get_world_size() + 1))
    assert result["w"].tolist() == [total, total], result


def partials_of_other_kinds(gather: Any) -> None:
    """Partials are reduced as they say: to the largest, to the smallest."""
    ends, own = ("min", "max"), torch.full((2,), float(dist.get_rank() + 1))
    result = gather({kind: _made_of(own.clone(), kind) for kind in ends})
    for kind, end in zip(ends, (1, dist.get_world_size()), strict=True):
        assert result[kind].tolist() == [end, end], (kind, result[kind])


def meshes_of_two_dims(gather: Any) -> None:
    """Shards over a mesh of two dims come together."""
    size, whole = dist.get_world_size(), torch.arange(6.0 * dist.get_world_size()).view(-1, 3)
    shapes = [(1, size), (size, 1), *([(2, size // 2)] if size > 2 and size % 2 == 0 else [])]
    meshes = {f"mesh {shape}": init_device_mesh("cpu", shape) for shape in shapes}
    spread = {f"{name}, R S": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]) for name, mesh in meshes.items()}
    spread |= {f"{name}, S S": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]) for name, mesh in meshes.items()}
    result = gather(spread)
    for name in spread:
        assert result[name].tolist() == whole.tolist(), (name, result[name])


def gathered_again(gather: Any) -> None:
    """What was gathered does not change when the next state is gathered, which is gathered as it is then."""
    size, results = 2 * dist.get_world_size(), []
    held: Any = _sharded(torch.arange(size))
    for step in range(4):
        held.to_local().add_(step)
        results.append(gather({"w": held})["w"])
    for found, added in zip(results, (0, 1, 3, 6), strict=True):
        assert found.tolist() == list(range(added, added + size)), (added, found)


def shards_that_are_not_contiguous(gather: Any) -> None:
    """Shards that are not contiguous are sent as they read."""
    whole = torch.arange(12.0 * dist.get_world_size()).view(-1, 4)
    own = whole.chunk(dist.get_world_size())[dist.get_rank()].t().contiguous().t()
    result = gather({"w": _made_of(own)})
    assert result["w"].tolist() == whole.tolist(), result


def dtypes_without_arithmetic(gather: Any) -> None:
    """Every dtype is gathered bit for bit."""
    bits = torch.arange(1, 48 * dist.get_world_size() + 1).to(torch.uint8)
    own = bits.chunk(dist.get_world_size())[dist.get_rank()]
    dtypes = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64, torch.int64)
    result = gather({str(dtype): _made_of(own.clone().view(dtype)) for dtype in dtypes})
    for dtype in dtypes:
        found = result[str(dtype)]
        assert (found.dtype, found.view(torch.uint8).tolist()) == (dtype, bits.tolist()), found


def order_of_keys(gather: Any) -> None:
    """Dicts in another order on each rank do no harm, and keep it."""
    size = 2 * dist.get_world_size()
    state = {name: _sharded(torch.arange(size) + at) for at, name in enumerate("abc")}
    state = dict(reversed(state.items())) if dist.get_rank() % 2 else state
    result = gather(state)
    assert list(result) == list(state), list(result)
    for at, name in enumerate("abc"):
        assert result[name].tolist() == list(range(at, at + size)), (name, result[name])


def collective_in_flight(gather: Any) -> None:
    """What a collective has not finished is waited for."""
    world: Any = dist.group.WORLD
    reduced = all_reduce(torch.full((3,), 1.0), "sum", world)
    result = gather({"w": reduced})
    assert reduced.tolist() == [float(dist.get_world_size())] * 3, "it is waited for, whatever was gathered"
    assert result["w"].tolist() == [float(dist.get_world_size())] * 3, result
