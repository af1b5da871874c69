"""``statetree prove-resume``: a training script is run whole, killed, and resumed, each in a process of its own.

At each save the digests of what is saved are recorded, and of what the process holds beside it, as a scheduler.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from statetree.cli.process import DIFFERENT, FAILED, SAME
from statetree.errors import StateTreeError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

#: A step, and the folder of the checkpointer that saved it.
_Save = tuple[int, str]
_STRUCTURE: Final = "its containers (a tuple that was a list, an empty one less): the leaves are the same"
#: What is said where nothing that is looked at differs but the state.
_UNKNOWN: Final = (
    "what was forgotten is not known: those random states, schedulers, optimizers and batches of a DataLoader that are "
    "not saved are as in the whole run, which saves the same bits each time. Look at what the script does with what it "
    "restores, and at what else it keeps from step to step."
)


def prove_resume(script: Path, arguments: Sequence[str], kill_at: int) -> int:
    """Run a script three times, and print whether the killed run was resumed bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        whole = _run(Path(folder, "whole"), -1, script, arguments)
        killed = _run(Path(folder, "killed"), kill_at, script, arguments)
        if _differs_by_itself(whole, killed, f"{script} differs from run to run, before any kill,"):
            return FAILED
        resumed = _run(Path(folder, "killed"), -1, script, arguments)
        steps = [save for save in resumed if save in whole]
        if not steps:
            click.echo(f"{script} saved nothing after the kill that the whole run saved.")
            return DIFFERENT
        if min(steps) == min(whole):
            why = f"it restores nothing, or saved nothing before step {kill_at}"
            click.echo(f"{script} began anew after the kill: {why}.")
            return DIFFERENT
        before = [*killed][:-1]  # the last save was begun alone
        complete, first = min(_last_steps(before).values(), default=0), min(step for step, _ in resumed)
        if first < complete:  # what it restored, if anything, is older
            why = f"it saved step {first}, while step {complete} was complete"
            click.echo(f"{script} did not go on after the kill: {why}. It restores nothing, or not the latest step.")
            return DIFFERENT
        save, names = next(_different_saves(whole, resumed), ((0, ""), []))
        ends = (_last_steps([*before, *resumed]), _last_steps(whole))
        if not names and ends[0] != ends[1] and _by_steps(whole, before):
            found, expected = (", ".join(f"step {step} of {where}" for where, step in end.items()) for end in ends)
            click.echo(f"killed at step {kill_at}, resumed, and saved last {found}: the whole run {expected}.")
            return DIFFERENT
        if not names:
            listed = ", ".join(dict.fromkeys(str(step) for step, _ in steps))
            click.echo(f"killed at step {kill_at}, and resumed bit for bit: compared at steps {listed}.")
            if others := ", ".join(dict.fromkeys(str(save[0]) for save in resumed if save not in whole)):
                click.echo(f"not compared: steps {others}, which the whole run did not save.")
            return SAME
        forgotten = _differing(whole[save]["beside"], resumed[save]["beside"])
        # What an optimizer holds differs whenever something else was forgotten.
        forgotten = [name for name in forgotten if not name.startswith("optimizer ")] or forgotten
        if not forgotten:  # then a kill may have nothing to do with it
            again = _run(Path(folder, "again"), -1, script, arguments)
            if _differs_by_itself(whole, again, f"{script} differs from run to run, without any kill,"):
                return FAILED
    click.echo(f"killed at step {kill_at}, resumed, and different at step {save[0]}.")
    hedges = {*whole[save]["renamed"], *resumed[save]["renamed"]}
    said = [f"{name}{' (unless it is saved under other names)' if name in hedges else ''}" for name in forgotten]
    click.echo(f"forgotten: {', '.join(said)}" if forgotten else _UNKNOWN)
    click.echo(f"so these of the state differ:\n  {shown(names)}")
    return DIFFERENT


def _last_steps(saves: Iterable[_Save]) -> dict[str, int]:
    """Return the last step that each checkpointer saved."""
    return {where: step for step, where in sorted(saves)}


def _by_steps(whole: Iterable[_Save], before: Sequence[_Save]) -> bool:
    """Whether what was saved before a kill is what the whole run saved by then: else a clock may decide that."""
    return {*before} == {save for save in whole if before and save <= max(before)}


def _differs_by_itself(one: dict[_Save, Any], other: dict[_Save, Any], what: str) -> bool:
    """Say where two runs differ of which neither was resumed, if they do."""
    for (step, _), names in _different_saves(one, other):
        click.echo(f"{what} at step {step}: {shown(names)}. Seed it, and use deterministic operations.")
        return True
    return False


def _different_saves(one: dict[_Save, Any], other: dict[_Save, Any]) -> Iterator[tuple[_Save, list[str]]]:
    for save in other:
        if save in one and one[save]["tree"] != other[save]["tree"]:
            yield save, _differing(one[save]["saved"], other[save]["saved"]) or [_STRUCTURE]


def _differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    return [name for name in {**left, **right} if left.get(name) != right.get(name)]


