"""Long phases, for those who watch: spans in torch's profiler, and lines in the log at DEBUG."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch.autograd.profiler import record_function

from statetree.torch_internals import is_profiling

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("statetree")
_NOTHING: AbstractContextManager[None] = nullcontext()


def phase(name: str) -> AbstractContextManager[None]:
    """Return what a phase, such as ``gather.move``, runs in: nothing at all unless somebody watches."""
    return _watched(name) if is_profiling() or _log.isEnabledFor(logging.DEBUG) else _NOTHING


@contextmanager
def _watched(name: str) -> Iterator[None]:
    since = time.monotonic()
    with record_function(f"statetree.{name}"):
        yield
    _log.debug("%s: %.6f s", name, time.monotonic() - since)
