"""The states that the work is done on, each made afresh for a row and freed after it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

KB: Final = 1 << 10
MB: Final = 1 << 20


@dataclass(frozen=True)
class State:
    """A tree and what is in it.

    Attributes:
        title: What it is, with its size.
        tree: The state itself, in plain containers.
    """

    title: str
    tree: Any

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors, in the order of the containers."""
        return [leaf for leaf in leaves(self.tree) if isinstance(leaf, torch.Tensor)]

    @property
    def num_leaves(self) -> int:
        """How many tensors and plain values there are."""
        return sum(1 for _ in leaves(self.tree))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def change(self) -> None:
        """Change every tensor in place, as a training step does, so that a copy that was not renewed shows."""
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.add_(1)


class Kept(State):
    """A state that stays as it is, as the file does that it is compared with."""

    def change(self) -> None:
        """Change nothing."""


def leaves(tree: Any) -> Iterator[Any]:
    """Yield what is in dicts, lists and tuples. Written out, since no contender can be its own judge."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def many_small(scale: float) -> State:
    """10,000 tensors of 1 KB in a flat dict: what a tensor costs."""
    return _flat(10_000, KB, scale)


def few_large(scale: float) -> State:
    """32 tensors of 32 MB in a flat dict: what a byte costs."""
    tensors = _tensors(32, max(int(32 * MB * scale), 64))
    title = f"32 x {size(tensors[0].nbytes)}"
    return State(title, {f"layers.{index}.weight": tensor for index, tensor in enumerate(tensors)})


def of_3_mb(scale: float) -> State:
    """341 tensors of 3 MB in a flat dict: a gigabyte in tensors of one huge page and a half."""
    return _flat(341, 3 * MB, scale)


def quarter_of_32_mb(scale: float) -> State:
    """8 tensors of 32 MB in a flat dict: 256 MB."""
    return _flat(8, 32 * MB, scale)


def quarter_of_3_mb(scale: float) -> State:
    """85 tensors of 3 MB in a flat dict: 256 MB in tensors of one huge page and a half."""
    return _flat(85, 3 * MB, scale)


def quarter_of_1_5_mb(scale: float) -> State:
    """171 tensors of 1.5 MB in a flat dict: 256 MB in tensors that are smaller than a huge page."""
    return _flat(171, 3 * MB // 2, scale)


def nested(scale: float) -> State:
    """10,000 tensors of 1 KB, three containers deep: lists of layers of modules."""
    layers = max(round(100 * scale), 1)
    pool = iter(_tensors(100 * layers, KB))
    modules = [
        {f"module{module}": {"weight": next(pool), "bias": next(pool)} for module in range(50)} for _ in range(layers)
    ]
    return State(f"{100 * layers:,} leaves nested in lists and dicts", {"model": {"layers": modules}})


def optimizer_state(scale: float) -> State:
    """What ``Adam.state_dict()`` looks like for 3,333 parameters: integer keys, three tensors a parameter."""
    params = max(round(3_333 * scale), 2)
    pool = iter(_tensors(2 * params, KB))
    per_param = {
        index: {"step": torch.tensor(float(index)), "exp_avg": next(pool), "exp_avg_sq": next(pool)}
        for index in range(params)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": list(range(params))}
    return State(f"Adam's state for {params:,} parameters", {"state": per_param, "param_groups": [group]})


def training_state(scale: float) -> State:
    """The real thing: a transformer's ``state_dict()`` (an ``OrderedDict`` with ``_metadata``), AdamW's, and a step."""
    width = max(round(16 * scale), 1) * 8
    layer = torch.nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width)
    model = torch.nn.ModuleDict(
        {"layers": torch.nn.TransformerEncoder(layer, max(round(24 * scale), 1), enable_nested_tensor=False)}
    )
    for index, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, index + 1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    state = State("", tree)
    return State(f"a transformer and AdamW: {len(state.tensors):,} tensors, {size(state.nbytes)}", tree)


def model_state(scale: float) -> State:
    """10,000 tensors in an ``OrderedDict`` with ``_metadata``, as ``nn.Module.state_dict()`` returns it."""
    layers = max(round(5_000 * scale), 1)
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(layers)])
    return State(f"Module.state_dict() of {2 * layers:,} tensors", model.state_dict())


def zeros_like(state: State) -> State:
    """Return a state with the same containers, and zeros in its tensors."""
    other = State(state.title, copy.deepcopy(state.tree))
    with torch.no_grad():
        for tensor in other.tensors:
            tensor.zero_()
    return other


def _flat(count: int, nbytes: int, scale: float) -> State:
    count = max(round(count * scale), 2)
    tensors = _tensors(count, nbytes)
    tree = {f"layers.{index}.weight": tensor for index, tensor in enumerate(tensors)}
    return State(f"{count:,} x {size(nbytes)}", tree)


def _tensors(count: int, nbytes: int) -> list[torch.Tensor]:
    """Return float32 tensors whose elements are unique by position, as far as float32 can count."""
    length = nbytes // 4
    return [torch.arange(index, index + length, dtype=torch.float32) for index in range(count)]


def size(nbytes: int) -> str:
    """Return a number of bytes in the units of the titles."""
    if nbytes % MB and MB < nbytes < 10 * MB:
        return f"{nbytes / MB:.1f} MB"
    return f"{nbytes / MB:,.0f} MB" if nbytes >= MB else f"{nbytes / KB:,.0f} KB"