def _run(folder: Path, kill_at: int, script: Path, arguments: Sequence[str]) -> dict[_Save, Any]:
    """Run the script with its checkpoints in a folder, and return what was recorded at each save."""
    record = folder.with_name("record")
    record.write_text("")
    command = [sys.executable, "-m", __name__, str(folder), str(record), str(kill_at), str(script), *arguments]
    status = subprocess.run(command, stdout=2, check=False).returncode
    if status != (0 if kill_at < 0 else -signal.SIGKILL):
        what = "success" if kill_at < 0 else f"a save at step {kill_at} or later"
        raise StateTreeError(f"prove-resume: {script} ended with status {status}: expected {what}.")
    return {(step, where): found for step, where, found in map(json.loads, record.read_text().splitlines())}


def _beside() -> Iterator[tuple[str, Any]]:
    """Yield what this process holds beside the state that it saves."""
    import torch

    yield "random state of torch", torch.get_rng_state()
    yield "random state of Python", random.getstate()
    if "numpy" in sys.modules:
        yield "random state of NumPy", sys.modules["numpy"].random.get_state()
    gc.collect()  # what a script has made anew leaves others behind
    for value in gc.get_objects():
        cls = type(value)  # what an object says of its class may be anything
        for kind, base in (("scheduler", torch.optim.lr_scheduler.LRScheduler), ("optimizer", torch.optim.Optimizer)):
            if issubclass(cls, base):
                yield f"{kind} {cls.__qualname__}", value.state_dict()


def _times_saved(found: Mapping[str, int], saved: Mapping[str, int]) -> int:
    """Return how often leaves stand in what is saved, under one name and then their own ones."""
    first = next(iter(found), "")
    above = [name.removesuffix(first) for name in saved if f".{name}".endswith(f".{first}" if first else "")]
    return sum(all(saved.get(f"{start}{name}") == number for name, number in found.items()) for start in above)


def _not_saved(saved: Mapping[str, int], beside: Iterable[tuple[str, Any]]) -> tuple[dict[str, list[int]], list[str]]:
    """Return the digests of what is held beside the state, by what it is, and what may be saved under other names.

    What is held several times has to be saved as often.
    """
    from statetree.transforms.digest import digest

    held: dict[tuple[str, int], list[Mapping[str, int]]] = {}
    for name, value in beside:
        with suppress(StateTreeError):
            found = digest(value)
            held.setdefault((name, found.tree), []).append(found.leaves)
    unsaved: dict[str, list[int]] = {}
    renamed: list[str] = []
    for (name, tree), alike in sorted(held.items()):
        # What an optimizer holds tells it from everything else; numbers as those of a scheduler may be anything's.
        is_there = {*alike[0].values()} <= {*saved.values()}
        if _times_saved(alike[0], saved) < len(alike) and not (is_there and name.startswith("optimizer ")):
            unsaved.setdefault(name, []).extend([tree] * len(alike))
            if is_there:
                renamed.append(name)
    return unsaved, renamed


def _child(folder: str, record: str, kill_at: int, script: str) -> None:
    """Run the script, with its checkpoints in our folder and a record of each save."""
    import torch
    from torch.utils.data import DataLoader

    from statetree.dcp.checkpointer import Checkpointer
    from statetree.dcp.stateful import StatefulTree
    from statetree.transforms.digest import digest

    make, iterate, batches = Checkpointer.__init__, DataLoader.__iter__, dict[str, Any]()
    names: dict[Path, str] = {}

    def made(self: Any, directory: Any, **options: Any) -> None:
        where = os.path.abspath(directory)
        own = Path(folder, hashlib.sha256(os.fsencode(where)).hexdigest()[:16], os.path.basename(where) or "root")
        names[own] = os.path.relpath(where)
        options["mirror"] = None  # which holds the checkpoints of real runs, and would lose them to those of this one
        make(self, own, **options)

    def recorded(save: Any) -> Any:
        def recording(self: Any, step: Any, state: Any, **options: Any) -> Any:
            found = digest(StatefulTree("save", state).state)
            leaves = dict(found.leaves)
            unsaved, renamed = _not_saved(leaves, [*_beside(), *batches.items()])
            row = {"saved": leaves, "tree": found.tree, "beside": unsaved, "renamed": renamed}
            with open(record, "a", encoding="utf-8") as file:
                file.write(json.dumps([int(step), names[Path(self.directory)], row]) + "\n")
            if 0 <= kill_at <= step:
                self.close()  # what was saved in the background is complete
                os.kill(os.getpid(), signal.SIGKILL)
            return save(self, step, state, **options)

        return recording

    def watched(inner: Iterator[Any]) -> Iterator[Any]:
        for batches["batches of the DataLoader"] in inner:
            yield batches["batches of the DataLoader"]

    patched: Any = Checkpointer  # and the class of loaders: this process is for nothing else
    patched.__init__, patched.save, patched.async_save = made, recorded(Checkpointer.save), recorded(patched.async_save)
    patched = DataLoader
    patched.__iter__ = lambda self: watched(iterate(self))
    random.seed(0)  # these begin at random
    torch.manual_seed(0)
    with suppress(ImportError):
        __import__("numpy").random.seed(0)
    sys.argv, sys.path[0] = sys.argv[4:], str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
