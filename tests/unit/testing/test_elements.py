"""Every loss of elements shows: in the states that ``check_transform`` draws, and in trees and tensors."""

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import statetree
from statetree.testing import check_transform, state_trees, tied_trees
from statetree.testing.elements import DTYPES, counted, revealing

DRAWN = settings(
    max_examples=50, phases=[Phase.generate], database=None, derandomize=False, suppress_health_check=list(HealthCheck)
)


def through(source, step):
    return source, lambda tensor: tensor.to(step).to(source)


def transform_of(dtype, lose):
    def leaf(value):
        known = type(value) is torch.Tensor and value.dtype is dtype and not value.is_meta and not value.requires_grad
        return lose(value) if known else value

    return lambda tree: statetree.map_leaves(leaf, tree)


def loses(leaf, dtype, lose):
    """Whether a leaf is not, to the bit, what it was."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype is not dtype or leaf.is_meta:
        return False
    if leaf.layout is not torch.strided or not leaf.numel():
        return False
    plain = torch.empty(leaf.shape, dtype=dtype).copy_(leaf.detach())
    one, other = (tensor.flatten().view(torch.uint8) for tensor in (plain, lose(plain)))
    return not torch.equal(one, other)


def without_payload(tensor):
    return torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)


LOSSES = {
    "float32 through bfloat16": through(torch.float32, torch.bfloat16),
    "float64 through float32": through(torch.float64, torch.float32),
    "int64 through float32": through(torch.int64, torch.float32),
    "int64 through float64": through(torch.int64, torch.float64),
    "int32 through float32": through(torch.int32, torch.float32),
    "sign of zero": (torch.float32, lambda tensor: torch.where(tensor == 0, 0.0, tensor)),
    "payload of NaN": (torch.float32, without_payload),
    "subnormals": (
        torch.float32,
        lambda t: torch.where((t.abs() < torch.finfo(torch.float32).tiny) & (t != 0), 0.0, t),
    ),
}


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_found_in_fifty_states(name, number):
    assert check_transform(transform_of(*LOSSES[name]), examples=50, seed=number)["values"].holds is False


def test_float64_that_stays_float32_is_found():
    def narrowed(tree):
        return statetree.map_leaves(
            lambda leaf: leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float64 else leaf, tree
        )

    assert check_transform(narrowed, examples=50)["values"].holds is False


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_found_in_fifty_trees(name, number):
    seen = []

    @seed(number)
    @settings(DRAWN)
    @given(state_trees(dtypes="training"))
    def draw(tree):
        statetree.map_leaves(lambda leaf: seen.append(loses(leaf, *LOSSES[name])), tree)

    draw()
    assert any(seen)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("strategy", [state_trees, tied_trees])
def test_half_of_the_trees_have_ten_leaves_or_more(strategy, number):
    counts = []

    @seed(number)
    @settings(DRAWN, max_examples=100)
    @given(strategy())
    def draw(tree):
        counts.append(len(statetree.paths(tree)))

    draw()
    assert sum(count >= 10 for count in counts) * 2 >= len(counts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_have_their_dtype_and_shape(dtype):
    if dtype is not torch.float4_e2m1fn_x2:
        for code in (counted, revealing):
            made = eval(code((2, 3), dtype, 5))
            assert (made.dtype, made.shape) == (dtype, (2, 3)), code
