"""``statetree doctor``: what is wrong with somebody's stager, copy, gather, save or transform, in sentences."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from contextlib import closing
from importlib import import_module
from operator import attrgetter
from textwrap import indent
from typing import Any, Final

import click

from statetree.cli.process import DIFFERENT, SAME
from statetree.errors import StateTreeError

_SAVED: Final = ("pure", "structure", "geometry", "values")
_COPIED: Final = (*_SAVED, "ties", "independent", "separate", "stable")
#: The laws that must hold. A state that is refused with an error is no fault of what is not a transform.
_NEEDED: Final = {
    "save": _SAVED,
    "copy": _COPIED,
    "stager": _COPIED,
    "gather": ("pure", "stable", "structure", "global_values", "ties"),
    "transform": ("accepts", *_COPIED, "idempotent", "commutes_with_offload", "streams"),
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
    status = _conformance(name, kind, found) if kind in ("stager", "copy", "gather") else SAME
    if kind == "stager":
        from statetree.testing.conformance_suite import StagerAdapter

        with closing(StagerAdapter(found())) as stager:
            return max(status, _laws(name, kind, stager.copied))
    return max(status, _laws(name, kind, _round_trip(found, loader) if kind == "save" else found))


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


def _laws(name: str, kind: str, transform: Any) -> int:
    from statetree.testing import check_transform, laws

    report = check_transform(transform, ranks=2 if kind == "gather" else None)
    broken = [name for name in report.broken if name in _NEEDED[kind]]
    needless = [name for name in report.broken if name not in (*broken, "accepts")]
    for verdict in map(report.__getitem__, broken):
        _tell(f"does not hold that: {verdict.law.statement}\n  {verdict.error}", verdict.source)
    held = [verdict.law.name for verdict in report.verdicts if verdict.holds]
    click.echo(f"\nLaws that hold: {', '.join(held)}. That do not: {', '.join(broken) or 'none'}.")
    if needless:
        click.echo(f"Not needed of a {kind}, and not kept: {', '.join(needless)}.")
    others = [verdict for verdict in report.verdicts if verdict.law is not laws.accepts]
    if all(verdict.holds is None and verdict.refused for verdict in others):
        raise _not_judged(name, kind, others[0].error)
    if "accepts" in report.broken and "accepts" not in broken:
        click.echo(f"Some states are refused with an error; the smallest:\n  {report['accepts'].error}")
        click.echo(indent(report["accepts"].source.strip(), "    "))
    return DIFFERENT if broken else SAME


def _not_judged(name: str, kind: str, said: str) -> StateTreeError:
    what = f"{name} was not judged: expected a {kind} that takes some of the states, got an error for each"
    return StateTreeError(
        f"doctor: {what}: {said.partition(chr(10))[0].rstrip('.')}. Mend it, or say with --as what it is."
    )


def _tell(what: str, source: str, how: str = "") -> None:
    click.echo(f"\nIt {what}\n  Lines that show it{how}:\n{indent(source.strip(), '    ')}")
