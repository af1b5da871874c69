"""Train a tiny sharded model with torchtitan's containers on two ranks; print the digest of its weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import statetree
from statetree.testing import run_ranks
from tests.integrations.kills import kill


@dataclass
class Progress:
    """The part of torchtitan's trainer that is saved."""

    step: int = 0
    losses: list[float] = field(default_factory=list)

    def state_dict(self):
        return {"step": torch.tensor(self.step), "losses": list(self.losses)}

    def load_state_dict(self, state):
        self.step, self.losses = int(state["step"]), state["losses"]


class Data(torch.utils.data.IterableDataset):
    def __init__(self, rank):
        self.rank, self.position = rank, 0

    def __iter__(self):
        while True:
            self.position += 1
            yield torch.randn(6, generator=torch.Generator().manual_seed(100 * self.position + self.rank))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def train(directory, kill_at):
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from statetree.integrations.torchtitan import CheckpointManager

    torch.manual_seed(0)
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = default_adamw(lr=0.01)
    optimizer.implementation = "for-loop"
    optimizers = optimizer.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    progress = Progress()
    loader = ParallelAwareDataloader(Data(rank), rank, 2, batch_size=2)
    config = CheckpointManager.Config(enable=True, interval=3, keep_latest_k=2, last_save_model_only=False)
    manager = config.build(
        dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": progress}, sd_adapter=None, base_folder=directory,
    )  # fmt: skip
    manager.load(step=-1)
    batches = iter(loader)
    while progress.step < 10:
        progress.step += 1
        optimizers.zero_grad()
        manager.maybe_wait_for_staging()
        loss = model(next(batches)).square().mean()
        loss.backward()
        optimizers.step()
        schedulers.step()
        progress.losses.append(loss.item())
        if progress.step == kill_at:
            kill(directory)
        manager.save(progress.step, last_step=progress.step == 10)
    manager.close()
    return str(statetree.digest([model.state_dict(), optimizers.state_dict(), schedulers.state_dict(), progress.step]))


if __name__ == "__main__":
    print("weights", run_ranks(2, train, sys.argv[1], int(sys.argv[2]), timeout=300))
