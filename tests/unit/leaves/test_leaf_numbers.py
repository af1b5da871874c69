"""Numbers of leaves: equal values have equal ones, in every process."""

import os
import subprocess
import sys

import pytest
import torch

import statetree as st


class Holder:
    def __init__(self, held):
        self.held = held
        self.tensor = torch.ones(2)


def digest_of(held):
    return st.digest({"a": Holder(held)})


def filled(*elements):
    """Return a set: two elements that fall into one place of its table lie in the order in which they came."""
    found = set()
    for element in elements:
        found.add(element)
    assert list(found) == list(elements)
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (filled(0, 8), filled(8, 0)),
        (frozenset(filled(0, 8)), frozenset(filled(8, 0))),
        ({"a": filled(0, 8), "b": [{(1, 2)}]}, {"a": filled(8, 0), "b": [{(1, 2)}]}),
        ({frozenset(filled(0, 8))}, {frozenset(filled(8, 0))}),
    ],
)
def test_equal_sets_in_objects_have_equal_digests(one, other):
    assert digest_of(one) == digest_of(other)
    assert not st.delta({"a": Holder(one)}, {"a": Holder(other)})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({1, 2}, {1, 3}),
        ({1, 2}, frozenset({1, 2})),
        ({1}, {1.0}),
        ({1}, {True}),
        ({0.0}, {-0.0}),
        ({("a", "b")}, {("a", ("b",))}),
        ([{1}, {2}], [{2}, {1}]),
        ({"1"}, {1}),
        ({1}, "builtins.set {builtins.int 1}"),
        ([{1}, "x"], [{1}, "y"]),
    ],
)
def test_other_sets_have_other_digests(one, other):
    assert digest_of(one) != digest_of(other)
    assert st.delta({"a": Holder(one)}, {"a": Holder(other)})


CODE = """
import torch
import statetree as st


class Sampler:
    def __init__(self):
        self.seen = {"apple", "pear", "plum", "fig", ("a", b"b"), frozenset({"x", "y", "z"})}
        self.counts = torch.arange(3)


print(st.digest({"sampler": Sampler(), "plain": {"apple", "pear", "plum"}}))
"""


@pytest.mark.slow
def test_digests_of_sets_are_equal_in_every_process():
    found = set()
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1
