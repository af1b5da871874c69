"""Layouts that are hard to get right: summands, sub-groups, meshes of some ranks only, local tensors of any kind."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import statetree
from statetree.exchange import routes
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, check_in_step, group_of

RANKS = pytest.mark.parametrize("world_size", [2, 3, 4])


def line(*ranks):
    return Layout((len(ranks),), ranks or tuple(range(dist.get_world_size())), ("S0",)).device_mesh()


REDUCED = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.sum(0) / len(stack),
    "product": lambda stack: stack.prod(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
}


def reduce_summands():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh, columns = line(*range(size)), functools.partial(Layout, (7, 3), tuple(range(size)), ("S1",))
    tree, like, expected, empty = {}, {}, {}, {}
    for dtype in (torch.float32, torch.float64, torch.int64):
        summands = [((torch.arange(21) * (each + 3)) % 11 + 1).to(dtype).view(7, 3) for each in range(size)]
        for name, reduce in REDUCED.items():
            if name == "avg" and dtype == torch.int64:
                continue
            key = f"{name} of {dtype}"
            tree[key] = DTensor.from_local(summands[rank].clone(), mesh, [Partial(name)])
            like[key], expected[key] = columns(dtype).build(), reduce(torch.stack(summands))
            empty[key] = DTensor.from_local(torch.zeros(0, 3, dtype=dtype), mesh, [Partial(name)])
    before = {key: held._local_tensor.clone() for key, held in tree.items()}
    few = ["sum of torch.float32", "max of torch.int64"]  # a round takes long, and small buckets are many rounds
    for bucket_bytes, keys in ((1, few[:1]), (50, few), (1000, [*tree])):
        chosen = {key: tree[key] for key in keys}
        whole = statetree.gather(chosen, bucket_bytes=bucket_bytes)
        there = statetree.gather(chosen, dst=[size - 1], bucket_bytes=bucket_bytes)
        moved = statetree.reshard(chosen, {key: like[key] for key in keys}, bucket_bytes=bucket_bytes)
        for key in keys:
            reduced = expected[key]
            assert torch.equal(whole[key], reduced), key
            assert there[key].is_meta if rank < size - 1 else torch.equal(there[key], reduced), key
            assert torch.equal(moved[key]._local_tensor, reduced.flatten()[columns(reduced.dtype).indices(rank)]), key
            assert torch.equal(tree[key]._local_tensor, before[key])
    assert {leaf.shape for leaf in statetree.gather(empty).values()} == {(0, 3)}


@RANKS
def test_summands_are_reduced(world_size):
    run_ranks(world_size, reduce_summands)


def reduce_bools():
    """Reduce summands that are bools: by "or" and "and", never to a byte that is neither 0 nor 1."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = line(*range(size))
    summands = torch.tensor([[True, False, True, each == 0, each == 1] for each in range(size)])
    expected = {"sum": summands.any(0), "max": summands.any(0), "product": summands.all(0), "min": summands.all(0)}
    for name, reduced in expected.items():
        tree = {"w": DTensor.from_local(summands[rank].clone(), mesh, [Partial(name)])}
        found = statetree.gather(tree)["w"]
        assert found.dtype == torch.bool
        assert torch.equal(found.view(torch.uint8), reduced.view(torch.uint8)), name
        moved = statetree.reshard(tree, {"w": Layout((5,), tuple(range(size)), ("R",), torch.bool).build()})["w"]
        assert torch.equal(moved._local_tensor.view(torch.uint8), reduced.view(torch.uint8)), name


@RANKS
def test_summands_that_are_bools(world_size):
    run_ranks(world_size, reduce_bools)


