"""Train a tiny model with accelerate; print the digest of its weights."""

from __future__ import annotations

import sys

import accelerate
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import statetree
from statetree.integrations import RandomState
from statetree.integrations.accelerate import Registered


def main(directory, after_step=lambda step: None):
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.arange(60.0).view(20, 3) / 60)
    loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
    ema = {"weights": [parameter.detach().clone() for parameter in model.parameters()]}
    random = RandomState()
    run = {"ema": ema, "loader": loader, "random": random, "step": 0, "epoch": 0}
    registered = Registered(f"{directory}/run", run)
    accelerator.register_for_checkpointing(registered)
    folder = registered.latest(f"{directory}/accelerate")
    is_resumed = folder is not None
    if is_resumed:
        accelerator.load_state(folder)
        run = registered.state
    for epoch in range(run["epoch"], 3):
        batches = iter(loader)
        if is_resumed:  # beginning the loader again has drawn a number
            registered.checkpointer.restore({"random": random}, where="random.**")
            is_resumed = False
        for (inputs,) in batches:
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            for mean, parameter in zip(run["ema"]["weights"], model.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 0.1)
            run |= {"step": run["step"] + 1, "epoch": epoch}
            registered.state = run
            after_step(run["step"])
            if run["step"] % 3 == 0:
                accelerator.save_state(f"{directory}/accelerate/step-{run['step']}")
        run["epoch"] = epoch + 1
    print("weights", statetree.digest([model.state_dict(), run["ema"]]))


def killed_at(step):
    from tests.integrations.kills import kill

    return lambda now: kill(sys.argv[1]) if now == step else None


def kill_within_save(step):
    from tests.integrations.kills import kill

    save = statetree.Checkpointer.save

    def killed(self, number, state, **options):
        if state["step"] == step:
            kill(sys.argv[1])
        save(self, number, state, **options)

    statetree.Checkpointer.save = killed


if __name__ == "__main__":
    if "within" in sys.argv:
        kill_within_save(int(sys.argv[2]))
        main(sys.argv[1])
    else:
        main(sys.argv[1], killed_at(int(sys.argv[2])))
