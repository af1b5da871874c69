"""Train a tiny model with Lightning; print the digest of its weights."""

from __future__ import annotations

import os
import signal
import sys

import torch
from lightning import pytorch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import statetree
from statetree.integrations.lightning import Callback, CheckpointIO


class Model(pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]


def main(directory, every, *callbacks, **options):
    torch.manual_seed(0)
    model = Model()
    data = torch.utils.data.TensorDataset(torch.arange(60.0).view(20, 3) / 60)
    loader = StatefulDataLoader(data, batch_size=4, shuffle="strategy" not in options)
    options = {"enable_checkpointing": False, **options}
    io = CheckpointIO(f"{directory}/run", every=every, keep=2)
    trainer = pytorch.Trainer(
        accelerator="cpu", max_epochs=3, plugins=[io], callbacks=[Callback(), *callbacks], default_root_dir=directory,
        logger=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=io.latest())
    print("weights", statetree.digest(model.state_dict()))
    return trainer


class Kill(pytorch.Callback):
    def __init__(self, at, directory):
        self.at, self.directory = at, directory

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 0:
            torch.manual_seed(trainer.global_rank)  # every rank drops out other elements
        from tests.integrations.kills import kill

        if trainer.global_step == self.at:
            kill(self.directory)


class Preempt(Kill):
    """Signals one rank."""

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.checkpoint_io.checkpointer.save_on(signal.SIGTERM)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        at, self.at = self.at, -1
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.at = at
        if (trainer.global_step, trainer.global_rank) == (at, trainer.world_size - 1):
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _, directory, kill_at, every, *how = sys.argv
    options = {
        "ddp": {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False},
        "accumulating": {"accumulate_grad_batches": 2},
    }.get("".join(how[:1]), {})
    averages = [pytorch.callbacks.EMAWeightAveraging(decay=0.5)] if how == ["averaging"] else []
    ending = (Preempt if "preempted" in how else Kill)(int(kill_at), directory)
    main(directory, int(every), *averages, ending, **options)
