"""Take the weights of a model in training to one in use, in another layout, after every step.

    torchrun --standalone --nproc-per-node 2 examples/sync_weights.py

As reinforcement learning does: the trainer is sharded by FSDP, and the model that generates is tensor parallel. Two
ways to sync them:

1. Both models are on the same ranks: ``reshard`` moves each element to where it is needed, in place.
2. The weights are wanted whole, one by one, by something else on rank 0: ``stream`` hands them out bucket by bucket,
   so that no rank ever holds the whole model.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from _layouts import build
from torch.nn import functional

import statetree as st

STEPS = 3


def main() -> None:
    """Train a little, and sync after each step."""
    dist.init_process_group("gloo")
    trainer, engine = build("fsdp", seed=0), build("tp", seed=1).eval()
    whole = build("whole", seed=2).eval() if dist.get_rank() == 0 else None
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, 256, (2, 9))
        loss = functional.cross_entropy(trainer(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        st.reshard(trainer.state_dict(), engine.state_dict(), in_place=True)

        for path, weight in st.stream(trainer.state_dict(), partial(st.gather, dst=0)):
            if whole is not None:
                with torch.no_grad():
                    whole.state_dict()[str(path)].copy_(weight)

        check(step, engine, whole)
    dist.barrier()  # a rank that left earlier might end while gloo still holds what it sent last
    dist.destroy_process_group()


def check(step: int, engine: torch.nn.Module, whole: torch.nn.Module | None) -> None:
    """Let both models say the same."""
    prompt = torch.arange(8).view(1, 8)
    with torch.no_grad():
        said = engine(prompt)  # of all ranks together
        if whole is not None:
            torch.testing.assert_close(said, whole(prompt))
            print(f"step {step}: the tensor parallel model and the whole one agree")


if __name__ == "__main__":
    main()
