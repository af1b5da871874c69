"""Collectives of very many ranks: the whole call of one of them, against a fake process group.

The rank describes, agrees, plans, lays out, packs and unpacks as it would among the others, who say the same as it
does. Only the travel of bytes is left out. Processor time counts, and the memory beside the state.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import statetree as st
from benchmarks.machine import Bystanders
from benchmarks.measure import Timing
from benchmarks.memory import peak_of
from benchmarks.rows import Aim, Result, Row
from benchmarks.states import MB, State
from statetree.exchange.buckets import BUCKET_BYTES
from statetree.exchange.group import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.tensor.placement_types import Placement

    from benchmarks.measure import Budget

COLUMNS: Final = 8
#: Not fewer ranks than this are made of more.
FEWEST: Final = 64
#: What the table calls the smaller size of a row that has two.
SMALLER: Final = "smaller size"
#: How many rows of a leaf each rank has, about.
ROWS_OF_RANK: Final = 4


class Scale(NamedTuple):
    """What a rank takes itself for: which of how many ranks, with how many leaves of how many shapes."""

    rank: int
    ranks: int
    leaves: int
    shapes: int = 10  # some divide evenly among the ranks, some do not

    def scaled(self, scale: float) -> Scale:
        """Return a smaller one."""
        ranks = self.ranks if self.ranks < FEWEST else max(round(self.ranks * scale), FEWEST) // 2 * 2
        return self._replace(ranks=ranks, leaves=max(round(self.leaves * scale), 1))

    def sharded(self, *, replicas: int = 1, times: int = 1) -> dict[str, DTensor]:
        """Return leaves of which this rank holds its shard, so many times as long as they are otherwise."""
        shards = self.ranks // replicas
        mesh = DeviceMesh("cpu", torch.arange(self.ranks).view(replicas, shards), _init_backend=False)
        shapes = [
            (times * (self.ranks * ROWS_OF_RANK + number % self.shapes), COLUMNS) for number in range(self.leaves)
        ]
        return {f"layers.{n}": self._shard(shape, mesh, [Replicate(), Shard(0)]) for n, shape in enumerate(shapes)}

    def _shard(self, shape: tuple[int, int], mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
        shards = mesh.size(mesh.ndim - 1)
        step = -(-shape[0] // shards)
        held = min(step, max(shape[0] - step * (self.rank % shards), 0))
        size = torch.Size(shape)
        return DTensor.from_local(
            torch.zeros(held, shape[1]), mesh, placements, run_check=False, shape=size, stride=(shape[1], 1)
        )


def gather_to_one(scale: Scale) -> Callable[[], Any]:
    """Gather to rank 0."""
    tree = scale.sharded()
    return lambda: st.gather(tree, dst=0)


def gather_one_leaf(scale: Scale) -> Callable[[], Any]:
    """Gather a leaf of 2 GB to all ranks (of less, to half as many ranks)."""
    mesh = DeviceMesh("cpu", torch.arange(scale.ranks), _init_backend=False)
    tree = {"leaf": scale._shard((8 * scale.ranks, 8192), mesh, [Shard(0)])}  # noqa: SLF001
    return lambda: st.gather(tree)


def fill_one_leaf(scale: Scale) -> Callable[[], Any]:
    """Fill fresh memory of the size of that leaf: the least that it takes."""
    bucket = torch.zeros(BUCKET_BYTES, dtype=torch.uint8)

    def fill() -> torch.Tensor:
        result = torch.empty(8 * scale.ranks * 8192 * 4, dtype=torch.uint8)
        for part in result.split(BUCKET_BYTES):
            part.copy_(bucket[: part.numel()])
        return result

    return fill


def reshard_to_hybrid(scale: Scale) -> Callable[[], Any]:
    """Reshard from all ranks to two replicas over half of them each."""
    tree, like = scale.sharded(), scale.sharded(replicas=2)
    return lambda: st.reshard(tree, like)


def reshard_fused(scale: Scale) -> Callable[[], Any]:
    """Reshard pairs of leaves, one after the other in one leaf, to two replicas over half of the ranks each."""
    pairs = scale._replace(leaves=max(scale.leaves // 2, 1))
    tree = {f"{key}.{part}": leaf for part in "qk" for key, leaf in pairs.sharded().items()}
    fused = st.Conversion([(["layers.{n}.q", "layers.{n}.k"], "layers.{n}.qk", "a m, b m -> (a + b) m")])
    like = {f"{key}.qk": leaf for key, leaf in pairs.sharded(replicas=2, times=2).items()}
    return lambda: st.reshard(fused(tree), like)


def partition_hybrid(scale: Scale) -> Callable[[], Any]:
    """Partition the replicas of a hybrid mesh."""
    tree = scale.sharded(replicas=2)
    return lambda: st.partition_replicas(tree)


def measure_here(make: Callable[[Scale], Callable[[], Any]], scale: Scale) -> tuple[float, int | None, float]:
    """Measure the first call of a process: its time, its memory, and the cores that other processes took meanwhile."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=scale.rank, world_size=scale.ranks)
    call = make(scale)
    st.gather({"warm": torch.zeros(1)})  # imports what is imported at the first use
    seconds: list[float] = []

    def timed() -> Any:
        before = time.process_time()
        result = call()
        seconds.append(time.process_time() - before)
        return result

    with ExitStack() as patches:
        # The fake group copies what it does not send.
        patches.enter_context(patch.object(Group, "all_gather_into", lambda *_: _nothing))
        bystanders = Bystanders()
        nbytes = peak_of(timed)
        cores = bystanders.cores()
    dist.destroy_process_group()
    return seconds[0], nbytes, cores


