"""Refuses arguments of strategies, layouts and ranks when they are given, not when something is made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn


def refuse(name: str, expected: str, given: object, error: type[Exception] = ValueError) -> NoReturn:
    """Raise, saying which argument it is, what it may be, and what it is."""
    msg = f"{name}: expected {expected}, got {given!r}."
    raise error(msg)


def check_one_of(name: str, given: object, allowed: Collection[Any]) -> None:
    """Refuse what is not among some values."""
    if given not in tuple(allowed):  # of a dict, even what cannot be hashed
        refuse(name, f"one of {', '.join(map(repr, allowed))}", given)


def check_some_of(name: str, given: object, allowed: Collection[Any]) -> None:
    """Refuse what is no sequence of some values, or an empty one."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        error = ValueError if isinstance(given, (list, tuple)) else TypeError
        refuse(name, f"a list or tuple of some of {', '.join(map(repr, allowed))}", given, error)
    for value in given:
        check_one_of(name, value, allowed)


def check_at_least(name: str, given: object, least: int) -> None:
    """Refuse what is no whole number, or too small."""
    if not isinstance(given, int) or isinstance(given, bool):
        refuse(name, "a whole number", given, TypeError)
    if given < least:
        refuse(name, f"at least {least}", given)


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
