"""Where the time goes: the work of the rows that have times to reach, by its phases.

``python -m benchmarks.profiles`` prints a table and writes ``results/profiles.json``. A profiler would time every call
of every function; here a clock is read only where the engines' functions begin and end, some dozens of times a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import wraps
from importlib import import_module
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from benchmarks import catalogue
from benchmarks.machine import load, machine, versions
from benchmarks.measure import OURS, Alone, WrongResult
from benchmarks.ranks import TIMEOUT_S, InStep, RankRow
from benchmarks.rows import variant_of
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
#: How often each row is run, at least, and for how many seconds: half of them without the clock. Rows that take long
#: are run less often.
RUNS: Final = 15
RUNS_OF_SLOW: Final = 2
SECONDS: Final = 0.6

#: What each phase consists of: the functions in which it begins. What they call belongs to it, too, unless it begins
#: another phase.
PHASES: Final = {
    "flatten": ("statetree.tree.traversal.traverse",),
    "checks": (
        "statetree.leaves.parts.unpack",
        "statetree.leaves.pairing.LeafPairing._find_ordinary",
        "statetree.leaves.pairing.leave_out_differences",
        "statetree.tree.matching.matched",
        "statetree.spans.layout.check_memory",
        "statetree.leaves.copying._CopyJob.differences",
        "statetree.stager.snapshot.Geometry.fits",
        "statetree.stager.snapshot.Snapshot.is_leased",
        "statetree.stager.snapshot.Snapshot.was_sent",
        "statetree.exchange.manifest.Manifest.__init__",
        "statetree.exchange.manifest.Manifest.check_readable",
        "statetree.exchange.manifest.Manifest.entries",
        "statetree.exchange.fitting.unfit",
        "statetree.exchange.call.Call.agree",
        "statetree.exchange.like.LikeDestination._check_sources",
        "statetree.exchange.like.LikeDestination._check_writable",
        "statetree.exchange.like.LikeDestination._check_disjoint",
        "statetree.leaves.held_memory.HeldMemory.moved",
        "statetree.transforms.deltas.state_parts.StateParts.__init__",
        "statetree.transforms.deltas.state_parts.StateParts.entangled",
        "statetree.transforms.deltas.change.TensorChange.check",
    ),
    "plan": (
        "statetree.spans.layout.lay_out",
        "statetree.stager.snapshot.Geometry.__init__",
        "statetree.tree.spec.TreeSpec.flat_keys",
        "statetree.exchange.transfers.plan_transfers",
        "statetree.exchange.description.described",
        "statetree.exchange.description.read_description",
        "statetree.tree.selection.selected",
        "statetree.transforms.deltas.change.as_gaps",
        "statetree.transforms.deltas.change.from_gaps",
        "statetree.transforms.deltas.change.places_of",
        "statetree.stager.frozen.FrozenStorages.parted",
        "statetree.dcp.saving.StateSave._describe",
        "statetree.dcp.saving.StateSave._plan",
        "statetree.files.loading._Filled.plan",
        "statetree.dcp.saving.StateSave._finish",
        "statetree.dcp.data_files.read_described",
    ),
    "allocation": (
        "statetree.spans.replicate.replicate_columns",
        "statetree.stager.snapshot.Snapshot.__init__",
        "statetree.exchange.like.allocated",
        "statetree.exchange.destination.FreshDestination._make",
    ),
    "bytes": (
        "statetree.torch_internals.copy_all",
        "statetree.spans.threads.copy_together",
        "statetree.torch_internals.copy_each",
        "statetree.torch_internals.clone_all",
        "statetree.stager.batches.Batch.fill",
        "statetree.exchange.buckets.BucketedPlan.run",
        "statetree.exchange.executor.Recorder.replay",
        "statetree.transforms.deltas.state_parts.HeldPart.take",
        "statetree.transforms.deltas.state_parts.put",
    ),
    "compare": (
        "statetree.spans.bits.same_bytes",
        "statetree.spans.bits.differ_in_more",
        "statetree.spans.bits._equal",
        "statetree.spans.bits._positions",
    ),
    "sums": (
        "statetree.spans.sums.piece_sums",
        "statetree.spans.sums.whole_sums",
        "statetree.spans.sums.sums_at",
        "statetree.files.crc32.crc32",
    ),
    "archives": (
        "torch.save",
        "statetree.files.tensor_archives.archive_of",
        "statetree.files.torch_format.TorchArchive.__init__",
        "statetree.files.torch_format.TorchArchive.read",
        "statetree.files.torch_format.TorchArchive.piece",
    ),
    "rebuild": (
        "statetree.tree.mapping.to_flat",
        "statetree.tree.mapping.from_flat",
        "statetree.tree.traversal.rebuild",
        "statetree.leaves.parts.Unpacked.pack",
        "statetree.stager.snapshot.Snapshot.fill",
        "statetree.stager.frozen.FrozenStorages.copies",
        "statetree.tree.pruning.pruned",
        "statetree.leaves.copying._CopyJob.result",
    ),
    "waiting": (
        "statetree.exchange.group.Group._wait",
        "os.pwritev",
        "statetree.files.ranges.FileRange.fill",
        "os.fsync",
    ),
}
#: What is in none of them: of the whole run, and of what other threads do meanwhile.
REST: Final = "rest"
IN_THREADS: Final = (
    "statetree.dcp.saving.StateSave.run",
    "statetree.dcp.data_writer.DataWriter._unchanged_in",
)
#: Not counted at all: another thread works, whose time is.
ELSEWHERE: Final = "elsewhere"
FOR_THREADS: Final = ("concurrent.futures.Future.result", "concurrent.futures.ThreadPoolExecutor.shutdown")
NAMES: Final = (*PHASES, REST)

#: Groups of rows about growth, about files and conversions, that have or need other processes, or need a GPU.
LEFT_OUT: Final = frozenset({"leaves", "scale", "import", "gpu", "busy", "convert", "combine"})


class Profiled(NamedTuple):
    """A row that is taken to pieces, and by its name the contender whose work it is: statetree, in one way or another.

    There is one for each contender whose time the row has an aim for.
    """

    row: Row
    contender: str


PROFILED: Final = tuple(
    [
        Profiled(row, contender)
        for row in catalogue.ROWS
        if row.group not in LEFT_OUT
        for contender in dict.fromkeys(aim.timed for aim in row.aims if aim.timed)
    ]
)


class _Open(threading.local):
    """The phases that a thread is in, and since when it is in the innermost one."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.since = 0.0


