"""Prepared transfers: planned once, they move what the tensors hold each time, or tell all ranks why not."""

import functools
import gc
import math
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import statetree
from statetree.testing import run_ranks
from tests.collectives.checks import attempt, blank, check_in_step, check_same


def sharded(shape, first, placement=None, dtype=torch.float32):
    """Return a tensor that is distributed over all ranks, with unique elements from a number on."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = placement or Shard(0)
    full = torch.arange(first, first + math.prod(shape)).view(shape).to(dtype)
    if isinstance(placement, Partial):
        return DTensor.from_local(full, mesh, [placement], run_check=False)
    if isinstance(placement, Replicate):
        return DTensor.from_local(full.clone(), mesh, [placement], run_check=False)
    local = full.chunk(mesh.size(), placement.dim)[dist.get_rank()].clone()
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def state():
    """Return a tree with all kinds of leaves."""
    weight = sharded((6, 4), 100)
    local = torch.arange(3.0)
    return {
        "weight": weight,
        "again": weight,
        "columns": sharded((2, 8), 200, Shard(1), torch.bfloat16),
        "everywhere": sharded((3,), 300, Replicate(), torch.bool),
        "transposed": sharded((4, 6), 400, Shard(1)),
        "plain": local,
        "part": local[1:],
        "step": 7,
        "nested": [torch.arange(5), {"name": "adam"}],
    }


def change(tree):
    """Change every element in place."""
    seen = set()
    for leaf in statetree.flatten(tree)[0]:
        tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
        if isinstance(tensor, torch.Tensor) and not tensor.is_sparse and tensor.data_ptr() not in seen:
            if tensor._is_view():
                continue
            seen.add(tensor.data_ptr())
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)


def follow(dst):
    """Gather a tree that changes."""
    tree = state()
    sync = statetree.prepare(statetree.gather, tree, dst=dst)
    result = None
    for _ in range(3):
        found = sync()
        assert result is None or found is result
        result = found
        check_same(found, statetree.gather(tree, dst=dst))
        change(tree)
    check_in_step()


@pytest.mark.parametrize("dst", [None, 1, [0, 1]])
def test_gather_fills_the_same_tree(dst):
    run_ranks(2, follow, dst)


def reshard_often(in_place):
    tree = state()
    like = blank(
        {**state(), "weight": sharded((6, 4), 0, Shard(1)), "columns": torch.zeros(2, 8, dtype=torch.bfloat16)}
    )
    like["again"] = like["weight"]
    expected = statetree.offload(like)
    sync = statetree.prepare(statetree.reshard, tree, like, in_place=in_place)
    check_same(like, expected)  # nothing has moved yet
    for _ in range(3):
        found = sync()
        check_same(found, statetree.reshard(tree, expected))
        assert (found["weight"] is like["weight"]) == in_place
        assert found["weight"]._local_tensor.data_ptr() == found["again"]._local_tensor.data_ptr()
        change(tree)
    if not in_place:
        check_same(like, expected)


@pytest.mark.parametrize("in_place", [True, False])
def test_reshard_moves_what_the_tensors_hold(in_place):
    run_ranks(2, reshard_often, in_place)


def distribute_often(src, in_place):
    like, rank = blank(state()), dist.get_rank()
    full = statetree.gather(state())
    given = full if src in (None, rank) else None
    before = statetree.offload(like)
    sync = statetree.prepare(statetree.distribute, given, like, src=src, in_place=in_place)
    check_same(like, before)
    for _ in range(3):
        found = sync()
        check_same(found, statetree.distribute(full, before))
        change(full)
    assert (found["weight"] is like["weight"]) == in_place


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("src", [None, 1])
def test_distribute_moves_what_the_tensors_hold(src, in_place):
    run_ranks(2, distribute_often, src, in_place)


class Box:
    """An opaque object."""

    def __init__(self, tensor):
        self.tensor = tensor


def broadcast_often():
    tree, rank = {**state(), "box": Box(torch.arange(4.0)), "sparse": torch.eye(3).to_sparse()}, dist.get_rank()
    summand = sharded((4,), 10 * rank, Partial())
    tree["summand"] = summand
    sync = statetree.prepare(statetree.broadcast, tree, src=1)
    for _ in range(3):
        found = dict(sync())
        expected = statetree.broadcast(tree, src=1)
        assert torch.equal(found.pop("box").tensor, expected.pop("box").tensor)
        check_same(found, expected)
        assert torch.equal(found["summand"]._local_tensor, summand._local_tensor)
        change(tree)
        tree["box"].tensor.add_(1)
        tree["sparse"]._values().add_(1)


def test_broadcast_sends_elements_again():
    run_ranks(2, broadcast_often)


def write_again():
    """Call prepared verbs twice, and see that autograd can tell that each tensor with elements was written."""
    plain, rank = {"w": torch.ones(1000, 4), "v": torch.ones(3), "s": torch.eye(3).to_sparse()}, dist.get_rank()
    opaque = {"box": Box(torch.arange(4.0))}
    sharded_, whole = {"w": sharded((100, 4), 1, Shard(0))}, {"w": torch.ones(100, 4)}
    like = {"w": sharded((100, 4), 1, Shard(1))}
    for sync in (
        statetree.prepare(statetree.broadcast, plain),
        statetree.prepare(statetree.broadcast, opaque),
        statetree.prepare(statetree.broadcast, sharded_),
        statetree.prepare(statetree.gather, sharded_),
        statetree.prepare(statetree.reshard, sharded_, like),
        statetree.prepare(statetree.reshard, sharded_, like, in_place=True),
        statetree.prepare(statetree.distribute, whole if rank == 0 else None, like, src=0, in_place=True),
        statetree.prepare(statetree.distribute, plain if rank == 0 else None, plain, src=0),
        statetree.prepare(statetree.distribute, whole, like),
    ):
        leaves = [getattr(leaf, "_local_tensor", leaf) for leaf in sync().values()]
        leaves = [getattr(leaf, "tensor", leaf) for leaf in leaves]
        leaves = [leaf._values() if leaf.is_sparse else leaf for leaf in leaves]
        before = [leaf._version for leaf in leaves]
        sync()
        assert all(leaf._version > count for leaf, count in zip(leaves, before, strict=True))


def test_autograd_can_tell_what_was_filled_again():
    run_ranks(2, write_again)


def sum_often():
    tree = {"sum": sharded((5,), 1, Partial()), "most": sharded((5,), dist.get_rank(), Partial("max"))}
    sync = statetree.prepare(statetree.gather, tree)
    for _ in range(3):
        check_same(sync(), statetree.gather(tree))
        for leaf in tree.values():
            leaf._local_tensor.add_(1)


def test_summands_are_reduced_each_time():
    run_ranks(2, sum_often)


def replace_data(tree):
    tree["plain"].data = torch.zeros(3)


def replace_local(tree):
    tree["weight"]._local_tensor = tree["weight"]._local_tensor.clone()


def free(tree):
    tree["weight"]._local_tensor.untyped_storage().resize_(0)


def resize(tree):
    tree["nested"][0].resize_(4)


def transpose(tree):
    tree["transposed"]._local_tensor.t_()


BROKEN = {
    "plain": replace_data,
    "again|weight": replace_local,
    "weight|again": free,
    "nested.0": resize,
    "transposed": transpose,
}


def move_away(path, verb):
    """Have tensors of rank 1 moved between two runs."""
    rank = dist.get_rank()
    tree, like = state(), blank(state())
    full = statetree.offload(statetree.gather(tree))
    calls = {
        "reshard": (statetree.reshard, (tree, like), {"in_place": True}),
        "distribute": (statetree.distribute, (full if rank else None, tree), {"src": 1, "in_place": True}),
        "broadcast": (statetree.broadcast, (tree,), {"src": 1}),
        "broadcast from another": (statetree.broadcast, (tree,), {"src": 0}),
    }
    call, args, options = calls[verb]
    sync = statetree.prepare(call, *args, **options)
    sync()
    before = statetree.offload(like)
    change(tree)
    if rank == 1:
        BROKEN[path](tree)
    name, message = attempt(sync)
    assert name == "RankMismatch", (name, message)
    assert ("rank 1 failed: RankMismatch: " in message) == (rank == 0), message
    assert any(f"the tensor at {place} is not what it was" in message for place in path.split("|")), message
    check_same(like, before)
    check_in_step()
    assert attempt(sync)[0] == "RankMismatch"


@pytest.mark.parametrize("verb", ["reshard", "distribute", "broadcast"])
@pytest.mark.parametrize("path", BROKEN)
def test_all_ranks_hear_of_a_tensor_that_is_elsewhere(path, verb):
    run_ranks(2, move_away, path, verb)


@pytest.mark.parametrize("path", ["again|weight", "weight|again", "transposed"])
def test_and_of_one_that_a_broadcast_reads_beside_the_source(path):
    run_ranks(2, move_away, path, "broadcast from another")


def close_and_call():
    tree = state()
    with statetree.prepare(statetree.gather, tree) as sync:
        sync()
    sync.close()
    name, message = attempt(sync)
    assert (name, "was closed" in message) == ("StateTreeError", True), message
    other = statetree.prepare(statetree.gather, tree)
    if dist.get_rank() == 0:
        other.close()
    name, message = attempt(other)
    assert name == ("StateTreeError" if dist.get_rank() == 0 else "RankMismatch"), message
    check_in_step()


def closing_lets_go_of_tensors_and_buffers():
    with statetree.prepare(statetree.gather, {"w": sharded((6, 4), 0)}) as sync:
        sync()
    gc.collect()  # torch keeps the first DTensor of a process in a frame, until garbage is collected
    gc.disable()
    for make in (
        lambda tree: statetree.prepare(statetree.gather, tree),
        lambda tree: statetree.prepare(statetree.reshard, tree, statetree.offload(tree), in_place=True),
        lambda tree: statetree.prepare(statetree.broadcast, tree),
    ):
        tree = {"w": sharded((6, 4), 0), "whole": torch.arange(5.0)}
        held = [weakref.ref(tree["w"]), weakref.ref(tree["w"]._local_tensor.untyped_storage())]
        sync = make(tree)
        result = sync()
        held += [weakref.ref(result["w"])]
        buffers = [weakref.ref(each) for each in tensors_of(sync)]
        del tree, result
        assert all(each() is not None for each in held)
        sync.close()
        left = [*held, *buffers]
        for _ in range(500):  # a thread of gloo lets go of what was sent a moment after the transfer is done
            left = [each for each in left if each() is not None]
            if left:
                time.sleep(0.01)
        assert left == []
        name, message = attempt(sync)
        assert (name, "was closed" in message) == ("StateTreeError", True), message
    gc.enable()
    check_in_step()


def tensors_of(prepared):
    """Every tensor that the recorded operations hold."""
    pending, found = list(prepared._recorder._operations), {}
    while pending:
        each = pending.pop()
        if isinstance(each, torch.Tensor):
            found[id(each)] = each
        elif isinstance(each, (list, tuple)):
            pending += each
        elif isinstance(each, functools.partial):
            pending += [*each.args, *each.keywords.values()]
        elif getattr(each, "__closure__", None):
            pending += [cell.cell_contents for cell in each.__closure__]
    assert found
    return list(found.values())


def test_closing_lets_go_of_tensors_and_buffers():
    run_ranks(2, closing_lets_go_of_tensors_and_buffers)


def close_while_it_moves(by):
    """Close a transfer in the middle of a call, from another thread or from a handler: the call ends before."""
    sync = statetree.prepare(statetree.gather, state())
    expected = sync()
    threads = []

    def close():
        if by == "a thread":
            threads.append(threading.Thread(target=sync.close))
            threads[0].start()
            threads[0].join(0.1)
            assert threads[0].is_alive()
        elif by == "a handler":
            sync.close()
        elif not threads:
            threads.append(threading.Thread())
            sync()  # once more, within the call
            sync.close()

    sync._recorder._operations.insert(1, close)
    check_same(sync(), expected)
    if by == "a thread":
        threads[0].join()
    name, message = attempt(sync)
    assert (name, "was closed" in message) == ("StateTreeError", True), message
    assert sync._recorder._operations == []
    assert sync._tree is None
    check_in_step()


@pytest.mark.parametrize("by", ["a thread", "a handler", "a call within"])
def test_closing_waits_for_a_call(by):
    run_ranks(2, close_while_it_moves, by)


def call_after_the_group_is_gone():
    group = dist.new_group([0, 1])
    with statetree.prepare(statetree.gather, state(), group=group) as sync:
        sync()
        dist.destroy_process_group(group)
        name, message = attempt(sync)
        assert (name, "the process group of this gather was destroyed" in message) == ("RankMismatch", True), message
    check_in_step()


def test_a_destroyed_group_is_named():
    run_ranks(2, call_after_the_group_is_gone)


def test_a_closed_transfer_is_refused():
    run_ranks(2, close_and_call)


def call_others():
    """Call two prepared transfers, alike but for their tensors, in different orders; and a verb."""
    one, other = (statetree.prepare(statetree.gather, state()) for _ in range(2))
    rank = dist.get_rank()
    name, message = attempt(one if rank else other)
    assert (name, "do not call the same" in message) == ("RankMismatch", True), message
    name, message = attempt(one if rank else functools.partial(statetree.gather, state()))
    assert name == "RankMismatch", message
    check_same(one(), other())
    check_in_step()


def test_different_transfers_are_told_apart():
    run_ranks(2, call_others)


def tie_by_value():
    """Move two tensors with the same elements into one memory, until they differ."""
    for kind in (functools.partial(sharded, (4,), 0), lambda: torch.arange(4.0)):
        like = {"a": kind()}
        like["b"] = like["a"]
        for verb, given, options in (
            (statetree.reshard, {"a": kind(), "b": kind()}, {}),
            (statetree.distribute, statetree.gather({"a": kind(), "b": kind()}), {"src": 0}),
        ):
            sync = statetree.prepare(verb, given, like, in_place=True, **options)
            for leaf in statetree.flatten(given)[0]:
                getattr(leaf, "_local_tensor", leaf).add_(1)
            sync()
            getattr(given["b"], "_local_tensor", given["b"]).add_(1)
            name, message = attempt(sync)
            assert name in ("TreeMismatch", "RankMismatch"), (name, message)
            assert " b" in message, message
            check_in_step()


def test_different_values_do_not_go_to_one_memory():
    run_ranks(2, tie_by_value)


def prepare_what_cannot():
    tree = state()
    for verb in (statetree.offload, statetree.partition_replicas):
        name, message = attempt(functools.partial(statetree.prepare, verb, tree))
        assert (name, "expected gather, distribute" in message) == ("TypeError", True), message
    twice = statetree.chain(lambda tree: statetree.gather(tree), lambda tree: statetree.gather(tree))
    name, message = attempt(functools.partial(statetree.prepare, twice, tree))
    assert (name, "expected one collective" in message) == ("TypeError", True), message
    given = tree if dist.get_rank() else {"a": 1}
    name, message = attempt(functools.partial(statetree.prepare, statetree.gather, given))
    assert name == "RankMismatch", message
    check_in_step()
    check_same(statetree.prepare(functools.partial(statetree.gather, dst=0), tree)(), statetree.gather(tree, dst=0))


def test_what_cannot_be_prepared_is_refused():
    run_ranks(2, prepare_what_cannot)


def fail_at_the_end():
    """Fail on one rank after the ranks have agreed on everything else."""
    from statetree.exchange import prepared

    def fails(self, call):
        raise MemoryError

    conclude = prepared.Preparation.conclude
    if dist.get_rank() == 1:
        prepared.Preparation.conclude = fails
    name, _ = attempt(functools.partial(statetree.prepare, statetree.gather, state()))
    assert name == ("MemoryError" if dist.get_rank() == 1 else "RankMismatch")
    prepared.Preparation.conclude = conclude
    check_in_step()


def test_a_rank_that_fails_last_is_heard():
    run_ranks(2, fail_at_the_end)
