"""Ties through collectives: moved once, tied again on arrival, and refused where the layout has a tie too many."""

import functools
import re

import pytest
import torch
import torch.distributed as dist

import statetree
from statetree.exchange import buckets as exchange
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, blank, check_equal, check_in_step, locals_of

RANKS = pytest.mark.parametrize("world_size", [2, 4])


def everywhere():
    return tuple(range(dist.get_world_size()))


def shards(*, kind="S0", shape=(10, 3)):
    return Layout(shape, everywhere(), (kind,)).build()


def alias(leaf):
    """Return another DTensor on the same memory."""
    from torch.distributed.tensor import DTensor

    return DTensor(leaf._local_tensor, leaf._spec, requires_grad=False)


def sent_by(call):
    """Make a call, and return how many bytes this rank sent in it."""
    sent = []
    run = exchange.Exchange.run

    def counted(self, *args, **kwargs):
        sent.append(self.bytes_sent())
        return run(self, *args, **kwargs)

    exchange.Exchange.run = counted
    try:
        result = call()
    finally:
        exchange.Exchange.run = run
    return result, sum(sent)


def gather_shards():
    return sent_by(lambda: statetree.gather({"a": shards()}))[1]


def test_a_rank_sends_the_bytes_of_its_shard():
    assert run_ranks(2, gather_shards) == [5 * 3 * 4] * 2


def memory(leaf):
    return [tensor.data_ptr() for tensor in locals_of(leaf)]


def move_ties():
    one, other = shards(), shards()
    tied = {"a": one, "b": {"alias": alias(one), "same": one}, "c": other}
    alone = {"a": one, "c": other}
    rank = dist.get_rank()
    like, like_alone = shards(kind="S1"), shards(kind="S1")
    likes = {"a": like, "b": {"alias": alias(like), "same": like}, "c": like_alone}
    whole = statetree.gather(tied)
    calls = {
        "gather": lambda tree, _: statetree.gather(tree),
        "gather to one": lambda tree, _: statetree.gather(tree, dst=1),
        "reshard": statetree.reshard,
        "reshard in place": functools.partial(statetree.reshard, in_place=True),
        "distribute": lambda tree, like: statetree.distribute(
            {key: whole[key] for key in tree} if rank == 0 else None, like, src=0
        ),
    }
    for name, call in calls.items():
        found, sent = sent_by(lambda call=call: call(tied, likes))
        _, least = sent_by(lambda call=call: call(alone, {"a": likes["a"], "c": likes["c"]}))
        if name != "distribute":  # which also describes the tree
            assert sent == least, (name, sent, least)
        else:
            assert sent - least < 120 * dist.get_world_size(), (sent, least)
        assert type(found["b"]["alias"]) is type(found["a"]), name
        assert memory(found["a"]) == memory(found["b"]["alias"]) == memory(found["b"]["same"]), name
        assert found["a"] is found["b"]["same"], name
        if any(memory(found["a"])):
            assert memory(found["a"]) != memory(found["c"]), name
        if "in place" not in name:
            assert memory(found["a"]) != memory(likes["a"]) or not any(memory(likes["a"])), name


@RANKS
def test_tied_shards_are_moved_once(world_size):
    run_ranks(world_size, move_ties)


def keep_plain_ties():
    base = torch.arange(12.0)
    tree = {"w": base, "t": base.view(3, 4).t(), "part": base[3:7], "dist": shards(), "own": torch.arange(3.0)}
    rank = dist.get_rank()
    source = {**tree, "dist": statetree.gather(tree["dist"])}
    for result in (
        statetree.broadcast(tree, src=1),
        statetree.distribute(source, blank(tree)),
        statetree.distribute(source if rank == 1 else None, blank(tree), src=1),
        statetree.reshard(tree, blank(tree)),
    ):
        check_equal(
            {key: result[key] for key in ("w", "t", "part", "own")}, {key: tree[key] for key in tree if key != "dist"}
        )
        start = result["w"].data_ptr()
        assert result["t"].data_ptr() == start
        assert result["part"].data_ptr() == start + 12
        assert start != base.data_ptr()


@RANKS
def test_plain_ties_are_kept(world_size):
    run_ranks(world_size, keep_plain_ties)


