"""Ranks that disagree: every one of them raises, nobody hangs, and the group is in step afterwards."""

import random

import pytest
import torch
import torch.distributed as dist

import statetree
from statetree.exchange.call import Call
from statetree.key_paths import printable
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, check_in_step
from tests.collectives.disagreements import (
    CHANGES,
    FAULTS,
    VARIATIONS,
    VERBS,
    base_tree,
    other_options,
    usual_call,
    whole_tree,
)
from tests.pace import units

RANKS = pytest.mark.parametrize("world_size", [2, 4])


def rank_names(culprit):
    """Return what a message calls the culprit, and the others."""
    others = [rank for rank in range(dist.get_world_size()) if rank != culprit]
    return f"rank {culprit}", f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"


def call_of(verb, culprit, chance):
    """Return a call, and the source in it."""
    source = chance.randrange(dist.get_world_size())
    return usual_call(verb, source)


def check_mismatch(found, *texts):
    name, message = found
    assert name == "RankMismatch", found
    for text in texts:
        assert printable(text) in message, (text, message)


def disagree(kind, verb, chance):
    """Let one rank do something else, and check what all of them raise."""
    size, rank = dist.get_world_size(), dist.get_rank()
    culprit = chance.randrange(size)
    names = rank_names(culprit)
    call = call_of(verb, culprit, chance)
    if kind == "options":
        options = other_options(verb, chance, size)
        if not options:
            return
        if rank == culprit:
            call.options.update(options)
        found = attempt(call)
        if verb == "distribute" or call.options.get("in_place") is None or rank != culprit:
            check_mismatch(found, "expected one call", f"{verb}(", *names)
    elif kind == "verb":
        other = chance.choice([name for name in VERBS if name != verb])
        if rank == culprit:
            call = call_of(other, culprit, chance)
        check_mismatch(attempt(call), f"{verb}(", f"{other}(", *names)
    elif kind in CHANGES:
        change, named = CHANGES[kind]
        if rank == culprit:
            change(call.tree)
        check_mismatch(attempt(call), named, *names)
    else:
        spoil, own, verbs = FAULTS[kind]
        if verb not in verbs:
            return
        if rank == culprit:
            spoil(call.tree)
            if verb == "reshard":
                call.options["like"] = base_tree()
            name, message = attempt(call)
            assert name == own, (name, message)
        else:
            check_mismatch(attempt(call), f"rank {culprit} failed: {own}: ")


CONTAINERS = ["options", "options", "options", "verb", "verb", *CHANGES, *FAULTS]


def disagree_often(first, count):
    for seed in range(first, first + count):
        chance = random.Random(seed)
        kind, verb = chance.choice(CONTAINERS), chance.choice(VERBS)
        try:
            disagree(kind, verb, chance)
            check_in_step()
        except Exception as error:
            error.add_note(f"seed {seed}: {verb} with {kind}")
            raise


@pytest.mark.parametrize(("world_size", "count"), [(2, 30), pytest.param(2, 250, marks=pytest.mark.slow), (4, 250)])
def test_every_rank_hears_of_a_disagreement(world_size, count):
    run_ranks(world_size, disagree_often, 1000 * world_size, count, timeout=units(60))


def differ_without_harm():
    for name, vary in VARIATIONS.items():
        for verb in VERBS:
            call = usual_call(verb, 1)
            if dist.get_rank() == 1:
                vary(call.tree)
            try:
                call()
                check_in_step()
            except Exception as error:
                error.add_note(f"{verb} with {name}")
                raise


@RANKS
def test_what_does_not_matter_may_differ(world_size):
    run_ranks(world_size, differ_without_harm)


def name_wrong_ranks():
    size, rank = dist.get_world_size(), dist.get_rank()
    tree = base_tree()
    full = whole_tree()
    for wrong in (size, -1, "0", None, 1.0):
        for call in (
            lambda wrong=wrong: statetree.broadcast(tree, src=wrong),
            lambda wrong=wrong: statetree.distribute(full, tree, src=size if wrong is None else wrong),
            lambda wrong=wrong: statetree.gather(tree, dst=[0, size if wrong is None else wrong]),
        ):
            assert attempt(call)[0] in ("RankMismatch", "TypeError"), attempt(call)
            check_in_step()
    # On one rank alone
    check_mismatch(attempt(lambda: statetree.gather(tree, dst=size if rank else 0)), "dst" if rank else "rank 1 failed")
    check_in_step()
    check_mismatch(attempt(lambda: statetree.broadcast(tree, src=size if rank else 0)), "0 to")
    check_in_step()
    for wrong in (0, -1, 1.5, None):
        for name in ("gather", "broadcast"):
            found = attempt(lambda wrong=wrong, name=name: getattr(statetree, name)(tree, bucket_bytes=wrong))
            assert found[0] == "ValueError", found
            assert "bucket_bytes" in found[1]
            check_in_step()


