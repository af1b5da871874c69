"""chain and stream over collectives: bucket by bucket, in one order on all ranks, and all raise if one fails."""

import contextlib
import functools
import time
import weakref

import pytest
import torch
import torch.distributed as dist

import statetree
import statetree.compose
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, check_equal, check_in_step, check_same, group_of
from tests.collectives.models import state_of, whole
from tests.pace import units

RANKS = pytest.mark.parametrize("world_size", [2, 4])


@contextlib.contextmanager
def buckets_of(nbytes):
    """Make the buckets of chain and stream small."""
    before = statetree.compose.BUCKET_BYTES
    statetree.compose.BUCKET_BYTES = nbytes
    try:
        yield
    finally:
        statetree.compose.BUCKET_BYTES = before


def make_tree(count=12):
    """Return a tree of distributed and plain leaves; their paths are in another order than its keys."""
    ranks = tuple(range(dist.get_world_size()))
    tree = {f"w{number:02}": Layout((10, 3), ranks, (f"S{number % 2}",)).build() for number in reversed(range(count))}
    tree["list"] = [torch.arange(4.0), 3, None, Layout((5,), ranks, ("R",)).build()]
    tree["again"] = tree["w01"]
    return tree


def go_by_bucket():
    tree = make_tree()
    expected = statetree.gather(tree)
    rank = dist.get_rank()
    for nbytes in (1, 200, 1000, 64 << 20):
        with buckets_of(nbytes):
            seen = list(statetree.stream(tree, functools.partial(statetree.gather, dst=0, bucket_bytes=100)))
            assert [str(path) for path, _ in seen] == sorted(statetree.to_flat(tree)[0])
            flat = statetree.to_flat(expected)[0]
            for path, leaf in seen:
                if isinstance(leaf, torch.Tensor):
                    assert leaf.is_meta == (rank != 0)
                    assert leaf.shape == flat[str(path)].shape
                    assert rank or torch.equal(leaf, flat[str(path)])
            ties = {str(path): leaf for path, leaf in seen}
            assert ties["again"] is ties["w01"]
            result = statetree.chain(functools.partial(statetree.gather, dst=0), statetree.offload)(tree)
            if rank == 0:
                check_equal(result, statetree.offload(expected))
            assert result["again"] is result["w01"]


@RANKS
def test_buckets_make_no_difference(world_size):
    run_ranks(world_size, go_by_bucket)


def stream_models():
    with buckets_of(300):
        for kind in ("fsdp1", "fsdp2_tp", "fsdp1_hybrid"):
            state = state_of(kind)
            found = {str(path): leaf for path, leaf in statetree.stream(state, statetree.gather)}
            check_same(found, statetree.to_flat(whole())[0])


@RANKS
def test_models_are_streamed(world_size):
    run_ranks(world_size, stream_models)


def count_what_is_kept():
    """Return the most bytes of whole tensors that were alive at once while they were streamed."""
    ranks = tuple(range(dist.get_world_size()))
    tree = {f"w{number:02}": Layout((1000,), ranks, ("S0",)).build() for number in range(30)}  # 4000 bytes each
    alive = []
    most = 0

    def watched(bucket):
        alive.extend(weakref.ref(leaf) for leaf in bucket.values())
        return bucket

    def count():
        nonlocal most
        most = max(most, sum(4000 for found in alive if found() is not None))

    with buckets_of(8000):
        step = statetree.chain(statetree.gather, watched)
        streamed = statetree.stream(tree, functools.partial(statetree.gather))
        for _, leaf in streamed:
            alive.append(weakref.ref(leaf))
            count()
            del leaf
        assert len(alive) == 30
        for _ in statetree.stream(tree, step):
            count()
    return most


def test_results_are_not_kept():
    # A bucket that is handed out, and one more leaf: the consumer's name for the one before.
    assert max(run_ranks(2, count_what_is_kept)) <= 8000 + 4000


class Faulty:
    """A local step that fails on one rank, at a certain bucket."""

    def __init__(self, culprit, at, how):
        self.left = at
        self.culprit = culprit
        self.how = how

    def __call__(self, bucket):
        self.left -= 1
        if dist.get_rank() != self.culprit or self.left != -1:
            return bucket
        if self.how == "raises":
            raise ValueError("a local step")
        return {}


