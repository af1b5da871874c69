"""A training run whose whole state is one tree."""

from __future__ import annotations

import ctypes
import hashlib
import random
from pydoc_data.topics import topics
from typing import Any

import torch
from _transformer import Transformer
from torch.nn import functional

import statetree as st

BATCH = 8


def read_text() -> torch.Tensor:
    """Return a text that every CPython brings along, the help texts on its language, as a tensor of bytes."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Trainer:
    """A model, its optimizer and scheduler, and the random numbers that it draws.

    Random numbers come from two generators: dropout uses torch's, the choice of batches Python's.

    Args:
        total_steps: The length of the whole run, over which the learning rate rises and falls.
    """

    def __init__(self, total_steps: int) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(mode=True)
        torch.manual_seed(0)
        random.seed(0)
        self.step = 0
        self.text = read_text()
        self.model = Transformer()
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            betas=(0.9, 0.99),
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=2e-3, total_steps=total_steps, cycle_momentum=False
        )

    def advance(self) -> float:
        """Take one step. Returns the loss, in nats a byte."""
        context = self.model.context
        starts = [random.randrange(len(self.text) - context) for _ in range(BATCH)]
        batch = torch.stack([self.text[start : start + context + 1] for start in starts]).long()
        logits = self.model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return loss.item()

    def state(self) -> dict[str, Any]:
        """Return everything that decides how the run goes on. Its tensors are the run's own."""
        version, words, gauss = random.getstate()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": {
                "torch": torch.get_rng_state(),
                # One tensor, because 625 leaves would be 625 entries in a checkpoint.
                "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
            },
            "step": self.step,
        }

    def prime_optimizer(self) -> None:
        """Make the optimizer allocate its state, which it does in its first step, so that ``state`` is complete.

        It is a step of zero gradients and zero learning rate, for a run that is to be overwritten.
        """
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def restore(self, saved: dict[str, Any]) -> None:
        """Go back, or on, to a saved state. Call ``prime_optimizer`` first in a run that took no step yet.

        ``copy_into`` writes straight into the parameters and the optimizer's moments, after it has checked that the
        whole tree fits; what is left to do is to hand over the plain values.
        """
        state = st.copy_into(saved, self.state())
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"]["torch"])
        python = state["rng"]["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        self.step = state["step"]


def digest(state: dict[str, Any]) -> str:
    """Return the SHA-256 of a state: of every leaf's path, and of every bit of its value."""
    total = hashlib.sha256()
    for path, leaf in sorted(st.to_flat(state)[0].items()):
        if isinstance(leaf, torch.Tensor):
            total.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
            dense = leaf.contiguous()
            total.update(ctypes.string_at(dense.data_ptr(), dense.nbytes))
        else:
            total.update(f"{path} {leaf!r}\n".encode())
    return total.hexdigest()


def is_tied(state: dict[str, Any]) -> bool:
    """Return whether the token embedding and the output head of a state are one storage."""
    embed, head = state["model"]["embed.weight"], state["model"]["head.weight"]
    return embed.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()
