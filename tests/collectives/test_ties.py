"""Ties through collectives: moved once, tied again on arrival, and refused where the layout has a tie too many."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardMetadata

import statetree
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, blank, check_equal, check_in_step, locals_of, sent_by
from tests.kept_calls import of_one_call

RANKS = pytest.mark.parametrize("world_size", [2, 4])


def everywhere():
    return tuple(range(dist.get_world_size()))


def shards(*, kind="S0", shape=(10, 3)):
    return Layout(shape, everywhere(), (kind,)).build()


def alias(leaf):
    """Return another DTensor on the same memory."""
    from torch.distributed.tensor import DTensor

    return DTensor(leaf._local_tensor, leaf._spec, requires_grad=False)


def gather_shards():
    return sent_by(lambda: statetree.gather({"a": shards()}))[1]


@of_one_call
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


@of_one_call
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
    """Two tensors cannot take each other's places: what is sent must not lie in the memory that is written."""
    one, other = shards(), shards()
    copies = Layout((4,), everywhere(), ("R",))
    left, right = copies.build(), copies.build()
    full, whole = {"a": right._local_tensor, "b": left._local_tensor}, {"a": left, "b": right}
    calls = {
        "reshard": lambda: statetree.reshard({"a": one, "b": other}, {"a": other, "b": one}, in_place=True),
        "distribute": lambda: statetree.distribute(full, whole, in_place=True),
        "distribute from one": lambda: statetree.distribute(full, whole, src=1, in_place=True),
    }
    before = statetree.offload((one, other, left, right))
    for name, call in calls.items():
        kind, message = attempt(call)
        assert "in the memory that is written" in message, (name, kind, message)
        assert "Copy it first, or do without in_place" in message
        assert kind in ("TreeMismatch", "RankMismatch"), (name, kind, message)
    assert statetree.similarity(before, (one, other, left, right), values=True)
    check_in_step()
    statetree.reshard({"a": one}, {"a": one}, in_place=True)  # it stays where it is
    assert statetree.similarity(before[0], one, values=True)


@RANKS
def test_what_is_sent_lies_elsewhere(world_size):
    run_ranks(world_size, swap)


def numbers():
    """Return the elements that ``shards`` has between the ranks."""
    return torch.arange(1.0, 31).view(10, 3)


def arrive(tree, like, expected, *, in_place):
    """Reshard, and check what arrives."""
    found = statetree.reshard(tree, like, in_place=in_place)
    for key, value in expected.items():
        assert torch.equal(found[key], value), (key, found[key], value)
    assert (found["a"].data_ptr() == found["b"].data_ptr()) == (like["a"].data_ptr() == like["b"].data_ptr())


def move_to_other_ties(tied_first, in_place):
    """Call with the same trees but for the ties between plain tensors of ``like``: each call has a plan of its own."""
    full = numbers()
    other = shards()
    other._local_tensor.add_(100)
    for tied in (tied_first, not tied_first, tied_first):
        one = torch.full((10, 3), -1.0)
        like = {"a": one, "b": one if tied else torch.full((10, 3), -2.0)}
        tree = {"a": shards(), "b": shards() if tied else other}
        arrive(tree, like, {"a": full, "b": full if tied else full + 100}, in_place=in_place)


@RANKS
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tied_first", [False, True])
def test_ties_of_plain_tensors_are_part_of_the_plan(world_size, tied_first, in_place):
    run_ranks(world_size, move_to_other_ties, tied_first, in_place)


