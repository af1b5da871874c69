"""What planning an exchange costs a rank, as there are more ranks: on one machine, with a fake process group."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from benchmarks.machine import Bystanders
from benchmarks.measure import Budget, ours, peak, variant
from benchmarks.measure import measure as measure_contenders
from benchmarks.rows import Aim, Result, Row
from benchmarks.states import State
from statetree.chunks import layouts as chunks
from statetree.chunks.layouts import whole_on
from statetree.exchange.buckets import BUCKET_BYTES
from statetree.exchange.group import group_of
from statetree.exchange.manifest import Manifest
from statetree.exchange.plan import ExchangePlan, Move

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor.placement_types import Placement

    from benchmarks.measure import Timing
    from statetree.chunks.layouts import ChunkLayout as Layout

RANKS: Final = (1024, 256, 64)
LEAVES: Final = 1000
#: Rows of the first leaf. The others have up to as many more as there are shapes.
ROWS_OF_FIRST: Final = 4096
COLUMNS: Final = 8


class Shape(NamedTuple):
    """What is planned: how many leaves, and how many different shapes these have."""

    leaves: int
    shapes: int

    def sizes(self, number: int) -> tuple[int, int]:
        """Return the global shape of a leaf."""
        return (ROWS_OF_FIRST + number % self.shapes, COLUMNS)


def dtensors(of: Shape, mesh: dist.DeviceMesh, placements: list[Placement]) -> dict[str, DTensor]:
    """Return leaves of which this rank holds its shard."""
    shards = mesh.size(-1)
    local = {
        (rows, columns): torch.zeros(-(-rows // shards), columns) for rows, columns in map(of.sizes, range(of.shapes))
    }
    return {
        f"leaf{number}": DTensor.from_local(
            local[of.sizes(number)], mesh, placements, run_check=False, shape=of.sizes(number), stride=(COLUMNS, 1)
        )
        for number in range(of.leaves)
    }


Layouts = list[tuple["Layout", torch.dtype]]


def _layouts(tree: dict[str, DTensor]) -> Layouts:
    manifest = Manifest("plan", tree, group_of("plan", None, None))
    return [(chunks.layout, chunks.dtype) for chunks in manifest.chunks.values() if chunks.layout is not None]


def plan_gather(sharded: dict[str, DTensor], _: dict[str, DTensor]) -> int:
    """Plan a gather to rank 0."""
    return _transfers([Move(layout, whole_on(layout.shape, [0]), dtype) for layout, dtype in _layouts(sharded)])


def plan_gather_to_all(sharded: dict[str, DTensor], _: dict[str, DTensor]) -> int:
    """Plan a gather to every rank."""
    everyone = range(dist.get_world_size())
    return _transfers([Move(layout, whole_on(layout.shape, everyone), dtype) for layout, dtype in _layouts(sharded)])


def plan_reshard(sharded: dict[str, DTensor], hybrid: dict[str, DTensor]) -> int:
    """Plan a reshard from one mesh dim to two, the first of which replicates."""
    both = zip(_layouts(sharded), _layouts(hybrid), strict=True)
    return _transfers([Move(source, target, dtype) for (source, dtype), (target, _) in both])


def _transfers(moves: list[Move]) -> int:
    plan = ExchangePlan(moves, dist.get_rank(), dist.get_world_size(), BUCKET_BYTES)
    shares = [share for round_ in plan.rounds() for share in round_]
    return len(moves) and sum(len(share.sends) + len(share.receives) + len(share.copies) for share in shares)


def _forget() -> None:
    for cached in (chunks.mesh_layout, chunks._whole_on, chunks._cut, chunks._grid):  # noqa: SLF001
        cached.cache_clear()


def plan_here(work: Callable[..., int], of: Shape, budget: Budget) -> tuple[list[Timing], float]:
    """Measure planning as rank 0 of ever fewer ranks, and how many cores other processes took meanwhile."""
    torch.set_num_threads(1)
    bystanders = Bystanders()
    timings = [_plan_as_first_of(ranks, work, of, budget) for ranks in RANKS]
    return timings, bystanders.cores()


def _plan_as_first_of(ranks: int, work: Callable[..., int], of: Shape, budget: Budget) -> Timing:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    sharded = dtensors(of, init_device_mesh("cpu", (ranks,)), [Shard(0)])
    hybrid = dtensors(of, init_device_mesh("cpu", (2, ranks // 2)), [Replicate(), Shard(0)])
    make = ours if ranks == RANKS[0] else partial(variant, f"{ranks:,} ranks")
    contender = make(lambda _: work(sharded, hybrid), lambda transfers: transfers >= of.leaves, fresh=_forget)
    contender = replace(contender, num_leaves=of.leaves)
    (timing,) = measure_contenders([contender], lambda: None, budget)
    nbytes = peak(contender)
    timing.peaks.extend([] if nbytes is None else [nbytes])
    dist.destroy_process_group()
    return timing


@dataclass(frozen=True)
class PlanRow(Row):
    """A row that is measured in a process of its own, which takes itself for one of many ranks.

    Attributes:
        plan: What is planned.
        shapes: How many different shapes the leaves have.
    """

    plan: Callable[..., int] = plan_gather
    shapes: int = 1

    def measure(self, scale: float, budget: Budget) -> Result:
        """Plan for each number of ranks."""
        leaves = max(round(LEAVES * scale), 1)
        of = Shape(leaves, min(self.shapes, leaves))
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            timings, cores = process.submit(plan_here, self.plan, of, self.limited(budget)).result()
        title = f"{self.work}, {leaves:,} leaves of {of.shapes:,} shapes, {RANKS[0]:,} ranks"
        return Result(self, title, leaves, 0, timings, cores)


def takes_at_most(seconds: float) -> Aim:
    """Aim at so many seconds a rank."""
    return Aim(f"≤ {seconds:g} s a rank", lambda result: result.ours, lambda value: value <= seconds)


def _nothing(_: Any) -> Any:
    return State("", {})


ROWS = tuple(
    PlanRow(
        "plan",
        f"plan {name}",
        _nothing,
        _nothing,
        (takes_at_most(2),),
        moves_bytes=False,
        rounds=3,
        plan=plan,
        shapes=shapes,
    )
    for name, plan in {
        "gather(dst=0)": plan_gather,
        "gather": plan_gather_to_all,
        "reshard": plan_reshard,
    }.items()
    for shapes in (10, LEAVES)
)
