"""Save a sharded model as one file, written by rank 0.

    torchrun --standalone --nproc-per-node 2 examples/save_one_file.py model.safetensors

Every rank holds a part of the model. ``gather`` brings the parts together on rank 0, where ``offload`` takes them to
host memory: in a chain the two work bucket by bucket, so that on a GPU no whole model is ever needed. The other ranks
get tensors on ``meta``: the same structure, and no memory.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _layouts import build
from safetensors.torch import save_file

import statetree as st


def main(file: Path) -> None:
    """Make a model and save it."""
    dist.init_process_group("gloo")
    model = build("fsdp", seed=0)
    save = st.chain(partial(st.gather, dst=0), st.offload)
    state = save(model.state_dict())
    if dist.get_rank() == 0:
        write(state, file)
        nbytes = file.stat().st_size
        print(f"{len(state)} tensors, {nbytes} bytes in {file.name}")
    dist.barrier()  # a rank that left earlier might end while gloo still holds what it sent last
    dist.destroy_process_group()


def write(state: dict[str, Any], file: Path) -> None:
    """Write a state dict as what the file's name says."""
    if file.suffix == ".safetensors":
        save_file({name: tensor.clone() for name, tensor in state.items()}, file)  # it knows no ties
    else:
        torch.save(state, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
