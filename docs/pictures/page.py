"""Writes the page that ``page.png`` and ``page_phone.png`` show: ``python docs/pictures/page.py page.html``.

The pictures were made by headless Chromium, 1,400 and 390 pixels wide; in each, "qkv" or "norm" was searched for, and a
leaf was chosen. They were reduced to 64 colours.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import statetree as st


def main(path: str) -> None:
    """Write the page of a state of eight ranks, compared with another one."""
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replica", "shard"))
    model = {"embed.weight": torch.nn.Parameter(torch.randn(512, 64))}
    for layer in range(3):
        qkv, out = torch.randn(192, 64), torch.rand(64, 64)
        model[f"layers.{layer}.attn.qkv"] = distribute_tensor(qkv, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        model[f"layers.{layer}.attn.out"] = distribute_tensor(out, mesh, [Shard(1), Shard(0)], src_data_rank=None)
        model[f"layers.{layer}.norm"] = torch.ones(64)
    model["head.weight"] = model["embed.weight"]
    moments = {name: {"exp_avg": leaf.detach().clone(), "step": torch.tensor(3.0)} for name, leaf in model.items()}
    state = {"model": model, "optimizer": {"state": moments}, "step": 1200, "rng": torch.get_rng_state()}
    other = st.offload(state)
    other["model"]["layers.1.norm"] = torch.ones(65)
    del other["model"]["layers.2.norm"]
    other["step"] = 1.5
    st.to_html(state, path, other=other)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
