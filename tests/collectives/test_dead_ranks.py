"""Ranks that were killed or stopped: with a timeout, the others raise in time."""

import contextlib
import datetime
import functools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import statetree
from statetree.exchange.group import Group
from statetree.testing import Layout
from tests.collectives.checks import attempt
from tests.collectives.disagreements import VERBS, usual_call
from tests.pace import units
from tests.ranks import rank_outcomes

TIMEOUT_S = float(round(units(1)))
#: How late an error may be on a busy machine.
SLACK_S = units(10)


def outlive(number):
    """Make every collective without rank 1, each on a group of its own: a group that timed out is of no more use."""
    pids = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    groups = {verb: dist.new_group(timeout=datetime.timedelta(seconds=units(30))) for verb in (*VERBS, "stream")}
    calls = {verb: usual_call(verb, 0) for verb in VERBS}
    tree = calls["gather"].tree
    for group in groups.values():
        dist.barrier(group)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    found = {}
    for verb, group in groups.items():
        start = time.monotonic()
        if verb == "stream":
            step = functools.partial(statetree.gather, group=group, timeout=TIMEOUT_S)
            outcome = attempt(lambda step=step: list(statetree.stream(tree, step)))
        else:
            limit = TIMEOUT_S if verb == "gather" else datetime.timedelta(seconds=TIMEOUT_S)
            calls[verb].options.update(group=group, timeout=limit)
            outcome = attempt(calls[verb])
        found[verb] = (*outcome, time.monotonic() - start)
    if dist.get_rank() == 0:
        with contextlib.suppress(ProcessLookupError):  # it is dead already
            os.kill(int(pids[1]), signal.SIGKILL)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_raise_in_time(number):
    outcomes = rank_outcomes(3, outlive, number, timeout=units(55), collective_timeout=units(30))
    assert [outcome.status for outcome in outcomes] == ["returned", "died", "returned"], "\n".join(map(str, outcomes))
    for outcome in (outcomes[0], outcomes[2]):
        assert len(outcome.value) == len(VERBS) + 1
        for verb, (name, message, elapsed_s) in outcome.value.items():
            assert name == "RankMismatch", (verb, name, message)
            assert f"did not answer within {TIMEOUT_S:g} s" in message, (verb, message)
            assert elapsed_s < TIMEOUT_S + SLACK_S, (verb, elapsed_s)


def outlive_a_move(number, verb):
    """Make a collective in which rank 1 ends in the midst: when it is about to send for the third time."""
    rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
    tree, like = ({f"w{n}": Layout((256, 512), ranks, (kind,)).build() for n in range(8)} for kind in ("S0", "S1"))
    whole = {name: torch.zeros(256, 512) for name in tree} if rank == 0 else None
    call = {
        "reshard": functools.partial(statetree.reshard, tree, like),
        "distribute": functools.partial(statetree.distribute, whole, like, src=0),
    }[verb]
    pid = torch.tensor(os.getpid() if rank == 1 else 0)
    dist.all_reduce(pid)
    group = dist.new_group(timeout=datetime.timedelta(seconds=units(30)))
    dist.barrier(group)
    count = 0
    exchange = Group.exchange

    def third_time(self, sent, received):
        nonlocal count
        count += 1
        if rank == 1 and count == 3:
            os.kill(os.getpid(), number)
        return exchange(self, sent, received)

    Group.exchange = third_time
    start = time.monotonic()
    found = attempt(lambda: call(group=group, timeout=TIMEOUT_S, bucket_bytes=1 << 20))
    elapsed_s = time.monotonic() - start
    if rank == 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid.item(), signal.SIGKILL)
    return (*found, elapsed_s)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "verb"), [(signal.SIGKILL, "distribute"), (signal.SIGSTOP, "reshard")])
def test_survivors_raise_in_time_while_elements_move(number, verb):
    outcomes = rank_outcomes(3, outlive_a_move, number, verb, timeout=units(55), collective_timeout=units(30))
    assert [outcome.status for outcome in outcomes] == ["returned", "died", "returned"], "\n".join(map(str, outcomes))
    for outcome in (outcomes[0], outcomes[2]):
        name, message, elapsed_s = outcome.value
        assert name == "RankMismatch", (name, message)
        assert f"did not answer within {TIMEOUT_S:g} s" in message, message
        assert elapsed_s < TIMEOUT_S + SLACK_S
