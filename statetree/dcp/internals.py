"""The private parts of DCP that everything here stands on, each behind one function.

Tried with torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import filesystem

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed.checkpoint.metadata import Metadata


_NOT_IN_GROUP: Any = dist.GroupMember.NON_GROUP_MEMBER


def has_process_group() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def is_alive(group: Any) -> bool:
    """Whether a group was not destroyed, or this process is not in it."""
    try:
        return has_process_group() and (group is _NOT_IN_GROUP or bool(dist.get_process_group_ranks(group)))
    except KeyError:
        return False


def count_groups() -> int:
    """Return how many groups this process is in. Torch names those that are synchronized locally after it."""
    return len(distributed_c10d._world.pg_names)  # noqa: SLF001


def new_gloo_group(ranks: list[int], limit: timedelta) -> Any:
    """Return a new group, which only its ranks make, for at most a time. In use, it waits as long as others do."""
    group = dist.new_group(ranks, limit, "gloo", use_local_synchronization=True)
    distributed_c10d._set_pg_timeout(distributed_c10d.default_pg_timeout, group)  # noqa: SLF001
    return group


def storage_info(name: str, offset: int, length: int) -> Any:
    """Return what DCP's metadata say of a piece: the file, where it begins, and how many bytes it has."""
    return filesystem._StorageInfo(name, offset, length)  # noqa: SLF001


def stamp_version(metadata: Metadata) -> None:
    """Write the version of DCP's format into metadata, where DCP does."""
    if hasattr(metadata, "version"):
        metadata.version = filesystem.CURRENT_DCP_VERSION
