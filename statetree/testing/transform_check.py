"""``check_transform``: finds out which laws hold of a transform, and shows a state for which one does not as a test."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from statetree.errors import UnsupportedLeaf
from statetree.testing import laws as known
from statetree.testing.pace import units
from statetree.testing.rank_calls import run_ranks
from statetree.testing.sources import literal, module, run, smallest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.testing.laws import Law, Transform

#: What a law says of one state, or the check for a fault; of several ranks, the first of these that one says.
FAILS, HANGS, REFUSES, SAYS_NOTHING, PASSES = OUTCOMES = ("FAILS", "hangs", "refuses", "says nothing", "passes")
_ANSWERS = {True: "yes", False: "NO", None: "?"}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a law holds of a transform: see ``check_transform``."""

    law: Law
    holds: bool | None
    examples: int
    refused: int
    error: str  # of the smallest state for which it does not hold, or what was raised first
    source: str = ""

    def __str__(self) -> str:
        count = f"{self.examples} states" + (f", {self.refused} refused" if self.refused else "")
        return f"{self.law.name:<22} {_ANSWERS[self.holds]:<4} {count:<24} {self.law.statement}"


@dataclasses.dataclass(frozen=True)
class Report:
    """Which laws hold of a transform: true if all do of which a state says anything, and by name a verdict on each."""

    transform: Callable[[Any], Any]
    verdicts: tuple[Verdict, ...]

    def __bool__(self) -> bool:
        return not self.broken and (not self.verdicts or any(verdict.holds for verdict in self.verdicts))

    def __getitem__(self, name: str) -> Verdict:
        return {verdict.law.name: verdict for verdict in self.verdicts}[name]

    @property
    def broken(self) -> list[str]:
        """The names of the laws that a state breaks."""
        return [verdict.law.name for verdict in self.verdicts if verdict.holds is False]

    @property
    def _not_judged(self) -> list[str]:
        """Say why no state tells whether some laws hold."""
        names: dict[tuple[str, str], list[str]] = {}
        for verdict in self.verdicts:
            if verdict.holds is None:
                why = "the transform refused every state" if verdict.refused else "no result could be looked at"
                names.setdefault((why, verdict.error), []).append(verdict.law.name)
        return [
            f"{', '.join(found)}: not judged, since {why}. Mend the transform, or leave these laws out. "
            f"The first error: {error}"
            for (why, error), found in names.items()
        ]

    def __str__(self) -> str:
        lines = [f"check_transform: {_named(self.transform)[1]}", *map(str, self.verdicts)]
        for verdict in map(self.__getitem__, self.broken):
            lines += ["", f"{verdict.law.name} does not hold. {verdict.error}", "", verdict.source.rstrip()]
        for text in self._not_judged:
            lines += ["", text]
        return "\n".join(lines)


class Refusal(Exception):
    """What an implementation raised, and not what judges it."""


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises a ``Refusal`` where the given one raises anything."""

    def called(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise Refusal(f"{type(error).__name__}: {error}") from error

    return called


def on_ranks(world_size: int, call: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Say what a call found that every rank makes: its outcome, and what was said."""
    try:
        found = run_ranks(world_size, call, timeout=units(20), collective_timeout=units(2))
    except AssertionError as error:  # a rank hangs, or has left the others in the middle of things
        return HANGS, str(error)
    return min(found, key=lambda each: OUTCOMES.index(each[0]))


def check_transform(
    fn: Transform,
    *,
    laws: Iterable[Law | str] | None = None,
    inverse: Transform | None = None,
    ranks: int | Sequence[int] | None = None,
    examples: int = 200,
    seed: int = 0,
) -> Report:
    """Find out which laws hold of a transform of states, or make sure that some do.

    A law is checked with ordinary training states, with states that are known to be hard, and with trees that
    hypothesis draws: the same ones in every run. The first state that breaks the law is reduced, and shown as a test
    that can be pasted. An exception of the transform breaks only the law ``accepts``: the other laws are checked on
    accepted states, and not judged if there is none.

    Args:
        fn: A function of one tree.
        laws: Those that must hold: laws, or names of ``statetree.testing.laws``. By default all of these are checked,
            and none must hold.
        inverse: A function from each result back to the state. Then the round trip is one more law.
        ranks: A world size, or several. The function is called as a collective on real ranks, with states that hold
            DTensors. It must be picklable.
        examples: How many states there are, at least 1.
        seed: Another number gives other examples.

    Returns:
        A report, which is true if all laws hold of which a state says anything (and of one at least), and prints as a
        table with a test for each law that a state breaks.
        ``broken`` are the names of these; ``report[name]`` has ``holds`` (``None`` if no state says anything of it),
        ``examples``, ``refused`` (for how many states the transform raised), ``error``, and ``source``, the test.

    Raises:
        AssertionError: If ``laws`` are given and one does not hold, or the transform refuses every state. It shows the
            report, with the first error.
        TypeError: If ``fn`` or ``inverse`` cannot be called.
        ValueError: If ``laws``, ``ranks`` or ``examples`` are not what they may be.

    Example:
        >>> import torch
        >>> import statetree as st
        >>> from statetree.testing import check_transform
        >>> def untied(state):
        ...     return st.map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)
        >>> report = check_transform(untied, examples=100)
        >>> report["pure"].holds, report["ties"].holds
        (True, False)
    """
    if not callable(fn):
        raise TypeError(f"check_transform: fn: expected a function of a tree, got {fn!r}.")
    if inverse is not None and not callable(inverse):
        raise TypeError(f"check_transform: inverse: expected a function of a result, got {inverse!r}.")
    if type(examples) is not int or examples < 1:
        raise ValueError(f"check_transform: examples: expected a whole number of at least 1, got {examples!r}.")
    world_sizes: list[int | None] = list(ranks) if isinstance(ranks, Iterable) else [ranks]
    if ranks is not None and not (world_sizes and all(type(size) is int and size > 0 for size in world_sizes)):
        raise ValueError(f"check_transform: ranks: expected a world size, or several, such as (1, 2), got {ranks!r}.")
    chosen = [_known(law) for law in ((known.ALL if ranks is None else known.COLLECTIVE) if laws is None else laws)]
    if inverse is not None:
        chosen.append(known.round_trip(inverse))
    report = report_on(fn, chosen, world_sizes, examples, seed)
    if laws is not None and not all(verdict.holds for verdict in report.verdicts):
        raise AssertionError(str(report))
    return report