def refuse_ties():
    """Ask for two values in one memory."""
    rank = dist.get_rank()
    one = shards()
    plain = torch.zeros(4)
    like = {"a": one, "b": alias(one), "c": torch.zeros(2)}
    plain_like = {"a": plain, "b": plain[:], "d": shards()}
    same, more = torch.arange(30.0).view(10, 3), torch.arange(30.0).view(10, 3) + 1
    full = {"a": same, "b": more, "c": torch.ones(2)}
    plain_full = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 1, "d": torch.ones(10, 3)}
    sharded = {"a": shards(), "b": shards(), "c": torch.ones(2)}
    sharded["b"]._local_tensor.add_(1)
    before, plain_before = statetree.offload(like), statetree.offload(plain_like)
    for in_place in (False, True):
        for src in (None, 0, 1):
            for values, target in ((full, like), (plain_full, plain_like)):
                given = values if src in (None, rank) else None
                name, message = attempt(
                    lambda given=given, target=target, src=src, in_place=in_place: statetree.distribute(
                        given, target, src=src, in_place=in_place
                    )
                )
                assert name == "TreeMismatch", (in_place, src, name, message)
                assert re.search(r"ties.* at b\b|overlap.* at a\b.* b\b", message), message
                check_in_step()
                check_equal(like, before)
                check_equal(plain_like, plain_before)
        name, message = attempt(lambda in_place=in_place: statetree.reshard(sharded, like, in_place=in_place))
        assert name in ("TreeMismatch", "RankMismatch")
        assert "ties at b" in message or "rank" in message, message
        check_in_step()
        check_equal(like, before)
    # Equal values can go into one memory.
    for src in (None, 0):
        given = {**full, "b": same.clone()} if src in (None, rank) else None
        found = statetree.distribute(given, like, src=src)
        assert memory(found["a"]) == memory(found["b"])
        assert torch.equal(statetree.gather(found)["b"], same)


@RANKS
def test_a_tie_too_many_is_refused(world_size):
    run_ranks(world_size, refuse_ties)


def differ_on_one_rank():
    """Let values that are tied in ``like`` differ on one rank alone: all hear of it."""
    rank = dist.get_rank()
    one = shards()
    like = {"a": one, "b": alias(one)}
    tree = {"a": shards(), "b": shards()}
    if rank == 1:
        tree["b"]._local_tensor[0].add_(1)
    name, message = attempt(lambda: statetree.reshard(tree, like, in_place=True))
    assert name == ("TreeMismatch" if rank == 1 else "RankMismatch"), (name, message)
    assert "ties at b" in message
    check_in_step()
    assert torch.equal(one._local_tensor, shards()._local_tensor)


@RANKS
def test_a_tie_that_one_rank_cannot_keep_is_refused_by_all(world_size):
    run_ranks(world_size, differ_on_one_rank)


def see_ties_differently():
    """Rank 0 holds nothing of two leaves, on one empty storage: it takes them for tied, and the others know better."""
    from torch.distributed.tensor import DTensor

    layout = Layout((3, 2), everywhere(), ("S0",))
    first, second = layout.build(), layout.build()
    second._local_tensor.add_(100)
    if not first._local_tensor.numel():
        second = DTensor(first._local_tensor, second._spec, requires_grad=False)
    expected = layout.full()
    found = statetree.gather({"a": first, "b": second})
    assert torch.equal(found["a"], expected)
    assert torch.equal(found["b"], expected + 100)
    assert found["a"].data_ptr() != found["b"].data_ptr()
    moved = statetree.reshard({"a": first, "b": second}, {"a": expected, "b": expected.clone()})
    assert torch.equal(moved["b"], expected + 100)


@pytest.mark.slow
def test_ties_of_nothing_are_none():
    run_ranks(4, see_ties_differently)


def swap():
    """Let two tensors take each other's places."""
    one, other = shards(), shards()
    other._local_tensor.mul_(-1)
    expected = one._local_tensor.clone()
    statetree.reshard({"a": one, "b": other}, {"a": other, "b": one}, in_place=True)
    assert torch.equal(other._local_tensor, expected)
    assert torch.equal(one._local_tensor, -expected)
    copies = Layout((4,), everywhere(), ("R",))
    left, right = copies.build(), copies.build()
    right._local_tensor.mul_(-1)
    full = {"a": right._local_tensor, "b": left._local_tensor}
    statetree.distribute(full, {"a": left, "b": right}, in_place=True)
    assert torch.equal(left._local_tensor, -copies.full())
    assert torch.equal(right._local_tensor, copies.full())
    statetree.distribute(full, {"a": left, "b": right}, src=1, in_place=True)
    assert torch.equal(left._local_tensor, copies.full())


@RANKS
def test_a_state_may_be_moved_within_its_own_memory(world_size):
    run_ranks(world_size, swap)
