"""``statetree doctor``: what is wrong with somebody's stager, copy, gather, save or transform, in sentences."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import warnings
from contextlib import closing
from importlib import import_module
from operator import attrgetter
from textwrap import indent
from typing import Any, Final

import click

from statetree.cli.process import DIFFERENT, SAME
from statetree.errors import StateTreeError, suppress

_SAVED: Final = ("pure", "structure", "geometry", "values")
_COPIED: Final = (*_SAVED, "independent", "separate", "stable")
#: The laws that must hold. A state that is refused with an error is no fault of what is not a transform.
_NEEDED: Final = {
    "save": _SAVED,
    "copy": (*_COPIED, "ties"),
    "stager": _COPIED,  # in shared memory, small storages may be pieces of a large one
    "gather": ("pure", "stable", "structure", "global_values", "ties"),
    "transform": ("accepts", *_COPIED, "ties", "idempotent", "commutes_with_offload", "streams"),
}

#: What the lines that show something call.
_CALLED: Final = {
    "stager": " (copied stages a state with your stager, and waits for it)",
    "save": " (saved_and_loaded saves a state, and loads it)",
}


def doctor(name: str, kind: str | None, load: str | None) -> int:
    """Examine what a name stands for, and print a page about it."""
    try:
        return _examine(name, kind, load)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, Exception) and not sys.stdout.closed):
            raise
        # What was asked did something that ends the examination: Python's status for it would be taken for ours.
        did, expected = f"raises a {type(error).__qualname__}", "returns, or raises an Exception"
        if isinstance(error, SystemExit):
            did, expected = f"ends the process (sys.exit({error.code!r}))", "returns, or raises"
        elif isinstance(error, Exception):
            did, expected = "closes sys.stdout", "leaves it open"
        raise StateTreeError(f"doctor: {name} {did}: expected one that {expected}.") from error


def _examine(name: str, kind: str | None, load: str | None) -> int:
    sys.path.insert(0, os.getcwd())  # as python -m does
    found, loader = _imported(name), load and _imported(load)
    kind = kind or _kind_of(found, has_load=loader is not None)
    if kind == "save" and loader is None:
        raise StateTreeError("doctor: a save is examined with its load: expected --load package.module:function.")
    click.echo(f"{name} is examined as a {kind}{'' if kind != 'save' else f' with {load}'}.")
    if kind == "save":
        return _laws(name, kind, _round_trip(found, loader))
    if kind == "transform":
        return _laws(name, kind, found)
    status = _conformance(name, kind, found)
    if kind != "stager":
        return max(status, _laws(name, kind, found, is_judged=True))
    with closing(_Staged(found)) as staged:
        return max(status, _laws(name, kind, staged.copied, is_judged=True))


def _imported(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found = attrgetter(path)(import_module(module)) if path else None
    except (ImportError, AttributeError, ValueError) as error:
        msg = f"doctor: {name} cannot be imported: expected package.module:function. {type(error).__name__}: {error}"
        raise StateTreeError(msg) from error
    if not callable(found):
        got = f"a {type(found).__qualname__}" if path else "no name after a colon"
        raise StateTreeError(f"doctor: {name} cannot be called: expected package.module:function, got {got}.")
    return found


def _kind_of(found: Any, *, has_load: bool) -> str:
    """Guess what it is: from its methods, its name, its arguments, and what it makes of a small state."""
    import torch

    if has_load or hasattr(found, "stage"):
        return "save" if has_load else "stager"
    if "gather" in getattr(found, "__name__", ""):
        return "gather"
    given = inspect.signature(found).parameters.values()
    needed = [each for each in given if each.default is inspect.Parameter.empty and each.kind < 2]
    if len(needed) != 1:
        return "save" if needed else "stager"
    # Numbers that no narrower dtype has: a cast is no copy.
    state = {str(dtype): torch.tensor([1], dtype=dtype) / 3 for dtype in (torch.float64, torch.float32, torch.float16)}
    try:
        copies = found(state)
        kept = all(torch.equal(copies[key], given) and copies[key] is not given for key, given in state.items())
    except Exception:  # noqa: BLE001 - which states it takes, the examination says
        kept = False
    return "copy" if kept else "transform"


def _round_trip(save: Any, load: Any) -> Any:
    def saved_and_loaded(state: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            save(state, f"{folder}/checkpoint")
            return load(f"{folder}/checkpoint")

    return saved_and_loaded


class _Staged:
    """A stager as a copy: another one after an error, of which nobody says what a stager is good for then."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._stager: Any = None

    def copied(self, state: Any) -> Any:
        from statetree.testing.conformance_suite import StagerAdapter

        try:
            self._stager = self._stager or StagerAdapter(self._make())
            return self._stager.copied(state)
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        stager, self._stager = self._stager, None
        with suppress(Exception):  # what it says of that, the checks for faults have heard
            if stager is not None:
                stager.close()


