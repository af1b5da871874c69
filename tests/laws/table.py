"""Laws in a table: drawing a tree takes longer than looking whether a law holds of it, so all of a table share one."""

import inspect
from collections.abc import Callable
from typing import Any


class DoesNotApply(Exception):
    """Raised by a law that says nothing of what was drawn."""


class Table:
    """Functions that each state a law of what was drawn: of its plan, or of that and what else they name."""

    def __init__(self) -> None:
        self.laws: dict[str, Callable[..., None]] = {}

    def __call__(self, law: Callable[..., None]) -> Callable[..., None]:
        self.laws[law.__name__] = law
        return law

    def check(self, **drawn: Any) -> None:
        """Check every law. Each builds trees of its own, so that none sees what another one did to them."""
        for name, law in self.laws.items():
            try:
                law(**{argument: drawn[argument] for argument in inspect.signature(law).parameters})
            except DoesNotApply:
                continue
            except Exception as error:
                error.add_note(f"law: {name}")
                raise
