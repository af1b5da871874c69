"""Plans of optimizer states: what torch.optim's own optimizers hold after a few real steps."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as hyp

from tests.trees.corpus import Ramp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Optimizers, and the options with which each keeps all the kinds of state that it can.
OPTIMIZERS: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}),
    "Adam": ({}, {"amsgrad": True}, {"capturable": False, "foreach": True}),
    "AdamW": ({}, {"amsgrad": True}, {"fused": True}),
    "Adamax": ({},),
    "NAdam": ({}, {"decoupled_weight_decay": True}),
    "RAdam": ({},),
    "Adagrad": ({}, {"initial_accumulator_value": 0.5}),
    "Adadelta": ({},),
    "RMSprop": ({}, {"momentum": 0.9, "centered": True}),
    "Rprop": ({},),
    "ASGD": ({},),
    "Adafactor": ({},),
    "LBFGS": ({},),
    "SparseAdam": ({},),
    **({"Muon": ({},)} if hasattr(torch.optim, "Muon") else {}),
}
#: How many dims the parameters of an optimizer must have (0: any number), and how long each of them is at least.
SIDES: dict[str, tuple[int, int]] = {"Adafactor": (0, 1), "LBFGS": (0, 1), "Muon": (2, 1)}


@dataclasses.dataclass(frozen=True)
class OptimizerPlan:
    """How a state of parameters and of an optimizer that has stepped over them is made.

    Attributes:
        name: One of ``OPTIMIZERS``.
        variant: Which of its sets of options.
        shapes: The shapes of the parameters of each group.
        steps: How many steps it has taken.
        dtype: The dtype of the parameters.
    """

    name: str = "SGD"
    variant: int = 0
    shapes: tuple[tuple[tuple[int, ...], ...], ...] = (((2, 2),),)
    steps: int = 1
    dtype: torch.dtype = torch.float32

    def build(self) -> dict[str, Any]:
        """Make the parameters, step, and return the state of both as a training loop would save it."""
        new = Ramp()
        groups = [[torch.nn.Parameter(new(*shape, dtype=self.dtype)) for shape in group] for group in self.shapes]
        options = OPTIMIZERS[self.name][self.variant]
        optimizer = _optimizer(self.name, groups, options)
        for step in range(self.steps):
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of prototypes
                closure: Any = _closure(optimizer, groups, step, sparse=self.name == "SparseAdam")
                optimizer.step(closure)
        parameters = [parameter for group in groups for parameter in group]
        return {
            "model": {f"p{index}": parameter.detach() for index, parameter in enumerate(parameters)},
            "optimizer": optimizer.state_dict(),
        }


def _optimizer(name: str, groups: Sequence[list[torch.nn.Parameter]], options: dict[str, Any]) -> torch.optim.Optimizer:
    cls: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, name)
    if name == "LBFGS":  # takes one group
        return cls([parameter for group in groups for parameter in group], **options)
    return cls([{"params": group, "lr": 0.5 / 2**index} for index, group in enumerate(groups)], **options)


def _closure(
    optimizer: torch.optim.Optimizer, groups: Sequence[list[torch.nn.Parameter]], step: int, *, sparse: bool
) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for group in groups:
            for parameter in group:
                slope = torch.arange(1, parameter.numel() + 1, dtype=parameter.dtype).reshape(parameter.shape) + step
                parameter.grad = slope.to_sparse() if sparse else slope
                loss = loss + (parameter.detach() * slope).sum().float()
        return loss

    return closure


@hyp.composite
def optimizer_plans(draw: hyp.DrawFn) -> OptimizerPlan:
    """Plans of states of parameters and of an optimizer that has really stepped over them."""
    name = draw(hyp.sampled_from(list(OPTIMIZERS)))
    dims, least = SIDES.get(name, (0, 0))
    sides = hyp.lists(hyp.integers(least, 3), min_size=dims, max_size=2).map(tuple)
    group = hyp.lists(sides, min_size=1, max_size=2).map(tuple)
    return OptimizerPlan(
        name=name,
        variant=draw(hyp.integers(0, len(OPTIMIZERS[name]) - 1)),
        shapes=tuple(draw(hyp.lists(group, min_size=1, max_size=2))),
        steps=draw(hyp.integers(1, 3)),
        dtype=draw(hyp.sampled_from([torch.float32, torch.float64])),
    )
