"""Load one file into a model, however that is sharded.

    torchrun --standalone --nproc-per-node 2 examples/load_any_layout.py model.safetensors tp

Only rank 0 reads the file. ``distribute`` sends each rank its own part alone, straight into the model's tensors: the
traffic is one model, however many ranks there are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _layouts import LAYOUTS, build
from safetensors.torch import load_file

import statetree as st


def main(file: Path, layout: str) -> None:
    """Load a file into a model, and compare the two."""
    dist.init_process_group("gloo")
    model = build(layout, seed=1)  # other weights than in the file
    full = read(file) if dist.get_rank() == 0 else None
    st.distribute(full, model.state_dict(), src=0, in_place=True)

    back = st.gather(model.state_dict(), dst=0)
    if full is not None:
        report = st.similarity(back, full, values=True)
        if not report:
            sys.exit(f"The model is not what the file holds:\n{report}")
        print(f"{len(full)} tensors from {file.name} are in the layout {layout}, bit for bit")
    dist.barrier()  # a rank that left earlier might end while gloo still holds what it sent last
    dist.destroy_process_group()


def read(file: Path) -> dict[str, Any]:
    """Read a state dict."""
    if file.suffix == ".safetensors":
        return load_file(file)
    state: dict[str, Any] = torch.load(file, weights_only=True, mmap=True)
    return state


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in LAYOUTS:
        sys.exit(f"usage: load_any_layout.py FILE {{{','.join(LAYOUTS)}}}")
    main(Path(sys.argv[1]), sys.argv[2])
