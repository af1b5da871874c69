"""The law of staging: a staged tree is what a deepcopy at that moment was, whatever happens afterwards.

To what ``StagerMachine`` does with any stager, this adds what ours promises beyond: trees are staged in the background,
too; stages fail, are interrupted at any line, and are refused exactly if there is no room.
"""

import copy
import os
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as hyp
from hypothesis.stateful import initialize, rule

import statetree as st
from tests.faults import fault
from tests.laws.stager_machine import HeldSnapshot, StagerMachine
from tests.pace import units

STEPS = 100 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 50


class Stubborn:
    """Cannot be staged."""

    def __reduce__(self):
        msg = "not now"
        raise ValueError(msg)


class Sleepless:
    """Can be staged, but not put together again."""

    def __reduce__(self):
        return (_refuse, ())


def _refuse():
    msg = "not then"
    raise ValueError(msg)


@dataclass(eq=False)
class Pending:
    """A stage in the background."""

    future: Future
    expected: Any
    most_alive: int  # how many leases there may have been at most when its turn came


class Staging(StagerMachine):
    # Which stages find room depends on threads: so that stories can be told again, no draw depends on it.

    @initialize(share_memory=hyp.booleans(), most=hyp.integers(1, 3))
    def begin(self, share_memory, most):
        self.options = {"share_memory": share_memory, "max_snapshots": most}
        self.most = most
        self.pending = []
        self.make = lambda: st.Stager(**self.options)
        self.stager = self.make()
        self.begin_state()

    def settle(self):
        """Wait until the source may be changed."""
        self.stager.synchronize()
        for pending in self.pending:
            self.finish(pending)
        self.pending = []

    def finish(self, pending):
        assert pending.future.done()
        error = pending.future.exception(0)
        if error is None:
            self.held.append(HeldSnapshot(pending.future.result(0), pending.expected))
        else:
            assert isinstance(error, st.StagerBusy), error
            assert pending.most_alive >= self.most

    def alive(self):
        """How many leases there may be."""
        return sum(1 for held in self.held if held.leases) + len(self.pending)

    @rule()
    def free_and_restore_a_storage(self):
        """As FSDP does between steps; staging in between is refused."""
        self.settle()
        storage, size = self.state["w"].untyped_storage(), self.state["w"].untyped_storage().nbytes()
        storage.resize_(0)
        if self.state["w"].numel():
            with pytest.raises(st.UnsupportedLeaf, match="freed or resized"):
                self.stager.stage(self.state)
        storage.resize_(size)
        storage.copy_(torch.full((size,), self.counter % 251, dtype=torch.uint8).untyped_storage())

    # Staging

    @rule()
    def stage(self):
        expected = copy.deepcopy(self.state)
        alive = self.alive()
        for pending in self.pending:  # this one may come first
            pending.most_alive += 1
        try:
            staged = self.stager.stage(self.state)
        except st.StagerBusy:
            assert alive >= self.most
        else:
            assert alive - len(self.pending) < self.most
            self.held.append(HeldSnapshot(staged, expected))

    @rule()
    def stage_in_the_background(self):
        alive = self.alive()
        self.pending.append(Pending(self.stager.stage_async(self.state), copy.deepcopy(self.state), alive))

    @rule()
    def wait_for_the_background(self):
        self.settle()

    @rule(background=hyp.booleans(), bad=hyp.sampled_from([Stubborn, Sleepless]))
    def fail(self, background, bad):
        state = {**self.state, "~": bad()}
        refusals = (st.UnsupportedLeaf, ValueError)
        if self.alive() >= self.most:
            refusals = (*refusals, st.StagerBusy)
        with pytest.raises(refusals, match=r"not now|not then|alive"):
            self.stager.stage_async(state).result(units(30)) if background else self.stager.stage(state)

    @rule(verb=hyp.sampled_from(["stage", "stage_async", "prewarm", "synchronize"]), step=hyp.integers(1, 150))
    def interrupt(self, verb, step):
        """Ctrl-C, at any line of ours."""
        arguments = () if verb == "synchronize" else (self.state,)
        result = None
        for pending in self.pending:
            pending.most_alive += 1
        try:
            with fault(step, "signal", KeyboardInterrupt):
                result = getattr(self.stager, verb)(*arguments)
        except KeyboardInterrupt:
            self.stager.synchronize()  # an interrupted stage_async may have begun
        except st.StagerBusy:
            assert self.alive() >= self.most
        if isinstance(result, Future):
            self.pending.append(Pending(result, copy.deepcopy(self.state), self.alive()))

    @rule()
    def prewarm(self):
        try:
            self.stager.prewarm(self.state)
        except st.StagerBusy:
            assert self.alive() >= self.most

    @rule(step=hyp.one_of(hyp.none(), hyp.integers(1, 10)))
    def close_and_begin_anew(self, step):
        if step is not None:
            try:
                with fault(step, "signal", KeyboardInterrupt):
                    self.stager.close()
            except KeyboardInterrupt:
                pass
        self.stager.close()
        with pytest.raises(st.StagerClosed, match="Make a new Stager"):
            self.stager.stage(self.state)
        with pytest.raises(st.StagerClosed, match="Make a new Stager"):
            self.stager.stage_async(self.state)
        assert self.stager.nbytes == 0
        for pending in self.pending:
            try:
                self.held.append(HeldSnapshot(pending.future.result(units(30)), pending.expected))
            except st.StagerClosed:
                continue
            except st.StagerBusy:
                assert pending.most_alive >= self.most
        self.pending = []
        for held in self.held:
            held.leases = False
        self.stager = st.Stager(**self.options)


class TestStaging(Staging.TestCase):
    settings = settings(settings.default, stateful_step_count=STEPS)
