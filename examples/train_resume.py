"""Train, checkpoint in the background, kill, resume: and end with the very bits of a run that was never stopped.

A small transformer, sharded by FSDP2 over two ranks, trains on the help texts that come with Python. Three runs, each
of a process a rank, do it in turn:

1. one runs to the end undisturbed, and its losses and its final state are the reference;
2. one saves its whole state every few steps, while training goes on, and is killed by SIGKILL as it writes;
3. one restores the last complete checkpoint, and carries on to the end.

Run it with ``make demo``, or ``python examples/train_resume.py --help``. It exits with 1 if a single bit differs.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from _progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = 2
UNINTERRUPTED, KILLED, RESUMED = ROLES = ("uninterrupted", "killed", "resumed")

# How long the killed run may write its last checkpoint: well below what a save takes. Only which checkpoint is the
# last complete one depends on it.
MID_SAVE_S = 0.03


class DemoError(Exception):
    """The demo did not show what it is there to show."""


@dataclass
class Run:
    """What the first rank of a run has told about it.

    Attributes:
        losses: The loss of each step, as an exact hexadecimal number.
        stopped_s: How long training stood still for each save that did not wait for the one before, in seconds.
        waits: How many saves did.
        facts: All else: ``digest``, ``costs``, ….
    """

    losses: dict[int, str] = field(default_factory=dict)
    stopped_s: list[float] = field(default_factory=list)
    waits: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    """Run the demo, or, with the options that it passes to its children, a rank of one of its training runs."""
    options = parse_options()
    if options.role:
        work(options)
        return 0
    try:
        demonstrate(options)
    except DemoError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="length of the run (default: 120)")
    parser.add_argument("--every", type=int, default=15, help="steps between two checkpoints (default: 15)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the checkpoints in this new directory")
    parser.add_argument(
        "--sabotage",
        action="store_true",
        help="after the restore, move one tensor by the last bit: the demo must fail then",
    )
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.every < 1 or options.steps <= 2 * options.every:
        parser.error("--steps must be more than twice --every: the run is killed after two saves or more")
    if options.keep and not options.role and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep: {options.keep} is not empty")
    return options


def work(options: argparse.Namespace) -> None:
    """Be a child process: train."""
    import _worker  # with torch, which takes seconds and which the parent does without

    _worker.join(options.rank, RANKS, options.store)
    if options.role == UNINTERRUPTED:
        _worker.train_uninterrupted(options.steps, options.keep)
    elif options.role == KILLED:
        _worker.train_saving(options.steps, options.every, options.keep)
    else:
        _worker.train_resumed(options.steps, options.every, options.keep, sabotage=options.sabotage)
    _worker.leave()


def demonstrate(options: argparse.Namespace) -> None:
    """Do the three runs, compare them, and print what was found."""
    start = time.perf_counter()
    with ExitStack() as stack:
        directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="statetree-demo-")))
        whole = run(UNINTERRUPTED, options, directory)
        # Two saves at least, so that the first is complete: the second waited for it.
        kill_at = options.every * max(2, round(0.6 * options.steps / options.every))
        killed = run(KILLED, options, directory, kill_at=kill_at)
        left = sorted(path.name for path in directory.iterdir())
        resumed = run(RESUMED, options, directory)
    check(whole, killed, resumed)

    restored = resumed.facts["restored"]
    print(f"""
The last step that the killed run reported was {max(killed.losses)}; it left behind {", ".join(left)}.
Other processes restored step {restored} and went on to step {options.steps}.
Losses, in nats a byte: {loss_at(whole, 1)} at step 1, {loss_at(whole, restored)} at step {restored}, \
{loss_at(whole, options.steps)} at step {options.steps}.

Resumed and uninterrupted run agree bit for bit:
  losses       {len(resumed.losses)} of {len(resumed.losses)} equal, steps {restored + 1} to {options.steps}
  final state  SHA-256 {whole.facts["digest"]} for both
