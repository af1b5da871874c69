"""Tests of ``statetree.spans.threads``."""

from threading import get_ident
from typing import NamedTuple

import pytest
import torch

import statetree as st
from statetree.spans import threads
from statetree.spans.threads import in_threads


@pytest.fixture(autouse=True)
def _three_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


MANY = [torch.empty(1 << 24, dtype=torch.uint8)]


def test_results_come_in_the_order_of_the_items():
    assert in_threads(lambda item: item**2, range(20), MANY) == [item**2 for item in range(20)]


class OnDevice(NamedTuple):
    """What is asked of a tensor on a device, which may be none of this machine."""

    nbytes: int = 1 << 30
    is_cpu: bool = False
    is_meta: bool = False


@pytest.mark.parametrize(
    ("items", "tensors", "here"),
    [
        (9, MANY, False),
        (9, [*MANY, torch.empty(5, device="meta")], False),
        (9, [MANY[0][:99]], True),
        (9, [torch.empty(1 << 30, device="meta")], True),
        (9, [*MANY, OnDevice()], True),
        (1, MANY, True),
    ],
    ids=["many", "and meta", "few bytes", "meta", "on a device", "one"],
)
def test_threads_are_started_where_that_pays(items, tensors, here):
    found = set(in_threads(lambda _: get_ident(), range(items), tensors))
    assert (found == {get_ident()}) is here


def test_an_exception_comes_out():
    with pytest.raises(ZeroDivisionError, match="zero"):
        in_threads(lambda item: 1 // item, range(5), MANY)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_digests_and_deltas_are_the_same_in_threads(monkeypatch, mode):
    base = {str(number): torch.arange(5_000.0 * number) for number in range(1, 9)}
    base["parameter"] = torch.nn.Parameter(torch.arange(9_000.0))
    new = st.offload(base)
    for tensor in new.values():
        tensor.detach()[::70] += 1
    expected = st.digest(new), st.delta(new, base)
    monkeypatch.setattr(threads, "_WORTH_THREADS", 1)
    with mode():
        found = st.digest(new), st.delta(new, base)
        assert found[0] == expected[0]
        assert st.similarity(found[1], expected[1], values=True)
        assert st.similarity(st.apply_delta(found[1], base), new, values=True)
