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
from statetree.testing import rank_outcomes
from tests.collectives.checks import attempt
from tests.collectives.disagreements import VERBS, usual_call

TIMEOUT_S = 1.0
#: How late an error may be on a busy machine.
SLACK_S = 10.0


def outlive(number):
    """Make every collective without rank 1, each on a group of its own: a group that timed out is of no more use."""
    pids = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    groups = {verb: dist.new_group(timeout=datetime.timedelta(seconds=60)) for verb in (*VERBS, "stream")}
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_raise_in_time(number):
    outcomes = rank_outcomes(3, outlive, number, timeout=110, collective_timeout=60)
    assert [outcome.status for outcome in outcomes] == ["returned", "died", "returned"], "\n".join(map(str, outcomes))
    for outcome in (outcomes[0], outcomes[2]):
        assert len(outcome.value) == len(VERBS) + 1
        for verb, (name, message, elapsed_s) in outcome.value.items():
            assert name == "RankMismatch", (verb, name, message)
            assert "did not answer within 1 s" in message, (verb, message)
            assert elapsed_s < TIMEOUT_S + SLACK_S, (verb, elapsed_s)
