"""What the ranks of a group tell each other; without a process group, what the one process tells itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from statetree.dcp.internals import is_distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def size_of(group: ProcessGroup | None) -> int:
    """Return the number of ranks (1 without a process group)."""
    return dist.get_world_size(group) if is_distributed() else 1


def is_first(group: ProcessGroup | None) -> bool:
    """Whether this is the rank that acts for all."""
    return not is_distributed() or dist.get_rank(group) == 0


def from_first(value: Any, group: ProcessGroup | None) -> Any:
    """Return what the first rank of a group holds.

    Collective:
        Every rank of the group calls it.
    """
    if size_of(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def from_all(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Return what every rank of a group holds.

    Collective:
        Every rank of the group calls it.
    """
    if size_of(group) == 1:
        return [value]
    values = [None] * size_of(group)
    dist.all_gather_object(values, value, group=group)
    return values
