"""The command as a process: its streams, the signals that stop it, and its exit status."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click
from click.shell_completion import shell_complete

from statetree.errors import StateTreeError, harmless

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SAME: Final = 0
DIFFERENT: Final = 1
FAILED: Final = 2
NAME: Final = "statetree"
#: What click's scripts for shells set when they ask for completions.
_COMPLETE: Final = "_STATETREE_COMPLETE"
#: What shells say of a program that ended by a signal: 128 and its number. Not 1, which means that checkpoints differ.
_BY_SIGNAL: Final = 128
_BROKEN_PIPE: Final = _BY_SIGNAL + 13
_STOPPING: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A signal, whose number it has, asks the process to stop."""


def run(command: click.Command, args: Sequence[str] | None) -> int:
    """Run a command with arguments, by default the process'. Returns its exit status: what it returns, if a number."""
    _make_streams_usable()
    try:
        with _stopped_by_signals():
            return _run(command, sys.argv[1:] if args is None else list(args))
    except BrokenPipeError:
        return _BROKEN_PIPE
    finally:
        for stream in (sys.stdout, sys.stderr):
            _let_go(stream)


def _make_streams_usable() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by >&-
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper):  # one that knows few characters shows the others as escapes
            stream.reconfigure(errors="backslashreplace")


def _let_go(stream: Any) -> None:
    """Write out what is left, so that Python does not fail to as it ends, which would change the exit status."""
    try:
        stream.flush()
    except (OSError, ValueError):  # a ValueError: it is closed
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise ``Stopped`` in the block at the first signal that asks for an end, and ignore others from then on.

    So what was begun is cleaned up undisturbed. A signal that whoever started the process had it ignore stays ignored.
    """

    def stop(number: int, _frame: object) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    is_main = threading.current_thread() is threading.main_thread()
    found = {each: signal.getsignal(each) for each in _STOPPING if is_main}
    before = {each: handler for each, handler in found.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for each in before:
            signal.signal(each, stop)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _run(command: click.Command, args: list[str]) -> int:
    try:
        return _invoke(command, args)
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
        return FAILED
    except KeyboardInterrupt as error:
        number = error.args[0] if isinstance(error, Stopped) else signal.SIGINT
        _tell("interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}")
        return _BY_SIGNAL + number
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - Python's own status for it, 1, would mean that checkpoints differ
        _tell(_complaint(error))
        return FAILED


def _complaint(error: Exception) -> str:
    if not isinstance(error, (StateTreeError, OSError, MemoryError)):
        return f"error: statetree has a fault. Please report this:\n{harmless(traceback.format_exc())}"
    text = str(error) if isinstance(error, StateTreeError) else f"{type(error).__name__}: {error}"
    return f"error: {harmless(text)}"


def _invoke(command: click.Command, args: list[str]) -> int:
    """Run the command, without click's own ``main``, which ends with status 1 where nobody reads what is written."""
    instruction = os.environ.get(_COMPLETE, "")
    if instruction:
        return shell_complete(command, {}, NAME, _COMPLETE, instruction)
    try:
        with command.make_context(NAME, args) as context:
            status = command.invoke(context)
    except click.exceptions.Exit as ended:
        status = ended.exit_code
    sys.stdout.flush()
    return status if isinstance(status, int) else SAME


def _tell(text: str) -> None:
    with suppress(OSError, ValueError):  # that nobody can be told does not change the exit status
        click.echo(text, err=True)
