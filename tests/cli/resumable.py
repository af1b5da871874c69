"""A loop that resumes, unless it is told what to forget."""

from __future__ import annotations

import sys

import torch

import statetree as st
from statetree.integrations import RandomState


def main(forgotten):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    order = torch.Generator()
    data = torch.utils.data.TensorDataset(torch.arange(160.0).view(40, 4) / 160)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=order)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "random": RandomState(), "step": 0}
    state.pop(forgotten, None)
    with st.Checkpointer("run", keep=3, every=2) as checkpointer:
        step = 0
        if checkpointer.steps():
            state = checkpointer.restore(state)
            step = state["step"]
        for epoch in range(2):
            order.manual_seed(epoch)
            batches = iter(loader)
            before = RandomState().state_dict()
            for position, (inputs,) in enumerate(batches, 10 * epoch):
                if position < step and forgotten != "loader":  # was used before the kill
                    RandomState().load_state_dict(before)  # reading it again may draw numbers
                    continue
                if step == 20:
                    break
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step += 1
                if checkpointer.due(step):
                    checkpointer.async_save(step, {**state, "step": step})


if __name__ == "__main__":
    main(sys.argv[1])