def move_odd_bools():
    """Move views of numbers as bools: torch's copies would make 1 of every byte but 0."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = line(*range(size))
    numbers = (torch.arange(size * 6, dtype=torch.uint8) * 7 + 2).view(size * 2, 3)
    mine = numbers[2 * rank : 2 * rank + 2].clone().view(torch.bool)
    tree = {"w": DTensor.from_local(mine, mesh, [Shard(0)]), "plain": numbers.clone().view(torch.bool)}
    for bucket_bytes in (64 << 20, 5):
        whole = statetree.gather(tree, bucket_bytes=bucket_bytes)["w"]
        assert torch.equal(whole.view(torch.uint8), numbers)
        like = {
            "w": Layout(tuple(numbers.shape), tuple(range(size)), ("S1",), torch.bool).build(),
            "plain": torch.zeros(numbers.shape, dtype=torch.bool),
        }
        wanted = numbers.tensor_split(size, 1)[rank] if size <= 3 else numbers[:, rank : rank + 1]
        for moved in (
            statetree.reshard(tree, like, bucket_bytes=bucket_bytes),
            statetree.distribute({"w": whole, "plain": tree["plain"]}, like, src=0, bucket_bytes=bucket_bytes),
            statetree.distribute({"w": whole, "plain": tree["plain"]}, like),
        ):
            assert torch.equal(moved["w"]._local_tensor.view(torch.uint8), wanted)
            assert torch.equal(moved["plain"].view(torch.uint8), numbers)
        spread = statetree.broadcast(tree, src=size - 1, bucket_bytes=bucket_bytes)
        assert torch.equal(spread["w"]._local_tensor.view(torch.uint8), mine.view(torch.uint8))
        assert torch.equal(spread["plain"].view(torch.uint8), numbers)


@RANKS
def test_bools_of_other_bytes_keep_them(world_size):
    run_ranks(world_size, move_odd_bools)


def refuse_summands():
    mesh = line(*range(dist.get_world_size()))
    whole = torch.zeros(4)
    partial = DTensor.from_local(torch.zeros(4), mesh, [Partial()])
    for call in (
        lambda: statetree.distribute({"w": whole}, {"w": partial}),
        lambda: statetree.distribute({"w": whole}, {"w": partial}, src=0),
        lambda: statetree.reshard({"w": whole}, {"w": partial}, in_place=True),
        lambda: statetree.reshard({"w": partial}, {"w": partial}, in_place=True),
    ):
        name, message = attempt(call)
        assert name == "TreeMismatch", (name, message)
        assert "placements" in message
        assert "at w" in message
        check_in_step()
    for name, dtype in (
        ("sum", torch.uint16),
        ("max", torch.complex64),
        ("avg", torch.int64),
        ("sum", torch.float8_e5m2),
    ):
        summand = DTensor.from_local(torch.ones(4).to(dtype), mesh, [Partial(name)])
        found = attempt(lambda summand=summand: statetree.gather({"w": summand}))
        assert found[0] == "UnsupportedLeaf", found
        assert "at w" in found[1]
        check_in_step()


@RANKS
def test_summands_are_no_target(world_size):
    run_ranks(world_size, refuse_summands)


def gather_in_group():
    """Use groups of two of four ranks, in which global ranks are not the group's."""
    rank = dist.get_rank()
    groups = {ranks: group_of(*ranks) for ranks in ((1, 3), (0, 2))}
    ranks = (1, 3) if rank in (1, 3) else (0, 2)
    layouts = {ranks: Layout((5, 3), ranks, ("S0",)) for ranks in groups}
    leaves = {ranks: layout.build() for ranks, layout in layouts.items()}
    layout, tree, group = layouts[ranks], {"w": leaves[ranks]}, groups[ranks]
    index = ranks.index(rank)
    assert torch.equal(statetree.gather(tree, group=group)["w"], layout.full())
    there = statetree.gather(tree, group=group, dst=1)["w"]
    assert there.is_meta if index == 0 else torch.equal(there, layout.full())
    full = {"w": layout.full() + rank} if index == 1 else None
    found = statetree.distribute(full, tree, src=1, group=group)["w"]
    assert torch.equal(found._local_tensor, layout.local(rank) + ranks[1])
    sent = statetree.broadcast({"rank": rank} if index == 1 else None, src=1, group=group)
    assert sent == {"rank": ranks[1]}
    moved = statetree.reshard(tree, {"w": torch.zeros(5, 3)}, group=group)["w"]
    assert torch.equal(moved, layout.full())
    kept = statetree.partition_replicas({"w": torch.ones(3)}, group=group)["w"]
    assert kept.is_meta == (index == 1)
    for _, leaf in statetree.stream(tree, functools.partial(statetree.gather, group=group)):
        assert torch.equal(leaf, layout.full())
    check_in_step(group)
    # A group that holds only a part
    everyone = Layout((8,), (0, 1, 2, 3), ("S0",)).build()
    name, message = attempt(lambda: statetree.gather({"w": everyone}, group=group))
    assert name == "UnsupportedLeaf"
    assert "only a part of the leaf at w" in message
    check_in_step(group)
    # A caller from outside
    outside = next(group for ranks, group in groups.items() if rank not in ranks)
    for call in (
        lambda: statetree.gather(tree, group=outside),
        lambda: statetree.distribute(tree, tree, src=0, group=outside),
        lambda: statetree.broadcast(tree, group=outside),
        lambda: statetree.reshard(tree, tree, group=outside),
        lambda: statetree.partition_replicas(tree, group=outside),
        lambda: list(statetree.stream(tree, functools.partial(statetree.gather, group=outside))),
    ):
        name, message = attempt(call)
        assert name == "RankMismatch"
        assert f"global rank {rank}) is not in the group" in message
    check_in_step()


@pytest.mark.slow
def test_a_group_of_some_ranks():
    run_ranks(4, gather_in_group)


