"""A rank that runs out of memory: every rank raises, whichever allocation it was, and the group is in step."""

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import statetree
from statetree.exchange import buckets, transfers
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, check_in_step, check_same
from tests.pace import units

PACKAGE = Path(statetree.__file__).parent
#: What the ranks tell each other takes little memory, and cannot be refused: by whom would they hear of it?
TALK = {str(PACKAGE / name) for name in ("exchange/consensus.py", "exchange/group.py", "exchange/call.py")}
#: The functions of torch that take memory.
ALLOCATING = {"arange", "cat", "clone", "contiguous", "empty", "empty_strided", "new_empty", "stack", "tensor", "zeros"}


class Exhaustion:
    """Lets the N-th allocation of statetree fail."""

    def __init__(self, at):
        self.left = at
        self.where = ""

    def hook(self, frame, event, called):
        if event != "c_call" or called.__name__ not in ALLOCATING or not _is_torchs(called):
            return
        name = frame.f_code.co_filename
        if not name.startswith(str(PACKAGE)) or name in TALK:
            return
        self.left -= 1
        if self.left == 0:
            self.where = f"{Path(name).name}:{frame.f_lineno}"
            raise MemoryError(self.where)

    def __enter__(self):
        self.before = sys.getprofile()
        sys.setprofile(self.hook)
        return self

    def __exit__(self, *_):
        sys.setprofile(self.before)


def _is_torchs(called):
    module = getattr(called, "__module__", None) or type(getattr(called, "__self__", None)).__module__
    return module.startswith("torch")


def everyone():
    return tuple(range(dist.get_world_size()))


def make_tree(kind="S0"):
    """Return leaves that are packed, leaves too large for that, which lie in strips, and partials."""
    partials = kind == "S0"
    return {
        "large": Layout((600, 1200), everyone(), ("S1" if partials else "S0",)).build(),
        "small": Layout((5, 3), everyone(), (kind,)).build(),
        "copies": Layout((7,), everyone(), ("R",)).build(),
        "partials": Layout((9,), everyone(), ("P" if partials else "R",)).build(),
        "plain": torch.arange(5.0),
    }


def whole_tree():
    shapes = {"large": (600, 1200), "small": (5, 3), "copies": (7,), "partials": (9,), "plain": (5,)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def distribute_from_one():
    mine = whole_tree() if dist.get_rank() == 0 else None
    like = make_tree("S1")
    return lambda: statetree.distribute(mine, like, src=0)


#: What makes a call, apart from memory that is the caller's.
CALLS = {
    "gather": lambda: functools.partial(statetree.gather, make_tree()),
    "gather in slabs": lambda: functools.partial(statetree.gather, make_tree(), bucket_bytes=1 << 20),
    "reshard": lambda: functools.partial(statetree.reshard, make_tree(), make_tree("S1")),
    "reshard in place": lambda: functools.partial(statetree.reshard, make_tree(), make_tree("S1"), in_place=True),
    "distribute": distribute_from_one,
    "broadcast": lambda: functools.partial(statetree.broadcast, make_tree("S1")),
    "partition_replicas": lambda: functools.partial(statetree.partition_replicas, make_tree()),
    "stream": lambda: functools.partial(list, statetree.stream(make_tree(), statetree.gather)),
}


def exhaust(verb):
    """Fail at every allocation of rank 1 in turn, and return at how many places that was."""
    rank = dist.get_rank()
    for number in range(1, 10_000):
        transfers._PLANNED.clear()
        call = CALLS[verb]()
        with Exhaustion(number if rank == 1 else 0) as exhaustion:
            name, message = attempt(call)
        struck = torch.tensor([int(bool(exhaustion.where))])
        dist.all_reduce(struck)
        check_in_step()
        if not struck.item():
            assert not name, message
            return number - 1
        if rank == 1:
            assert name in ("MemoryError", "UnsupportedLeaf"), (number, name, message)
            assert exhaustion.where in message, (number, name, message)
        else:
            assert name == "RankMismatch", (number, name, message)
            assert "rank 1 failed: " in message
            assert "MemoryError: " in message
    raise AssertionError("it never succeeds")


def go_on_beyond():
    """Move in more rounds than memory is taken for in advance, of which the later ones need more."""
    tree = {"a": Layout((2, 3), everyone(), ("S0",)).build(), **make_tree()}
    expected = statetree.gather(tree)
    before, buckets._MAX_SIZED = buckets._MAX_SIZED, 1
    transfers._PLANNED.clear()
    try:
        for nbytes in (200_000, 1 << 20):
            check_same(statetree.gather(tree, bucket_bytes=nbytes), expected)
    finally:
        buckets._MAX_SIZED = before


def test_there_may_be_more_rounds_than_are_sized_in_advance():
    run_ranks(2, go_on_beyond)


@pytest.mark.slow
@pytest.mark.parametrize("verb", CALLS)
def test_every_rank_hears_of_one_without_memory(verb):
    assert min(run_ranks(2, exhaust, verb, timeout=units(60))) > 3
