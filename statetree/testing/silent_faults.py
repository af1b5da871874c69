"""Silent faults: what copies, stagers and gathers of states got wrong in ways that no error tells.

Each is a function of an implementation that raises ``AssertionError`` if it has the fault. It uses torch alone, so that
its source code is a reproduction that anybody can run.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

#: What an implementation is: a copy of a state, a stager, or a gather of a state on all ranks.
COPY, STAGER, GATHER = "copy", "stager", "gather"
_ARGUMENT = {COPY: "copied", STAGER: "stager", GATHER: "gather"}
_IMPORTS = (
    "import contextlib",
    "import copy",
    "import gc",
    "from collections import OrderedDict, namedtuple",
    "from typing import Any",
    "",
    "import torch",
    "import torch.distributed as dist",
    "",
    'Pair = namedtuple("Pair", ["first", "second"])',
)


@dataclasses.dataclass(frozen=True)
class SilentFault:
    """A fault that no error tells.

    Attributes:
        kind: What kind of implementation may have it: ``copy``, ``stager`` or ``gather``.
        name: One word or a few.
        statement: What holds where it is absent, in one line.
        check: A function of an implementation, which raises ``AssertionError`` if it has the fault.
    """

    kind: str
    name: str
    statement: str
    check: Callable[[Any], None] = dataclasses.field(repr=False)

    @property
    def source(self) -> str:
        """The check as a program that uses torch alone: whoever runs it adds a call with an implementation."""
        lines = inspect.getsource(self.check).splitlines()
        return "\n".join(
            [
                *_IMPORTS,
                "",
                "",
                *lines[lines.index(f"def {self.check.__name__}({_ARGUMENT[self.kind]}: Any) -> None:") :],
                "",
            ]
        )


class FaultTable(list[SilentFault]):
    """The faults of one kind, in the order of tables.

    Args:
        kind: What kind of implementation may have them.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def add(self, statement: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
        """Add a check under its own name (a decorator)."""

        def added(check: Callable[[Any], None]) -> Callable[[Any], None]:
            self.append(SilentFault(self.kind, check.__name__, statement, check))
            return check

        return added
