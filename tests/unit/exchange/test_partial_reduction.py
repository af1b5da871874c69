"""Summands on their way to the ranks that put them together."""

import torch

from statetree.chunks.layouts import whole_on
from statetree.exchange.partial_reduction import prepare_reduction
from statetree.exchange.plan import Chunked

RANKS = 4


def test_tensors_of_one_layout_go_the_same_way():
    layout = whole_on((8, 3), range(RANKS))
    summands = "sum", tuple(whole_on((8, 3), [rank]) for rank in range(RANKS))
    sources = [Chunked(layout, [torch.ones(8, 3)]) for _ in range(3)]
    found = prepare_reduction(sources, [torch.float32] * 3, [summands] * 3, 1)
    # Plans are made for pairs of layouts: as many as there are summands of one tensor.
    assert len({(id(transfer.source.layout), id(transfer.target.layout)) for transfer in found.transfers}) == RANKS
    assert len({id(reduced.layout) for reduced in found.reduced}) == 1
    assert found.reduced[0].layout.is_complete
