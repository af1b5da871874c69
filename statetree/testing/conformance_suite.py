"""``conformance``: looks whether an implementation of somebody else's has one of the silent faults that we know of."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from statetree.testing import faults, gather_faults
from statetree.testing.transform_check import FAILS, HANGS, PASSES, REFUSES, Refusal, guarded, on_ranks

#: What an implementation is, by what the checks call it: a copy of a state, a stager, or a gather of it on all ranks.
COPY, STAGER, GATHER = "copy", "stager", "gather"
_KINDS = {"copied": COPY, "stager": STAGER, "gather": GATHER}
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class SilentFault:
    """A fault that no error tells.

    Attributes:
        kind: What kind of implementation may have it: ``copy``, ``stager`` or ``gather``.
        name: One word or a few.
        statement: What holds where it is absent, in one line.
        check: A function that raises ``AssertionError`` if an implementation has it.
    """

    kind: str
    name: str
    statement: str
    check: Callable[[Any], None] = dataclasses.field(repr=False)

    @property
    def source(self) -> str:
        """The check as a program that uses torch alone: whoever runs it adds a call with an implementation."""
        text = inspect.getsource(self.check)
        module: Any = inspect.getmodule(self.check)
        imports, *functions = inspect.getsource(module).partition('"""\n\n')[2].split("\n\n\n")
        helpers = [each for each in functions if each.startswith("def _") and each[4 : each.index("(")] in text]
        return "\n\n\n".join([imports, *helpers, text])


#: All faults that we know of, in the order of tables.
FAULTS = tuple(
    [
        SilentFault(_KINDS[made.__code__.co_varnames[0]], made.__name__, str(made.__doc__), made)
        for module in (faults, gather_faults)
        for made in vars(module).values()
        if inspect.isfunction(made) and made.__module__ == module.__name__ and made.__name__[0] != "_"
    ]
)


class StagerAdapter:
    """A stager as the suite calls it: with ``stage``, ``wait`` and ``close``, whichever of the last two it has."""

    def __init__(self, stager: Any, called: Callable[[Function], Function] = lambda function: function) -> None:
        def result(staged: Any) -> Any:
            return staged.result() if hasattr(staged, "result") else staged

        self.stage, self.wait = called(stager.stage), called(getattr(stager, "wait", result))
        self.close = called(getattr(stager, "close", lambda: None))

    def copied(self, state: Any) -> Any:
        """Stage a state, and wait for the copy."""
        return self.wait(self.stage(state))


@dataclasses.dataclass(frozen=True)
class FaultVerdict:
    """Whether an implementation has a fault: see ``conformance``."""

    fault: SilentFault
    outcome: str
    said: str = ""  # what was noticed, or what was raised

    def __str__(self) -> str:
        said = f": {self.said.splitlines()[0][:80]}" if self.said else ""
        return f"{self.fault.kind:<7} {self.fault.name:<32} {self.outcome}{said}"


@dataclasses.dataclass(frozen=True)
class Conformance:
    """Which silent faults an implementation has: true if it has none, and by name a verdict on each."""

    verdicts: tuple[FaultVerdict, ...]

    def __bool__(self) -> bool:
        return not self.failed

    def __getitem__(self, name: str) -> FaultVerdict:
        return {verdict.fault.name: verdict for verdict in self.verdicts}[name]

    @property
    def failed(self) -> list[str]:
        """The names of the faults that the implementation has."""
        return [verdict.fault.name for verdict in self.verdicts if verdict.outcome == FAILS]

    def __str__(self) -> str:
        count = f"{len(self.failed)} of {len(self.verdicts)} silent faults"
        return "\n".join([f"conformance: {count}", *map(str, self.verdicts)])


def conformance(
    *,
    stager: Callable[[], Any] | None = None,
    gather: Function | None = None,
    copy: Function | None = None,
    world_size: int = 2,
) -> Conformance:
    """Check implementations for the silent faults that we know.

    A fault is silent if a wrong result is returned and nothing is raised. Each check uses torch alone;
    ``verdict.fault.source`` is its code, which reproduces the fault without statetree.

    Args:
        stager: A function that makes a stager: an object with ``stage(state)``; with ``wait(staged)``, unless ``stage``
            returns the copy or a future of it; and with ``close()``, if it has to be closed. Each fault gets a new one.
            The state is changed after ``wait``, and not before.
        gather: A function of a state that holds DTensors, which every rank calls, and which returns it with whole
            tensors. It must be picklable.
        copy: A function of a state that returns a copy.
        world_size: How many ranks call ``gather``.

    Returns:
        A report, which is true if there is no silent fault, and prints as a table. ``failed`` are the names of faults;
        ``report[name]`` has the ``fault``, what was ``said``, and the ``outcome``: ``passes``, ``FAILS``, or
        ``refuses`` if an error is raised.

    Raises:
        TypeError: If no implementation is given, or one cannot be called.

    Example:
        >>> import copy
        >>> from statetree.testing import conformance
        >>> found = conformance(copy=copy.deepcopy)
        >>> found["tied_weights"].outcome, found["parameter_tied_to_its_tensor"].outcome
        ('passes', 'FAILS')
    """
    given = {COPY: copy, STAGER: stager, GATHER: gather}
    if not any(given.values()) or not all(value is None or callable(value) for value in given.values()):
        raise TypeError(f"conformance: expected functions as copy, stager or gather, got {given!r}.")
    found = []
    for fault in FAULTS:
        if fault.kind == COPY and copy is not None:
            found.append(FaultVerdict(fault, *_of_function(fault, copy)))
        if fault.kind != GATHER and stager is not None:
            found.append(FaultVerdict(fault, *_outcome(functools.partial(_with_stager, fault, stager))))
        if fault.kind == GATHER and gather is not None:
            outcome, said = on_ranks(world_size, functools.partial(_of_function, fault, gather))
            verdict = (FAILS, f"ranks hang or leave each other: {said}") if outcome == HANGS else (outcome, said)
            found.append(FaultVerdict(fault, *verdict))
    return Conformance(tuple(found))


def _outcome(look: Callable[[], Any]) -> tuple[str, str]:
    try:
        look()
    except Refusal as error:
        return REFUSES, str(error)
    except Exception as error:  # a result that is not even of the shape that the check looks at
        return FAILS, f"{type(error).__name__}: {error}".removeprefix("AssertionError: ")
    return PASSES, ""


def _of_function(fault: SilentFault, function: Function) -> tuple[str, str]:
    return _outcome(functools.partial(fault.check, guarded(function)))


def _with_stager(fault: SilentFault, make: Callable[[], Any]) -> None:
    stager = StagerAdapter(guarded(make)(), guarded)
    try:
        fault.check(stager.copied if fault.kind == COPY else stager)
    finally:
        with contextlib.suppress(Refusal):  # a check may have closed it
            stager.close()
