"""Stagers over tensors on an accelerator: pinned and shared memory, streams, geometries that several devices have."""

import pytest
import torch

import statetree as st
from tests.gpu import DEVICE, PINS
from tests.gpu.test_verbs import state

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[(False, False), (PINS, False), (False, True), (PINS, True)], ids=str)
def stager(request):
    pinned, shared = request.param
    with st.Stager(pin_memory=pinned, share_memory=shared) as made:
        yield made


def test_staged_trees_are_exact_and_use_memory_again(stager):
    source = state()
    for _ in range(3):
        staged = stager.stage(source)
        assert st.similarity(staged, st.offload(source), values=True)
        allocations = stager.stats.allocations
        del staged
        for leaf in source["small"]:
            leaf.add_(1)
    assert stager.stats.allocations == allocations


def test_a_staged_tree_does_not_change_with_its_source(stager):
    source = state()
    staged = stager.stage(source)
    for leaf in source["small"]:
        leaf.zero_()
    stager.stage(source)
    assert st.similarity(staged, state("cpu"), values=True)


def test_what_is_queued_before_a_background_stage_is_in_it_and_what_comes_after_is_not(stager):
    source = {"w": torch.zeros(1 << 20, device=DEVICE)}
    for number in range(1, 6):
        source["w"].fill_(number)
        future = stager.stage_async(source)
        stager.synchronize()
        source["w"].fill_(-1)
        assert future.result()["w"].unique().tolist() == [number]
        del future


def test_pinned_memory_is_pinned():
    with st.Stager(pin_memory=PINS) as stager:
        staged = stager.stage({"large": torch.ones(1 << 20, device=DEVICE), "small": torch.ones(3, device=DEVICE)})
    assert all(leaf.is_pinned() is PINS for leaf in staged.values())


def test_one_snapshot_serves_tensors_of_one_geometry_on_several_devices(stager):
    for device in ("cpu", DEVICE, "cpu"):
        tensors = [torch.arange(start, start + 5, device=device) for start in range(20)]
        staged = stager.stage(tensors)
        assert all(torch.equal(copy, tensor.cpu()) for copy, tensor in zip(staged, tensors, strict=True))
        del staged
    assert stager.stats.allocations == 1
