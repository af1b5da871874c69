"""Ranks that save trees of different keys: each names its leaves alone, and what reads the same is never merged."""

from __future__ import annotations

import re
import tempfile

import pytest
import torch
import torch.distributed as dist

import statetree as st
from statetree.testing import run_ranks

A, B, C = (torch.full((3,), value) for value in (1.0, 2.0, 3.0))
CONFUSED = {
    "a key with a dot": (({"a.b": A}, {"a": {"b": B}}), r"'a\.b': .*\['a\.b'\] and, on rank 1, \['a', 'b'\]"),
    "plain values": (({"x": 1, "a.b": 1.5}, {"x": 1, "a": {"b": 2.5}}), r"leaves whose keys read 'a\.b'"),
    "numbers": (({0: A}, {"0": B}), r"got \[0\] and, on rank 1, \['0'\]"),
    "None": (({None: A}, {"None": B}), "leaves whose keys read 'None'"),
    "told apart on one rank": (({"a.b": A, "a": {"b": B}}, {"a": {"b": B}}), "expected one name for it"),
    "told apart on the other": (({"a": {"b": B}}, {"a.b": A, "a": {"b": B}}), "expected one name for it"),
}
CLEAR = {
    "stages": ({"m.1": A, "n": 1}, {"m.2": B, "n": 1}),
    "a part": ({"m": {"x.y": A}}, {"m": {"x.y": A, "z": C}}),
    "confused alike": ({"a.b": A, "a": {"b": B}}, {"a.b": A, "a": {"b": B}}),
    "a list and numbers": ({"a": [A, B]}, {"a": {0: A, 1: B}}),
}


def saved(trees, path):
    """Return what a rank loads again, or why it could not save."""
    mine = trees[dist.get_rank()]
    try:
        st.save(mine, path)
    except st.CheckpointError as error:
        return str(error)
    return bool(st.similarity(st.load(path, st.map_leaves(zeroed, mine), strict=False), mine))


def zeroed(leaf):
    return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else 0


def on_ranks(cases, folder):
    return [saved(trees, f"{folder}/{number}") for number, trees in enumerate(cases)]


@pytest.fixture(scope="module")
def found():
    with tempfile.TemporaryDirectory() as folder:
        cases = [trees for trees, _ in CONFUSED.values()] + list(CLEAR.values())
        rows = run_ranks(2, on_ranks, cases, folder)
    return [dict(zip((*CONFUSED, *CLEAR), row, strict=True)) for row in rows]


@pytest.mark.parametrize("name", CONFUSED)
def test_leaves_whose_names_read_the_same_are_refused_on_all_ranks(found, name):
    assert all(re.search(CONFUSED[name][1], row[name]) for row in found)


@pytest.mark.parametrize("name", CLEAR)
def test_others_come_back_to_each_rank(found, name):
    assert [row[name] for row in found] == [True, True]