def report_on(
    fn: Transform, laws: Iterable[Law], world_sizes: Iterable[int | None] = (None,), examples: int = 200, seed: int = 0
) -> Report:
    """Find out which of some laws hold of a transform."""
    from statetree.testing import states  # which needs hypothesis

    tried = {size: states.states_for(size, examples, seed) for size in world_sizes}
    return Report(fn, tuple([_judged(law, fn, tried) for law in laws]))


def _known(law: Any) -> Law:
    found: Any = law if isinstance(law, known.Law) else getattr(known, str(law), None)
    if not isinstance(found, known.Law):
        names = ", ".join(each.name for each in known.ALL)
        msg = f"check_transform: laws: expected laws, or names of some ({names}, and others), got {law!r}."
        raise ValueError(msg)  # noqa: TRY004 - it may well be a name
    return found


def _judged(law: Law, transform: Transform, states: dict[int | None, list[str]]) -> Verdict:
    """Look for the first state for which a law does not hold, and make it small."""
    counts: Counter[str] = Counter()
    first = ""
    for world_size, some in states.items():
        for state in some:
            call = functools.partial(outcome, law, transform, state)
            found, said = call() if world_size is None else on_ranks(world_size, call)
            counts[found] += 1
            first = first or said
            if found in (FAILS, HANGS):
                small = state  # those with ranks are small already
                if world_size is None:
                    small = smallest(state, lambda other: outcome(law, transform, other)[0] == FAILS)
                said = said if small is state else outcome(law, transform, small)[1]
                source = snippet(law, transform, small, world_size)
                return Verdict(law, False, counts[PASSES], counts[REFUSES], said, source)  # noqa: FBT003 - it is named
    return Verdict(law, True if counts[PASSES] else None, counts[PASSES], counts[REFUSES], first)


def outcome(law: Law, transform: Callable[[Any], Any], state: str) -> tuple[str, str]:
    """Say whether a law holds for a state."""
    try:
        law(guarded(transform), functools.partial(run, state))
    except AssertionError as error:
        return FAILS, str(error)
    except Refusal as error:
        return FAILS if law is known.accepts else REFUSES, str(error)
    except UnsupportedLeaf as error:  # of what the law does with a result
        return SAYS_NOTHING, f"{type(error).__name__}: {error}"
    return PASSES, ""


def snippet(law: Law, transform: Callable[..., Any], state: str, world_size: int | None = None) -> str:
    """Return a test that fails because a law does not hold for a state."""
    needed, called = _named(transform)
    is_ours = getattr(known, law.name, None) is law
    law_needed, law_called = ("", f"laws.{law.name}") if is_ours else _named(law.check)
    names = [*(["laws"] if is_ours else []), *(["run_ranks"] if world_size else [])]
    own = called.removeprefix("partial(").partition(",")[0].rpartition(".")[2]
    short = "".join(letter if letter.isalnum() else "_" for letter in f"{own}_{law.name}")
    arguments = f"{called}, state"
    test = f"run_ranks({world_size}, {law_called}, {arguments})" if world_size else f"{law_called}({arguments})"
    imports = [line for line in dict.fromkeys((needed, law_needed)) if line]
    imports += [f"import {name}" for name in ("pickle", "torch") if f"{name}." in called and f"{name}." not in state]
    return "\n".join([*imports, module(state, *names), "", "", f"def test_{short}():", f"    {test}", ""])


def _named(function: Any) -> tuple[str, str]:
    """Return the import that a function needs, and what it is called after it.

    What cannot be imported is called by its name, for whoever pastes the test next to it.
    """
    if isinstance(function, functools.partial):
        shown = [("", _named(function.func)), *(("", _shown(value)) for value in function.args)]
        shown += [(f"{name}=", _shown(value)) for name, value in function.keywords.items()]
        needed = dict.fromkeys(["from functools import partial", *(line for _, (line, _) in shown if line)])
        return "\n".join(needed), f"partial({', '.join([name + called for name, (_, called) in shown])})"
    name = getattr(function, "__qualname__", "")
    short = name.rpartition(".")[2]
    if getattr(sys.modules["statetree"], short, None) is function:
        return "import statetree as st", f"st.{short}"
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    with contextlib.suppress(AttributeError):  # it is local to a function
        if module is not None and module.__name__ != "__main__" and attrgetter(name)(module) is function:
            return f"from {module.__name__} import {name.partition('.')[0]}", name
    return "", short if short.isidentifier() else "transform"


def _shown(value: Any) -> tuple[str, str]:
    if callable(value):
        return _named(value)
    with contextlib.suppress(ValueError, SyntaxError):
        ast.literal_eval(repr(value))
        return "", repr(value)
    with contextlib.suppress(Exception):  # of what cannot be pickled
        return "", literal(value)
    return "", repr(value)
