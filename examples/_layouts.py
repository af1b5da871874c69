"""One model under several kinds of parallelism, for the examples that move states between them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _transformer import Transformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LAYOUTS = ("whole", "fsdp", "hsdp", "tp", "fsdp_tp")


def build(layout: str, *, seed: int) -> Transformer:
    """Return a small transformer in one of ``LAYOUTS``. Every rank calls it."""
    torch.manual_seed(seed)
    model = Transformer(width=30, depth=2, dropout=0.0)  # sizes that two ranks cannot share evenly everywhere
    ranks = dist.get_world_size()
    if "tp" in layout:
        columns = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        for block in model.blocks:
            parallelize_module(block, columns["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if layout == "fsdp_tp":
        shard_over(model, columns["data"])
    elif layout == "hsdp":
        shard_over(model, init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "fsdp":
        shard_over(model, init_device_mesh("cpu", (ranks,)))
    return model


def shard_over(model: Transformer, mesh: dist.device_mesh.DeviceMesh) -> None:
    """Shard a model by FSDP2, block by block."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