def _nothing() -> None:
    """Wait for nothing."""


_ALONE: Final = Scale(0, 1, 1)


@dataclass(frozen=True)
class ScaleRow(Row):
    """A row each sample of which is the first call of a fresh process.

    Attributes:
        make: Returns the call.
        at: What the rank takes itself for.
        also: The same for a smaller size, beside it.
        floor: What takes the least that it could.
    """

    make: Callable[[Scale], Callable[[], Any]] = gather_to_one
    at: Scale = _ALONE
    also: Scale | None = None
    floor: Callable[[Scale], Callable[[], Any]] | None = None

    def measure(self, scale: float, budget: Budget) -> Result:
        """Measure the call."""
        at = self.at.scaled(scale)
        timings = [Timing("statetree", "ours", num_leaves=at.leaves)]
        wanted = [(self.make, at)]
        if self.also is not None:
            smaller = self.also.scaled(scale)
            timings.append(Timing(SMALLER, "variant", num_leaves=smaller.leaves))
            wanted.append((self.make, smaller))
        if self.floor is not None:
            timings.append(Timing("fill fresh memory", "floor"))
            wanted.append((self.floor, at))
        cores = 0.0
        for _ in range(self.limited(budget).rounds):
            for timing, work in zip(timings, wanted, strict=True):
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    seconds, nbytes, others = process.submit(measure_here, *work).result()
                timing.samples.append(seconds)
                timing.peaks.extend([] if nbytes is None else [nbytes])
                cores = max(cores, others)
        title = f"{self.work}, {at.ranks:,} ranks, {at.leaves:,} leaves of {min(at.shapes, at.leaves)} shapes"
        return Result(self, title, at.leaves, 0, timings, cores)


def takes_at_most(seconds: float) -> Aim:
    """Aim at so many seconds of processor time."""
    return Aim(f"≤ {seconds:g} s a rank", lambda result: result.ours, lambda value: value <= seconds)


def needs_at_most(nbytes: int, text: str) -> Aim:
    """Aim at so much memory; the value is the part of it."""

    def value(result: Result) -> float | None:
        return min(result.of_ours.peaks) / nbytes if result.of_ours.peaks else None

    return Aim(text, value, lambda value: value <= 1)


def grows_at_most(times: float) -> Aim:
    """Aim at taking at most so many times what the smaller size takes."""
    return Aim(
        f"≤ {times:g} times the {SMALLER}",
        lambda result: result.ours / result.of(SMALLER).median,
        lambda got: got <= times,
    )


def _no_state(_: Any) -> Any:
    return State("", {})


def _row(work: str, make: Any, at: Scale, *aims: Aim, also: Scale | None = None, floor: Any = None) -> ScaleRow:
    return ScaleRow(
        "scale", work, _no_state, _no_state, aims, rounds=3, moves_bytes=False, make=make, at=at, also=also, floor=floor
    )


#: What the receiver returns: 1,000 leaves, of 1,024 times 4 rows each.
_RECEIVED: Final = 1000 * 1024 * ROWS_OF_RANK * COLUMNS * 4

ROWS = (
    _row("gather(dst=0), the receiver", gather_to_one, Scale(0, 1024, 1000), takes_at_most(0.3),
         needs_at_most(_RECEIVED + 2 * BUCKET_BYTES + 100 * MB, "the result, two buckets and 100 MB")),
    _row("gather(dst=0), the receiver", gather_to_one, Scale(0, 1024, 1000, 1000), takes_at_most(1)),
    _row("gather(dst=0), a sender", gather_to_one, Scale(5, 16_384, 10_000), takes_at_most(0.5),
         needs_at_most(100 * MB, "≤ 100 MB")),
    _row("reshard, FSDP to HSDP", reshard_to_hybrid, Scale(5, 16_384, 1000), takes_at_most(0.5)),
    _row("reshard through a conversion, FSDP to HSDP", reshard_fused, Scale(5, 16_384, 1000), takes_at_most(1)),
    _row("partition_replicas, HSDP", partition_hybrid, Scale(5, 16_384, 1000), takes_at_most(0.5)),
    _row("gather a leaf of 2 GB to all", gather_one_leaf, Scale(5, 8192, 1), takes_at_most(1),
         grows_at_most(2.2), also=Scale(5, 4096, 1), floor=fill_one_leaf),
    _row("gather(dst=0), two ranks", gather_to_one, Scale(0, 2, 1_000_000),
         grows_at_most(11), also=Scale(0, 2, 100_000)),
)  # fmt: skip
