"""What a leaf costs as there are more of them, and what a byte does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import statetree as st
from benchmarks.checks import has_leaves_of, holds_values_of, is_copy_of
from benchmarks.measure import Contender, floor, ours, variant
from benchmarks.rows import Row, memory_per_leaf, memory_within, share, within
from benchmarks.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEAVES = (1_000_000, 100_000, 10_000, 1_000, 100)
BYTES = tuple(10**digits for digits in range(9, 2, -1))
#: Samples of small sizes are means over so many leaves or bytes.
LEAVES_A_SAMPLE = 10_000
BYTES_A_SAMPLE = 10**7

#: A way of doing some work, and of telling whether it was done.
Work = tuple["Callable[[], Any]", "Callable[[Any], bool]"]


def leaves(scale: float) -> State:
    """A million tensors of one element, in a dict of layers."""
    count = max(round(LEAVES[0] * scale), 100)
    ones = torch.arange(count, dtype=torch.float32).split(1)  # views on one storage: the memory of none is its own
    layers = {f"layers.{start}": _layer(ones[start : start + 100]) for start in range(0, count, 100)}
    return State(f"{count:,} leaves", layers)


def _layer(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"weight{index}": tensor.clone() for index, tensor in enumerate(tensors)}


def by_leaves(state: State, *, work: Callable[[State], Work]) -> list[Contender]:
    """Do the work on all of a state, and on ever smaller parts of it."""
    scale = state.num_leaves / LEAVES[0]
    contenders = [ours(*work(state))]
    for count in LEAVES[1:]:
        layers = max(round(count * scale / 100), 1)
        part = State("", dict(list(state.tree.items())[:layers]))
        own = variant(f"1/{LEAVES[0] // count:,} of them", *work(part))
        repeats = max(LEAVES_A_SAMPLE // count, 1)
        contenders.append(replace(own, repeats=repeats, num_leaves=part.num_leaves, nbytes=part.nbytes))
    return contenders


def one_tensor(scale: float) -> State:
    """A gigabyte in one tensor."""
    nbytes = max(round(BYTES[0] * scale), 1000)
    return State(f"{nbytes:,} bytes in a tensor", {"weight": torch.arange(nbytes // 4, dtype=torch.float32)})


def by_bytes(state: State, *, work: Callable[[State], Work]) -> list[Contender]:
    """Do the work on all of a tensor, and on ever smaller tensors, each beside a bare copy."""
    scale = state.nbytes / BYTES[0]
    target = torch.zeros_like(state.tree["weight"])
    contenders: list[Contender] = []
    for nbytes in BYTES:
        fraction = f"1/{BYTES[0] // nbytes:,} of it"
        numel = max(round(nbytes * scale) // 4, 1)
        part = State("", {"weight": state.tree["weight"][:numel]})
        whole = nbytes == BYTES[0]
        own = ours(*work(part)) if whole else variant(fraction, *work(part))
        bare = floor("copy_" if whole else f"copy_, {fraction}", *_bare_copy(part, target[:numel]))
        repeats = max(BYTES_A_SAMPLE // nbytes, 1)
        contenders += [replace(one, repeats=repeats, nbytes=part.nbytes) for one in (own, bare)]
    return contenders


def _stage_again(state: State) -> Work:
    stager = st.Stager()
    return lambda: stager.stage(state.tree), is_copy_of(state)


def _copy_into(state: State) -> Work:
    target = _zeros_like(state)
    return lambda: st.copy_into(state.tree, target.tree), holds_values_of(state, target=target)


def _similarity(state: State) -> Work:
    other = _zeros_like(state)
    return lambda: st.similarity(state.tree, other.tree, values=False), bool


def _flatten_unflatten(state: State) -> Work:
    def run() -> Any:
        leaves, spec = st.flatten(state.tree)
        return st.unflatten(spec, leaves)

    return run, has_leaves_of(state)


def _zeros_like(state: State) -> State:
    def zeros(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: zeros(value) for key, value in node.items()}
        return torch.zeros_like(node)

    return State("", zeros(state.tree))


def _bare_copy(state: State, target: torch.Tensor) -> Work:
    source = state.tree["weight"]
    return lambda: target.copy_(source), lambda result: torch.equal(result, source)


_tenth = "1/10 of them"
_aims = (within(16, _tenth), memory_within(12, _tenth), memory_per_leaf(1024))

ROWS = (
    *(
        Row("leaves", name, leaves, partial(by_leaves, work=work), _aims, moves_bytes=False, rounds=3, memory=True)
        for name, work in (
            ("flatten + unflatten", _flatten_unflatten),
            ("similarity", _similarity),
            ("copy_into", _copy_into),
            ("stage again", _stage_again),
        )
    ),
    *(
        Row("bytes", name, one_tensor, partial(by_bytes, work=work), (share(0.95, "copy_"),), rounds=7)
        for name, work in (("copy_into", _copy_into), ("stage again", _stage_again))
    ),
)
