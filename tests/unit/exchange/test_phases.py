"""Phases in the profiler and in the log."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch

from statetree.exchange import phases


def test_a_phase_is_nothing_unless_somebody_watches():
    assert phases.phase("gather.move") is phases.phase("gather.plan")
    assert isinstance(phases.phase("gather.move"), nullcontext)


def test_a_phase_is_a_span_of_the_profiler():
    with torch.profiler.profile(acc_events=True) as profile, phases.phase("gather.move"):
        torch.zeros(3).add_(1)
    assert "statetree.gather.move" in {event.name for event in profile.events()}


def test_a_phase_is_a_line_of_the_log(caplog):
    with caplog.at_level(logging.DEBUG, "statetree"), phases.phase("gather.move"):
        pass
    (message,) = [record.getMessage() for record in caplog.records if record.name == "statetree"]
    assert message.startswith("gather.move: 0.0")


def test_what_a_phase_raises_is_raised(caplog):
    with caplog.at_level(logging.DEBUG, "statetree"), pytest.raises(ZeroDivisionError), phases.phase("gather.move"):
        raise ZeroDivisionError
