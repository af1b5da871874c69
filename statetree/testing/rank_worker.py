"""What runs in the process of a rank."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from statetree.testing.rank_line import framed, read_message

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

#: Each process group has several open files and threads: a process that has so many files open is not used again.
MAX_OPEN_FILES = 512


class Answer(NamedTuple):
    """How a call ended on one rank.

    The value is pickled by itself: whether it can be unpickled elsewhere, the rank cannot know.
    """

    status: str
    value: bytes
    traceback: str
    worn: bool


def serve(rank: int, world_size: int, folder: str, collective_timeout: float, end: socket.socket) -> None:
    """Join the group, and answer the calls that come through a socket until there is no one at its other end."""
    # Daemons, which ranks are so that they end with whoever started them, may not start processes, but DCP does.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    end.settimeout(None)  # whatever was the default where it was made
    with (Path(folder) / f"stack{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        failure = _join(rank, world_size, folder, collective_timeout)
        with contextlib.suppress(ConnectionError), end.makefile("rb") as stream:
            while (call := read_message(stream)) is not None:
                end.sendall(framed(failure or _answer(call)))
    # In an orderly exit, threads of groups that are out of step would be waited for.
    os._exit(0)


def pickled_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a call as a rank takes it: the path of modules comes first, so that what the call names is found."""
    return pickle.dumps((sys.path, pickle.dumps((fn, args))))


def _join(rank: int, world_size: int, folder: str, collective_timeout: float) -> bytes | None:
    """Start the process group; return what to answer to all calls if that fails."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=(Path(folder) / "store").as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=collective_timeout),
        )
    except Exception as error:
        return _failure(error)
    return None


def _answer(call: bytes) -> bytes:
    try:
        path, rest = pickle.loads(call)
        sys.path[:] = path
        fn, args = pickle.loads(rest)
        value = fn(*args)
        return pickle.dumps(Answer("returned", pickle.dumps(value), "", _is_worn()))
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> bytes:
    own = error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, own and (own.tb_next or own)))
    try:  # many exceptions cannot be sent, or not put together again
        value = pickle.dumps(error)
        pickle.loads(value)
    except Exception:
        value = pickle.dumps(None)
    return pickle.dumps(Answer("raised", value, text, worn=True))


def is_in_step(timeout_s: float) -> bool:
    """Find out whether one more collective on the default group comes out right on this rank."""
    if not dist.is_initialized():  # the function under test ended it
        return True
    timeout = datetime.timedelta(seconds=timeout_s)
    group: Any = dist.group.WORLD
    ranks = torch.tensor([dist.get_rank() + 1])
    options = dist.AllreduceOptions()
    options.timeout = timeout
    group.allreduce([ranks], options).wait(timeout)
    return int(ranks) == dist.get_world_size() * (dist.get_world_size() + 1) // 2


def _is_worn() -> bool:
    return bool(not dist.is_initialized()) or len(os.listdir("/dev/fd")) > MAX_OPEN_FILES
