"""What runs in the process of a rank."""

from __future__ import annotations

import datetime
import faulthandler
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

#: Each process group has several open files and threads: a process that has so many files open is not used again.
MAX_OPEN_FILES = 512
#: The file in which a rank writes where it hangs.
STACK = "stack{}"
#: How a call ended: ``returned`` or ``raised``, what it returned or raised, a report, and whether the process is worn.
Answer = tuple[str, bytes, str, bool]
#: The rank of this process, when it has joined its group.
_begun: list[int] = []


def _take_over(path: list[str], environment: dict[str, str]) -> None:
    """Make the caller's path and environment those of this process. By default, gloo listens on the loopback only."""
    sys.path[:] = path
    loopback = [("GLOO_SOCKET_IFNAME", name) for _, name in socket.if_nameindex() if name.startswith("lo")]
    environment = {**dict(loopback[:1]), **environment}
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)


def packed(value: Any) -> bytes:
    """Pickle a value. Storages stay shared, which torch pickles with each tensor by itself."""
    stream = io.BytesIO()
    _TensorPickler(stream).dump(value)
    return stream.getvalue()


class _TensorPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):
            return _typed, (value._untyped_storage, value.dtype)
        if type(value) is torch.UntypedStorage:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)
            return _storage, (value.nbytes() if whole.is_meta else whole.cpu().numpy().tobytes(),)
        return NotImplemented


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _storage(content: bytes | int) -> Any:
    if isinstance(content, int):
        return torch.UntypedStorage(content, device="meta")
    if not content:  # which `frombuffer` refuses
        return torch.UntypedStorage(0)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage().clone()


def pickled_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a call as a rank takes it: what finds modules, and the environment, come before what the call names."""
    return pickle.dumps(((sys.path, dict(os.environ)), packed((fn, args))))


def answer(rank: int, world_size: int, folder: str, collective_timeout: float, call: bytes) -> Answer:
    """Run a call, and join the group before the first one."""
    try:
        caller, rest = pickle.loads(call)
        _take_over(*caller)
        if not _begun:
            _begun.append(rank)
            _join(rank, world_size, Path(folder), collective_timeout)
        fn, args = pickle.loads(rest)
        value = packed(fn(*args))
        is_worn = not dist.is_initialized() or len(os.listdir("/dev/fd")) > MAX_OPEN_FILES
    except BaseException as error:
        return _failure(error)
    return "returned", value, "", is_worn


def _join(rank: int, world_size: int, folder: Path, collective_timeout: float) -> None:
    threading.Thread(target=_end_with_the_caller, args=(folder,), daemon=True).start()
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, file=(folder / STACK.format(rank)).open("w"), all_threads=False)
    store, timeout = (folder / "store").as_uri(), datetime.timedelta(seconds=collective_timeout)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout)


def _end_with_the_caller(folder: Path) -> None:
    """End this process when the one that started it has ended: nothing else does so while a function runs."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    shutil.rmtree(folder, ignore_errors=True)  # the caller does so too, unless it was killed
    # In an orderly exit, threads of groups that are out of step would be waited for.
    os._exit(0)


def _failure(error: BaseException) -> Answer:
    own = error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, own and (own.tb_next or own)))
    try:  # many exceptions cannot be sent, or not put together again
        value = packed(error)
        pickle.loads(value)
    except Exception:
        value = packed(None)
    return "raised", value, text, True


def is_in_step(timeout_s: float) -> bool:
    """Find out whether one more collective on the default group comes out right on this rank."""
    if not dist.is_initialized():  # the function under test ended it
        return True
    timeout = datetime.timedelta(seconds=timeout_s)
    group: Any = dist.group.WORLD
    ranks = torch.tensor([dist.get_rank() + 1], device="cpu")
    options = dist.AllreduceOptions()
    options.timeout = timeout
    group.allreduce([ranks], options).wait(timeout)
    return int(ranks) == dist.get_world_size() * (dist.get_world_size() + 1) // 2
