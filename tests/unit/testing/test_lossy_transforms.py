"""What loses bits is found among the first 50 examples, by ``check_transform`` and by trees that are drawn."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import statetree as st
from statetree.testing import check_transform, state_trees
from statetree.testing.elements import DTYPES
from tests.judge import assert_trees_equal

FLOATS = (torch.float32, torch.float64)


def through(dtype, other):
    return lambda leaf: leaf.to(other).to(dtype) if leaf.dtype is dtype else leaf


def clamped(dtype, **ends):
    return lambda leaf: leaf.clamp(**ends) if leaf.dtype is dtype else leaf


def without_sign_of_zero(leaf):
    return torch.where(leaf == 0, torch.zeros_like(leaf), leaf) if leaf.dtype in FLOATS else leaf


def without_payload(leaf):
    return torch.where(leaf.isnan(), torch.full_like(leaf, torch.nan), leaf) if leaf.dtype in FLOATS else leaf


LOSSES = {
    "float32 through bfloat16": through(torch.float32, torch.bfloat16),
    "float64 through float32": through(torch.float64, torch.float32),
    "int64 through float32": through(torch.int64, torch.float32),
    "int64 through float64": through(torch.int64, torch.float64),
    "sign of zero": without_sign_of_zero,
    "payload of NaN": without_payload,
}
#: What the fixed states show; it is drawn now and then.
RARER = {
    "complex128 through complex64": through(torch.complex128, torch.complex64),
    "sign of zero in complex64": lambda leaf: leaf + 0 if leaf.dtype is torch.complex64 else leaf,
    "sign of zero in float16": lambda leaf: leaf + 0 if leaf.dtype is torch.float16 else leaf,
    "sign of zero in bfloat16": lambda leaf: leaf + 0 if leaf.dtype is torch.bfloat16 else leaf,
    "infinity in float16": clamped(torch.float16, max=60_000),
    "infinity in bfloat16": clamped(torch.bfloat16, max=1e30),
    "NaN in complex64": lambda leaf: leaf.nan_to_num(1.0) if leaf.dtype is torch.complex64 else leaf,
    "uint8 through int8": lambda leaf: leaf.clamp(max=127) if leaf.dtype is torch.uint8 else leaf,
    "int16 through int8": through(torch.int16, torch.int8),
    "uint8 above 200": clamped(torch.uint8, max=200),
    "int16 above 30,000": clamped(torch.int16, max=30_000),
    "int16 below -30,000": clamped(torch.int16, min=-30_000),
    "int32 above 2**30": clamped(torch.int32, max=2**30),
    "int64 above 2**62": clamped(torch.int64, max=2**62),
    "uint16 in int16's range": lambda leaf: (
        leaf.int().clamp(max=32767).to(torch.uint16) if leaf.dtype is torch.uint16 else leaf
    ),
}


def without_dims(loss):
    """Return a loss of what counts steps alone."""
    return lambda leaf: leaf if leaf.dim() else loss(leaf)


RARER |= {
    f"{before} through {after}, without dims".replace("torch.", ""): without_dims(through(before, after))
    for before, after in [
        *((torch.int64, after) for after in (torch.float32, torch.int32, torch.float64)),
        *((torch.int32, torch.float32), (torch.float64, torch.float32), (torch.float32, torch.bfloat16)),
    ]
}
LOSSY = pytest.mark.parametrize("loss", [pytest.param(loss, id=name) for name, loss in LOSSES.items()])


def applied(loss, tree):
    def on_tensors(leaf):
        return loss(leaf.detach().resolve_conj().resolve_neg()) if isinstance(leaf, torch.Tensor) else leaf

    return st.map_leaves(on_tensors, tree)


@LOSSY
@pytest.mark.parametrize("number", range(3))
def test_check_transform_finds_it(loss, number):
    with pytest.raises(AssertionError, match="elements differ"):
        check_transform(lambda tree: applied(loss, tree), laws=["values"], examples=50, seed=number)


@pytest.mark.parametrize("name", RARER)
def test_check_transform_finds_rarer_losses(name):
    with pytest.raises(AssertionError, match="elements differ"):
        check_transform(lambda tree: applied(RARER[name], tree), laws=["values"], examples=50)


@pytest.mark.parametrize(
    ("kind", "loss", "shown"),
    [(int, lambda number: int(float(number)), "9007199254740993"), (float, lambda x: torch.tensor(x).item(), "0.1")],
    ids=["int through float64", "float through float32"],
)
def test_check_transform_finds_what_rounds_numbers(kind, loss, shown):
    def rounded(tree):
        return st.map_leaves(lambda leaf: loss(leaf) if type(leaf) is kind else leaf, tree)

    with pytest.raises(AssertionError, match=shown):
        check_transform(rounded, laws=["values"], examples=50)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_check_transform_finds_what_loses_the_elements_of_one_dtype(dtype):
    def emptied(tree):
        copy = st.offload(tree)
        for leaf in st.flatten(copy)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.dtype is dtype and not leaf.is_meta:
                leaf.untyped_storage().fill_(0)
        return copy

    with pytest.raises(AssertionError, match="elements differ"):
        check_transform(emptied, laws=["values"])


@LOSSY
@pytest.mark.parametrize("number", range(10))
def test_trees_that_are_drawn_show_it(loss, number):
    @seed(number)
    @settings(
        max_examples=50,
        derandomize=False,
        phases=[Phase.generate],
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(tree=state_trees())
    def check(tree):
        assert_trees_equal(applied(lambda leaf: leaf, tree), applied(loss, tree), ties=False, strides=False)

    with pytest.raises(AssertionError, match="elements differ"):
        check()


@pytest.mark.slow
def test_half_of_the_trees_have_ten_leaves_or_more():
    counts = []

    @seed(1)
    @settings(max_examples=200, derandomize=False, phases=[Phase.generate], database=None)
    @given(tree=state_trees())
    def count(tree):
        counts.append(len(st.flatten(tree)[0]))

    count()
    assert sum(leaves >= 10 for leaves in counts) >= len(counts) / 2


def test_lost_ties_are_found_among_the_first_ten_examples():
    def untied(state):
        return st.map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)

    assert not check_transform(untied, examples=10)["ties"].holds


def without_the_last_element(state):
    return on_tensors_of(state, lambda copy: copy.view(-1)[-1:].zero_() if copy.numel() > 100_000 else None)


def without_memory_format(state):
    return on_tensors_of(state, lambda copy: copy.set_(copy.contiguous()) if copy.dim() == 4 else None)


def on_tensors_of(state, change):
    copies = st.offload(state)
    for copy in st.flatten(copies)[0]:
        if type(copy) is torch.Tensor and copy.layout is torch.strided and copy.device.type == "cpu":
            change(copy)
    return copies


def in_order_further_down(state, depth=0):
    if type(state) is dict:
        items = [(key, in_order_further_down(value, depth + 1)) for key, value in state.items()]
        return dict(sorted(items) if depth > 2 < len(items) and all(type(key) is str for key in state) else items)
    if type(state) in (list, tuple):
        return type(state)([in_order_further_down(value, depth + 1) for value in state])
    return st.offload(state)


@pytest.mark.parametrize(
    ("transform", "law"),
    [
        (without_the_last_element, "values"),
        (without_memory_format, "geometry"),
        (in_order_further_down, "structure"),
    ],
)
def test_what_only_large_channels_last_or_deep_states_show_is_found(transform, law):
    assert law in check_transform(transform, laws=None).broken


def test_check_transform_finds_what_has_a_buffer_saved():
    def saved(tree):
        copy = st.offload(tree)
        for leaf in st.flatten(copy)[0]:
            if isinstance(leaf, torch.nn.Buffer):
                leaf.persistent = True
        return copy

    assert check_transform(saved).broken == ["values"]
