"""The law of ties: leaves of a result share storage exactly if those of the source did, with the same overlap."""

from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as hyp

import statetree as st
from statetree import compose
from tests.judge import assert_trees_equal
from tests.trees.plans import build, tied_plans


@given(plan=tied_plans(), bucket_bytes=hyp.integers(1, 300))
def test_ties_are_kept_whatever_the_size_of_buckets(plan, bucket_bytes):
    tree = build(plan)
    with mock.patch.object(compose, "BUCKET_BYTES", bucket_bytes):
        assert_trees_equal(st.chain(st.offload, st.offload)(tree), tree)


@given(
    cuts=hyp.lists(hyp.tuples(hyp.integers(0, 39), hyp.integers(0, 12), hyp.sampled_from([1, 2, 4, 8])), max_size=6),
    gap=hyp.integers(0, 40),
)
def test_where_a_storage_is_cut_views_that_overlap_stay_together(cuts, gap):
    base = torch.arange(64, dtype=torch.uint8)
    sized = {1: torch.uint8, 2: torch.int16, 4: torch.float32, 8: torch.complex64}
    tree = [base[8 * (start // 8) :][: 8 * length].view(sized[size]) for start, length, size in cuts]
    with mock.patch("statetree.spans.layout.MIN_GAP_BYTES", gap):
        result = st.offload(tree)
    assert_trees_equal(result, tree, storages=False)
