"""Plans that are used again: looked up by what the ranks agreed on, and compared with what they would be now."""

import os

import pytest
import torch

from statetree.chunks.boxes import Box
from statetree.chunks.layouts import layout_of, whole_on
from statetree.exchange import transfers
from statetree.exchange.consensus import text_digest
from statetree.exchange.group import group_of
from statetree.exchange.plan import Chunked, Transfer
from statetree.exchange.transfers import TransferOptions, plan_transfers
from statetree.testing import run_ranks

ALONE = whole_on((4,), [0])
HALVES = layout_of((4,), {0: [Box((0,), (2,)), Box((2,), (4,))]})


def item(source=ALONE, target=ALONE, dtype=torch.float32, *, targets=1):
    halves = torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype)
    pieces = list(halves) if source is HALVES else [torch.arange(4).to(dtype)]
    received = list(halves) if target is HALVES else [torch.zeros(4, dtype=dtype)] * targets
    return Transfer(Chunked(source, pieces), Chunked(target, received), dtype)


def plan(*items):
    plan_transfers(TransferOptions("agreed", group_of("reshard", None, None), torch.device("cpu"), 100), items)


@pytest.fixture(autouse=True)
def _no_plans():
    transfers._PLANNED.clear()
    yield
    transfers._PLANNED.clear()


@pytest.mark.parametrize(
    "items",
    [
        [],
        [item(), item()],
        [item(dtype=torch.int32)],
        [item(source=HALVES)],
        [item(target=HALVES)],
        [item(targets=2)],
    ],
    ids=["fewer", "more", "dtype", "source", "target", "pieces"],
)
def test_a_plan_for_other_moves_is_noticed(items):
    plan(item())
    plan(item())
    with pytest.raises(AssertionError, match="the plan of elements was made for other moves"):
        plan(*items)


def test_plans_are_not_compared_outside_of_tests(monkeypatch):
    monkeypatch.delenv(transfers.CHECK_PLANS)
    plan(item())
    plan(item(dtype=torch.int32))


def test_ranks_compare_plans_too():
    assert run_ranks(2, os.getenv, transfers.CHECK_PLANS) == ["1", "1"]


def test_layouts_have_one_digest_exactly_if_they_are_the_same():
    made = [
        *(whole_on((4,), ranks) for ranks in ([0], [0, 1], [1])),
        *(whole_on(shape, [0]) for shape in ((), (2, 2), (4, 1), (0,))),
        layout_of((4,), {0: [Box((0,), (4,))]}),  # not known to be disjoint
        HALVES,
        layout_of((4,), {0: [Box((0,), (3,)), Box((3,), (4,))]}),
        layout_of((4,), {}),
    ]
    assert len({layout.digest for layout in made}) == len(made)
    assert layout_of((4,), {0: [Box((0,), (2,)), Box((2,), (4,))]}).digest == HALVES.digest


def test_texts_with_separators_have_digests_of_their_own():
    texts = [["a", "b"], ["a\0b"], ["a", "", "b"], ["a\0", "b"], ["a", "\0b"], [], [""]]
    assert len(set(map(text_digest, texts))) == len(texts)
