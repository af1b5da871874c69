"""Tests of ``statetree.spans.positions``."""

import pytest
import torch

from statetree.spans import positions
from statetree.spans.positions import as_gaps, from_gaps


@pytest.fixture(params=[1, 2, 3, 1 << 15], autouse=True)
def _block(request, monkeypatch):
    monkeypatch.setattr(positions, "_BLOCK", request.param)


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
        (-1, [0, 1]),
        (0, [0, 0]),
        (0, [0, 1, 2, 0]),
        (0, [0, 1, 1, -1]),
        (5, [0, (1 << 63) - 1]),
        (1, [0, 1 << 62, 1 << 62, 1 << 62, 1 << 62]),
    ],
    ids=str,
)
def test_gaps_that_do_not_ascend_are_told(start, gaps):
    assert from_gaps(start, torch.tensor(gaps)) is None
