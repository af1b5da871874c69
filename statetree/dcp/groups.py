"""What the ranks of a group tell each other and decide together; without a group, what the one process tells itself.

Whether there are ranks is decided once, when a save or load begins: a job that destroys its groups meanwhile must not
make each rank go on alone.
"""

from __future__ import annotations

import pickle
import threading
from contextlib import contextmanager
from hashlib import blake2b
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from statetree.errors import CheckpointError, RankMismatch, StateTreeError, shown, unsignalled
from statetree.exchange.call import Call, on_all_ranks
from statetree.exchange.consensus import Fingerprint
from statetree.exchange.group import Group, group_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

    from torch.distributed import ProcessGroup

T = TypeVar("T")
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


#: Private parts of torch, tried with 2.11.0, 2.13.0 and 2.15.0, here and in ``_named``.
_set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # noqa: SLF001
_SORTS: Final = "sort_ranks" not in signature(dist.new_group).parameters
#: The number of the next group, greater than that of any group that this process has been in.
_next = [0]


def new_gloo_group(parent: ProcessGroup | None, limit: timedelta = distributed_c10d.default_pg_timeout) -> Any:
    """Return a new group of another one's ranks, or of this rank alone, which only these ranks make.

    Making it takes at most a time. In use, it waits as long as others do.
    """
    ranks = [dist.get_rank()] if parent is None else dist.get_process_group_ranks(parent)
    number = max(from_all("torch.distributed.new_group", _next[0], parent))
    _next[0] = max(_next[0], number + 1)
    order: dict[str, Any] = {} if _SORTS else {"sort_ranks": False}
    name = blake2b(f"{ranks} {number}".encode(), digest_size=16).hexdigest()  # the ranks may be thousands
    with _named(f"statetree.{name}"):
        group = dist.new_group(ranks, limit, "gloo", use_local_synchronization=True, **order)
    _set_timeout(distributed_c10d.default_pg_timeout, group)
    return group


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Have torch give a name to the group that this thread makes.

    Torch names a group that only its ranks make after these and a number: that of the groups which this process is in,
    and since 2.15 a count of all that it has made, which also names groups that all ranks make. Where ranks have been
    in different groups, these differ: each waits for the others under another name, now or in a later group.
    """
    thread, original = threading.get_ident(), distributed_c10d._process_group_name  # noqa: SLF001
    names = [name]  # none, once it is made: another thread may have come between

    def given(*args: Any, **options: Any) -> Any:
        return names[0] if names and threading.get_ident() == thread else original(*args, **options)

    distributed_c10d._process_group_name = given  # noqa: SLF001
    try:
        yield
    finally:
        names.clear()
        if distributed_c10d._process_group_name is given:  # noqa: SLF001
            distributed_c10d._process_group_name = original  # noqa: SLF001


def group_for(verb: str, given: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group that a call is for: the given one, or all ranks; ``None`` where there are none."""
    group = dist.group.WORLD if given is None and has_process_group() else given
    ranks_of(verb, group)
    return group


def ranks_of(verb: str, group: ProcessGroup | None) -> Group:
    """Return the ranks of a group, as leaf types want to know them; raise ``CheckpointError`` if it was destroyed."""
    if group is None:
        return Group(None, 0, [0], verb)
    if not is_alive(group):
        raise CheckpointError(
            f"{verb}: the process group was destroyed: expected it to last until the {verb} is done. Wait for what "
            "runs in the background (its future, or Checkpointer.close) before destroy_process_group."
        )
    return group_of(verb, group, None)


def is_first(group: ProcessGroup | None) -> bool:
    """Whether this is the rank that acts for all."""
    return group is None or dist.get_rank(group) == 0


def from_all(verb: str, value: Any, group: ProcessGroup | None) -> list[Any]:
    """Return what every rank of a group holds; raise ``RankMismatch`` if one does not answer. Every rank calls it."""
    if group is None:
        return [value]
    ranks = ranks_of(verb, group)
    with Call(verb, ranks) as call:  # ranks that make another call hear of it
        said = pickle.dumps(value)
        call.agree(Fingerprint(verb))
    told = ranks.told_once(said)
    by_rank = {rank: pickle.loads(text) for text, speakers in told for rank in speakers}
    return [by_rank[rank] for rank in sorted(by_rank)]


def told_to_first(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Return, on the first rank, what every rank holds; nothing on the others. Every rank calls it."""
    if group is None:
        return [value]
    values = [None] * dist.get_world_size(group) if is_first(group) else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def dealt_by_first(values: list[Any], group: ProcessGroup | None) -> Any:
    """Return the one of the first rank's values that is for this one. Every rank calls it."""
    if group is None:
        return values[0]
    own: list[Any] = [None]
    dist.scatter_object_list(own, values if is_first(group) else None, group=group, group_src=0)
    return own[0]


def by_first(verb: str, group: ProcessGroup | None, action: Callable[[], T]) -> T:
    """Let the first rank act on the directory, and return on every rank what it returned, or raise what it raised."""
    ranks = ranks_of(verb, group)

    def act() -> bytes | None:
        try:
            return None if ranks.rank else pickle.dumps(action())
        except CheckpointError:
            raise
        except unsignalled(Exception) as error:
            raise CheckpointError(
                f"{verb}: the first rank could not use the directory: {type(error).__name__}: {error}. Mend the cause, "
                "and try again; complete checkpoints are untouched."
            ) from error

    ((said, _),) = ranks.told_once(on_all_ranks(verb, ranks, act))
    return pickle.loads(said)  # type: ignore[no-any-return]


def check_same(verb: str, what: str, text: str, group: ProcessGroup | None) -> None:
    """Raise on every rank if the ranks were not given the same."""
    texts = from_all(verb, text, group)
    if len(set(texts)) > 1:
        given = shown([f"rank {rank}: {text}" for rank, text in enumerate(texts)])
        msg = f"{verb}: {what} differs over the ranks: expected the same on all, got:\n  {given}\nPass the same {what}."
        raise RankMismatch(msg)


@contextmanager
def save_errors(place: Any) -> Iterator[None]:
    """Turn what goes wrong in a save into a ``CheckpointError`` that names the place."""
    try:
        yield
    except StateTreeError:
        raise
    except unsignalled(Exception) as error:
        what = f"{type(error).__name__}: {str(error).strip().rstrip('.')}"
        remedy = "It is incomplete, and does not load. Save again once the cause is mended."
        raise CheckpointError(f"save: the checkpoint {place}: {what}. {remedy}") from error