def tie_on_one_rank(which, order):
    """Tie tensors that are written on one rank alone: all ranks refuse, whatever was planned before."""
    rank = dist.get_rank()
    wholes = {"a": numbers(), "b": numbers()}

    def like_for(tied, kind):
        make = (lambda: torch.full((10, 3), -1.0)) if kind == "plain" else (lambda: blank(shards(kind="S1")))
        one = make()
        return {"a": one, "b": (one if kind == "plain" else alias(one)) if tied else make()}

    for kind in ("plain", "distributed"):
        calls = {
            "reshard": lambda like: statetree.reshard({"a": shards(), "b": shards()}, like, in_place=True),
            "distribute": lambda like: statetree.distribute(wholes if rank == 1 else None, like, src=1, in_place=True),
            "broadcast": lambda like: statetree.broadcast(like, src=1),
        }
        for verb, call in calls.items():
            if kind == "plain" and verb != "reshard":
                continue  # what is not distributed comes from one rank, ties included
            for tied in order:
                like = like_for(rank == which if tied is None else tied, kind)
                before = statetree.offload(like)
                name, message = attempt(lambda like=like, call=call: call(like))
                if tied is not None:
                    assert not name, message
                    continue
                assert name == "RankMismatch", (kind, verb, name, message)
                assert f"{verb}: the ranks do not see the same ties at b: " in message
                assert f"with a on every rank or on none, got that on rank {which} alone" in message
                check_in_step()
                check_equal(like, before)


@RANKS
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("order", [(None,), (False, None, False), (True, None, True)])
def test_ties_on_one_rank_are_refused_by_all(world_size, which, order):
    run_ranks(world_size, tie_on_one_rank, which, order)


def tie_what_others_hold(in_place, differs):
    """Rank 0 alone holds tensors that are tied: ranks that hold other parts of the values see to it that they agree."""
    rank = dist.get_rank()
    full = {"a": numbers(), "b": numbers()}
    tree = {"a": shards(), "b": shards()}
    if differs:
        full["b"][9, 2] = -1
        if rank == dist.get_world_size() - 1:
            tree["b"]._local_tensor[-1, 2] = -1
    calls = {
        "reshard": lambda like: statetree.reshard(tree, like, in_place=in_place),
        "distribute": lambda like: statetree.distribute(full if rank == 1 else None, like, src=1, in_place=in_place),
    }
    for verb, call in calls.items():
        one, other = (blank(Layout((10, 3), (0,), ("R",)).build()) for _ in range(2))
        like = {"a": one, "b": alias(one) if rank == 0 else other}
        if differs:
            name, message = attempt(lambda call=call, like=like: call(like))
            assert name in ("TreeMismatch", "RankMismatch"), (verb, name, message)
            assert "ties at b" in message, message
            check_in_step()
            continue
        found = call(like)
        if rank == 0:
            assert torch.equal(found["a"]._local_tensor, full["a"]), verb
            assert memory(found["a"]) == memory(found["b"]), verb


@RANKS
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("differs", [False, True])
def test_values_for_one_memory_are_compared_wherever_they_lie(world_size, in_place, differs):
    run_ranks(world_size, tie_what_others_hold, in_place, differs)


def receive_for_one_memory(tied_ranks, device, in_place, prepared):
    """Have leaves arrive from another rank that share memory on some ranks: equal ones, and then others."""
    rank = dist.get_rank()
    first = torch.zeros(3, device=device)
    like = {"a": first, "b": first if rank in tied_ranks else torch.zeros(3, device=device), "c": shards(shape=(4,))}
    full = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(4)}
    make = functools.partial(statetree.prepare if prepared else functools.partial, statetree.distribute)
    call = make(full if rank == 0 else None, like, src=0, in_place=in_place)
    arrived = call()
    assert statetree.similarity(statetree.gather(arrived), full, values=True)
    before = statetree.offload(full)
    full["b"].fill_(2.0)
    full["c"].fill_(3.0)
    refused = attempt(call)
    check_in_step()
    if in_place:
        assert statetree.similarity(statetree.gather(arrived), before, values=True)
    return refused


@RANKS
@pytest.mark.parametrize("tied_ranks", [(1,), (0, 1)])
@pytest.mark.parametrize(
    ("device", "in_place", "prepared"), [(None, True, False), ("meta", False, False), (None, True, True)]
)
def test_values_that_arrive_for_one_memory_are_compared(world_size, tied_ranks, device, in_place, prepared):
    for rank, (kind, message) in enumerate(
        run_ranks(world_size, receive_for_one_memory, tied_ranks, device, in_place, prepared)
    ):
        assert kind == "RankMismatch" or (kind == "TreeMismatch" and rank in tied_ranks)
        assert "overlap" in message


