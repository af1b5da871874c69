"""Where the time goes: the work of the rows that have figures to reach, by its phases.

``python -m benchmarks.profiles`` prints a table and writes ``results/profiles.json``. A profiler would time every call
of every function; here a clock is read only where the engines' functions begin and end, some dozens of times a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import wraps
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from benchmarks import rows_copy, rows_exchange, rows_similarity, rows_stage, rows_tree
from benchmarks.machine import load, machine, versions
from benchmarks.measure import Alone, WrongResult
from benchmarks.ranks import TIMEOUT_S, InStep, RankRow
from benchmarks.states import few_large, many_small
from statetree.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.measure import Contender
    from benchmarks.rows import Row
    from benchmarks.states import State

T = TypeVar("T")

#: The results that are kept beside the code.
PROFILES: Final = Path(__file__).parent / "results" / "profiles.json"
FORMAT: Final = 1
#: How often each row is run, at least, and for how many seconds.
RUNS: Final = 15
SECONDS: Final = 3.0

#: What each phase consists of: the functions in which it begins. What they call belongs to it, too, unless it begins
#: another phase.
PHASES: Final = {
    "flatten": ("statetree.tree.traversal.traverse",),
    "checks": (
        "statetree.leaves.parts.unpack",
        "statetree.leaves.pairing.LeafPairing._find_bare",
        "statetree.leaves.pairing.leave_out_differences",
        "statetree.tree.matching.matched",
        "statetree.spans.layout.check_memory",
        "statetree.leaves.copying._CopyJob.differences",
        "statetree.transforms.similarity._byte_differences",
        "statetree.stager.snapshot.Geometry.fits",
        "statetree.stager.snapshot.Snapshot.is_leased",
        "statetree.stager.snapshot.Snapshot.was_sent",
        "statetree.exchange.manifest.Manifest.__init__",
        "statetree.exchange.manifest.Manifest.check_readable",
        "statetree.exchange.manifest.Manifest.entries",
        "statetree.exchange.fitting.unfit",
        "statetree.exchange.like.LikeDestination._check_sources",
        "statetree.exchange.like.LikeDestination._check_writable",
        "statetree.exchange.like.LikeDestination._check_disjoint",
    ),
    "plan": (
        "statetree.spans.layout.lay_out",
        "statetree.stager.snapshot.Geometry.__init__",
        "statetree.tree.spec.TreeSpec.flat_keys",
        "statetree.exchange.transfers.plan_transfers",
    ),
    "allocation": (
        "statetree.spans.replicate.replicate_columns",
        "statetree.stager.snapshot.Snapshot.__init__",
        "statetree.exchange.like.allocated",
        "statetree.exchange.destination.FreshDestination._make",
    ),
    "bytes": (
        "statetree.torch_internals.copy_all",
        "statetree.torch_internals.copy_each",
        "statetree.torch_internals.clone_all",
        "statetree.stager.batches.Batch.fill",
        "statetree.exchange.buckets.BucketedPlan.run",
    ),
    "rebuild": (
        "statetree.tree.mapping.to_flat",
        "statetree.tree.mapping.from_flat",
        "statetree.tree.traversal.rebuild",
        "statetree.leaves.parts.Unpacked.pack",
        "statetree.stager.snapshot.Snapshot.fill",
        "statetree.leaves.copying._CopyJob.result",
    ),
    "waiting": ("statetree.exchange.group.Group._wait",),
}
#: What is in none of them.
REST: Final = "rest"
NAMES: Final = (*PHASES, REST)

#: The rows that are taken to pieces: those that have figures to reach, and one state is enough for each.
ROWS: Final = tuple(
    row
    for rows, group, states in (
        (rows_stage.ROWS, "stage", (many_small, few_large)),
        (rows_stage.ROWS, "first", (few_large,)),
        (rows_copy.ROWS, "copy_into", (many_small,)),
        (rows_copy.ROWS, "allocate_like", (many_small,)),
        (rows_similarity.ROWS, "similarity", (many_small,)),
        (rows_tree.ROWS, "flat", (many_small,)),
        (rows_exchange.ROWS, "gather", (rows_exchange.small,)),
        (rows_exchange.ROWS, "distribute", (rows_exchange.small,)),
    )
    for row in rows
    if row.group == group and row.state in states and getattr(row, "ranks", 1) <= 2
)


@dataclass
class PhaseClock:
    """Adds up how much time is spent in each phase.

    Attributes:
        spent: Seconds by phase.
    """

    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time in this block for a phase, and not for the one around it."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """Return the time spent so far, and begin anew."""
        spent, self.spent = self.spent, dict.fromkeys(NAMES, 0.0)
        return spent

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.spent[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have the engines' functions turn this clock."""
        restored: list[tuple[Any, str, Any]] = []
        try:
            for name, functions in PHASES.items():
                for function in functions:
                    for holder, attribute, original in _places_of(function):
                        restored.append((holder, attribute, original))
                        setattr(holder, attribute, self._watched(original, name))
            yield
        finally:
            for holder, attribute, original in reversed(restored):
                setattr(holder, attribute, original)

    def _watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return watched


