"""What a plan depends on where trees differ in keys or dtypes, and what ranks hear of what only one of them knows."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import statetree as st
from statetree.testing import run_ranks


def shard(local, ranks=(0, 1)):
    return DTensor.from_local(local, DeviceMesh("cpu", list(ranks)), [Shard(0)], run_check=False)


def send_other_keys():
    """The second call has as many leaves as the first, which go elsewhere."""
    rank = dist.get_rank()
    like = {name: shard(torch.full((2, 2), -1.0), ranks) for name, ranks in {"b": (0, 1), "c": (1, 0)}.items()}
    whole = torch.arange(8.0).view(4, 2)
    for name in "bc":
        full = {name: whole} if rank == 0 else None
        got = st.distribute(full, like, src=0, strict=False)[name].to_local()
        first = (rank == 0) == (name == "b")
        assert torch.equal(got, whole[:2] if first else whole[2:]), (name, got)


def cast_into_ties():
    """Ties of plain tensors are known where these are converted."""
    rank = dist.get_rank()
    full = {"a": torch.ones(4), "b": torch.ones(4)} if rank == 0 else None
    tied = torch.zeros(4, dtype=torch.bfloat16)
    for like in ({"a": tied, "b": tied}, {name: torch.zeros(4, dtype=torch.bfloat16) for name in "ab"}):
        got = st.distribute(full, like, src=0, cast=True, in_place=True)
        assert got["a"].tolist() == got["b"].tolist() == [1.0] * 4
    like = {"a": tied, "b": tied if rank == 1 else torch.zeros_like(tied)}
    with pytest.raises(st.RankMismatch, match="do not see the same ties"):
        st.distribute(full, like, src=0, cast=True, in_place=True)
    assert st.gather({"n": rank}, dst=0)["n"] == rank  # they are in step


def fill_a_part_of_a_tie():
    """Of tied tensors, the source has not the first."""
    source = {"b": DTensor.from_local(torch.arange(4.0), DeviceMesh("cpu", [0, 1]), [Replicate()], run_check=False)}
    for verb in (
        lambda like: st.reshard(source, like, strict=False, in_place=True),
        lambda like: st.distribute({"b": torch.arange(4.0)}, like, src=0, strict=False, in_place=True),
        lambda like: st.distribute({"b": torch.arange(4.0)}, like, strict=False, in_place=True),
    ):
        tied = shard(torch.full((2,), -1.0))
        got = verb({"a": tied, "b": tied})
        rank = dist.get_rank()
        assert got["b"].to_local().tolist() == [2.0 * rank, 2.0 * rank + 1]


def unite_what_one_rank_can_read():
    rank = dist.get_rank()
    if rank == 0:
        module = types.ModuleType("of_rank_0_alone")
        exec("def f(): pass", module.__dict__)
        sys.modules["of_rank_0_alone"] = module
    tree = {"x": sys.modules["of_rank_0_alone"].f, "w": torch.ones(2)} if rank == 0 else {"v": torch.ones(3)}
    with pytest.raises((st.RankMismatch, ModuleNotFoundError)):
        st.gather(tree, union=True)
    assert st.gather({"n": torch.ones(1)})["n"].tolist() == [1.0]  # they are in step


@pytest.mark.parametrize(
    "check",
    [send_other_keys, cast_into_ties, fill_a_part_of_a_tie, unite_what_one_rank_can_read],
    ids=lambda c: c.__name__,
)
def test_on_two_ranks(check):
    run_ranks(2, check)
