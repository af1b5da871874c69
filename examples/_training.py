"""A training run, sharded over ranks, whose whole state is one tree."""

from __future__ import annotations

import ctypes
import hashlib
import random
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from _transformer import Transformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import statetree as st

BATCH = 4  # on each rank


def read_text() -> torch.Tensor:
    """Return a text that every CPython brings along, the help texts on its language, as a tensor of bytes."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Trainer:
    """A model sharded by FSDP2, its optimizer and scheduler, and the random numbers that this rank draws.

    Random numbers come from two generators: dropout uses torch's, the choice of batches Python's. Every rank has its
    own.

    Args:
        total_steps: The length of the whole run, over which the learning rate rises and falls.
    """

    def __init__(self, total_steps: int) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(mode=True)
        torch.manual_seed(0)
        self.step = 0
        self.text = read_text()
        self.model = Transformer()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            betas=(0.9, 0.99),
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=2e-3, total_steps=total_steps, cycle_momentum=False
        )
        torch.manual_seed(1 + dist.get_rank())
        random.seed(dist.get_rank())

    def advance(self) -> float:
        """Take one step. Returns the loss over all ranks, in nats a byte."""
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
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def state(self) -> dict[str, Any]:
        """Return everything that decides how the run goes on. Its tensors are the run's own.

        Plain values are the same on all ranks, but for what lies under a rank's own key.
        """
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": {dist.get_rank(): {"torch": torch.get_rng_state(), "python": random.getstate()}},
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

    def adopt(self, state: dict[str, Any]) -> None:
        """Go on from a state whose tensors are the run's own already: hand over its plain values."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        own = state["random"][dist.get_rank()]
        torch.set_rng_state(own["torch"])
        random.setstate(own["python"])
        self.step = state["step"]


def digest(state: dict[str, Any]) -> str:
    """Return the SHA-256 of all ranks' states: of every leaf's path, and of every bit of its value.

    Every rank calls it.
    """
    total = hashlib.sha256()
    for path, leaf in sorted(st.to_flat(state)[0].items()):
        if isinstance(leaf, torch.Tensor):
            local = local_part(leaf).contiguous()
            total.update(f"{path} {leaf.dtype} {tuple(leaf.shape)} {tuple(local.shape)}\n".encode())
            total.update(ctypes.string_at(local.data_ptr(), local.nbytes))
        else:
            total.update(f"{path} {leaf!r}\n".encode())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, total.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def is_tied(state: dict[str, Any]) -> bool:
    """Return whether the token embedding and the output head of a state are one storage."""
    embed, head = (local_part(state["model"][f"{name}.weight"]) for name in ("embed", "head"))
    return embed.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor
