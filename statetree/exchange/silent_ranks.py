"""Which ranks did not answer, found out once a collective has failed: those that do answer say so in the group's store.

Nothing is written as long as all goes well. The store may have gone as well (the first rank usually serves it), or not
answer: then nobody is named.
"""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from statetree.torch_internals import store_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: How long to wait for other ranks to notice that the collective failed, in seconds, and between two looks.
_PATIENCE_S: Final = 1.0
_PAUSE_S: Final = 0.02


def silent_ranks(group: ProcessGroup, rank: int, size: int, patience_s: float) -> list[int]:
    """Return the ranks of a group that have not noticed that a collective failed; none if that cannot be found out.

    Args:
        group: The group. All ranks of it that are alive call this.
        rank: This rank.
        size: How many ranks there are.
        patience_s: How long this may take, at most.
    """
    found: list[int] = []
    limit_s = min(patience_s, _PATIENCE_S)

    def ask() -> None:
        with suppress(Exception):  # the store is gone
            found[:] = _without_answer(store_of(group), rank, size, time.monotonic() + limit_s)

    # A store that does not answer keeps whoever asks it for minutes.
    thread = Thread(target=ask, name="statetree-silent-ranks", daemon=True)
    thread.start()
    thread.join(2 * limit_s)
    return list(found)


def _without_answer(store: Any, rank: int, size: int, deadline: float) -> list[int]:
    store.set(_key(rank), "")
    silent = [other for other in range(size) if other != rank]
    while True:
        silent = [other for other in silent if not store.check([_key(other)])]
        if not silent or time.monotonic() >= deadline:
            return silent
        time.sleep(_PAUSE_S)


def _key(rank: int) -> str:
    return f"statetree/noticed/{rank}"
