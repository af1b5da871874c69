"""Many ranks in one process, by torch's ``LocalTensorMode``."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from statetree.testing.arguments import check_at_least

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def local_ranks(world_size: int) -> Iterator[Any]:
    """Let this process act as all ranks of a group, within a context.

    DTensors then hold the local tensors of all ranks, and torch's operations on them act for each rank. There are no
    processes and no collectives, so that there may be hundreds of ranks. It is for what DTensors do by themselves, such
    as ``distribute_tensor``, ``redistribute`` and ``full_tensor``: statetree's collectives need ranks of their own
    (``run_ranks``).

    Args:
        world_size: How many ranks there are.

    Yields:
        Torch's mode.

    Raises:
        RuntimeError: If there is a default group already, or torch has no such mode.

    Example:
        >>> import torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> from statetree.testing import local_ranks
        >>> with local_ranks(64):
        ...     tensor = distribute_tensor(torch.arange(100.0), init_device_mesh("cpu", (64,)), [Shard(0)])
        ...     sizes = [len(local) for local in tensor.to_local()._local_tensors.values()]
        >>> sizes[:2], sum(sizes)
        ([2, 2], 100)
    """
    check_at_least("local_ranks: world_size", world_size, 1)
    try:  # private: tried with torch 2.13
        from torch.distributed._local_tensor import LocalTensorMode
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        msg = "local_ranks: torch has no LocalTensorMode. Use run_ranks."
        raise RuntimeError(msg) from error
    if dist.is_initialized():
        msg = "local_ranks: there is a default process group already. End it, or use another process."
        raise RuntimeError(msg)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with LocalTensorMode(world_size) as mode:
            yield mode
    finally:
        dist.destroy_process_group()