def gather_own_meshes():
    """Give each pair of ranks a mesh of its own, as replicas of a tensor parallel model: the leaves are replicas."""
    rank = dist.get_rank()
    layouts = [Layout((5, 3), ranks, ("S0",)) for ranks in ((0, 1), (2, 3))]
    leaves = [layout.build() for layout in layouts]
    mine = rank // 2
    tree = {"w": leaves[mine], "plain": torch.arange(3)}
    full = layouts[0].full()
    assert torch.equal(statetree.gather(tree)["w"], full)
    there = statetree.gather(tree, dst=3)["w"]
    assert there.is_meta if rank < 3 else torch.equal(there, full)
    for given in (None, 2):
        source = {"w": full + 1, "plain": torch.arange(3)} if given in (None, rank) else None
        found = statetree.distribute(source, tree, src=given)["w"]
        assert torch.equal(found._local_tensor, layouts[mine].local(rank) + 1)
        assert found.device_mesh is leaves[mine].device_mesh
    everyone = Layout((5, 3), (0, 1, 2, 3), ("S1",))
    moved = statetree.reshard(tree, {"w": everyone.build(), "plain": torch.zeros(3, dtype=torch.int64)})["w"]
    assert torch.equal(moved._local_tensor, full.flatten()[everyone.indices(rank)])
    back = statetree.reshard({"w": moved, "plain": tree["plain"]}, tree)["w"]
    assert torch.equal(back._local_tensor, layouts[mine].local(rank))
    kept = not statetree.partition_replicas(tree)["w"]._local_tensor.is_meta
    counts = torch.zeros(2)
    counts[rank % 2] = kept
    dist.all_reduce(counts)
    assert counts.tolist() == [1, 1]
    # Summands of one mesh must not be added to another one's.
    summand = DTensor.from_local(torch.ones(3), leaves[mine].device_mesh, [Partial()])
    name, message = attempt(lambda: statetree.gather({"w": summand}))
    assert name == "UnsupportedLeaf"
    assert "expected Partial over one mesh" in message
    check_in_step()


@pytest.mark.slow
def test_meshes_that_differ_between_ranks_hold_replicas():
    run_ranks(4, gather_own_meshes)


def local_kinds():
    """Return local tensors that are more than their memory, and what they read as."""
    numbers = torch.arange(1.0, 13)
    complex_numbers = torch.complex(numbers, -numbers)
    return {
        "conjugated": complex_numbers.conj(),
        "negated": torch._neg_view(numbers),
        "imaginary": complex_numbers.clone().conj().imag,
        "strided": torch.arange(1.0, 25)[::2],
        "expanded": torch.ones(1).expand(12),
        "transposed": torch.arange(1.0, 13).view(3, 4).t(),
        "gaps": torch.arange(1.0, 49).view(4, 12)[:, ::4],
    }


def gather_kinds():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = line(*range(size))
    kinds = local_kinds()
    tree = {name: DTensor.from_local(local, mesh, [Shard(0)]) for name, local in kinds.items()}
    assert tree["conjugated"]._local_tensor.is_conj()
    for bucket_bytes in (1, 64 << 20):
        whole = statetree.gather(tree, bucket_bytes=bucket_bytes)
        for name, local in kinds.items():
            expected = torch.cat([local.resolve_conj().resolve_neg()] * size)
            assert torch.equal(whole[name].resolve_conj().resolve_neg(), expected), name
        whole, like = ({name: leaves[name] for name in kinds if name != "expanded"} for leaves in (whole, tree))
        back = statetree.distribute(whole if rank == 0 else None, like, src=0, bucket_bytes=bucket_bytes)
        moved = statetree.reshard(like, like, bucket_bytes=bucket_bytes)
        for name, wanted in like.items():
            for found in (back, moved):
                expected = wanted._local_tensor.resolve_conj().resolve_neg()
                assert torch.equal(found[name]._local_tensor.resolve_conj().resolve_neg(), expected), name
    # Conjugated wholes are distributed as they read.
    numbers = torch.complex(torch.arange(1.0, 7), torch.arange(1.0, 7)).conj()
    layout = Layout((6,), tuple(range(size)), ("S0",), torch.complex64)
    for src in (None, 0):
        found = statetree.distribute(
            {"w": numbers} if src is None or rank == 0 else None, {"w": layout.build()}, src=src
        )
        assert torch.equal(found["w"]._local_tensor, numbers.resolve_conj()[layout.indices(rank)])
    # Into local tensors with a bit, and into such that overlap themselves
    target = DTensor.from_local(torch.zeros(2, dtype=torch.complex64).conj(), mesh, [Replicate()])
    statetree.distribute({"w": numbers[:2]}, {"w": target}, in_place=True)
    assert torch.equal(target._local_tensor.resolve_conj(), numbers[:2].resolve_conj())
    name, message = attempt(lambda: statetree.reshard(tree, tree, in_place=True))
    assert name == "TreeMismatch"
    assert "writability" in message
    assert "at expanded" in message
    check_in_step()


