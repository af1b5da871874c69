"""What the ranks of a group tell each other; without a group, what the one process tells itself.

Whether there are ranks is decided once, when a save or load begins: a job that destroys its groups meanwhile must not
make each rank go on alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from statetree.dcp.internals import has_process_group, is_alive
from statetree.errors import CheckpointError
from statetree.exchange.group import Group, group_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_for(verb: str, given: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group that a call is for: the given one, or all ranks; ``None`` where there are none.

    Raises:
        CheckpointError: If the group was destroyed.
        RankMismatch: If this process is not in the group.
    """
    group = dist.group.WORLD if given is None and has_process_group() else given
    check_alive(verb, group)
    ranks_of(verb, group)
    return group


def check_alive(verb: str, group: ProcessGroup | None) -> None:
    """Raise ``CheckpointError`` if a group was destroyed."""
    if group is not None and not is_alive(group):
        msg = (
            f"{verb}: the process group was destroyed: expected it to last until the {verb} is done. Wait for what "
            "runs in the background (its future, or Checkpointer.close) before destroy_process_group."
        )
        raise CheckpointError(msg)


def ranks_of(verb: str, group: ProcessGroup | None) -> Group:
    """Return the ranks of a group, as leaf types want to know them."""
    return Group(None, 0, [0], verb) if group is None else group_of(verb, group, None)


def group_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks (1 without a group)."""
    return 1 if group is None else dist.get_world_size(group)


def is_first(group: ProcessGroup | None) -> bool:
    """Whether this is the rank that acts for all."""
    return group is None or dist.get_rank(group) == 0


def from_first(value: Any, group: ProcessGroup | None) -> Any:
    """Return what the first rank of a group holds.

    Collective:
        Every rank of the group calls it.
    """
    if group_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def from_all(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Return what every rank of a group holds.

    Collective:
        Every rank of the group calls it.
    """
    if group_size(group) == 1:
        return [value]
    values = [None] * group_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
