"""torchao's low-bit optimizers under FSDP2: trained, saved, and restored on another number of ranks, bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import statetree as st
from statetree.testing import run_ranks

pytestmark = pytest.mark.slow


def train(name, steps):
    """Return the state of a sharded model with rows that no number of ranks divides, and its optimizer."""
    import torchao.optim

    torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 70), torch.nn.Linear(70, 512), torch.nn.Linear(512, 256))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = getattr(torchao.optim, name)(model.parameters(), lr=1e-2)
    for step in range(steps):
        torch.manual_seed(100 + step)
        model(torch.randn(8, 256)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save(name, directory: Path):
    state = train(name, 3)
    held = [value for row in state["optimizer"]["state"].values() for value in row.values()]
    assert any("OptimState" in type(getattr(value, "_local_tensor", value)).__name__ for value in held)
    st.save(state, directory / name)
    assert st.similarity(st.offload(state), state)
    return st.digest(state)


def load(name, directory: Path):
    return st.digest(st.load(directory / name, train(name, 1), in_place=True))


@pytest.mark.parametrize(("name", "after"), [("AdamW8bit", 4), ("AdamW4bit", 1)])
def test_low_bit_optimizers_are_restored_on_other_ranks(tmp_path, name, after):
    saved = run_ranks(2, save, name, tmp_path)
    assert run_ranks(after, load, name, tmp_path) == saved[:1] * after