@RANKS
def test_local_tensors_of_any_kind(world_size):
    run_ranks(world_size, gather_kinds)


def wait_for_collectives():
    from torch.distributed import _functional_collectives as collectives

    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = line(*range(size))

    def waiting():
        return collectives.all_reduce(torch.arange(3.0), "sum", dist.group.WORLD)

    expected = torch.arange(3.0) * size
    tree = {"plain": waiting(), "shards": DTensor.from_local(waiting(), mesh, [Shard(0)])}
    whole = statetree.gather(tree)
    assert torch.equal(whole["plain"], expected)
    assert torch.equal(whole["shards"], expected.repeat(size))
    sent = statetree.broadcast({"plain": waiting()}, src=1)
    assert type(sent["plain"]) is torch.Tensor
    assert torch.equal(sent["plain"], expected)
    layout = Layout((3,), tuple(range(size)), ("S0",))
    for src in (None, 0):
        given = {"w": waiting()}
        found = statetree.distribute(given if src is None or rank == 0 else None, {"w": layout.build()}, src=src)
        assert torch.equal(found["w"]._local_tensor, expected[layout.indices(rank)])


@RANKS
def test_collectives_under_way_are_waited_for(world_size):
    run_ranks(world_size, wait_for_collectives)


def refuse_misfits():
    mesh = line(*range(dist.get_world_size()))
    wrong = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], shape=(100,), stride=(1,), run_check=False)
    for leaf, reason in ((wrong, "does not fit its placements"),):
        for call in (
            statetree.gather,
            statetree.broadcast,
            statetree.partition_replicas,
            lambda tree: statetree.reshard(tree, tree),
            lambda tree: statetree.distribute({"w": torch.ones(4)}, tree, src=0),
            lambda tree: statetree.distribute({"w": torch.ones(4)}, tree),
        ):
            name, message = attempt(lambda leaf=leaf, call=call: call({"w": leaf}))
            assert name == "UnsupportedLeaf", (name, message)
            assert reason in message, message
            assert "leaf at w" in message, message
            check_in_step()


@RANKS
def test_what_does_not_fit_its_placements_is_refused(world_size):
    run_ranks(world_size, refuse_misfits)


def gather_nothing():
    """Gather tensors on meta: there is nothing to gather, but a shape."""
    tree = {
        "w": statetree.allocate_like(
            Layout((5, 3), tuple(range(dist.get_world_size())), ("S0",)).build(), device="meta"
        )
    }
    for device in (None, "cpu"):
        found = statetree.gather(tree, device=device)["w"]
        assert found.is_meta
        assert found.shape == (5, 3)
    layout = Layout((5, 3), tuple(range(dist.get_world_size())), ("S0",))
    name, message = attempt(lambda: statetree.reshard(tree, {"w": layout.build()}))
    assert name == "TreeMismatch"
    assert "memory" in message
    assert "at w" in message
    found = statetree.distribute({"w": layout.full()}, tree)["w"]  # a layout without contents will do
    assert torch.equal(found._local_tensor, layout.local(dist.get_rank()))
    name, message = attempt(lambda: statetree.distribute({"w": layout.full()}, tree, src=0, in_place=True))
    assert name == "TreeMismatch", message
    kept = statetree.partition_replicas({"w": Layout((4,), tuple(range(dist.get_world_size())), ("R",)).build()})
    assert attempt(lambda: statetree.gather(kept))[0] == "RankMismatch"
    check_in_step()


@RANKS
def test_tensors_without_elements(world_size):
    run_ranks(world_size, gather_nothing)


def take_slices_of_many():
    """Take this rank's own part of many alike tensors: how they are cut is found out once."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = line(*range(size))
    full = {f"w{i}": torch.arange(size * 6).view(size * 2, 3) + i for i in range(20)}
    like = {key: DTensor.from_local(torch.zeros(2, 3, dtype=torch.int64), mesh, [Shard(0)]) for key in full}
    with pytest.MonkeyPatch.context() as patch:
        made = []
        init = routes.Route.__init__
        patch.setattr(routes.Route, "__init__", lambda *args: made.append(init(*args)))
        found = statetree.distribute(full, like)
    assert len(made) == 1
    for key, leaf in found.items():
        assert torch.equal(leaf._local_tensor, full[key][2 * rank : 2 * rank + 2])


def test_slices_of_many_tensors_are_planned_once():
    run_ranks(2, take_slices_of_many)
