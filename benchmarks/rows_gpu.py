"""Staging from an accelerator: into pinned memory, shared as well, of many small tensors, and beside computation.

The rows are part of the catalogue where CUDA is. What they are made of also runs without it, on a small scale, so that
tests can.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

import statetree as st
from benchmarks.checks import is_copy_of
from benchmarks.measure import Contender, floor, ours, peer, variant
from benchmarks.peers import StateDictStager
from benchmarks.rows import Aim, Row, faster, share
from benchmarks.states import KB, MB, State, size

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

HAS_CUDA: Final = torch.cuda.is_available()
DEVICE: Final = torch.device("cuda" if HAS_CUDA else "cpu")


def on_device(count: int, nbytes: int, scale: float) -> State:
    """Return float32 tensors on the accelerator in a flat dict, their elements unique by position."""
    number, length = max(round(count * min(10 * scale, 1)), 2), max(round(nbytes * scale / 4), 16)
    tree = {
        f"layers.{index}.weight": torch.arange(index, index + length, dtype=torch.float32, device=DEVICE)
        for index in range(number)
    }
    return State(f"{number:,} x {size(4 * length)} on {DEVICE.type}", tree)


large = partial(on_device, 150, 50 * MB)
small = partial(on_device, 10_000, 4 * KB)
#: Of this there is room for several snapshots.
medium = partial(on_device, 64, 32 * MB)


def to_pinned(state: State) -> list[Contender]:
    """Stage again into pinned memory, against a copy of each tensor into memory that is pinned already."""
    return [*_staged_again(state, shared=False), _raw_copy(state)]


def to_pinned_and_shared(state: State) -> list[Contender]:
    """Stage again into memory that is pinned and shared with other processes, against the same copy."""
    return [*_staged_again(state, shared=True), _raw_copy(state)]


def in_the_background(state: State) -> list[Contender]:
    """Have the state staged in the background. Timed is how long the caller waits."""
    stager = st.Stager(pin_memory=HAS_CUDA)
    under_way: list[Future[Any]] = []
    arrived = _arrived(state)

    def start(_: None) -> Future[Any]:
        under_way.append(stager.stage_async(state.tree))
        return under_way[-1]

    def settle() -> None:
        while under_way:
            under_way.pop().result()
        synchronize()

    return [
        ours(start, lambda future: arrived(future.result()), fresh=settle),
        variant("stage", lambda _: stager.stage(state.tree), arrived, fresh=settle),
    ]


def beside_computation(state: State) -> list[Contender]:
    """Stage while the accelerator computes for about as long, and wait for both."""
    stager = st.Stager(pin_memory=HAS_CUDA)
    compute = _computation(lambda: stager.stage(state.tree))
    arrived = _arrived(state)

    def overlapped(_: None) -> Any:
        future = stager.stage_async(state.tree)
        compute()
        result = future.result()
        synchronize()
        return result

    def in_turn(_: None) -> Any:
        result = stager.stage(state.tree)
        compute()
        synchronize()
        return result

    def alone(_: None) -> None:
        compute()
        synchronize()

    return [
        ours(overlapped, arrived, fresh=synchronize),
        variant("stage, then compute", in_turn, arrived, fresh=synchronize),
        floor("compute alone", alone, lambda _: True, fresh=synchronize),
    ]


def synchronize() -> None:
    """Wait until the accelerator has done all that was asked of it."""
    if HAS_CUDA:
        torch.cuda.synchronize()


def _staged_again(state: State, *, shared: bool) -> list[Contender]:
    stager = st.Stager(pin_memory=HAS_CUDA, share_memory=shared)
    their_stager = StateDictStager(pin_memory=HAS_CUDA, share_memory=shared)
    arrived = _arrived(state)

    def theirs(_: None) -> Any:
        result = their_stager.stage(state.tree, non_blocking=True)
        synchronize()
        return result

    return [
        ours(lambda _: stager.stage(state.tree), arrived, fresh=synchronize),
        peer("StateDictStager", theirs, arrived, fresh=synchronize),
    ]


def _raw_copy(state: State) -> Contender:
    """Return the floor: one asynchronous copy a tensor, and one synchronisation."""
    sources = state.tensors
    targets = [torch.empty(source.shape, dtype=source.dtype, pin_memory=HAS_CUDA) for source in sources]

    def copy_each(_: None) -> list[torch.Tensor]:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        synchronize()
        return targets

    return floor("copy_ to pinned memory", copy_each, _arrived(State("", sources)), fresh=synchronize)


def _arrived(state: State) -> Callable[[Any], bool]:
    """Return a check that a tree in host memory holds the state's values as they are now."""

    def check(result: Any) -> bool:
        here = State("", result).tensors
        copied = is_copy_of(State("", [tensor.cpu() for tensor in state.tensors]))
        return copied(here) and all(tensor.device.type == "cpu" for tensor in here)

    return check


def _computation(measure: Callable[[], Any]) -> Callable[[], None]:
    """Return work for the accelerator that takes about as long as something else."""
    width = 4096 if HAS_CUDA else 16
    factors = torch.ones(width, width, device=DEVICE), torch.ones(width, width, device=DEVICE)

    def multiply() -> None:
        torch.mm(*factors)

    for _ in range(3):
        measure()
        multiply()
    times = max(round(_seconds(measure) / max(_seconds(multiply), 1e-6)), 1)

    def compute() -> None:
        for _ in range(times):
            multiply()

    return compute


def _seconds(work: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def returns_within(milliseconds: float) -> Aim:
    """Aim at letting the caller go on after so long. It depends on the machine."""
    return Aim(
        f"returns within {milliseconds:g} ms", lambda result: result.ours * 1e3, lambda value: value <= milliseconds
    )


#: In the catalogue where there is CUDA.
ROWS_ON_CUDA: Final = (
    Row("gpu", "stage again to pinned memory", large, to_pinned, (share(0.95, "copy_ to pinned memory"),), rounds=11),
    Row(
        "gpu",
        "stage again to pinned and shared memory",
        large,
        to_pinned_and_shared,
        (share(0.9, "copy_ to pinned memory"),),
        rounds=11,
    ),
    Row("gpu", "stage again to pinned memory", small, to_pinned, (faster("StateDictStager", 10),)),
    Row(
        "gpu",
        "start to stage in the background",
        large,
        in_the_background,
        (returns_within(5),),
        moves_bytes=False,
        rounds=11,
    ),
    Row("gpu", "stage beside computation", medium, beside_computation, moves_bytes=False, rounds=11),
)
ROWS: Final = ROWS_ON_CUDA if HAS_CUDA else ()