def _places_of(function: str) -> list[tuple[Any, str, Any]]:
    """Return where a function can be found: the module or class it is defined in, and the modules that import it."""
    owner, attribute = function.rsplit(".", 1)
    try:
        holder: Any = import_module(owner)
    except ModuleNotFoundError:  # a method: the owner is a class
        module, cls = owner.rsplit(".", 1)
        holder = getattr(import_module(module), cls)
        return [(holder, attribute, getattr(holder, attribute))]
    original = getattr(holder, attribute)
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "statetree"]
    return [(module, attribute, original) for module in modules if vars(module).get(attribute) is original]


@dataclass(frozen=True)
class Profile:
    """Where a row's time goes.

    Attributes:
        title: The row.
        num_leaves: How many leaves its state has.
        nbytes: How many bytes.
        runs: How often it was run.
        unwatched_s: The median of the runs without the clock, in seconds.
        phases_s: The median seconds by phase.
    """

    title: str
    num_leaves: int
    nbytes: int
    runs: int
    unwatched_s: float
    phases_s: dict[str, float]


def profile(row: Row, scale: float = 1.0, seconds: float = SECONDS) -> Profile:
    """Run statetree's part of a row again and again, first without the clock and then with it.

    Of several ranks, the first one's profile is returned.

    Raises:
        WrongResult: If what it returns is wrong.
    """
    parts = (row.state, row.contenders, scale, seconds)
    if not isinstance(row, RankRow):
        return profile_here(row.work, *parts, Alone())
    return run_ranks(row.ranks, profile_here, row.work, *parts, InStep(), timeout=TIMEOUT_S)[0]


def profile_here(
    work: str,
    make_state: Callable[[float], State],
    make_contenders: Callable[[State], Sequence[Contender]],
    scale: float,
    seconds: float,
    company: Alone,
) -> Profile:
    """Do so in this process, in step with the company."""
    state = make_state(scale)
    own = next(contender for contender in make_contenders(state) if contender.role == "ours")

    checked: list[bool] = []

    def run(clock: PhaseClock) -> float:
        arguments = () if own.fresh is None else (own.fresh(),)
        company.ready()
        start = time.perf_counter()
        with clock.phase(REST):
            result = own.run(*arguments)
        elapsed = time.perf_counter() - start
        if not checked and not own.check(result):  # the others are the same once more
            msg = f"{work}: the result is wrong: expected the work to be done, got {type(result)}."
            raise WrongResult(msg)
        checked.append(True)
        return elapsed

    def again(once: Callable[[], T]) -> list[T]:
        found: list[T] = []
        began = time.perf_counter()
        while not company.decide(done=len(found) >= RUNS and time.perf_counter() - began >= seconds / 2):
            found.append(once())
        return found

    for _ in range(3):  # caches fill
        run(PhaseClock())
    # First without the clock: Python runs code slowly for a while after functions that it calls were replaced.
    unwatched = again(lambda: run(PhaseClock()))
    clock = PhaseClock()
    with clock.watching():
        samples = again(lambda: (run(clock), clock.take())[1])
    phases = {name: statistics.median(sample[name] for sample in samples) for name in NAMES}
    title = f"{work}, {state.title}"
    return Profile(title, state.num_leaves, state.nbytes, len(samples), statistics.median(unwatched), phases)


def table(profiles: Sequence[Profile]) -> str:
    """Return the phases' parts of the time, in percent."""
    width = max(len(one.title) for one in profiles)
    lines = [f"{'':{width}} {'ms':>9} " + " ".join(f"{name:>10}" for name in NAMES)]
    for one in profiles:
        total = sum(one.phases_s.values())
        parts = " ".join(f"{one.phases_s[name] / total:>10.0%}" for name in NAMES)
        lines.append(f"{one.title:{width}} {one.unwatched_s * 1e3:>9.3f} {parts}")
    return "\n".join(lines)


def document(profiles: Sequence[Profile], scale: float, load_before: float) -> dict[str, Any]:
    """Return what is kept of profiles."""
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "scale": scale,
        "load_before": load_before,
        "load_after": load(),
        "rows": [
            {
                "title": one.title,
                "leaves": one.num_leaves,
                "bytes": one.nbytes,
                "runs": one.runs,
                "median_s": one.unwatched_s,
                "phases_s": one.phases_s,
            }
            for one in profiles
        ],
    }


def _profile(number: int, scale: float, seconds: float) -> Profile:
    return profile(ROWS[number], scale, seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Take the rows to pieces, each in a process of its own, with a fresh heap."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the JSON goes, instead of beside the code")
    parser.add_argument("--scale", type=float, default=1.0, help="make the states so many times as large")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each row is run")
    options = parser.parse_args(arguments)
    before = load()
    profiles = []
    for number in range(len(ROWS)):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            profiles.append(process.submit(_profile, number, options.scale, options.seconds).result())
    print(table(profiles))
    path = options.json or (PROFILES if options.scale == 1 else None)
    if path is not None:
        path.write_text(json.dumps(document(profiles, options.scale, before), indent=1, ensure_ascii=False) + "\n")
        print(f"Written to {path}.")


if __name__ == "__main__":
    main()
