"""What ``check_transform`` found, with counter-examples as tests to paste."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any

from statetree.testing import laws
from statetree.testing.plans import code_of

if TYPE_CHECKING:
    from collections.abc import Callable

_ANSWERS = {True: "yes", False: "NO", None: "?"}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a law holds of a transform.

    Attributes:
        law: The law.
        holds: Whether it held for every state; ``None`` if there was no state of which it says anything.
        examples: How many states it held for.
        refused: How many states the transform raised for.
        error: What the law says of the smallest state for which it does not hold, or what the transform raised first.
        source: A test with that state, to paste; empty if the law holds.
    """

    law: laws.Law
    holds: bool | None
    examples: int = 0
    refused: int = 0
    error: str = ""
    source: str = ""

    def after(self, earlier: Verdict | None) -> Verdict:
        """Return the verdict on what this one and an earlier one looked at."""
        if earlier is None:
            return self
        holds = earlier.holds if self.holds is None else self.holds
        counts = earlier.examples + self.examples, earlier.refused + self.refused
        return dataclasses.replace(self, holds=holds, examples=counts[0], refused=counts[1])

    def __str__(self) -> str:
        count = f"{self.examples} states" + (f", {self.refused} refused" if self.refused else "")
        return f"{self.law.name:<22} {_ANSWERS[self.holds]:<4} {count:<24} {self.law.statement}"


@dataclasses.dataclass(frozen=True)
class Report:
    """Which laws hold of a transform: true if all do, and by name a verdict on each.

    Attributes:
        transform: What was looked at.
        verdicts: One for each law.
    """

    transform: Callable[[Any], Any]
    verdicts: tuple[Verdict, ...]

    def __bool__(self) -> bool:
        return not self.broken

    def __getitem__(self, name: str) -> Verdict:
        return {verdict.law.name: verdict for verdict in self.verdicts}[name]

    @property
    def broken(self) -> list[str]:
        """The names of the laws that do not hold."""
        return [verdict.law.name for verdict in self.verdicts if verdict.holds is False]

    def __str__(self) -> str:
        lines = [f"check_transform: {_named(self.transform)[1]}", *map(str, self.verdicts)]
        for verdict in self.verdicts:
            if verdict.holds is False:
                lines += ["", f"{verdict.law.name} does not hold. {verdict.error}", "", verdict.source.rstrip()]
        return "\n".join(lines)


def snippet(law: laws.Law, transform: Callable[..., Any], plan: Any, world_size: int | None = None) -> str:
    """Return a test that fails because a law does not hold for the tree of a plan."""
    needed, called = _named(transform)
    is_ours = getattr(laws, law.name, None) is law
    law_needed, law_called = ("", f"laws.{law.name}") if is_ours else _named(law.check)
    names = [*(["laws"] if is_ours else []), *(["run_ranks"] if world_size else [])]
    short = "".join(letter if letter.isalnum() else "_" for letter in f"{called.rpartition('.')[2]}_{law.name}")
    arguments = f"{called}, state"
    test = f"run_ranks({world_size}, {law_called}, {arguments})" if world_size else f"{law_called}({arguments})"
    imports = [line for line in dict.fromkeys((needed, law_needed)) if line]
    return "\n".join([*imports, code_of(plan).source(*names), "", "", f"def test_{short}():", f"    {test}", ""])


def _named(function: Any) -> tuple[str, str]:
    """Return the import that a function needs, and what it is called after it.

    What cannot be imported is called by its name, for whoever pastes the test next to it.
    """
    if isinstance(function, functools.partial):
        needed, called = _named(function.func)
        options = [_shown(value) for value in function.args]
        options += [f"{name}={_shown(value)}" for name, value in function.keywords.items()]
        return f"from functools import partial\n{needed}".rstrip(), f"partial({', '.join([called, *options])})"
    name = getattr(function, "__qualname__", "")
    short = name.rpartition(".")[2]
    if getattr(sys.modules["statetree"], short, None) is function:
        return "import statetree as st", f"st.{short}"
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is not None and module.__name__ != "__main__" and getattr(module, name, None) is function:
        return f"from {module.__name__} import {name}", name
    return "", short if short.isidentifier() else "transform"


def _shown(value: Any) -> str:
    return _named(value)[1] if callable(value) else repr(value)
