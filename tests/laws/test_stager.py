"""The law of staging: a staged tree is what a deepcopy at that moment was, whatever happens afterwards.

Hypothesis makes up the story: tensors come, change, are resized, freed, tied and swapped; trees are staged in the
foreground and in the background, held, dropped, or kept by a view alone; stages fail; stagers close. After every step
each staged tree that something still refers to is compared with its deepcopy.
"""

import copy
import gc
import os

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as hyp
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

import statetree as st
from tests.oracle import assert_same

SIZES = hyp.sampled_from([0, 1, 7, 64, 300, (1 << 18) + 5])  # the last gets a block of its own
STEPS = 100 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 50


class Stubborn:
    """Cannot be staged."""

    def __reduce__(self):
        msg = "not now"
        raise ValueError(msg)


class Staging(RuleBasedStateMachine):
    held = Bundle("held")  # (staged tree or a part of it, its deepcopy)

    @initialize(share_memory=hyp.booleans(), most=hyp.integers(1, 3))
    def begin(self, share_memory, most):
        self.options = {"share_memory": share_memory, "max_snapshots": most}
        self.most = most
        self.stager = st.Stager(**self.options)
        self.state = {"w": torch.arange(64.0), "nested": [torch.ones(3)], "step": 0}
        self.live = []  # what must be unchanged: entries [staged, deepcopy]
        self.counter = 0

    def teardown(self):
        if hasattr(self, "stager"):
            self.stager.close()
            self.unchanged()

    def fresh(self, size):
        self.counter += 1
        return torch.arange(self.counter, self.counter + size, dtype=torch.float32)

    # What a training loop does to its state

    @rule(key=hyp.sampled_from("wabc"), size=SIZES)
    def put(self, key, size):
        self.state[key] = self.fresh(size)

    @rule(key=hyp.sampled_from("abc"), kind=hyp.sampled_from(["alias", "slice", "steps", "transposed", "parameter"]))
    def tie(self, key, kind):
        base = self.state["w"]
        self.state[key] = {
            "alias": lambda: base,
            "slice": lambda: base[1:],
            "steps": lambda: base[::2],
            "transposed": lambda: base.view(-1, 1).t(),
            "parameter": lambda: torch.nn.Parameter(base.detach(), requires_grad=False),
        }[kind]()

    @rule(key=hyp.sampled_from("abc"))
    def remove(self, key):
        self.state.pop(key, None)

    @rule()
    def train(self):
        self.state["step"] += 1
        for leaf in st.flatten(self.state)[0]:
            if isinstance(leaf, torch.Tensor):
                leaf.detach().add_(1)

    @rule(size=SIZES)
    def swap_data(self, size):
        self.state["w"].data = self.fresh(size)

    @rule(size=SIZES)
    def resize_a_tensor(self, size):
        if self.state["w"].untyped_storage().resizable():
            self.state["w"].resize_(size)
            self.state["w"].fill_(float(self.counter))

    @rule()
    def free_and_restore_a_storage(self):
        """As FSDP does between steps; staging in between is refused."""
        storage, size = self.state["w"].untyped_storage(), self.state["w"].untyped_storage().nbytes()
        storage.resize_(0)
        if self.state["w"].numel():
            with pytest.raises((st.UnsupportedLeaf, st.StagerBusy)):
                self.stager.stage(self.state)
        storage.resize_(size)
        storage.copy_(torch.full((size,), self.counter % 251, dtype=torch.uint8).untyped_storage())

    @rule(nested=hyp.sampled_from([[], (), {"a": 1}, [[torch.ones(2)]], ({"b": None},)]))
    def restructure(self, nested):
        self.state["nested"] = nested

    # Staging

    def busy(self):
        gc.collect()
        return sum(1 for entry in self.live if entry[2]) >= self.most

    @rule(target=held, background=hyp.booleans())
    def stage(self, background):
        expected = copy.deepcopy(self.state)
        try:
            staged = self.stager.stage_async(self.state).result(60) if background else self.stager.stage(self.state)
        except st.StagerBusy:
            assert self.busy()
            return multiple()
        entry = [staged, expected, any(isinstance(leaf, torch.Tensor) for leaf in st.flatten(staged)[0])]
        self.live.append(entry)
        return entry

    @rule(entry=consumes(held))
    def drop(self, entry):
        self.live = [other for other in self.live if other is not entry]
        entry.clear()

    @rule(entry=consumes(held), key=hyp.sampled_from("wabc"))
    def keep_a_view_alone(self, entry, key):
        if entry and key in entry[0] and entry[0][key].numel() > 2:
            self.live.append([entry[0][key].view(-1)[1:], entry[1][key].view(-1)[1:], True])
        self.live = [other for other in self.live if other is not entry]
        entry.clear()

    @rule(entry=held)
    def train_the_staged_copy(self, entry):
        """It belongs to whoever holds it."""
        for tree in entry[:2]:
            for tensor in {id(leaf): leaf for leaf in st.flatten(tree)[0] if isinstance(leaf, torch.Tensor)}.values():
                tensor.detach().mul_(1)

    @rule(background=hyp.booleans())
    def fail(self, background):
        bad = {**self.state, "~": Stubborn()}
        with pytest.raises(st.UnsupportedLeaf, match="not now"):
            self.stager.stage_async(bad).result(60) if background else self.stager.stage(bad)

    @rule()
    def prewarm(self):
        try:
            self.stager.prewarm(self.state)
        except st.StagerBusy:
            assert self.busy()

    @rule()
    def close_and_begin_anew(self):
        self.stager.close()
        with pytest.raises(st.StagerClosed):
            self.stager.stage(self.state)
        with pytest.raises(st.StagerClosed):
            self.stager.stage_async(self.state)
        assert self.stager.nbytes == 0
        self.stager = st.Stager(**self.options)
        for entry in self.live:
            entry[2] = False  # what another stager staged counts no more

    @precondition(lambda self: hasattr(self, "live"))
    @invariant()
    def unchanged(self):
        for staged, expected, _ in self.live:
            # In shared memory small storages are pieces of one slab; deepcopy unties a Parameter from its tensor.
            assert_same(staged, expected, storages=False, ties=False)


TestStaging = Staging.TestCase
TestStaging.settings = settings(settings.default, stateful_step_count=STEPS)
