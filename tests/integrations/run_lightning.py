"""Train a tiny model with Lightning; print the digest of its weights."""

from __future__ import annotations

import sys

import torch
from lightning import pytorch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import statetree
from statetree.integrations.lightning import Callback, CheckpointIO
from tests.integrations.kills import kill


class Model(pytorch.LightningModule):
    def __init__(self, kill_at, directory):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.kill_at, self.directory = kill_at, directory

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.kill_at:
            kill(self.directory)
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]


def main(directory, kill_at):
    torch.manual_seed(0)
    model = Model(kill_at, directory)
    data = torch.utils.data.TensorDataset(torch.arange(60.0).view(20, 3) / 60)
    loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
    io = CheckpointIO(f"{directory}/run", every=int(sys.argv[3]), keep=2)
    trainer = pytorch.Trainer(
        accelerator="cpu", max_epochs=3, plugins=[io], callbacks=[Callback()], default_root_dir=directory, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path=io.latest())
    print("weights", statetree.digest(model.state_dict()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
