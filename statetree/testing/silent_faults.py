"""Silent faults: what copies, stagers and gathers of states got wrong in ways that no error tells.

Each is a function of an implementation that raises ``AssertionError`` if it has the fault. It uses torch alone, so that
its source code is a reproduction that anybody can run.
"""

import dataclasses
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

#: What an implementation is: a copy of a state, a stager, or a gather of a state on all ranks.
COPY, STAGER, GATHER = "copy", "stager", "gather"
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
        check: A function of an implementation, which raises ``AssertionError`` if it has the fault.
        helpers: What the function calls.
    """

    kind: str
    check: Callable[[Any], None] = dataclasses.field(repr=False)
    helpers: tuple[Callable[..., Any], ...] = dataclasses.field(default=(), repr=False)

    @property
    def name(self) -> str:
        """One word or a few."""
        return self.check.__name__

    @property
    def statement(self) -> str:
        """What holds where it is absent, in one line."""
        return str(self.check.__doc__)

    @property
    def source(self) -> str:
        """The check as a program that uses torch alone: whoever runs it adds a call with an implementation."""
        parts = ["\n".join(_IMPORTS), *map(inspect.getsource, (*self.helpers, self.check))]
        return "\n\n\n".join(map(str.rstrip, parts)) + "\n"


def faults_of(kind: str, module: ModuleType) -> list[SilentFault]:
    """Return the faults that a module checks for, in its order; its private functions are helpers of all checks."""
    held = filter(inspect.isfunction, vars(module).values())
    functions = [function for function in held if function.__module__ == module.__name__]
    helpers = tuple([function for function in functions if function.__name__.startswith("_")])
    return [SilentFault(kind, function, helpers) for function in functions if function not in helpers]
