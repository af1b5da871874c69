"""Positions of a delta as gaps between them, and damaged gaps."""

from dataclasses import replace

import pytest
import torch

import statetree as st
from statetree.transforms.deltas import change
from statetree.transforms.deltas.change import as_gaps, from_gaps


@pytest.fixture(params=[1, 2, 3, 1 << 15], autouse=True)
def _block(request, monkeypatch):
    monkeypatch.setattr(change, "_BLOCK", request.param)


@pytest.mark.parametrize(
    ("places", "dtype"),
    [
        ([], torch.uint8),
        ([7], torch.uint8),
        ([0, 255, 256], torch.uint8),
        ([3, 4, 260], torch.uint16),
        ([3, 4, 5, 70_000, 70_001, 70_002, 70_003], torch.int32),
        ([0, 1 << 40], torch.int64),
    ],
    ids=str,
)
def test_positions_come_back_from_gaps_of_the_smallest_dtype(places, dtype):
    gaps = as_gaps(torch.tensor(places, dtype=torch.int64))
    assert gaps.dtype == dtype
    found = from_gaps(places[0] if places else 0, gaps)
    assert (found.tolist(), found.dtype) == (places, torch.int64)


@pytest.mark.parametrize(
    ("start", "gaps"),
    [
        (0, [1, 1]),
        (-2, [0, 1]),
        (0, [0, 0]),
        (0, [0, 1, 1, -1]),
        (5, [0, (1 << 63) - 1]),
        (1, [0, 1 << 62, 1 << 62, 1 << 62, 1 << 62]),
    ],
    ids=str,
)
def test_gaps_that_were_damaged_are_refused(start, gaps):
    base, new = {"w": torch.arange(100.0)}, {"w": torch.arange(100.0)}
    new["w"][3 : 3 + len(gaps)] = -1
    made = st.delta(new, base)
    found = made.tensors["w"]
    head = torch.cat([torch.tensor([start]), found.head[1:]])
    broken = replace(found, gaps=torch.tensor(gaps), head=head)
    with pytest.raises(st.TreeMismatch, match="the delta is damaged at w"):
        st.apply_delta(replace(made, tensors={"w": broken}), base)
    assert base["w"].equal(torch.arange(100.0))
