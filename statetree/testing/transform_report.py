"""What ``check_transform`` found."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from statetree.testing.snippets import reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from statetree.testing.laws import Law

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

    law: Law
    holds: bool | None
    examples: int = 0
    refused: int = 0
    error: str = ""
    source: str = ""

    def after(self, earlier: Verdict | None) -> Verdict:
        """Return the verdict on what this one and an earlier one looked at."""
        if earlier is None:
            return self
        return dataclasses.replace(
            self,
            holds=earlier.holds if self.holds is None else self.holds,
            examples=earlier.examples + self.examples,
            refused=earlier.refused + self.refused,
        )

    def __str__(self) -> str:
        refused = f", {self.refused} refused" if self.refused else ""
        count = f"{self.examples} states{refused}"
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
        return all(verdict.holds is not False for verdict in self.verdicts)

    def __getitem__(self, name: str) -> Verdict:
        return {verdict.law.name: verdict for verdict in self.verdicts}[name]

    @property
    def broken(self) -> list[str]:
        """The names of the laws that do not hold."""
        return [verdict.law.name for verdict in self.verdicts if verdict.holds is False]

    def __str__(self) -> str:
        lines = [f"check_transform: {reference(self.transform)[1]}", *map(str, self.verdicts)]
        for verdict in self.verdicts:
            if verdict.holds is False:
                lines += ["", f"{verdict.law.name} does not hold. {verdict.error}", "", verdict.source.rstrip()]
        return "\n".join(lines)
