"""Refuses arguments when they are given, not when something is made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn


def refuse(name: str, expected: str, given: object, error: type[Exception] = ValueError) -> NoReturn:
    """Raise, saying which argument it is, what it may be, and what it is."""
    raise error(f"{name}: expected {expected}, got {given!r}.")


def check_some_of(name: str, given: object, allowed: Collection[Any]) -> None:
    """Refuse what is no sequence of some values, or an empty one."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not given or set(given) - set(allowed):
        refuse(name, f"a list or tuple of some of {', '.join(map(repr, allowed))}", given)


@contextlib.contextmanager
def needing_hypothesis(name: str) -> Iterator[None]:
    """Import what needs hypothesis, or say what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        msg = f"statetree.testing.{name} needs hypothesis: pip install statetree[testing]"
        raise ModuleNotFoundError(msg, name="hypothesis") from error
