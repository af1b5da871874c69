"""One path over meshes that differ from rank to rank: copies of one tensor, or another tensor on each."""

import functools

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as hyp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import statetree
from statetree.exchange import replica_check as replicas
from statetree.testing import Layout, layouts, run_ranks
from tests.collectives.checks import attempt, blank, check_equal, check_in_step, group_of, locals_of
from tests.collectives.test_custom_chunks import FULL, Blocks, BlocksType, blocks_of
from tests.kept_calls import of_one_call
from tests.laws.batches import as_many, batches, each
from tests.laws.test_collectives import DTYPES, check_local, same
from tests.products import product

MESHES = ((0, 1), (2, 3))


def over_meshes(first, second):
    """Build two layouts, each on its own ranks: 0 and 1 have the first, 2 and 3 the second."""
    built = first.build(), second.build()  # all ranks make both meshes
    return built[dist.get_rank() // 2]


def stages(kind="S0", *, shape=(6, 3), dtype=torch.float32, geometry="contiguous"):
    """Return the layouts of a tensor over one mesh and over the other."""
    return tuple(Layout(shape, mesh, (kind,), dtype, geometry) for mesh in MESHES)


def whole_calls():
    """Return the calls that take copies for one tensor."""
    return {
        "gather": statetree.gather,
        "gather to one": functools.partial(statetree.gather, dst=3),
        "reshard": lambda tree: statetree.reshard(tree, {key: torch.zeros(leaf.shape) for key, leaf in tree.items()}),
        "partition_replicas": statetree.partition_replicas,
    }


def lose_a_stage(kind):
    """Call with two stages that have one key: everybody raises, and nothing was written."""
    rank = dist.get_rank()
    one = over_meshes(*stages(kind))
    if rank >= 2:
        one._local_tensor.add_(100)
    tree = {"fine": Layout((5,), (0, 1, 2, 3), ("S0",)).build(), "layers": {"0": one}}
    like = {"fine": torch.zeros(5), "layers": {"0": torch.full((6, 3), -1.0)}}
    before = statetree.offload((tree, like))
    calls = {
        **{name: call for name, call in whole_calls().items() if name != "reshard"},
        "reshard": lambda tree: statetree.reshard(tree, like, in_place=True),
    }
    for name, call in calls.items():
        raised, message = attempt(lambda call=call: call(tree))
        assert raised == "RankMismatch", (name, raised, message)
        assert message.startswith(f"{name.split()[0]}: the ranks hold the leaf at layers.0 over meshes"), message
        assert "Nothing was moved." in message
        check_in_step()
        check_equal((tree, like), before)


@pytest.mark.parametrize("kind", ["S0", "S1", "R", "S0/2"])
def test_two_stages_with_one_key_are_refused(kind):
    run_ranks(4, lose_a_stage, kind)


def differ_among_many():
    """Two of five leaves differ, in what are the second and the third part of them, where two are compared at once."""
    first, second = stages()
    tree = {str(number): over_meshes(first, second) for number in range(5)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_LEAVES_AT_ONCE", 2)
        statetree.gather(tree)
        for number in ("3", "4"):
            if dist.get_rank() >= 2:
                tree[number]._local_tensor.add_(100)
        raised, message = attempt(lambda: statetree.gather(tree))
    check_in_step()
    assert raised == "RankMismatch"
    return message


def test_of_many_leaves_the_first_that_differs_is_named():
    for message in run_ranks(4, differ_among_many):
        assert message.startswith("gather: the ranks hold the leaf at 3 over meshes of their own"), message


def take_the_first(kind):
    layouts = stages(kind)
    one = over_meshes(*layouts)
    if dist.get_rank() >= 2:
        one._local_tensor.add_(100)
    full = layouts[0].full()
    assert torch.equal(statetree.gather({"a": one}, replicas="first")["a"], full)
    found = statetree.reshard({"a": one}, {"a": torch.zeros(6, 3)}, replicas="first")
    assert torch.equal(found["a"], full)


@pytest.mark.parametrize("kind", ["S0", "R", "S0/2"])
def test_the_first_mesh_is_taken_on_demand(kind):
    run_ranks(4, take_the_first, kind)


def take_copies(dtype, geometry):
    """Take tensors that are the same over both meshes, however they are cut and lie in memory; then change one byte."""
    rank = dist.get_rank()
    for shape in ((5, 3), (), (1, 4), (0, 2)):
        for kind in ("S0", "S1", "R", "S0/2") if shape else ("R",):
            layouts = stages(kind, shape=shape, dtype=dtype, geometry=geometry)
            one = over_meshes(*layouts)
            for _ in range(2):  # the second time with a known plan
                assert same(statetree.gather({"a": one})["a"], layouts[0].full()), (shape, kind)
            # What lies last in the local tensor of the last rank that has any; within a mesh, of the one that is asked.
            last = 2 if kind == "R" or (shape == (1, 4) and kind != "S1") else 3
            if rank == last and one._local_tensor.numel():
                place = one._local_tensor[(-1,) * len(shape)].view(-1).view(torch.uint8)
                place[-1] ^= 1
            raised, message = attempt(lambda one=one: statetree.gather({"a": one}))
            assert raised == ("RankMismatch" if 0 not in shape else ""), (shape, kind, message)
            assert 0 in shape or f"and on rank {last}. " in message
            check_in_step()


@pytest.mark.parametrize(("dtype", "geometry"), product(DTYPES, ["contiguous", "transposed", "inside"], every=15))
def test_copies_are_known_by_their_bytes(dtype, geometry):
    run_ranks(4, take_copies, dtype, geometry)


def drift_on_one_of_many_meshes():
    """Give each rank a mesh of its own, and one of them another element: it is found, whichever rank that is."""
    mine = [DeviceMesh("cpu", [rank]) for rank in range(3)][dist.get_rank()]
    for drifted in range(3):
        local = torch.arange(6)
        one = DTensor.from_local(local, mine, [Replicate()], run_check=False)
        assert torch.equal(statetree.gather({"a": one})["a"], torch.arange(6))
        local[4] += dist.get_rank() == drifted
        kind, message = attempt(lambda one=one: statetree.gather({"a": one}))
        others = ", ".join(str(rank) for rank in range(3) if rank != drifted)
        assert kind == "RankMismatch"
        assert f"on ranks {others} and on rank {drifted}. " in message
        check_in_step()


def test_one_that_differs_among_many_meshes_is_found():
    run_ranks(3, drift_on_one_of_many_meshes)


def take_views():
    """Compare tensors that read as the conjugate or negative of what lies in memory."""
    rank = dist.get_rank()
    numbers = torch.arange(1.0, 19).view(6, 3)
    for whole, view in (
        (torch.complex(numbers, numbers + 0.5), lambda tensor: tensor.conj().clone().conj()),
        (numbers, lambda tensor: torch._neg_view(-tensor)),
    ):
        held = over_meshes(*stages(dtype=whole.dtype))
        local = whole.chunk(2)[rank % 2].clone()
        for wrong in (False, True):
            given = view(local + wrong) if rank >= 2 else local
            assert rank < 2 or given.is_conj() or given.is_neg()
            one = DTensor.from_local(given, held.device_mesh, held.placements, run_check=False)
            kind, message = attempt(lambda one=one: statetree.gather({"a": one}))
            assert kind == ("RankMismatch" if wrong else ""), message
            if not wrong:
                assert torch.equal(statetree.gather({"a": one})["a"], whole)
            check_in_step()


def test_conjugate_and_negative_bits_are_resolved():
    run_ranks(4, take_views)


def go_through_meshes(first, place, dst):
    """Take a tensor over any two meshes, then one that differs in a single element."""
    shifted = Layout(first.shape, _shifted(first.mesh), first.placements, first.dtype, first.geometry)
    one, full, rank = over_meshes(first, shifted), first.full(), dist.get_rank()
    assert same(statetree.gather({"a": one})["a"], full)
    found = statetree.reshard({"a": one}, {"a": blank(one)})["a"]
    check_local(found, (first, shifted)[rank // 2], full)
    if not full.numel():
        return
    place %= full.numel()
    indices = shifted.indices(rank)
    if indices is not None and (indices == place).any():  # on every rank that holds it
        one._local_tensor[tuple((indices == place).nonzero()[0].tolist())] = -7
    for call in (functools.partial(statetree.gather, dst=dst), lambda tree: statetree.reshard(tree, {"a": full})):
        kind, message = attempt(lambda call=call: call({"a": one}))
        assert kind == "RankMismatch", (kind, message)
        check_in_step()
    assert same(statetree.gather({"a": one}, replicas="first")["a"], full)


def _shifted(mesh):
    return tuple(place + 2 if isinstance(place, int) else _shifted(place) for place in mesh)


@pytest.mark.slow
def test_any_two_meshes_are_compared():
    drawn = layouts(2, dtypes=(torch.float32, torch.int64, torch.bfloat16))

    @as_many()
    @hypothesis.given(batches(hyp.tuples(drawn, hyp.integers(0, 10_000), hyp.integers(0, 3))))
    def holds(batch):
        run_ranks(4, each, go_through_meshes, batch)

    holds()


def refuse_partial():
    one = over_meshes(*stages("P", shape=(4,)))
    for call in (
        statetree.gather,
        functools.partial(statetree.gather, replicas="first"),
        lambda tree: statetree.reshard(tree, {"a": torch.zeros(4)}),
        statetree.partition_replicas,
    ):
        kind, message = attempt(lambda call=call: call({"a": one}))
        assert kind == "UnsupportedLeaf"
        assert "cannot reduce the leaf at a: expected Partial over one mesh" in message
        check_in_step()


def test_partial_over_several_meshes_is_refused():
    run_ranks(4, refuse_partial)


def sharded(full):
    """Return a ShardedTensor over the ranks' own pair, in rows."""
    groups = {mesh: group_of(*mesh) for mesh in MESHES}
    rank = dist.get_rank()
    half = full.shape[0] // 2
    start = rank % 2 * half
    metadata = ShardMetadata([start, 0], [half, full.shape[1]], f"rank:{rank}/cpu")
    shard = Shard(full[start : start + half].clone(), metadata)
    return ShardedTensor._init_from_local_shards([shard], *full.shape, process_group=groups[MESHES[rank // 2]])


def compare_sharded():
    full = torch.arange(1.0, 19).view(6, 3)
    one = sharded(full)
    assert torch.equal(statetree.gather({"a": one})["a"], full)
    if dist.get_rank() == 3:
        locals_of(one)[0][2, 1] = -1
    for name, call in whole_calls().items():
        if name != "reshard":
            kind, message = attempt(lambda call=call: call({"a": one}))
            assert kind == "RankMismatch", (name, kind)
            assert "leaf at a over meshes of their own" in message
            assert "on rank 1 and on rank 3" in message
            check_in_step()
    assert torch.equal(statetree.gather({"a": one}, replicas="first")["a"], full)


def test_sharded_tensors_are_compared():
    run_ranks(4, compare_sharded)


def compare_blocks():
    """Compare chunks that only their own ranks know: each may be of another mesh."""
    rank = dist.get_rank()
    blocks = blocks_of(copies=2)
    assert torch.equal(statetree.gather({"a": blocks})["a"], FULL)
    whole = Blocks((10, 7), [((0, 0), FULL.clone())]) if rank == 3 else blocks_of()
    assert torch.equal(statetree.gather({"a": whole})["a"], FULL)  # cut in another way
    for held, first in ((blocks, True), (whole, False)):
        if rank == 3:
            held.blocks[0][1][0, 0] = -1
        for call in (statetree.gather, statetree.partition_replicas):
            kind, message = attempt(lambda call=call, held=held: call({"a": held}))
            assert kind == "RankMismatch", (kind, message)
            check_in_step()
        found = statetree.gather({"a": held}, replicas="first")["a"]
        assert torch.equal(found, FULL) or not first
    rows = Blocks((10, 7), [((rank % 2 * 5, 0), FULL[rank % 2 * 5 :][:5] + (rank >= 2) * 100)])
    assert attempt(lambda: statetree.gather({"a": rows}))[0] == "RankMismatch"
    assert torch.equal(statetree.gather({"a": rows}, replicas="first")["a"], FULL)
    # The first ranks hold everything: what the others have, cut in another way, is not mixed in.
    bounds = [(0, 5), (5, 10), (0, 3), (3, 10)][rank]
    other = Blocks((10, 7), [((bounds[0], 0), FULL[slice(*bounds)] + (rank >= 2) * 100)])
    assert attempt(lambda: statetree.gather({"a": other}))[0] == "RankMismatch"
    assert torch.equal(statetree.gather({"a": other}, replicas="first")["a"], FULL)


def test_chunks_that_ranks_list_are_compared():
    run_ranks(4, compare_blocks)


def count_numbers():
    """Count what is read where there is nothing to compare."""
    statetree.register_leaf_type(Blocks, BlocksType())
    counted = []
    number = replicas.chunk_number

    def counting(piece, *place):
        counted.append(piece.numel())
        return number(piece, *place)

    replicas.chunk_number = counting
    try:
        ranks = tuple(range(dist.get_world_size()))
        tree = {
            "shards": Layout((6, 3), ranks, ("S0",)).build(),
            "copies": Layout((6, 3), ranks, ("R",)).build(),
            "hsdp": Layout((6, 3), ((0, 1), (2, 3)), ("R", "S0")).build(),
            "blocks": blocks_of(),
            "plain": torch.arange(3.0),
        }
        for call in (statetree.gather, statetree.partition_replicas):
            call(tree)
        alone = len(counted)
        statetree.gather({"a": over_meshes(*stages("R"))}, replicas="first")
        ignored = len(counted)
        statetree.gather({"a": over_meshes(*stages("R"))})
        return alone, ignored, counted
    finally:
        replicas.chunk_number = number


@of_one_call
def test_nothing_is_read_where_meshes_agree():
    rows = run_ranks(4, count_numbers)
    assert [row[:2] for row in rows] == [(0, 0)] * 4
    # Each element once a mesh: of copies within one, the first is read.
    assert [row[2] for row in rows] == [[18], [], [18], []]


def fail_to_compare():
    """Fail on one rank while it makes a number: all hear of it."""
    one = over_meshes(*stages())
    number = replicas.chunk_number

    def failing(*_):
        raise MemoryError("no memory left")

    if dist.get_rank() == 2:
        replicas.chunk_number = failing
    try:
        kind, message = attempt(lambda: statetree.gather({"a": one}))
    finally:
        replicas.chunk_number = number
    assert kind == ("MemoryError" if dist.get_rank() == 2 else "RankMismatch")
    assert "no memory left" in message
    check_in_step()


def test_a_rank_that_cannot_compare_is_heard_of():
    run_ranks(4, fail_to_compare)


def pass_other_options():
    one = over_meshes(*stages())
    rank = dist.get_rank()
    calls = (statetree.gather, lambda tree, **options: statetree.reshard(tree, {"a": torch.zeros(6, 3)}, **options))
    for call in calls:
        for wrong in ("last", None, ["check"]):
            given = wrong if rank == 1 else "check"
            kind, message = attempt(lambda call=call, given=given: call({"a": one}, replicas=given))
            assert kind == ("ValueError" if rank == 1 else "RankMismatch"), message
            assert 'replicas must be "check" or "first"' in message
            check_in_step()
        given = "first" if rank == 1 else "check"
        kind, message = attempt(lambda call=call, given=given: call({"a": one}, replicas=given))
        assert kind == "RankMismatch"
        assert "do not call the same with the same options" in message
        check_in_step()


def test_ranks_pass_one_option():
    run_ranks(4, pass_other_options)


def partition_copies():
    """Keep each chunk of two copies of a tensor on one rank."""
    one = over_meshes(*stages())
    found = statetree.partition_replicas({"a": one})["a"]
    return not found._local_tensor.is_meta


def test_copies_over_two_meshes_are_kept_once():
    kept = run_ranks(4, partition_copies)
    assert kept[0] + kept[2] == 1
    assert kept[1] + kept[3] == 1


def partition_on_meta():
    """Leave alone what has no elements to compare."""
    one = over_meshes(*stages())
    if dist.get_rank() >= 2:
        one._local_tensor.untyped_storage().resize_(0)
    statetree.partition_replicas({"a": one})


def test_what_has_no_elements_is_not_compared():
    run_ranks(4, partition_on_meta)