@dataclass
class PhaseClock:
    """Adds up how much time is spent in each phase, by all threads.

    Attributes:
        spent: Seconds by phase.
    """

    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    _open: _Open = field(default_factory=_Open)
    _lock: Any = field(default_factory=threading.Lock)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time in this block for a phase, and not for the one around it."""
        self._turn()
        self._open.phases.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.phases.pop()

    def take(self) -> dict[str, float]:
        """Return the time spent so far, and begin anew."""
        spent, self.spent = self.spent, dict.fromkeys(NAMES, 0.0)
        return spent

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open.phases and self._open.phases[-1] != ELSEWHERE:
            with self._lock:
                self.spent[self._open.phases[-1]] += now - self._open.since
        self._open.since = now

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have the engines' functions turn this clock."""
        restored: list[tuple[Any, str, Any]] = []
        try:
            for name, functions in {**PHASES, REST: IN_THREADS, ELSEWHERE: FOR_THREADS}.items():
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
    """Return where a function can be found: the module or class it is defined in, and ours that import it."""
    owner, attribute = function.rsplit(".", 1)
    try:
        holder: Any = import_module(owner)
    except ModuleNotFoundError:  # a method: the owner is a class
        module, cls = owner.rsplit(".", 1)
        holder = getattr(import_module(module), cls)
        return [(holder, attribute, getattr(holder, attribute))]
    original = getattr(holder, attribute)
    ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "statetree"]
    found = [module for module in ours if vars(module).get(attribute) is original]
    return [(module, attribute, original) for module in dict.fromkeys([holder, *found])]


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


def profile(profiled: Profiled, scale: float = 1.0, seconds: float = SECONDS) -> Profile:
    """Run statetree's part of a row again and again, first without the clock and then with it.

    Of several ranks, the first one's profile is returned.

    Raises:
        WrongResult: If what it returns is wrong.
    """
    row, contender = profiled
    parts = (contender, row.state, row.contenders, scale, seconds)
    work = row.work if contender == OURS else f"{row.work}, {variant_of(contender)}"
    if not isinstance(row, RankRow):
        return profile_here(work, *parts, Alone())
    found = run_ranks(row.ranks, profile_here, work, *parts, InStep(), timeout=TIMEOUT_S)[0]
    return replace(found, title=f"{found.title}, {row.ranks} ranks")


def profile_here(
    work: str,
    name: str,
    make_state: Callable[[float], State],
    make_contenders: Callable[[State], Sequence[Contender]],
    scale: float,
    seconds: float,
    company: Alone,
) -> Profile:
    """Do so in this process, in step with the company."""
    state = make_state(scale)
    own = next(contender for contender in make_contenders(state) if contender.name == name)

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

    def again(once: Callable[[], T], seconds: float) -> list[T]:
        found: list[T] = []
        began = time.perf_counter()

        def enough() -> bool:
            took = time.perf_counter() - began
            return took >= seconds if len(found) >= RUNS else took >= 2 * seconds and len(found) >= RUNS_OF_SLOW

        while not company.decide(done=enough()):
            found.append(once())
        return found

    again(lambda: run(PhaseClock()), 0)  # caches fill
    # First without the clock: Python runs code slowly for a while after functions that it calls were replaced.
    unwatched = again(lambda: run(PhaseClock()), seconds / 2)
    clock = PhaseClock()
    with clock.watching():
        samples = again(lambda: (run(clock), clock.take())[1], seconds / 2)
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
    return profile(PROFILED[number], scale, seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Take the rows to pieces, each group in a process of its own, with a fresh heap."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the JSON goes, instead of beside the code")
    parser.add_argument("--scale", type=float, default=1.0, help="make the states so many times as large")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each row is run")
    options = parser.parse_args(arguments)
    before = load()
    profiles: list[Profile] = []
    for _, numbers in groupby(range(len(PROFILED)), key=lambda number: PROFILED[number].row.group):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            profiles += [
                process.submit(_profile, number, options.scale, options.seconds).result() for number in numbers
            ]
    print(table(profiles))
    path = options.json or (PROFILES if options.scale == 1 else None)
    if path is not None:
        path.write_text(json.dumps(document(profiles, options.scale, before), indent=1, ensure_ascii=False) + "\n")
        print(f"Written to {path}.")


if __name__ == "__main__":
    main()
