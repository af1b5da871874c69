"""What a checkpointer tells of what it does: to a function of the caller's, and to the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.errors import unsignalled
from statetree.tree.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("statetree")


class Event(NamedTuple):
    """Something that a ``Checkpointer`` has done, passed to ``on_event``.

    Attributes:
        kind: ``stage``, ``save``, ``upload``, ``removal`` or ``restore``.
        step: The step of the checkpoint.
        seconds: How long it took.
        bytes: The bytes of the checkpoint's files; of ``stage``, those of this rank's tensors. They are sizes, not
            work: files that an incremental save links, and frozen tensors that a stage does not copy, count too.
        waited: How many seconds the caller waited; of an ``async_save``, with the wait for the save before it.
    """

    kind: str
    step: int
    seconds: float
    bytes: int
    waited: float


def is_told(on_event: Callable[[Event], object] | None) -> bool:
    """Whether anybody hears of a stage, for which its bytes are counted."""
    return on_event is not None or _log.isEnabledFor(logging.DEBUG)


def local_bytes(tree: Any) -> int:
    """Return the bytes of the tensors of a tree that this rank holds."""
    found = (leaf.to_local() if hasattr(leaf, "to_local") else leaf for leaf in flatten(tree)[0])
    return sum(leaf.numel() * leaf.element_size() for leaf in found if isinstance(leaf, torch.Tensor))


def tell(on_event: Callable[[Event], object] | None, event: Event, *, is_first: bool) -> None:
    """Tell of an event. The log has those of the first rank at INFO. What ``on_event`` raises is logged."""
    level = logging.INFO if is_first and event.kind != "stage" else logging.DEBUG
    _log.log(level, "%s of step %d: %.3f s, %d bytes, waited %.3f s", *event)
    try:
        if on_event is not None:
            on_event(event)
    except unsignalled(Exception):  # whatever watches is not to stop the training
        _log.warning("on_event failed with %s", event, exc_info=True)
