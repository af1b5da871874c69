"""DCP's failures, a ``BaseException`` with the ranks' errors in it, as statetree's."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException

from statetree.errors import CheckpointError, StateTreeError, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_FULL_BYTES = 1 << 20


@contextmanager
def checkpoint_errors(verb: str, place: Any) -> Iterator[None]:
    """Turn what goes wrong inside into a ``CheckpointError`` that names the place.

    Where the ranks' errors are statetree's own, such as a ``TreeMismatch``, the first rank's is raised as it is, with a
    note that says on which ranks it came up.
    """
    try:
        yield
    except CheckpointException as failure:
        errors = {rank: failure.failures[rank][0] for rank in sorted(failure.failures)}
        raise _from_ranks(verb, place, errors) from next(iter(errors.values()))
    except StateTreeError:
        raise
    except Exception as error:
        msg = f"{verb}: the checkpoint {place}: {_described(error)}. {_remedy(verb, place)}"
        raise CheckpointError(msg) from error


def _from_ranks(verb: str, place: Any, errors: Mapping[int, BaseException]) -> BaseException:
    for error in errors.values():
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return error  # DCP caught the interrupt
    first = next(iter(errors.values()))
    if all(_is_complete(verb, error) for error in errors.values()):
        if set(errors) != {0}:
            first.add_note(f"statetree: raised on rank {', '.join(map(str, errors))}")
        return first.with_traceback(None)
    lines = [f"rank {rank}: {_described(error)}" for rank, error in errors.items()]
    msg = f"{verb}: the checkpoint {place}: {shown(lines)}. {_remedy(verb, place)}"
    return CheckpointError(msg)


def _is_complete(verb: str, error: BaseException) -> bool:
    """Whether an error says all there is to say."""
    if isinstance(error, CheckpointError):
        return str(error).startswith(f"{verb}: ")
    return isinstance(error, StateTreeError)


def _described(error: BaseException) -> str:
    text = str(error).strip().rstrip(".")
    return text if isinstance(error, StateTreeError) else f"{type(error).__name__}: {text}"


def _remedy(verb: str, place: Any) -> str:
    if verb == "load":
        return "The template's tensors may be filled in part. Load another checkpoint."
    free = _free_bytes(place)
    if free is not None and free < _FULL_BYTES:
        return f"The disk is full ({free} bytes are free): it is incomplete. Make room, or save elsewhere."
    return "It is incomplete, and does not load. Save again once the cause is mended."


def _free_bytes(place: Path) -> int | None:
    try:
        return shutil.disk_usage(place).free
    except (OSError, TypeError, ValueError):
        return None