@RANKS
def test_ranks_and_sizes_that_cannot_be_are_refused(world_size):
    run_ranks(world_size, name_wrong_ranks)


def lack_memory():
    """Ask rank 0 for more memory than there is: the shards take none, as they are expanded."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = Layout((2,), (0, 1), ("S0",)).device_mesh()
    local = torch.zeros(1).expand(1 << 45)
    tree = {"small": torch.zeros(1), "vast": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    name, message = attempt(lambda: statetree.gather(tree, dst=0, bucket_bytes=1 << 32))
    if dist.get_rank() == 0:
        assert name == "RuntimeError", name
    else:
        assert name == "RankMismatch"
        assert "rank 0 failed: RuntimeError" in message
    check_in_step()


def test_a_rank_without_memory_makes_all_raise():
    run_ranks(2, lack_memory)


def differ_in_like():
    """Let one rank give another layout to take."""
    rank = dist.get_rank()
    tree, like, in_other = base_tree(), base_tree(), base_tree()
    CHANGES["other_placements"][0](in_other)
    given = in_other if rank == 1 else like
    check_mismatch(attempt(lambda: statetree.reshard(tree, given)), "inner.columns (like)", "rank 1")
    check_in_step()
    check_mismatch(attempt(lambda: statetree.distribute(whole_tree(), given, src=0)), "inner.columns", "rank 1")
    check_in_step()
    del given["text"]
    found = attempt(lambda: statetree.reshard(tree, given))
    assert found[0] == "TreeMismatch"
    assert "at text" in found[1]
    check_in_step()


def test_layouts_to_take_must_agree():
    run_ranks(2, differ_in_like)


def count_agreements():
    """Return how often the ranks agree in each verb, where they know the layouts."""
    ranks = tuple(range(dist.get_world_size()))
    tree = {"rows": Layout((4, 6), ranks, ("S0",)).build(), "step": 3}
    like = {"rows": Layout((4, 6), ranks, ("S1",)).build(), "step": 0}
    full = {"rows": torch.zeros(4, 6), "step": 1}
    calls = {
        "gather": lambda: statetree.gather(tree),
        "reshard": lambda: statetree.reshard(tree, like),
        "distribute": lambda: statetree.distribute(full, like, src=0),
        "broadcast": lambda: statetree.broadcast(tree),
        "distribute of whole tensors": lambda: statetree.distribute(full, full, src=0),
        "distribute in place": lambda: statetree.distribute(
            full, {"rows": torch.zeros(4, 6), "step": 0}, in_place=True, src=0
        ),
        "distribute with cast": lambda: statetree.distribute(
            full, {"rows": torch.zeros(4, 6).half(), "step": 0}, cast=True, src=0
        ),
        "broadcast of whole tensors": lambda: statetree.broadcast(full),
        "broadcast of both": lambda: statetree.broadcast({**tree, "whole": torch.zeros(3)}),
    }
    found = {}
    agree = Call.agree
    for verb, call in calls.items():
        count = 0

        def counted(self, fingerprint):
            nonlocal count
            count += 1
            return agree(self, fingerprint)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Call, "agree", counted)
            call()
        found[verb] = count
    return found


def test_ranks_agree_twice_at_most():
    found = run_ranks(2, count_agreements)[0]
    assert found.pop("gather") == found.pop("reshard") == 1
    assert set(found.values()) == {2}


def load_beside(verb, directory):
    """Load on one rank while the other calls something else; neither, one or the other fails."""
    rank = dist.get_rank()
    like = base_tree()
    statetree.save(like, directory / "saved")
    call = usual_call(verb, 0)
    found = attempt(lambda: statetree.load(directory / "saved", like) if rank == 1 else call())
    check_mismatch(found, "expected one call", "load on rank 1", f"{verb}(")
    check_in_step()

    call = usual_call(verb, 0)
    name, message = attempt(lambda: statetree.load(directory / "none", like) if rank == 1 else call())
    assert name == ("CheckpointError" if rank == 1 else "RankMismatch"), (name, message)
    assert rank == 1 or "rank 1 failed: CheckpointError: " in message
    check_in_step()

    call = usual_call(verb, 0)
    call.options["timeout"] = -1
    name, message = attempt(lambda: statetree.load(directory / "saved", like) if rank == 1 else call())
    assert name == ("CheckpointError" if rank == 1 else "ValueError"), (name, message)
    assert rank != 1 or "load: it failed on other ranks: rank 0: RuntimeError: ValueError: " in message
    check_in_step()


@pytest.mark.parametrize("verb", VERBS)
def test_a_load_beside_another_call_is_refused(verb, tmp_path):
    run_ranks(2, load_beside, verb, tmp_path)
