"""What cannot be is refused before anything moves, by every rank, and nothing is written."""

import datetime
import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import statetree
from statetree.testing import Layout, run_ranks
from statetree.tree.spec import TreeSpec
from tests.collectives.checks import attempt, blank, check_in_step
from tests.judge.watch import Watch
from tests.pace import units

RANKS = pytest.mark.parametrize("world_size", [1, 2, 4])


def everyone():
    return tuple(range(dist.get_world_size()))


def make_like():
    return {
        "w": Layout((5, 3), everyone(), ("S0",)).build(),
        "b": {"v": Layout((4,), everyone(), ("R",)).build(), "plain": torch.zeros(2)},
        "list": [torch.zeros(1)],
    }


def make_full():
    return {
        "w": torch.arange(15.0).view(5, 3),
        "b": {"v": torch.arange(4.0), "plain": torch.ones(2)},
        "list": [torch.ones(1)],
    }


def spoil(tree, how):
    """Make a tree one that does not fit, and return what the error names."""
    if how == "shape":
        tree["w"] = torch.zeros(3, 5)
        return "TreeMismatch", ("shape", "at w", "(3, 5)", "(5, 3)")
    if how == "plain shape":
        tree["b"]["plain"] = torch.zeros(3)
        return "TreeMismatch", ("shape", "at b.plain")
    if how == "dtype":
        tree["b"]["v"] = torch.zeros(4, dtype=torch.int64)
        return "TreeMismatch", ("dtype", "at b.v", "torch.int64")
    if how == "several":
        tree["w"], tree["b"]["v"] = torch.zeros(1), torch.zeros(4, dtype=torch.int64)
        return "TreeMismatch", ("at w", "at b.v")
    if how == "missing":
        del tree["b"]["v"]
        return "TreeMismatch", ("at b.v",)
    if how == "more":
        tree["b"]["more"] = 1
        return "TreeMismatch", ("at b.more",)
    if how == "tuple":
        tree["list"] = tuple(tree["list"])
        return "TreeMismatch", ("at list",)
    if how == "sparse":
        tree["b"]["v"] = torch.ones(4).to_sparse()
        return "TreeMismatch", ("at b.v",)
    if how == "none":
        tree["w"] = None
        return "TreeMismatch", ("at w",)
    if how == "meta":
        tree["w"] = torch.zeros(5, 3, device="meta")
        return "TreeMismatch", ("memory", "at w")
    if how == "freed":
        tree["w"].untyped_storage().resize_(0)
        return "TreeMismatch", ("memory", "at w")
    tree["w"] = Layout((5, 3), everyone(), ("S1",)).build()
    return "UnsupportedLeaf", ("the leaf at w", "is distributed already", "Use reshard")


HOWS = (
    *("shape", "plain shape", "dtype", "several", "missing", "more", "tuple", "sparse", "none", "meta", "freed"),
    "distributed",
)


def distribute_what_does_not_fit():
    rank, size = dist.get_rank(), dist.get_world_size()
    for how in HOWS:
        like = make_like()
        watch = Watch(like)
        full = make_full()
        expected, texts = spoil(full, how)
        for src in (None, *range(min(size, 2))):
            for in_place in (False, True):
                given = full if src in (None, rank) else None
                name, message = attempt(
                    lambda given=given, like=like, src=src, in_place=in_place: statetree.distribute(
                        given, like, src=src, in_place=in_place
                    )
                )
                assert name == expected, (how, src, name, message)
                for text in texts:
                    assert text in message, (how, src, text, message)
                assert message.startswith("distribute: ")
                check_in_step()
                watch.check()
        if how == "distributed":
            continue
        for in_place in (False, True):
            name, message = attempt(
                lambda full=full, like=like, in_place=in_place: statetree.reshard(full, like, in_place=in_place)
            )
            assert name == expected, (how, name, message)
            assert all(text in message for text in texts), (how, message)
            assert message.startswith("reshard: ")
            check_in_step()
            watch.check()


@RANKS
def test_what_does_not_fit_is_refused_and_nothing_is_written(world_size):
    run_ranks(world_size, distribute_what_does_not_fit)


