"""Writes the page that ``page.png`` shows: ``python docs/pictures/page.py page.html``, then a picture in a browser.

The picture was made by Chromium: ``--headless --window-size=900,830 --screenshot=page.png page.html``.
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
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replica", "shard"))
    model = {"embed.weight": torch.nn.Parameter(torch.zeros(512, 64))}
    for layer in range(3):
        qkv, out = torch.zeros(192, 64), torch.zeros(64, 64)
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
