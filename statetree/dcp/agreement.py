"""What the ranks of a group decide together about a directory: one acts, all hear of it, or all raise."""

from __future__ import annotations

from traceback import StackSummary
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from statetree.dcp.groups import check_alive, from_all, from_first, is_first
from statetree.errors import CheckpointError, RankMismatch, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

T = TypeVar("T")


def by_first(verb: str, group: ProcessGroup | None, action: Callable[[], T]) -> T:
    """Let the first rank act on the directory, and return on every rank what it returned, or raise what it raised."""
    check_alive(verb, group)
    outcome: Any = None
    cause: BaseException | None = None
    if is_first(group):
        try:
            outcome = action()
        except CheckpointError as error:
            outcome = error
        except BaseException as error:  # noqa: BLE001 - also an interrupt: the others must not be left waiting
            cause = error
            outcome = CheckpointError(
                f"{verb}: the first rank could not use the directory: {type(error).__name__}: {error}. Mend the cause, "
                "and try again; complete checkpoints are untouched."
            )
    told = from_first(outcome, group)
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    if isinstance(told, CheckpointError):
        raise told from cause
    return told  # type: ignore[no-any-return]


def on_all(step: str, group: ProcessGroup | None, action: Callable[[], T]) -> T:
    """Act on every rank of a group, and wait for the others.

    Raises:
        CheckpointException: On every rank if the action raised on any, with what each of these raised, as DCP has it.
    """
    result: Any = None
    error: BaseException | None = None
    try:
        result = action()
    except BaseException as raised:  # noqa: BLE001 - also an interrupt: the others must not be left waiting
        error = raised
    found = from_all(error, group)
    failures = {rank: (raised, StackSummary()) for rank, raised in enumerate(found) if raised is not None}
    if failures:
        raise CheckpointException(step, failures)
    return result  # type: ignore[no-any-return]


def check_same(verb: str, what: str, text: str, group: ProcessGroup | None) -> None:
    """Raise on every rank if the ranks were not given the same."""
    texts = from_all(text, group)
    if len(set(texts)) > 1:
        given = shown([f"rank {rank}: {text}" for rank, text in enumerate(texts)])
        msg = f"{verb}: {what} differs over the ranks: expected the same on all, got:\n  {given}\nPass the same {what}."
        raise RankMismatch(msg)


def raise_together(verb: str, error: BaseException | None, what: str, remedy: str, group: ProcessGroup | None) -> None:
    """Raise on every rank if there is an error on any: a rank's own, or a ``CheckpointError`` that names the others'.

    Args:
        verb: On whose behalf.
        error: What came up on this rank, if anything did.
        what: What failed, for the message.
        remedy: What to do.
        group: The ranks.
    """
    told = from_all(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if failed:
        msg = f"{verb}: {what} on other ranks:\n  {shown(failed)}\n{remedy}"
        raise CheckpointError(msg)