def _conformance(name: str, kind: str, found: Any) -> int:
    from statetree.testing import conformance

    report = conformance(**{kind: found})
    for fault, said in ((verdict.fault, verdict.said) for verdict in report.verdicts if verdict.outcome == "FAILS"):
        _tell(
            f"fails where {fault.name}: {fault.statement}\n  Noticed: {said}",
            fault.source,
            f" (call {fault.name} with your {fault.kind})",
        )
    refused = [verdict.fault.name for verdict in report.verdicts if verdict.outcome == "refuses"]
    click.echo(f"\n{len(report.failed)} of {len(report.verdicts)} checks found a result that is silently wrong.")
    click.echo(f"Refused with an error: {', '.join(refused) or 'nothing'}.")
    if len(refused) == len(report.verdicts):
        raise _not_judged(name, kind, report.verdicts[0].said)
    return DIFFERENT if report.failed else SAME


def _laws(name: str, kind: str, transform: Any, *, is_judged: bool = False) -> int:
    """Say which laws hold; ``is_judged`` is whether something is known without them."""
    from statetree.testing import laws
    from statetree.testing.transform_check import report_on

    tried: tuple[laws.Law, ...] = laws.COLLECTIVE if kind == "gather" else laws.ALL
    if kind == "stager":  # others would have it keep more snapshots than it may have room for
        tried = tuple([law for law in tried if law.name in ("accepts", *_COPIED)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of each of hundreds of states
        report = report_on(transform, tried, [2 if kind == "gather" else None])
    broken = [name for name in report.broken if name in _NEEDED[kind]]
    needless = [name for name in report.broken if name not in (*broken, "accepts")]
    for verdict in map(report.__getitem__, broken):
        _tell(f"does not hold that: {verdict.law.statement}\n  {verdict.error}", verdict.source, _CALLED.get(kind, ""))
    others = [verdict for verdict in report.verdicts if verdict.law is not laws.accepts]
    if not is_judged and all(verdict.holds is None and verdict.refused for verdict in others):
        raise _not_judged(name, kind, others[0].error)
    held = [verdict.law.name for verdict in report.verdicts if verdict.holds]
    click.echo(f"\nLaws that hold: {', '.join(held) or 'none'}. That do not: {', '.join(broken) or 'none'}.")
    if needless:
        click.echo(f"Not needed of a {kind}, and not kept: {', '.join(needless)}.")
    if refused := [verdict for verdict in others if verdict.refused]:
        counts = [f"{verdict.law.name} {verdict.refused}" for verdict in refused]
        most = max(verdict.examples + verdict.refused for verdict in refused)
        click.echo(f"States of {most} that are refused with an error: {', '.join(counts)}.")
        if "accepts" in report.broken:  # the error of a broken law is not that of a refusal
            click.echo(f"The smallest of these:\n{indent(report['accepts'].error, '  ')}")
    return DIFFERENT if broken else SAME


def _not_judged(name: str, kind: str, said: str) -> StateTreeError:
    what = f"{name} was not judged: expected a {kind} that takes some of the states, got an error for each"
    return StateTreeError(
        f"doctor: {what}: {said.partition(chr(10))[0].rstrip('.')}. Mend it, or say with --as what it is."
    )


def _tell(what: str, source: str, how: str = "") -> None:
    click.echo(f"\nIt {what}\n  Lines that show it{how}:\n{indent(source.strip(), '    ')}")
