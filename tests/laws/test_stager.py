"""The law of staging: a staged tree is what a deepcopy at that moment was, whatever happens afterwards.

Hypothesis makes up the story: tensors come, change, are resized, freed, tied and swapped; trees are staged in the
foreground and in the background, held, changed, dropped, or kept by a view alone; stages fail, are interrupted at any
line, and end when the stager is closed. After every step each staged tree that something still refers to is compared
with its deepcopy.
"""

import copy
import os
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as hyp
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import statetree as st
from statetree.testing import assert_trees_equal
from tests.faults import fault
from tests.pace import units

SIZES = hyp.sampled_from([0, 1, 7, 32, 64, 300, (1 << 18) + 5])  # the last gets a block of its own
DTYPES = hyp.sampled_from([torch.float32, torch.int32, torch.float16, torch.complex64])
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
class Held:
    """A staged tree, or what is left of one, and what must be in it."""

    staged: Any
    expected: Any
    leases: bool = True  # of the stager of now, not of one that was closed


@dataclass(eq=False)
class Pending:
    """A stage in the background."""

    future: Future
    expected: Any
    most_alive: int  # how many leases there may have been at most when its turn came


class Staging(RuleBasedStateMachine):
    # Which stages find room depends on threads: so that stories can be told again, no draw depends on it.

    @initialize(share_memory=hyp.booleans(), most=hyp.integers(1, 3))
    def begin(self, share_memory, most):
        self.options = {"share_memory": share_memory, "max_snapshots": most}
        self.most = most
        self.stager = st.Stager(**self.options)
        self.held = []
        self.pending = []
        self.counter = 0
        self.state = {
            "w": self.fresh(64),
            "a": self.fresh(32),
            "b": self.fresh(7),
            "nested": [torch.ones(3)],
            "step": 0,
        }

    def teardown(self):
        if hasattr(self, "stager"):
            self.settle()
            self.stager.close()
            self.unchanged()

    def fresh(self, size, dtype=torch.float32):
        self.counter += 1
        return torch.arange(self.counter, self.counter + size, dtype=torch.float32).to(dtype)

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
            self.held.append(Held(pending.future.result(0), pending.expected))
        else:
            assert isinstance(error, st.StagerBusy), error
            assert pending.most_alive >= self.most

    def alive(self):
        """How many leases there may be."""
        return sum(1 for held in self.held if held.leases) + len(self.pending)

    # What a training loop does to its state

    @rule(key=hyp.sampled_from("wabc"), size=SIZES, dtype=DTYPES)
    def put(self, key, size, dtype):
        self.state[key] = self.fresh(size, dtype)

    @rule(
        key=hyp.sampled_from("abc"), kind=hyp.sampled_from(["alias", "slice", "steps", "square", "real", "parameter"])
    )
    def tie(self, key, kind):
        base = self.state["w"]
        self.state[key] = {
            "alias": lambda: base,
            "slice": lambda: base[1:],
            "steps": lambda: base[::2],
            "square": lambda: base[:25].view(5, 5).t() if base.numel() > 25 and base.dim() == 1 else base,
            "real": lambda: base.real,
            "parameter": lambda: torch.nn.Parameter(base.detach().contiguous(), requires_grad=False),
        }[kind]()

    @rule(key=hyp.sampled_from("wabc"), change=hyp.sampled_from(["dtype", "strides", "class", "offset"]))
    def change_one_fact(self, key, change):
        """The shape stays."""
        if key not in self.state:
            return
        old = self.state[key]
        self.state[key] = {
            "dtype": lambda: old.real.to(torch.int32 if old.dtype != torch.int32 else torch.float32),
            "strides": lambda: old.repeat_interleave(2, -1)[..., ::2],
            "class": lambda: torch.nn.Parameter(old.detach().contiguous(), requires_grad=False),
            "offset": lambda: torch.cat([old.reshape(-1)[:1], old.reshape(-1)])[1:].view(old.shape),
        }[change]()

    @rule(key=hyp.sampled_from("abc"))
    def remove(self, key):
        self.state.pop(key, None)

    @rule(nested=hyp.sampled_from([[], (), {"a": 1}, [[torch.ones(2)]], ({"b": None},)]))
    def restructure(self, nested):
        self.state["nested"] = copy.deepcopy(nested)

    @rule()
    def train(self):
        self.settle()
        self.state["step"] += 1
        for leaf in st.flatten(self.state)[0]:
            if isinstance(leaf, torch.Tensor):
                leaf.detach().add_(1)

    @rule()
    def clone_everything(self):
        """As a state_dict hook does."""
        self.state = copy.deepcopy(self.state)

    @rule(size=SIZES)
    def swap_data(self, size):
        """A stage in the background goes on with the memory that it was given."""
        self.state["w"].data = self.fresh(size, self.state["w"].dtype)

    @rule(size=SIZES)
    def resize_a_tensor(self, size):
        self.settle()
        self.state["w"].resize_(size)
        self.state["w"].fill_(float(self.counter))

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
            self.held.append(Held(staged, expected))

    @rule()
    def stage_in_the_background(self):
        alive = self.alive()
        self.pending.append(Pending(self.stager.stage_async(self.state), copy.deepcopy(self.state), alive))

    @rule()
    def wait_for_the_background(self):
        self.settle()

    @rule(which=hyp.integers(0, 3))
    def drop(self, which):
        del self.held[which : which + 1]

    @rule(which=hyp.integers(0, 3), key=hyp.sampled_from("wabc"))
    def keep_a_view_alone(self, which, key):
        for held in self.held[which : which + 1]:
            self.held.remove(held)
            if isinstance(held.staged, dict) and key in held.staged and held.staged[key].numel() > 2:
                views = (tree[key][1:] for tree in (held.staged, held.expected))
                self.held.append(Held(*views, held.leases))

    @rule(which=hyp.integers(0, 3))
    def train_the_staged_copy(self, which):
        """It belongs to whoever holds it."""
        leaves = [st.flatten([held.staged, held.expected])[0] for held in self.held[which : which + 1]]
        for leaf in chain.from_iterable(leaves):
            if isinstance(leaf, torch.Tensor):
                leaf.detach().fill_(-float(self.counter))

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
                self.held.append(Held(pending.future.result(units(30)), pending.expected))
            except st.StagerClosed:
                continue
            except st.StagerBusy:
                assert pending.most_alive >= self.most
        self.pending = []
        for held in self.held:
            held.leases = False
        self.stager = st.Stager(**self.options)

    @precondition(lambda self: hasattr(self, "held"))
    @invariant()
    def unchanged(self):
        for held in self.held:
            # In shared memory small storages are pieces of one slab; deepcopy unties a Parameter from its tensor (and
            # forgets strides of Parameters and conjugate bits, of which there are none here for that reason).
            assert_trees_equal(held.staged, held.expected, storages=False, ties=False)


class TestStaging(Staging.TestCase):
    settings = settings(settings.default, stateful_step_count=STEPS)
