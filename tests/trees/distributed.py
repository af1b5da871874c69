"""Trees of tensors of torch.distributed, which need a process group."""

from __future__ import annotations

from typing import Any

import torch

from tests.trees.classes import TwoTensors
from tests.trees.corpus import DISTRIBUTED_TREES, Ramp, tree


@tree(into=DISTRIBUTED_TREES)
def dtensors(new: Ramp) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    line, square = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    local = new(4, 3)
    return {
        "shard": DTensor.from_local(new(4, 3), line, [Shard(0)]),
        "replicate": DTensor.from_local(local, line, [Replicate()]),
        "partial": DTensor.from_local(new(2), line, [Partial()]),
        "square": DTensor.from_local(new(4, 3).t(), square, [Shard(1), Replicate()]),
        "empty": DTensor.from_local(new(0, 3), line, [Shard(0)]),
        "parameter": torch.nn.Parameter(DTensor.from_local(new(3), line, [Shard(0)])),
        "tied": local[1:],
        "wrapped": DTensor.from_local(TwoTensors(new(2), new(2)), line, [Replicate()]),
    }


@tree(into=DISTRIBUTED_TREES)
def dtensor_with_attributes(new: Ramp) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    result = DTensor.from_local(new(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    result.note, result.tensor = ["note"], new(1)
    return [result]


@tree(into=DISTRIBUTED_TREES)
def sharded_tensors(new: Ramp) -> Any:
    from torch.distributed._shard import sharded_tensor

    def shards(*offsets_and_tensors: Any) -> list[Any]:
        return [
            sharded_tensor.Shard.from_tensor_and_offsets(tensor, offsets, rank=0)
            for offsets, tensor in offsets_and_tensors
        ]

    base = new(4, 2)
    return {
        "one": sharded_tensor.init_from_local_shards(shards(([0, 0], base)), 4, 2),
        "two": sharded_tensor.init_from_local_shards(shards(([0], new(2)), ([2], new(3))), 5),
        "tied": base[1:3],
    }


@tree(into=DISTRIBUTED_TREES, changes=True)
def async_collective(new: Ramp) -> Any:
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as collectives

    return {"waiting": collectives.all_reduce(new(3), "sum", dist.group.WORLD), "beside": new(1)}
