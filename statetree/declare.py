"""What code declares: how ``chain`` applies transforms, what is cached, what phases are, when garbage is collected."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Final, Generic, Self, TypeVar, cast, overload
from weakref import WeakKeyDictionary

from torch.autograd.profiler import record_function

from statetree.errors import unsignalled
from statetree.torch_internals import is_profiling, quietly

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

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
    return collective_unless(lambda _: False)(transform)


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
    except unsignalled(TypeError):  # a callable that cannot be hashed
        return False


def is_collective(step: Callable[..., Any]) -> bool:
    """Whether a step communicates with other ranks."""
    try:
        alone = _COLLECTIVE.get(getattr(step, "func", step))
    except unsignalled(TypeError):  # a callable that cannot be hashed
        return False
    return alone is not None and not alone(getattr(step, "keywords", {}))


class _PutOff:
    """Which thread has put collections off, if one has."""

    thread: int | None = None


def without_collections(function: F) -> F:
    """Declare that a function makes many objects which stay, and ends soon (a decorator): garbage is collected later.

    It is for what describes and plans, and for what reads and writes many small tensors here: no function of users'
    that takes memory runs in it often. What may take long inside is declared ``with_collections``.
    Python looks for cycles whenever so many objects were made, and looks at all that there are: in a process that holds
    a training job, that takes longer than what makes them. In other threads than the main one nothing is put off, since
    the program goes on beside them, and may make cycles that hold memory.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != threading.main_thread().ident or not gc.isenabled():
            return function(*args, **kwargs)
        # Handlers of signals run after calls: what one raises must find the block, and collections on after it. So
        # there is no context manager here.
        try:
            _PutOff.thread = threading.get_ident()
            gc.disable()
            return function(*args, **kwargs)
        finally:
            _PutOff.thread = None  # first: a handler runs after the call, at the earliest
            gc.enable()

    return cast("F", run)


def with_collections(function: F) -> F:
    """Declare that a function takes as long as a disk does (a decorator): garbage is collected while it runs.

    It is for what is called where collections are put off.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if gc.isenabled() or _PutOff.thread != threading.get_ident():
            return function(*args, **kwargs)
        try:
            gc.enable()
            return function(*args, **kwargs)
        finally:
            if _PutOff.thread == threading.get_ident():
                gc.disable()

    return cast("F", run)


class cached_property(Generic[T]):
    """A property that is computed once, and then lies in the instance's ``__dict__``, where it is found first.

    On Python 3.11 the one of ``functools`` holds a lock of its class while it computes. A process that is forked
    meanwhile has a copy of that lock which nobody releases, and waits for ever where it computes one. Without a lock,
    two threads may both compute: the values follow from the instance, so that either will do.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


_log = logging.getLogger("statetree")
_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


def phase(name: str) -> AbstractContextManager[None]:
    """Return what a long phase, such as ``gather.move``, runs in: nothing at all unless somebody watches.

    It is a span of torch's profiler, and a line of the log at DEBUG.
    """
    return _watched(name) if is_profiling() or _log.isEnabledFor(logging.DEBUG) else _NOTHING


@contextmanager
def _watched(name: str) -> Iterator[None]:
    since = time.monotonic()
    with record_function(f"statetree.{name}"):
        yield
    _log.debug("%s: %.6f s", name, time.monotonic() - since)


#: What each object does in a forked process, as long as it lives.
_RENEWED: Final[WeakKeyDictionary[Any, Callable[[Any], None]]] = WeakKeyDictionary()


def renew_after_fork(obj: T, renew: Callable[[T], None]) -> None:
    """Have a function called with an object in forked processes, where threads are gone and locks held by nobody."""
    _RENEWED[obj] = renew


def _renew_all() -> None:
    for obj, renew in list(_RENEWED.items()):
        renew(obj)
    if _PutOff.thread not in (None, threading.get_ident()):  # by a thread that the child lacks
        _PutOff.thread = None
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
