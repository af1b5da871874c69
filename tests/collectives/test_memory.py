"""Tensors that share memory, on either side: each leaf gets the elements that are its own, or everybody is refused."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import statetree
from statetree.testing import run_ranks
from tests.collectives.checks import attempt


@functools.cache
def mesh_of(*ranks):
    return DeviceMesh("cpu", list(ranks))


@functools.cache
def group_of(*ranks):
    return dist.new_group(list(ranks))


def numbers(count, start=0.0):
    return torch.arange(float(count)) + start


def sharded(full):
    return distribute_tensor(full, mesh_of(0, 1), [Shard(0)])


def local(tensor, mesh=None):
    return DTensor.from_local(tensor, mesh or mesh_of(0, 1), [Shard(0)], run_check=False)


def refusal(call):
    try:
        call()
    except statetree.StateTreeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def conjugated():
    values = torch.complex(numbers(4), numbers(4, start=9))
    whole = statetree.gather({"a": local(values), "b": local(values.conj())})
    return bool((whole["a"] == torch.cat([values] * 2)).all() and (whole["b"] == torch.cat([values.conj()] * 2)).all())


def over_swapped_meshes():
    own = numbers(2, start=10.0 * dist.get_rank())
    whole = statetree.gather({"a": local(own), "b": local(own, mesh_of(1, 0))})
    return whole["a"].tolist() == [0, 1, 10, 11] and whole["b"].tolist() == [10, 11, 0, 1]


def sources_in_targets():
    old, fresh = numbers(4), torch.zeros(4)
    like = {"a": local(old), "b": fresh}
    moved = distribute_tensor(numbers(8, start=100), mesh_of(0, 1), [Replicate()])
    name, message = attempt(lambda: statetree.reshard({"a": moved, "b": old}, like, in_place=True))
    assert (name, "overlap at b" in message) == ("TreeMismatch", True), message
    return old.tolist() == [0, 1, 2, 3] and not fresh.any()


def sources_in_targets_of_distribute():
    old, fresh = numbers(4), torch.zeros(4)
    full, like = {"a": numbers(8, start=100), "b": old}, {"a": local(old), "b": fresh}
    name, message = attempt(lambda: statetree.distribute(full, like, in_place=True))
    assert (name, "overlap at b" in message) == ("TreeMismatch", True), message
    return old.tolist() == [0, 1, 2, 3] and not fresh.any()


def columns_of_one_matrix():
    matrix = torch.zeros(4, 2)
    like = {"a": local(matrix[:, 0]), "b": local(matrix[:, 1])}
    statetree.distribute({"a": numbers(8), "b": numbers(8, start=50)}, like, in_place=True)
    first = 4 * dist.get_rank()
    return matrix.T.tolist() == [numbers(4, start=first).tolist(), numbers(4, start=50 + first).tolist()]


def versions():
    large = torch.zeros(2 << 20)
    like = {"a": local(large)}
    source = {"a": distribute_tensor(torch.zeros(4 << 20), mesh_of(0, 1), [Shard(0)])}
    source["a"] = DTensor.from_local(source["a"].to_local(), mesh_of(1, 0), [Shard(0)], run_check=False)
    before = large._version
    statetree.reshard(source, like, in_place=True)
    return large._version > before


@pytest.mark.parametrize(
    "holds",
    [
        conjugated,
        over_swapped_meshes,
        sources_in_targets,
        sources_in_targets_of_distribute,
        columns_of_one_matrix,
        versions,
    ],
)
def test_each_leaf_gets_its_own(holds):
    assert run_ranks(2, holds) == [True, True]


def tied_plain():
    return refusal(
        lambda: statetree.reshard(
            {"a": sharded(numbers(8)), "b": sharded(numbers(8, start=100))}, dict.fromkeys("ab", torch.zeros(8))
        )
    )


def overlapping(src):
    memory = torch.zeros(6)
    full = {"a": numbers(8), "b": numbers(8, start=100)}
    return refusal(lambda: statetree.distribute(full, {"a": local(memory[:4]), "b": local(memory[2:])}, src=src))


def plain_over_distributed():
    memory = torch.zeros(4)
    full = {"a": numbers(8, start=100), "b": numbers(4)}
    return refusal(lambda: statetree.distribute(full, {"a": local(memory), "b": memory}))


def plain_that_agree_over_distributed():
    memory = torch.zeros(8)
    full = {"a": numbers(8), "b": numbers(3, start=100), "c": numbers(3, start=102)}
    return refusal(lambda: statetree.distribute(full, {"a": local(memory[:4]), "b": memory[3:6], "c": memory[5:]}))


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (tied_plain, "TreeMismatch: reshard: ties at b: .* tied to a"),
        (functools.partial(overlapping, None), "TreeMismatch: distribute: overlap at b: .* overlaps a"),
        (functools.partial(overlapping, 0), "TreeMismatch: distribute: overlap at b: .* overlaps a"),
        (plain_over_distributed, "TreeMismatch: distribute: overlap at a: .* overlaps b"),
        (plain_that_agree_over_distributed, "TreeMismatch: distribute: overlap at b: .* overlaps a"),
    ],
    ids=[
        "tied plain tensors",
        "overlapping, sliced",
        "overlapping, sent",
        "a plain tensor over a local one",
        "plain tensors that agree where they overlap, over a local one",
    ],
)
def test_targets_that_cannot_hold_two_values_are_refused(refused, reason):
    for found in run_ranks(2, refused):
        assert re.search(reason, found), found


def summands_elsewhere():
    group = group_of(0, 1)
    mesh = mesh_of(0, 1, 2, 3)
    leaf = DTensor.from_local(numbers(4), mesh, [Partial()], run_check=False)
    return refusal(lambda: statetree.gather({"a": leaf}, group=group)) if dist.get_rank() < 2 else ""


def meshes_of_their_own():
    first = 2 * (dist.get_rank() // 2)
    meshes = [mesh_of(0, 1), mesh_of(2, 3)]
    values = numbers(2, start=50.0 * first + 2 * (dist.get_rank() % 2))
    return statetree.gather({"a": local(values, meshes[first // 2])}, replicas="first")["a"].tolist()


@pytest.mark.slow
def test_summands_that_the_group_does_not_hold():
    found = run_ranks(4, summands_elsewhere)
    assert all("UnsupportedLeaf: gather: the ranks of the group hold only a part" in text for text in found[:2])


@pytest.mark.slow
def test_what_pairs_of_ranks_hold_over_meshes_of_their_own_is_not_mixed():
    assert run_ranks(4, meshes_of_their_own) == [[0.0, 1.0, 2.0, 3.0]] * 4
