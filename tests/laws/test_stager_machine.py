"""``StagerMachine`` finds stagers whose snapshots change."""

import copy

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import statetree as st
from tests.laws.stager_machine import StagerMachine

FEW = settings(
    max_examples=60,
    stateful_step_count=15,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Right(StagerMachine):
    class make:
        stage = staticmethod(copy.deepcopy)


class Ours(StagerMachine):
    make = staticmethod(st.Stager)
    refusals = (st.StagerBusy,)


class Alias:
    def stage(self, state):
        return {**state, "nested": copy.deepcopy(state["nested"])}


class Reused:
    """Writes each snapshot over the last one."""

    kept = None

    def stage(self, state):
        fits = self.kept is not None and st.similarity(state, self.kept, values=False)
        self.kept = st.copy_into(state, self.kept) if fits else st.offload(state)
        return self.kept


@pytest.mark.parametrize("machine", [Right, Ours])
def test_a_stager_that_is_right(machine):
    run_state_machine_as_test(machine, settings=FEW)


@pytest.mark.parametrize("stager", [Alias, Reused])
def test_a_stager_that_is_wrong(stager):
    class Machine(StagerMachine):
        make = stager

    with pytest.raises(AssertionError, match="the trees differ"):
        run_state_machine_as_test(Machine, settings=FEW)
