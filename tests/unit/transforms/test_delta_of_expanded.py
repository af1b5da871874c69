"""Deltas of tensors that overlap themselves: expanded ones, and windows over one memory."""

import pytest
import torch

import statetree as st


def expanded(values):
    return {"e": torch.tensor(values)[:, None].expand(len(values), 5)}


def windows(values):
    return {"e": torch.tensor(values).unfold(0, 3, 1)}


MADE = [expanded, windows]


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("new", [[0.0, 9.0, 2.0, 3.0], [5.0, 6.0, 7.0, 8.0]], ids=["one", "all"])
def test_they_are_patched_in_their_memory(make, new):
    base, wanted = make([0.0, 1.0, 2.0, 3.0]), make(new)
    target = st.offload(base)
    change = st.delta(wanted, base)
    result = st.apply_delta(change, target)
    assert result["e"] is target["e"]
    assert st.similarity(result, wanted, values=True)
    assert st.similarity(st.apply_delta(change, result), wanted, values=True)
    assert not st.delta(result, wanted)
    back = st.apply_delta(change.inverse(base), result)
    assert st.similarity(back, base, values=True)


@pytest.mark.parametrize("make", MADE)
def test_new_values_may_lie_apart(make):
    base, wanted = make([0.0, 1.0, 2.0, 3.0]), make([0.0, 1.0, 7.0, 3.0])
    apart = {"e": wanted["e"].contiguous()}
    assert st.similarity(st.apply_delta(st.delta(apart, base), base), wanted, values=True)


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("count", [1, 99])
def test_different_values_for_one_place_are_refused_at_once(make, count):
    base = make([0.0, 1.0, 2.0, 3.0])
    apart = {"e": base["e"].contiguous()}
    changed = apart["e"].view(-1)[1 : 1 + count]
    changed += torch.arange(1.0, 1 + len(changed))
    with pytest.raises(st.TreeMismatch, match=r"overlap at e"):
        st.delta(apart, base)
    target = make([0.0, 1.0, 2.0, 3.0])
    with pytest.raises(st.TreeMismatch, match="memory in which it overlaps itself"):
        st.apply_delta(st.delta(apart, {"e": base["e"].contiguous()}), target)
    assert st.similarity(target, base, values=True)


@pytest.mark.parametrize("make", MADE)
def test_they_may_be_tied(make):
    def tied(values):
        tree = make(values)
        return {**tree, "m": tree["e"].as_strided((4,), (1,))}

    base, wanted = tied([0.0, 1.0, 2.0, 3.0]), tied([0.0, 9.0, 2.0, 3.0])
    result = st.apply_delta(st.delta(wanted, base), st.offload(base))
    assert st.similarity(result, wanted, values=True)
