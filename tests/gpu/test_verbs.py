"""Verbs over tensors on an accelerator: from there, to there, and there."""

import pytest
import torch

import statetree as st
from tests.gpu import DEVICE

pytestmark = pytest.mark.gpu


def state(device=DEVICE):
    """Return a state of several dtypes and strides, with ties, unique by position."""
    ramp = torch.arange(600, dtype=torch.float32, device=device)
    tied = ramp[100:400].view(20, 15)
    return {
        "small": [torch.arange(start, start + 12, dtype=torch.float32, device=device) for start in range(40)],
        "dtypes": [ramp[:64].to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.bool)],
        "tied": [tied, tied.t(), ramp[::3]],
        "conj": torch.complex(ramp[:9], ramp[9:18]).conj(),
        "empty": ramp[:0],
        "param": torch.nn.Parameter(ramp[:30].clone().view(5, 6)),
        "step": 3,
    }


def test_a_copy_lies_in_host_memory_and_keeps_ties():
    found = st.offload(state())
    assert st.similarity(found, state("cpu"), values=True)
    first, second, _ = found["tied"]
    assert first.data_ptr() == second.data_ptr()
    assert {leaf.device.type for leaf in st.flatten(found)[0] if isinstance(leaf, torch.Tensor)} == {"cpu"}


def test_a_copy_can_go_to_the_device_and_back():
    there = st.offload(state("cpu"), device=DEVICE)
    assert {leaf.device.type for leaf in st.flatten(there)[0] if isinstance(leaf, torch.Tensor)} == {DEVICE.type}
    assert st.similarity(st.offload(there), state("cpu"), values=True)


@pytest.mark.parametrize(("source", "target"), [("cpu", DEVICE), (DEVICE, "cpu"), (DEVICE, DEVICE)], ids=str)
def test_copy_into_writes_across_devices(source, target):
    written = state(target)
    for leaf in (*written["small"], written["param"].data, written["tied"][0]):
        leaf.zero_()
    st.copy_into(state(source), written)
    assert st.similarity(st.offload(written), state("cpu"), values=True)


@pytest.mark.parametrize(
    "name",
    ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "uint16", "uint32", "uint64", "bool"],
)
def test_every_bit_is_copied_on_the_device(name):
    """NaNs of narrow floats keep their payloads, and integers that CUDA has few kernels for are copied."""
    dtype = getattr(torch, name)
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.uint8).to(DEVICE)
    source = {"whole": patterns.clone().view(dtype), "turned": patterns.clone().view(dtype).view(16, -1).t()}
    there = st.offload(source, device=DEVICE)
    written = st.copy_into(source, st.allocate_like(source, device=DEVICE))
    for found in (there, written):
        assert torch.equal(found["whole"].view(torch.uint8), patterns)
        assert torch.equal(found["turned"].t().contiguous().view(-1).view(torch.uint8), patterns)


def test_memory_is_allocated_on_the_device():
    like = st.allocate_like(state("cpu"), device=DEVICE)
    assert st.similarity(like, state(), values=False)
    assert {leaf.device.type for leaf in st.flatten(like)[0] if isinstance(leaf, torch.Tensor)} == {DEVICE.type}


def test_values_are_compared_on_the_device():
    other = state()
    assert st.similarity(state(), other, values=True)
    other["small"][7][3] += 1
    (difference,) = st.similarity(state(), other, values=True).differences
    assert str(difference.path) == "small.7"


def test_a_digest_does_not_depend_on_the_device():
    assert st.digest(state()) == st.digest(state("cpu"))


def test_a_delta_made_on_the_device_is_applied_there():
    base, new = state(), state()
    new["small"][7][3] += 1
    new["param"].data.add_(1)
    st.apply_delta(st.delta(new, base), base)
    assert st.similarity(base, new, values=True)
