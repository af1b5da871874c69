"""What transforms declare of themselves, so that ``chain`` and ``stream`` know how to apply them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

from statetree.torch_internals import quietly

F = TypeVar("F", bound=Callable[..., Any])

_LEAFWISE: Final[set[Callable[..., Any]]] = set()
#: Transforms that every rank of a group has to call, each with a function that says for which options it has not.
_COLLECTIVE: Final[dict[Callable[..., Any], Callable[[Mapping[str, Any]], bool]]] = {}


def leafwise(transform: F) -> F:
    """Declare that a transform treats leaves independently of each other, up to ties (a decorator)."""
    _LEAFWISE.add(transform)
    return transform


def collective(transform: F) -> F:
    """Declare that every rank of a group has to call a transform (a decorator).

    It takes ``group`` and ``timeout`` by keyword. If it is leafwise, it has to be called with the same buckets, too.
    Inside it, autograd, modes of the user and a default device are off.
    """
    return collective_unless(_never)(transform)


def _never(_: Mapping[str, Any]) -> bool:
    return False


def collective_unless(alone: Callable[[Mapping[str, Any]], bool]) -> Callable[[F], F]:
    """Do as ``collective``, for a transform that with some options communicates with nobody (a decorator)."""

    def declare(transform: F) -> F:
        quiet = cast("F", quietly(transform))
        _COLLECTIVE[quiet] = alone
        return quiet

    return declare


def is_leafwise(step: Callable[..., Any]) -> bool:
    """Whether a function, or what a partial was made of, is declared leafwise."""
    try:
        return getattr(step, "func", step) in _LEAFWISE
    except TypeError:  # a callable that cannot be hashed
        return False


def is_collective(step: Callable[..., Any]) -> bool:
    """Whether a step communicates with other ranks."""
    try:
        alone = _COLLECTIVE.get(getattr(step, "func", step))
    except TypeError:  # a callable that cannot be hashed
        return False
    return alone is not None and not alone(getattr(step, "keywords", {}))