def check_raised(found, culprit, own):
    name, message = found
    if dist.get_rank() == culprit:
        assert name == own, found
    else:
        assert name == "RankMismatch", found
        assert f"rank {culprit} failed: {own}: " in message, found


def fail_in_a_step():
    tree = make_tree(6)
    size = dist.get_world_size()
    with buckets_of(100):
        count = len({*statetree.to_flat(tree)[0]}) - 1
        for at in (0, 1, 5):
            for how, own in (("raises", "ValueError"), ("shrinks", "TreeMismatch")):
                culprit = at % size
                for before in (True, False):
                    faulty = Faulty(culprit, at, how)
                    steps = (faulty, statetree.gather) if before else (statetree.gather, faulty)
                    if how == "shrinks" and before:
                        continue  # the ranks hand different buckets to gather
                    found = attempt(lambda steps=steps: list(statetree.stream(tree, statetree.chain(*steps))))
                    check_raised(found, culprit, own)
                    check_in_step()
        assert count > 5
        for at in (0, 2):
            shrunk = Faulty(1, at, "shrinks")
            name, message = attempt(
                lambda shrunk=shrunk: list(statetree.stream(tree, statetree.chain(shrunk, statetree.gather)))
            )
            assert name == "RankMismatch", (name, message)
            check_in_step()


@RANKS
def test_all_raise_if_one_fails_in_a_step(world_size):
    run_ranks(world_size, fail_in_a_step)


def fail_between_collectives():
    """Fail on one rank before a collective that takes the whole tree."""
    tree = {"w": torch.arange(4.0)}
    sharded = make_tree(2)
    for following in (
        functools.partial(statetree.broadcast, src=0),
        functools.partial(statetree.distribute, like=tree, src=0),
        functools.partial(statetree.reshard, like=sharded),
        statetree.partition_replicas,
        statetree.gather,
    ):
        given = sharded if following in (statetree.gather,) or "reshard" in str(following) else tree
        for more in ((), (lambda tree: tree,)):
            step = statetree.chain(Faulty(1, 0, "raises"), *more, following)
            check_raised(attempt(lambda step=step, given=given: step(given)), 1, "ValueError")
            check_in_step()
            fine = statetree.chain(Faulty(1, 1, "raises"), *more, following)
            fine(given)
            check_in_step()
    # Nobody waits for what a distribute without a source does, and so nobody is told.
    step = statetree.chain(Faulty(1, 0, "raises"), functools.partial(statetree.distribute, like=tree))
    name, _ = attempt(lambda: step(tree))
    assert name == ("ValueError" if dist.get_rank() == 1 else "")
    check_in_step()


@RANKS
def test_all_raise_if_one_fails_before_a_collective(world_size):
    run_ranks(world_size, fail_between_collectives)


def stream_different_trees():
    rank = dist.get_rank()
    for change in ("missing", "shape", "dtype", "placements", "tie"):
        tree = make_tree(4)
        if rank == 1:
            if change == "missing":
                del tree["w02"]
            elif change == "shape":
                tree["list"][0] = torch.zeros(5000)
            elif change == "dtype":
                tree["list"][0] = torch.zeros(4, dtype=torch.float64)
            elif change == "placements":
                tree["w02"] = Layout((10, 3), tuple(range(dist.get_world_size())), ("R",)).build()
            else:
                tree["again"] = make_tree(4)["w01"]
        for nbytes in (100, 64 << 20):
            with buckets_of(nbytes):
                name, message = attempt(lambda tree=tree: list(statetree.stream(tree, statetree.gather)))
                # Where all is in one bucket, gather sees to ties that one rank sees alone.
                expected = "" if change == "tie" and nbytes > 100 else "RankMismatch"
                assert name == expected, (change, name, message)
                check_in_step()


@RANKS
def test_different_trees_are_refused(world_size):
    run_ranks(world_size, stream_different_trees)


