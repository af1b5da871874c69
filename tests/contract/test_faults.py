"""Whatever fails at whatever step: nothing held before is changed, nothing leaks, and a retry succeeds."""

import gc
import os
from functools import partial

import pytest
import torch

import statetree as st
from statetree.spans import memory as buffers
from tests.contract.verbs import VERBS, Verb, staged
from tests.faults import STEPS, fail_each
from tests.judge import assert_trees_equal, tree_differences
from tests.judge.watch import Watch
from tests.trees.corpus import Held, Ramp

PINNED = [
    Verb("offload to pinned memory", partial(st.offload, pin_memory=True), slabs=True),
    Verb("allocate_like in pinned memory", partial(st.allocate_like, pin_memory=True), copies=False, slabs=True),
    Verb("stage into pinned memory", partial(staged, pin_memory=True), slabs=True, deep=True),
    Verb("offload to pinned and shared memory", partial(st.offload, pin_memory=True, share_memory=True), slabs=True),
]
SHARED = [verb for verb in VERBS if "shared" in verb.name]
#: Signals may strike at so many places that every seventh is tried; calls are fewer.
STRIDES = {"signal": 7, "SIGINT": 11}
#: An interrupt between the opening of a file and the assignment of its descriptor loses the file: nothing helps.
LOST = 3
CASES = [
    *((verb, step) for verb in VERBS for step in ("signal", "SIGINT")),
    *((verb, "call") for verb in VERBS if verb.looks),  # others call nothing of torch's
    *((verb, step) for verb in SHARED for step in ("descriptor", "room")),
    *((verb, "pin") for verb in PINNED),
]
#: One of each engine; the others go through the same ones.
QUICK = {("offload", "call"), ("copy_into", "call"), ("stage into shared memory", "call")}
QUICK |= {(verb.name, "room") for verb in SHARED}


def make_tree():
    new, held = Ramp(), Held()
    base = new(40)
    held.weight, held.inside = new(2, 2), {"deep": base[3:7]}
    return {
        "dense": [new(4), new(3, 2).t()],
        "tied": (base[:10], base[5::3]),
        "complex": torch.complex(new(3), new(3)).conj(),
        "parameter": torch.nn.Parameter(new(3)),
        "sparse": torch.sparse_coo_tensor(torch.tensor([[0, 2]]), new(2), (3,), check_invariants=False),
        "held": held,
        "large": new((1 << 18) + 3),
        "n": 1,
    }


def open_files():
    return len(os.listdir("/proc/self/fd"))


def same(verb, result, tree):
    found = tree_differences(result, tree, storages=not verb.slabs, ties=verb.prepare is None)
    return [line for line in found if verb.copies or not line.startswith("elements differ")] == []


# An interrupt that strikes while Python closes a generator is lost, and Python says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("verb", "step"),
    [
        pytest.param(verb, step, id=f"{verb}-{step}", marks=() if (verb.name, step) in QUICK else pytest.mark.slow)
        for verb, step in CASES
    ],
)
def test_whatever_fails(verb, step, monkeypatch):
    pinned = set()
    if step == "pin":
        monkeypatch.setattr(buffers, "_can_pin", lambda: True)
        monkeypatch.setattr("torch.cuda._pin_memory_utils.pin_memory", lambda pointer, _: pinned.add(pointer))
        monkeypatch.setattr("torch.cuda._pin_memory_utils.unpin_memory", pinned.remove)
    tree = make_tree()
    before, earlier = Watch(tree), verb.ready(tree)()
    expected = st.offload(earlier)
    arguments = () if verb.prepare is None else (verb.prepare(tree),)

    def after(where):
        assert torch.is_grad_enabled(), where
        assert not torch.is_inference_mode_enabled(), where
        before.check()
        if arguments:
            assert_trees_equal(st.copy_into(tree, arguments[0]), tree, ties=False)

    files, pins = open_files(), len(pinned)
    tried = fail_each(lambda: verb.apply(tree, *arguments), after, step=step, stride=STRIDES.get(step, 1))
    assert tried >= 1
    if verb.copies:
        assert_trees_equal(earlier, expected, storages=False)
    assert same(verb, verb.ready(tree)(), tree)
    gc.collect()
    assert open_files() <= files + (LOST if step in STRIDES else 0)
    assert len(pinned) == pins


def test_every_kind_of_fault_is_tried():
    assert {step for _, step in CASES} == set(STEPS)
