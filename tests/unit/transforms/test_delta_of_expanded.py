"""Deltas of tensors that overlap themselves: expanded ones, and windows over one memory. They may not change."""

import pytest
import torch

import statetree as st


def expanded(values):
    return {"e": torch.tensor(values)[:, None].expand(len(values), 5), "w": torch.tensor(values)}


def windows(values):
    return {"e": torch.tensor(values).unfold(0, 3, 1), "w": torch.tensor(values)}


MADE = [expanded, windows]


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("new", [[0.0, 9.0, 2.0, 3.0], [5.0, 6.0, 7.0, 8.0]], ids=["one", "all"])
def test_they_are_refused_where_they_change(make, new):
    base, wanted = make([0.0, 1.0, 2.0, 3.0]), make(new)
    with pytest.raises(st.TreeMismatch, match=r"overlap at e"):
        st.delta(wanted, base)
    apart = {key: leaf.contiguous() for key, leaf in base.items()}
    with pytest.raises(st.TreeMismatch, match="memory in which it overlaps itself"):
        st.apply_delta(st.delta(wanted, apart), base)
    assert st.similarity(base, make([0.0, 1.0, 2.0, 3.0]), values=True)
    assert st.similarity(st.apply_delta(st.delta(wanted, apart), apart), wanted, values=True)


@pytest.mark.parametrize("make", MADE)
def test_others_change_beside_them(make):
    base, wanted = make([0.0, 1.0, 2.0, 3.0]), make([0.0, 1.0, 2.0, 3.0])
    wanted["w"][1] = 9
    assert st.apply_delta(st.delta(wanted, base), base)["w"].tolist() == [0, 9, 2, 3]