def write_what_cannot_be_written():
    """Refuse to write in place into memory that cannot be written, before anything else is."""
    full = make_full()
    for how in ("inference", "overlapping", "freed", "plain overlapping"):
        like = make_like()
        like["a"] = blank(like)["w"]  # comes first: it would be written before
        full["a"] = full["w"]
        if how == "inference":
            with torch.inference_mode():
                inner = torch.zeros(4)
            like["b"]["v"]._local_tensor = inner
        elif how == "overlapping":
            like["b"]["v"]._local_tensor = torch.zeros(1).expand(4)
        elif how == "freed":
            like["b"]["v"]._local_tensor.untyped_storage().resize_(0)
        else:
            like["b"]["plain"] = torch.zeros(1).expand(2)
            full["b"]["plain"] = torch.arange(2.0)  # equal values would fit
        for src in (None, 0):
            given = full if src is None or dist.get_rank() == src else None
            name, message = attempt(
                lambda given=given, like=like, src=src: statetree.distribute(given, like, src=src, in_place=True)
            )
            assert name == "TreeMismatch", (how, name, message)
            assert "at b." in message, (how, message)
            assert not like["a"]._local_tensor.any(), how
            assert torch.equal(like["w"]._local_tensor, make_like()["w"]._local_tensor), how
            check_in_step()


@RANKS
def test_what_cannot_be_written_is_refused(world_size):
    run_ranks(world_size, write_what_cannot_be_written)


def give_bad_options():
    tree = make_like()
    for call in (
        lambda limit: statetree.gather(tree, timeout=limit),
        lambda limit: statetree.broadcast(tree, timeout=limit),
        lambda limit: statetree.reshard(tree, tree, timeout=limit),
        lambda limit: statetree.partition_replicas(tree, timeout=limit),
        lambda limit: statetree.distribute(make_full(), tree, timeout=limit),
    ):
        for limit in (0, -1.0, datetime.timedelta(0)):
            name, message = attempt(lambda call=call, limit=limit: call(limit))
            assert name == "ValueError"
            assert "the timeout must be positive" in message
            check_in_step()
        call(units(10))
        call(datetime.timedelta(seconds=units(10)))
    for call in (
        lambda: statetree.gather(tree, group=object()),
        lambda: statetree.gather(tree, dst="0"),
    ):
        attempt(call)  # whatever it is, it is the same everywhere
        check_in_step()
    for dst in ([], True, [0, False]):
        name, message = attempt(lambda dst=dst: statetree.gather(tree, dst=dst))
        assert (name, "dst must name ranks" in message) == ("RankMismatch", True), (dst, name, message)
        check_in_step()


@RANKS
def test_bad_options_are_refused(world_size):
    run_ranks(world_size, give_bad_options)


def give_a_bad_timeout_on_one_rank():
    """Let rank 1 give a timeout that cannot be: it must not leave the others waiting."""
    rank = dist.get_rank()
    tree, full = make_like(), make_full()
    for limit in (0, float("nan"), 1e300, "5"):
        given = limit if rank == 1 else None
        for call in (
            functools.partial(statetree.gather, tree),
            functools.partial(statetree.broadcast, tree),
            functools.partial(statetree.reshard, tree, tree),
            functools.partial(statetree.partition_replicas, tree),
            functools.partial(statetree.distribute, full, tree, src=0),
            lambda timeout: list(statetree.stream(tree, functools.partial(statetree.gather, timeout=timeout))),
        ):
            name, message = attempt(lambda call=call, given=given: call(timeout=given))
            if rank == 1:
                assert name == ("TypeError" if limit == "5" else "ValueError"), (name, message)
            else:
                assert name == "RankMismatch", (name, message)
                assert "rank 1 failed: " in message
            check_in_step()


def test_a_bad_timeout_on_one_rank_makes_all_raise():
    run_ranks(2, give_a_bad_timeout_on_one_rank)


