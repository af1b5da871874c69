"""Writes the small checkpoints that each version of torch reads of every other: ``python -m tests.dcp.versions``.

Run by hand, once for a version of torch, in an environment that has it.
"""

from __future__ import annotations

import shutil
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as torch_dcp

import statetree as st

WRITTEN: Final = Path(__file__).parent / "data" / "versions"


def flat() -> dict[str, Any]:
    """What torch's own checkpoint holds."""
    return {
        "weight": torch.arange(12.0).view(3, 4),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
    }


def nested() -> dict[str, Any]:
    """What statetree's checkpoint holds, and torch's file: a state as training has it."""
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3))
        model.bias.copy_(torch.tensor([6.0, 7.0]))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for number, moments in enumerate(optimizer.state.values()):  # not what arithmetic makes of them: that may differ
        for place, name in enumerate(("exp_avg", "exp_avg_sq")):
            moments[name].copy_(torch.arange(moments[name].numel()).view_as(moments[name]) + 100 * number + 10 * place)
    shared = torch.arange(8, dtype=torch.int16)
    return {
        "model": OrderedDict((name, value.detach().clone()) for name, value in flat().items()),
        "optimizer": optimizer.state_dict(),
        "tied": [shared, shared[2:6]],
        "step": 3,
        "history": [1.5, (2, "three"), None],
    }


def write(folder: Path) -> None:
    """Write the checkpoints of this version of torch."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch_dcp.save(flat(), checkpoint_id=folder / "torch_dcp", no_dist=True)
    st.save(nested(), folder / "statetree_dcp")
    torch.save(nested(), folder / "torch.pt")


if __name__ == "__main__":
    place = WRITTEN / torch.__version__.partition("+")[0]
    write(place)
    sys.stdout.write(f"{place}\n")