def fill_dtypes_of_one_memory():
    """Tensors of two dtypes begin after as many elements of one memory: that is in two places."""
    source = {"numbers": Layout((4,), everywhere(), ("S0",)).build()}
    source["bytes"] = Layout((4,), everywhere(), ("S0",), torch.uint8).build()
    full = statetree.gather(source)
    for in_place in (False, True):
        for verb in (
            functools.partial(statetree.reshard, source),
            functools.partial(statetree.distribute, full if dist.get_rank() == 0 else None, src=0),
            functools.partial(statetree.distribute, full),
        ):
            memory = torch.zeros(64, dtype=torch.uint8)
            like = {"numbers": memory.view(torch.float32)[8:12], "bytes": memory[8:12]}
            found = verb(like=like, in_place=in_place)
            assert statetree.similarity(found, full, values=True), (verb, in_place, found)


@RANKS
def test_dtypes_of_one_memory_are_each_filled(world_size):
    run_ranks(world_size, fill_dtypes_of_one_memory)


def receive_what_no_rank_compares(kind, in_place):
    """Leaves of which each rank holds another one go to one memory: whether they are the same, nobody sees."""
    rank = dist.get_rank()
    own = torch.full((6, 2), 1.0 + rank)
    tree = {"n": 1, **({"ab"[rank]: own} if rank < 2 else {})}
    one = torch.full((6, 2), -1.0) if kind == "plain" else Layout((6, 2), everywhere(), ("S0",)).build()
    like = {"n": 1, "a": one, "b": one}
    before = statetree.offload(like)
    name, message = attempt(lambda: statetree.reshard(tree, like, union=True, in_place=in_place))
    assert name == "TreeMismatch", (name, message)
    assert "ties at b" in message, message
    check_in_step()
    check_equal(like, before)
    tree = {"n": 1, **({"a": torch.ones(6, 2), "b": torch.ones(6, 2)} if rank == 1 else {})}
    moved = statetree.gather(statetree.reshard(tree, like, union=True, in_place=in_place))  # one rank holds both
    assert torch.equal(moved["b"], torch.ones(6, 2))


@RANKS
@pytest.mark.parametrize("kind", ["plain", "distributed"])
@pytest.mark.parametrize("in_place", [False, True])
def test_values_for_one_memory_that_no_rank_compares_are_refused(world_size, kind, in_place):
    run_ranks(world_size, receive_what_no_rank_compares, kind, in_place)


def swap_local_shards():
    """Where each piece stays in the memory that is written, but in the place of another one, it does not stay."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = [torch.full((2, 2), 1.0 + rank), torch.full((2, 2), 10.0 + rank)]

    def sharded(first, second):
        places = [ShardMetadata([4 * rank + row, 0], [2, 2], f"rank:{rank}/cpu") for row in (0, 2)]
        shards = [Shard(first, places[0]), Shard(second, places[1])]
        return ShardedTensor._init_from_local_shards(shards, 4 * size, 2)

    tree, like = {"w": sharded(*pieces)}, {"w": sharded(*reversed(pieces))}
    name, message = attempt(lambda: statetree.reshard(tree, like, in_place=True))
    assert name == "TreeMismatch", (name, message)
    assert "overlap at w" in message, message
    check_in_step()
    assert pieces[0].eq(1.0 + rank).all()
    assert pieces[1].eq(10.0 + rank).all()
    statetree.reshard(tree, {"w": sharded(*pieces)}, in_place=True)  # onto themselves


def test_local_shards_in_each_others_places_are_refused():
    run_ranks(2, swap_local_shards)


def empty_ties():
    """Tensors without elements lie in one place on some ranks and not on others, which does not matter."""
    nothing = torch.empty(0, 3)
    like = {"a": nothing, "b": nothing if dist.get_rank() else torch.empty(0, 3), "c": torch.zeros(10, 3)}
    empty = Layout((0, 3), everywhere(), ("S0",))
    found = statetree.reshard({"a": empty.build(), "b": empty.build(), "c": shards()}, like, in_place=True)
    assert torch.equal(found["c"], numbers())


@RANKS
def test_ties_of_empty_tensors_do_not_matter(world_size):
    run_ranks(world_size, empty_ties)