def chain_verbs():
    """Take a tree through verbs that want it whole, and back."""
    tree = make_tree(3)
    other = {**tree, **{name: Layout((10, 3), (0, 1), ("S0",)).build() for name in ("w00", "w01", "w02")}}
    tree["again"] = other["again"] = 1
    there_and_back = statetree.chain(
        functools.partial(statetree.reshard, like=other),
        statetree.gather,
        statetree.offload,
        statetree.broadcast,
        functools.partial(statetree.distribute, like=tree, src=1),
    )
    check_same(there_and_back(tree), tree)


@RANKS
def test_every_verb_can_be_chained(world_size):
    run_ranks(world_size, chain_verbs)


def fail_where_nobody_waits():
    def fails(tree):
        if dist.get_rank() == 1:
            raise ZeroDivisionError
        return tree

    gather, last = statetree.gather, dist.get_rank() == 1
    name, _ = attempt(lambda: statetree.chain(gather, fails)(make_tree(2)))
    assert name == ("ZeroDivisionError" if last else "")  # the others have their results
    check_in_step()
    name, message = attempt(lambda: statetree.chain(gather, fails, len, lambda _: make_tree(2), gather)(make_tree(2)))
    assert name == ("ZeroDivisionError" if last else "RankMismatch"), message
    check_in_step()


def test_a_failure_is_heard_where_a_later_step_communicates():
    run_ranks(2, fail_where_nobody_waits)


def name_two_groups():
    other = group_of(*range(dist.get_world_size()))
    steps = [statetree.gather, functools.partial(statetree.broadcast, group=other)]
    called = []
    for between in ([], [lambda tree: called.append(tree)]):
        name, message = attempt(lambda between=between: statetree.chain(steps[0], *between, steps[1])(make_tree(2)))
        assert name == "ValueError"
        assert message.startswith("chain: the steps communicate in different process groups: expected one, got 2.")
    name, message = attempt(lambda: next(statetree.stream(make_tree(2), statetree.chain(*steps))))
    assert (name, message.partition(":")[0]) == ("ValueError", "stream")
    assert not called
    check_in_step()
    check_in_step(other)
    of_one = [functools.partial(step, group=other) for step in (statetree.gather, statetree.broadcast)]
    check_same(statetree.chain(*of_one)(make_tree(2)), statetree.gather(make_tree(2)))


def test_a_chain_over_two_groups_is_refused():
    run_ranks(2, name_two_groups)


def stop_early():
    """Let some ranks take a part of the results alone."""
    size, rank = dist.get_world_size(), dist.get_rank()
    tree = make_tree(6)
    with buckets_of(100):
        count = len(statetree.to_flat(tree)[0])
        for stopping in ((1,), tuple(range(size)), (0,)):
            for taken in (1, 4):

                def take(stopping=stopping, taken=taken):
                    for number, _ in enumerate(statetree.stream(tree, statetree.gather), start=1):
                        if rank in stopping and number == taken:
                            break

                name, message = attempt(take)
                if rank in stopping:
                    assert not name, message
                else:
                    assert name == "RankMismatch", (name, message)
                    assert f"rank {stopping[0]} failed: " in message
                    assert "stopped before the end" in message
                check_in_step()
        # One that takes all results and asks for no more has missed nothing.
        streamed = statetree.stream(tree, statetree.gather)
        for _ in range(count if rank == 1 else count + 1):
            next(streamed, None)
        streamed.close()
        check_in_step()

        def fail():
            for _ in statetree.stream(tree, statetree.gather):
                if rank == 1:
                    raise ValueError("a consumer")

        assert attempt(fail)[0] == ("ValueError" if rank == 1 else "RankMismatch")
        check_in_step()


@RANKS
def test_all_raise_if_one_stops_early(world_size):
    run_ranks(world_size, stop_early)


def stop_after_the_group():
    """Let go of a stream whose group is destroyed: nobody is left to tell."""
    group = dist.new_group(list(range(dist.get_world_size())))
    with buckets_of(100):
        streamed = statetree.stream(make_tree(6), functools.partial(statetree.gather, group=group))
        next(streamed)
    dist.destroy_process_group(group)
    start = time.monotonic()
    streamed.close()
    assert time.monotonic() - start < units(3)
    check_in_step()


def test_a_stream_may_outlive_its_group():
    run_ranks(2, stop_after_the_group)
