"""The law of exactness: every supported leaf comes out bit-identical, in a tree that a strict judge calls the same."""

import copy
import io

import torch
from hypothesis import assume, given
from hypothesis import strategies as hyp

import statetree as st
from tests.contract.verbs import VERBS
from tests.oracle import assert_same, differences
from tests.strategies import made, tied_plans, tree_plans
from tests.watching import covered_bytes, storages

plans = hyp.one_of(tree_plans(), tied_plans())
exact = hyp.sampled_from([verb for verb in VERBS if verb.copies and verb.prepare is None])


@given(plan=plans, verb=exact)
def test_what_comes_out_is_what_went_in(plan, verb):
    tree = made(plan)
    assert_same(verb.apply(tree), tree, storages=not verb.slabs)


@given(plan=plans)
def test_offload(plan):
    tree = made(plan)
    assert_same(st.offload(tree), tree)


@given(plan=plans, share_memory=hyp.booleans())
def test_stage(plan, share_memory):
    tree = made(plan)
    with st.Stager(share_memory=share_memory) as stager:
        for _ in range(2):
            assert_same(stager.stage(tree), tree, storages=not share_memory, containers=True)


@given(plan=plans)
def test_no_more_is_copied_than_is_needed(plan):
    tree = made(plan)
    assert sum(storage.nbytes() for storage in storages(st.offload(tree))) <= covered_bytes(tree)


@given(plan=plans, verb=exact)
def test_surroundings_have_no_say(plan, verb):
    tree = made(plan)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with torch.inference_mode():
            result = verb.apply(tree)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert_same(result, tree, storages=not verb.slabs)


@given(plan=tied_plans(opaque=False))
def test_deepcopy_agrees(plan):
    """Where deepcopy copies a tree exactly, so do we.

    It forgets conjugate and negative bits, and the ties of parameters.
    """
    tree = made(plan)
    found = differences(st.offload(tree), copy.deepcopy(tree))
    forgotten = ("conj bit", "neg bit", *(("storage of", "overlap") if "parameter" in repr(plan) else ()))
    assert [line for line in found if not line.startswith(forgotten)] == []


@given(plan=tied_plans())
def test_a_saved_offloaded_tree_loads_as_the_tree_itself(plan):
    tree = made(plan)

    def reloaded(value):
        file = io.BytesIO()
        try:
            torch.save(value, file)
        except RuntimeError as error:
            assume("that view the same data as different types" not in str(error))  # which torch.save cannot do
            raise
        file.seek(0)
        return torch.load(file, weights_only=False)

    assert_same(reloaded(st.offload(tree)), reloaded(tree), storages=False)