def write_onto_meta():
    """Write in place onto tensors on meta, of which some ranks hold nothing."""
    layouts = {name: Layout((2, 3), everyone(), ("S0",)).build() for name in "ab"}
    like = statetree.offload(layouts, device="meta")
    for src in (None, 0):
        full = {name: torch.zeros(2, 3) for name in "ab"}
        name, message = attempt(lambda src=src, full=full: statetree.distribute(full, like, src=src, in_place=True))
        assert name == "TreeMismatch", (src, name, message)
        assert message.count("a tensor without memory") == 2, message
        assert "at a" in message
        check_in_step()


@RANKS
def test_tensors_on_meta_are_refused_by_all_ranks(world_size):
    run_ranks(world_size, write_onto_meta)


class Unpackable(torch.Tensor):
    """A tensor that can be taken apart, and not put together."""

    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts, _context, _size, _stride):
        raise ValueError("cannot be put together")


def want_what_cannot_be_made():
    like = {**make_like(), "deep": [{"odd.one": Unpackable(torch.zeros(2))}]}
    full = {**make_full(), "deep": [{"odd.one": torch.zeros(2)}]}
    for verb, call in {
        "distribute": lambda: statetree.distribute(full, like),
        "reshard": lambda: statetree.reshard(full, like),
        "gather": lambda: statetree.gather(like, device="meta"),
    }.items():
        with pytest.raises(statetree.UnsupportedLeaf, match=r"at deep\.0\.odd\.one") as caught:
            call()
        assert caught.value.path == "deep.0.odd.one"
        assert verb == "gather" or str(caught.value).startswith(f"{verb}: ")
        check_in_step()


def test_errors_of_fresh_tensors_name_the_verb_and_the_path():
    run_ranks(2, want_what_cannot_be_made)


def go_deep():
    """Move a tree at the depth that every verb works at."""
    tree = leaf = {}
    for _ in range(900):
        leaf["next"] = {}
        leaf = leaf["next"]
    leaf["w"] = Layout((5, 3), everyone(), ("S0",)).build()
    whole = statetree.gather(tree)
    for result in (
        statetree.distribute(whole, tree),
        statetree.distribute(whole if dist.get_rank() == 0 else None, tree, src=0),
        statetree.reshard(tree, tree),
        statetree.broadcast(tree),
        statetree.partition_replicas(tree),
    ):
        assert statetree.flatten(result)[0][0].shape == (5, 3)
    assert attempt(lambda: statetree.broadcast(whole if dist.get_rank() == 0 else None))[0] == ""


@RANKS
def test_deep_trees_are_moved(world_size):
    run_ranks(world_size, go_deep)


def lack_memory_in_many():
    """Take many targets without memory: the paths of a tree are made once for all that is wrong, not for each."""
    mesh = Layout((4, 3), tuple(range(dist.get_world_size())), ("S0",)).device_mesh()
    like = {f"w{i}": DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, [Shard(0)]) for i in range(50)}
    full = {key: torch.zeros(4, 3) for key in like}
    made = []
    paths = TreeSpec.paths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeSpec, "paths", lambda spec: made.append(spec) or paths(spec))
        name, message = attempt(lambda: statetree.distribute(full, like, in_place=True))
    assert name == "TreeMismatch"
    assert "w0" in message
    assert len(made) < 10


def test_many_faults_are_told_at_once():
    run_ranks(2, lack_memory_in_many)


class Refusing:
    def __reduce__(self):
        raise RuntimeError("it will not be pickled")


VERBS_OF_ONE = {
    "gather": statetree.gather,
    "broadcast": statetree.broadcast,
    "partition_replicas": statetree.partition_replicas,
    "reshard": lambda tree: statetree.reshard(tree, tree),
}


@pytest.mark.parametrize("verb", VERBS_OF_ONE.values(), ids=VERBS_OF_ONE)
def test_a_leaf_that_cannot_be_taken_apart_is_named(verb):
    with pytest.raises(statetree.UnsupportedLeaf, match=r"the leaf at model\.x \(Refusing\) cannot") as raised:
        verb({"first": torch.ones(1), "model": {"x": Refusing(), "w": torch.ones(2)}})
    assert raised.value.path == "model.x"
