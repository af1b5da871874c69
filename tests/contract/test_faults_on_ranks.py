"""Whatever fails at whatever step of a collective on one rank: no rank hangs, and none goes on as if nothing had."""

import datetime
import functools
import os
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import statetree as st
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, blank, check_in_step
from tests.faults import Fault
from tests.judge import assert_trees_equal
from tests.judge.watch import Watch
from tests.pace import units

#: How long a rank waits for one that has left it in the middle of things, and how late it may be on a busy machine.
TIMEOUT_S = units(1.5)
SLACK_S = units(15)
#: In the middle of things every so many steps are tried: the others have to wait each time.
STRIDE = 25
#: Trees of everything that a collective treats in a way of its own, and what is called on them.
VERBS = {
    "gather": lambda tree, like, whole: functools.partial(st.gather, tree),
    "gather partials": lambda tree, like, whole: functools.partial(st.gather, {**tree, "partials": partials()}),
    "distribute": lambda tree, like, whole: functools.partial(st.distribute, whole, like, src=0),
    "broadcast": lambda tree, like, whole: functools.partial(st.broadcast, tree, src=0),
    "reshard": lambda tree, like, whole: functools.partial(st.reshard, tree, like),
    "partition_replicas": lambda tree, like, whole: functools.partial(st.partition_replicas, tree),
    "chain": lambda tree, like, whole: functools.partial(chained, tree),
}
ALL_CASES = [*((verb, 1) for verb in VERBS), ("distribute", 0), ("broadcast", 0)]
#: They wait for each other's timeouts most of the time, so that `make test` takes some of them only.
CASES = ALL_CASES if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else [("gather", 1), ("distribute", 0)]


def everyone():
    return tuple(range(dist.get_world_size()))


def partials():
    return Layout((4,), everyone(), ("P",)).build()


def make_tree(rows="S0"):
    base = torch.arange(12.0)
    return {
        "rows": Layout((5, 3), everyone(), (rows,)).build(),
        "columns": Layout((4, 6), everyone(), ("S1",), geometry="transposed").build(),
        "copies": Layout((4,), everyone(), ("R",), torch.complex64).build(),
        "tied": [base, base.view(3, 4).t()],
        "parameter": torch.nn.Parameter(torch.arange(3.0)),
        "number": 3,
    }


def chained(tree, **options):
    return st.chain(functools.partial(st.gather, dst=0, **options), st.offload)(tree)


class Attempt(NamedTuple):
    """What became of a call with a fault on one rank: on this one, and where the fault struck if it was here."""

    error: str
    message: str
    elapsed_s: float
    struck: bool
    where: str
    running: list[str]

    @property
    def was_preparing(self):
        """Whether the rank was doing what may fail: the others wait to hear whether it did."""
        calls = zip(self.running, self.running[1:], strict=False)
        return any(outer == "agree" and "<locals>" in inner and inner[:6] != "agree." for inner, outer in calls)


def on_every_rank(value):
    """Return what each rank has, by way of the default group, on which nothing fails."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def attempt_with_fault(call, at, *, here):
    fault = Fault(at if here else 0, MemoryError)
    dist.barrier()
    start = time.monotonic()
    if here:
        with fault.call():
            error, message = attempt(call)
    else:
        error, message = attempt(call)
    struck = here and fault.struck
    return Attempt(error, message, time.monotonic() - start, struck, fault.where, fault.running)


def fresh_group():
    return dist.new_group(timeout=datetime.timedelta(seconds=units(30)))


def fail_each(verb, culprit):
    """Let one rank fail at each step in turn, and look at all of them after each time.

    Returns how often the others were told, and how often they were left alone.
    """
    tree, like = make_tree(), blank(make_tree(rows="S1"))
    whole = st.offload(st.gather(tree))
    call = VERBS[verb](tree, like, whole)
    group = fresh_group()
    expected = call(group=group)
    watch = Watch([tree, like, whole])
    told = left = 0
    at = 1
    while True:
        limited = functools.partial(call, group=group, timeout=TIMEOUT_S)
        attempts = on_every_rank(attempt_with_fault(limited, at, here=dist.get_rank() == culprit))
        own = attempts[culprit]
        others = [other for rank, other in enumerate(attempts) if rank != culprit]
        watch.check()
        if not own.struck:
            break
        assert f"injected at step {at}" in own.message, own
        if all(f"injected at step {at}" in other.message for other in others):
            check_in_step(group)
            told += 1
            at += 1
        else:
            assert not own.was_preparing, (own, others)
            for other in others:  # which may have had all that it needed
                assert not other.error or "did not answer" in other.message, (own, other)
                assert other.elapsed_s < TIMEOUT_S + SLACK_S, (own, other)
            group = fresh_group()
            left += 1
            at += STRIDE
    assert [each.error for each in attempts] == [""] * len(attempts), attempts
    assert_trees_equal(call(group=group), expected)
    return told, left


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "culprit"), CASES, ids=[f"{verb} on rank {culprit}" for verb, culprit in CASES])
def test_whatever_fails_on_one_rank(verb, culprit):
    for told, left in run_ranks(2, fail_each, verb, culprit, timeout=units(100)):
        assert told >= 10
        assert left >= 1
