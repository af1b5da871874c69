"""A small model under every kind of parallelism that torch has, whose values are known: for use on the ranks."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

#: What can be made of the model on two ranks and on four.
CONTAINERS = (
    "ddp",
    "fsdp1",
    "fsdp1_orig",
    "fsdp1_hybrid",
    "fsdp1_hybrid_orig",
    "fsdp2",
    "hsdp",
    "tp",
    "fsdp2_tp",
)


class Net(nn.Module):
    """Sizes from 5 to 10, so that shards are uneven; a parameter that stays plain, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 6)
        self.norm = nn.BatchNorm1d(10)
        self.plain = nn.Linear(3, 1, bias=False)
        position = 1
        with torch.no_grad():
            for tensor in self.state_dict(keep_vars=True).values():
                tensor.copy_(torch.arange(position, position + tensor.numel()).view(tensor.shape))
                position += tensor.numel()


def whole() -> dict[str, Any]:
    """Return the tensors that the state has, whatever the parallelism."""
    model = Net()
    moments = {
        name: {
            "step": torch.tensor(1.0),
            "exp_avg": parameter.detach() * 0.5,
            "exp_avg_sq": parameter.detach() ** 2 * 0.5,
        }
        for name, parameter in model.named_parameters()
    }
    return {"model": dict(model.state_dict()), "moments": moments}


@functools.cache
def state_of(kind: str) -> dict[str, Any]:
    """Return the state of a model and its optimizer under one kind of parallelism. All ranks call it.

    It is made once in a process: nobody may write into it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = parallel(kind, Net())
        if "hybrid" in kind:
            return {"model": get_model_state_dict(model), "moments": _hybrid_moments(kind)}
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.5, 0.5), foreach=False)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()  # moments that are known exactly, and parameters unchanged
        found = get_optimizer_state_dict(model, optimizer)
        return {"model": get_model_state_dict(model), "moments": found["state"]}


def _hybrid_moments(kind: str) -> dict[str, Any]:
    """Return the moments in the layouts of a model: FSDP1 cannot tell them where rank 0 is not in the shard group."""
    sharded = []
    for moment in (lambda tensor: tensor * 0.5, lambda tensor: tensor**2 * 0.5):
        model = Net()
        for parameter in model.parameters():
            parameter.data = moment(parameter.data)
        sharded.append(get_model_state_dict(parallel(kind, model)))
    return {
        name: {"step": torch.tensor(1.0), "exp_avg": sharded[0][name], "exp_avg_sq": sharded[1][name]}
        for name, _ in Net().named_parameters()
    }


def parallel(kind: str, model: Net) -> nn.Module:
    """Return the model under one kind of parallelism."""
    ranks = dist.get_world_size()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind.startswith("fsdp1"):
        hybrid = "hybrid" in kind
        grid = mesh(ranks // 2, 2)
        return FullyShardedDataParallel(
            model,
            process_group=(grid.get_group(1), grid.get_group(0)) if hybrid else dist.group.WORLD,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
            ignored_modules=[model.plain],
            use_orig_params=kind.endswith("orig"),
            device_id=torch.device("cpu"),
        )
    if "tp" in kind:
        column = mesh(ranks // 2, 2)["tp"]
        parallelize_module(model, column, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    chosen: Any = {"fsdp2": mesh(ranks, 1)["dp"], "hsdp": mesh(2, ranks // 2), "fsdp2_tp": mesh(ranks // 2, 2)["dp"]}
    if kind != "tp":
        fully_shard(model, mesh=chosen[kind], ignored_params=set(model.plain.parameters()))
    return model


@functools.cache
def mesh(rows: int, columns: int) -> DeviceMesh:
    """Return a mesh of all ranks, made once in a process."""
    return init_device_mesh("cpu", (rows, columns), mesh_dim_names=("dp", "tp"))