Embedding and head are one storage in the staged state, and in the restored one.
""")
    print_costs(whole.facts["costs"], killed, resumed)
    print("\n".join(["\nThe state, with the bytes of the first of the two ranks:", *whole.facts["sizes"]]))
    print(f"\nOK: killed, resumed, and no bit differs ({time.perf_counter() - start:.0f} s in all).")


def run(role: str, options: argparse.Namespace, directory: Path, *, kill_at: int | None = None) -> Run:
    """Train in new processes.

    With ``kill_at``, they are killed once that step's state is staged: training has gone on to the next step then, and
    the checkpoint is being written.
    """
    result = Run()
    with Progress(role, options.steps) as progress, started(role, options, directory) as processes:
        for line in processes[0].stdout or ():
            facts = json.loads(line)
            event = facts.pop("event")
            if event == "step":
                result.losses[facts["step"]] = facts["loss"]
                progress.show(facts["step"], float.fromhex(facts["loss"]))
            elif event == "saving":
                if facts["waited"]:
                    result.waits += 1
                else:
                    result.stopped_s.append(facts["stopped_s"])
                if facts["step"] == kill_at:
                    time.sleep(MID_SAVE_S)
                    for process in processes:
                        process.kill()
            else:
                result.facts |= facts
    expected = 0 if kill_at is None else -signal.SIGKILL
    statuses = [process.returncode for process in processes]
    if statuses != [expected] * RANKS:
        msg = f"the {role} run's processes should have ended with status {expected}, but did with {statuses}"
        raise DemoError(msg)
    return result


@contextmanager
def started(role: str, options: argparse.Namespace, directory: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes of a run, and wait for their end."""
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="statetree-demo-"))) / "store"
        command = [sys.executable, __file__, "--role", role, "--keep", str(directory), "--store", str(store)]
        command += ["--steps", str(options.steps), "--every", str(options.every)]
        if options.sabotage:
            command.append("--sabotage")
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(RANKS):
                output = subprocess.PIPE if rank == 0 else None
                process = subprocess.Popen([*command, "--rank", str(rank)], stdout=output)
                processes.append(stack.enter_context(process))
            yield processes
        except BaseException:
            for process in processes:
                process.kill()
            raise


def check(whole: Run, killed: Run, resumed: Run) -> None:
    """Raise ``DemoError`` unless the runs agree in every bit."""
    for name, other in (KILLED, killed), (RESUMED, resumed):
        differing = [step for step in other.losses if other.losses[step] != whole.losses[step]]
        if differing:
            step = min(differing)
            msg = (
                f"{len(differing)} of {len(other.losses)} losses of the {name} run differ from the uninterrupted "
                f"run's, first that of step {step}: expected {whole.losses[step]}, got {other.losses[step]}"
            )
            raise DemoError(msg)
    steps = list(range(resumed.facts["restored"] + 1, max(whole.losses) + 1))
    if list(resumed.losses) != steps:
        msg = f"the resumed run should have taken the steps {steps}, but took {list(resumed.losses)}"
        raise DemoError(msg)
    if resumed.facts["digest"] != whole.facts["digest"]:
        msg = (
            "the final states differ, though the losses do not: expected SHA-256 "
            f"{whole.facts['digest']}, got {resumed.facts['digest']}"
        )
        raise DemoError(msg)
    if not (whole.facts["staged_tied"] and resumed.facts["restored_tied"]):
        msg = "embedding and head are no longer one storage"
        raise DemoError(msg)


def loss_at(whole: Run, step: int) -> str:
    """Return a loss for people to read."""
    return f"{float.fromhex(whole.losses[step]):.3f}"


def print_costs(costs: dict[str, float], *saving: Run) -> None:
    """Print how long the trainer stands still for each way to take its state."""
    stage_s = costs["stage_s"]

    def line(name: str, seconds: float) -> str:
        return f"  {name:<22}{seconds * 1e3:8.1f} ms  {seconds / stage_s:6.1f} x"

    print(f"How long a trainer stands still for its state (medians of {costs['rounds']}, on one rank, in turns):")
    print(line("Stager.stage", stage_s) + f"   (the first one: {costs['first_stage_s'] * 1e3:.1f} ms)")
    print(line("copy.deepcopy", costs["deepcopy_s"]))
    print(line("Checkpointer.save", costs["save_s"]))
    stopped_s = [seconds for run in saving for seconds in run.stopped_s]
    print(
        f"While training, Checkpointer.async_save took {median(stopped_s) * 1e3:.1f} ms (median of {len(stopped_s)}), "
        f"and {sum(run.waits for run in saving)} times had to wait for the save before."
    )


if __name__ == "__main__":
    sys.exit(main())
