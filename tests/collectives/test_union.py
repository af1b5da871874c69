"""``union=True``: keys that only some ranks hold, as pipeline stages and experts have them."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import statetree
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, blank, check_in_step, check_same, group_of


def shard(layout):
    """Build a layout. All ranks do, since making a mesh is a collective."""
    return layout.build()


def state(size):
    """Return what this rank holds of a pipeline of two stages, and the whole state."""
    rank, ranks = dist.get_rank(), tuple(range(size))
    stages = [ranks[: size // 2], ranks[size // 2 :]]
    layers = [Layout((4, 3 + number), stages[number], ("S0",)) for number in range(2)]
    built = [shard(layout) for layout in layers]
    stage = int(rank in stages[1])
    everywhere = Layout((6,), ranks, ("S0",))
    tied = built[stage]
    own = {
        "step": 7,
        "layers": {str(stage): {"weight": built[stage], "tied": tied, "plain": torch.arange(3.0) + 10 * stage}},
        "everywhere": everywhere.build(),
        "local": torch.arange(2.0) + rank,
        "list": [torch.arange(4) * 2],
    }
    if stage:
        own["layers"]["1"]["name"] = "head"
        own["layers"]["1"]["bias"] = torch.nn.Parameter(torch.arange(5.0))
    full = {
        "everywhere": everywhere.full(),
        "layers": {
            str(number): {"plain": torch.arange(3.0) + 10 * number, "tied": layer.full(), "weight": layer.full()}
            for number, layer in enumerate(layers)
        },
        "list": [torch.arange(4) * 2],
        "local": torch.arange(2.0) + rank,
        "step": 7,
    }
    full["layers"]["1"] |= {"bias": torch.nn.Parameter(torch.arange(5.0)), "name": "head"}
    return own, full


def gather_all(size, dst):
    own, full = state(size)
    found = statetree.gather(own, dst=dst, union=True)
    structures = [None] * size
    dist.all_gather_object(structures, list(map(str, statetree.paths(found))))
    assert structures == [structures[0]] * size
    assert list(found["layers"]) == ["0", "1"]
    if dst in (None, dist.get_rank()):
        check_same(found, full)
        assert found["layers"]["1"]["tied"].data_ptr() == found["layers"]["1"]["weight"].data_ptr()
        assert isinstance(found["layers"]["1"]["bias"], torch.nn.Parameter)
        assert not isinstance(found["everywhere"], DTensor)
        assert found["local"] is own["local"]
    else:
        assert all(leaf.is_meta for leaf in statetree.flatten(found)[0] if isinstance(leaf, torch.Tensor))
        check_same(found, statetree.allocate_like(full, device="meta"))
    check_in_step()
    sync = statetree.prepare(statetree.gather, own, dst=dst, union=True)
    for leaf in statetree.flatten(own)[0]:
        if isinstance(leaf, DTensor):
            leaf._local_tensor.add_(0.5)
    check_same(sync(), statetree.gather(own, dst=dst, union=True))


@pytest.mark.parametrize(("size", "dst"), [(2, None), (2, 0), (2, 1), (4, None)])
def test_gather_has_all_keys(size, dst):
    run_ranks(size, gather_all, size, dst)


def reshard_all(in_place):
    own, full = state(2)
    rank = dist.get_rank()
    target = Layout((4, 3), (0, 1), ("S1",)).build(), Layout((4, 4), (0, 1), ("S1",)).build()
    like = {
        "everywhere": torch.zeros(6),
        "layers": {
            str(number): {"plain": torch.zeros(3), "tied": torch.zeros(4, 3 + number), "weight": blank(target[number])}
            for number in range(2)
        },
        "list": [torch.zeros(4, dtype=torch.int64)],
        "local": torch.zeros(2),
        "step": 0,
    }
    like["layers"]["1"] |= {"bias": torch.nn.Parameter(torch.zeros(5)), "name": ""}
    found = statetree.reshard(own, like, union=True, in_place=in_place)
    check_same(statetree.gather(found), full)
    assert found["layers"]["0"]["weight"].placements == target[0].placements
    assert (found["layers"]["0"]["weight"] is like["layers"]["0"]["weight"]) == in_place
    if in_place:
        check_same(statetree.gather(like)["layers"]["1"]["weight"], full["layers"]["1"]["weight"])
    # Each rank asks for the other stage.
    other = {"layers": {str(1 - rank): {"weight": torch.zeros(4, 4 - rank)}}, "everywhere": torch.zeros(6)}
    found = statetree.reshard(
        {"layers": {str(rank): {"weight": own["layers"][str(rank)]["weight"]}}, "everywhere": own["everywhere"]},
        other,
        union=True,
        in_place=in_place,
    )
    assert torch.equal(found["layers"][str(1 - rank)]["weight"], full["layers"][str(1 - rank)]["weight"])
    assert (found["layers"][str(1 - rank)]["weight"] is other["layers"][str(1 - rank)]["weight"]) == in_place
    assert found["layers"][str(rank)]["weight"].is_meta
    assert torch.equal(found["everywhere"], full["everywhere"])
    check_in_step()


@pytest.mark.parametrize("in_place", [False, True])
def test_reshard_has_all_keys(in_place):
    run_ranks(2, reshard_all, in_place)


class Opaque:
    def __init__(self):
        self.tensor = torch.zeros(2)


def refuse():
    rank = dist.get_rank()
    own, _ = state(2)
    gather = functools.partial(statetree.gather, union=True)
    cases = {
        "keys without union": (functools.partial(statetree.gather, own), "union=True"),
        "reshard without union": (functools.partial(statetree.reshard, own, own), "union=True"),
        "lists": (functools.partial(gather, {"a": [1] * (rank + 1)}), "length"),
        "containers": (functools.partial(gather, {"a": [1] if rank else (1,)}), "structure"),
        "leaf and container": (functools.partial(gather, {"a": 1 if rank else {"b": 1}}), "structure"),
        "shapes": (functools.partial(gather, {"a": torch.zeros(2 + rank), str(rank): 1}), "at a: expected one layout"),
        "opaque": (functools.partial(gather, {str(rank): Opaque()}), "the leaf at 0 is on rank 0 alone"),
        "options": (functools.partial(statetree.gather, own, union=bool(rank)), "the same options"),
        "unequal": (functools.partial(statetree.gather, {"a": torch.zeros(2) + rank}, union=True), ""),
    }
    for case, (call, text) in cases.items():
        name, message = attempt(call)
        assert (name in ("RankMismatch", "UnsupportedLeaf")) == bool(text), (case, name, message)
        assert text in message, (case, message)
        check_in_step()


def test_what_cannot_be_united_is_refused():
    run_ranks(2, refuse)


def differ():
    """Two of three ranks hold another tensor under one key: compared by bytes, unless the first one's is asked for."""
    rank = dist.get_rank()
    tree = {"mine": rank} if rank == 0 else {"mine": rank, "head": torch.arange(3.0) + (rank == 2)}
    name, message = attempt(functools.partial(statetree.gather, tree, union=True))
    assert (name, "at head over meshes of their own" in message) == ("RankMismatch", True), message
    found = statetree.gather(tree, union=True, replicas="first")
    assert torch.equal(found["head"], torch.arange(3.0))
    assert found["mine"] == rank
    same = {"mine": rank} if rank == 0 else {"mine": rank, "head": torch.arange(3.0)}
    assert torch.equal(statetree.gather(same, union=True)["head"], torch.arange(3.0))
    check_in_step()


def test_different_tensors_under_one_key_are_refused():
    run_ranks(3, differ)


def in_a_group():
    group = group_of(1, 2)
    if dist.get_rank() in (1, 2):
        tree = {dist.get_rank(): torch.arange(2.0) + dist.get_rank(), "empty": {}}
        found = statetree.gather(tree, union=True, group=group)
        check_same(found, {1: torch.arange(2.0) + 1, 2: torch.arange(2.0) + 2, "empty": {}})


def test_a_group_of_some_ranks():
    run_ranks(3, in_a_group)
