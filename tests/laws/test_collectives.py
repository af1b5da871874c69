"""The laws of collectives, on real ranks: whatever the layouts, each rank ends up with exactly its elements."""

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

import statetree
from statetree.leaves.copying import castable
from statetree.testing import Layout, layouts, run_ranks
from tests.laws.batches import as_many, batches, each

DTYPES = (
    torch.float32,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
#: Rounds of one element each take as long as all other examples together: few have them.
BUCKETS = st.sampled_from([64 << 20, 200, 48, 13, 64 << 20, 200, 48, 1])


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor.numel()


def same(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return not a.numel() or torch.equal(bits(a.resolve_conj()), bits(b.resolve_conj()))


def check_local(found, layout, full):
    """Check that a DTensor is a whole tensor in a layout, as far as this rank sees it."""
    assert found.placements == tuple(layout.torch_placements())
    assert tuple(found.shape) == layout.shape
    indices = layout.indices(dist.get_rank())
    if indices is None:
        assert not found._local_tensor.numel()
    else:
        expected = full.flatten()[indices]
        assert same(found._local_tensor, expected), (found._local_tensor, expected)


@st.composite
def pairs(draw, world_size, *, sums=True):
    """Draw a layout, with partial sums or without, and another one for the same tensor."""
    dtype = draw(st.sampled_from(DTYPES))
    partial = sums and dtype in (torch.float32, torch.float64, torch.int64, torch.complex64)
    source = draw(layouts(world_size, dtypes=(dtype,), partial=partial))
    candidates = layouts(world_size, dtypes=(source.dtype,), max_dims=len(source.shape)).filter(
        lambda layout: len(layout.shape) == len(source.shape)
    )
    target = draw(candidates)
    return source, Layout(source.shape, target.mesh, target.placements, source.dtype, target.geometry)


def go_there_and_back(drawn, bucket_bytes, dst, src):
    """Take tensors through every collective."""
    full = {str(index): source.full() for index, (source, _) in enumerate(drawn)}
    tree = {str(index): source.build() for index, (source, _) in enumerate(drawn)}
    like = {str(index): target.build() for index, (_, target) in enumerate(drawn)}
    tree["again"] = tree["0"]
    full["again"] = full["0"]
    like["again"] = like["0"]
    before = {key: value._local_tensor.clone() for key, value in tree.items()}
    rank = dist.get_rank()
    options = {"bucket_bytes": bucket_bytes}

    whole = statetree.gather(tree, **options)
    assert whole["again"] is whole["0"]
    for key, tensor in full.items():
        assert type(whole[key]) is torch.Tensor
        assert same(whole[key], tensor), (key, whole[key], tensor)
    there = statetree.gather(tree, dst=dst, **options)
    for key, tensor in full.items():
        assert there[key].is_meta if rank not in dst else same(there[key], tensor)
        assert there[key].shape == tensor.shape
        assert there[key].dtype == tensor.dtype

    moved = statetree.reshard(tree, like, **options)
    assert moved["again"]._local_tensor.data_ptr() == moved["0"]._local_tensor.data_ptr()
    for index, (_, target) in enumerate(drawn):
        check_local(moved[str(index)], target, full[str(index)])
    for given in (None, src):
        spread = statetree.distribute(full if given in (None, rank) else None, like, src=given, **options)
        for index, (_, target) in enumerate(drawn):
            check_local(spread[str(index)], target, full[str(index)])
    back = [index for index, (source, _) in enumerate(drawn) if "P" not in source.placements]
    returned = statetree.reshard(
        {str(index): moved[str(index)] for index in back}, {str(index): tree[str(index)] for index in back}, **options
    )
    for index in back:
        check_local(returned[str(index)], drawn[index][0], full[str(index)])
    for key, value in tree.items():
        assert same(value._local_tensor, before[key])  # nothing was written
    for value in like.values():
        value._local_tensor.zero_()
    filled = statetree.reshard(tree, like, in_place=True, **options)
    for index, (_, target) in enumerate(drawn):
        assert filled[str(index)] is like[str(index)]
        check_local(filled[str(index)], target, full[str(index)])


def flipped(tensor):
    """Return the elements in another order, of any dtype: torch flips the usual ones alone."""
    dims = tuple(range(tensor.dim()))
    if tensor.is_complex():
        return tensor.flip(dims)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.view(integers).flip(dims).view(tensor.dtype)


def go_in_other_ways(drawn, bucket_bytes, dst, src):
    """Take tensors through the options of the collectives: each gives what the plain call would give."""
    full = {str(index): source.full() for index, (source, _) in enumerate(drawn)}
    tree = {str(index): source.build() for index, (source, _) in enumerate(drawn)}
    like = {str(index): target.build() for index, (_, target) in enumerate(drawn)}
    rank, options = dist.get_rank(), {"bucket_bytes": bucket_bytes}

    # Prepared transfers move what the tensors hold then.
    given = {key: leaf.clone() for key, leaf in full.items()} if rank == src else None
    gathered = statetree.prepare(statetree.gather, tree, dst=dst, **options)
    distributed = statetree.prepare(statetree.distribute, given, like, src=src, **options)
    for change in (0, 1):
        if change:
            for tensor in [*(leaf._local_tensor for leaf in tree.values()), *(given or {}).values()]:
                tensor.copy_(flipped(tensor))
            full = {key: flipped(leaf) for key, leaf in full.items()}
        expected, found = statetree.gather(tree, dst=dst, **options), gathered()
        for key, leaf in expected.items():
            assert leaf.is_meta == found[key].is_meta
            assert leaf.is_meta or same(found[key], leaf), (key, found[key], leaf)
        found = distributed()
        for index, (_, target) in enumerate(drawn):
            check_local(found[str(index)], target, full[str(index)])

    # Elements are converted on their way as they are before or after it.
    wide = {key: leaf.to(torch.complex128 if leaf.is_complex() else torch.float64) for key, leaf in like.items()}
    chosen = [key for key, leaf in tree.items() if castable(leaf.dtype, wide[key].dtype)]
    before, after = ({key: held[key] for key in chosen} for held in (tree, wide))
    there = statetree.reshard(before, after, cast=True, **options)
    back = statetree.reshard(before, {key: like[key] for key in chosen}, **options)
    for key in chosen:
        assert same(there[key]._local_tensor, back[key]._local_tensor.to(after[key].dtype)), key

    # What only one tree has is left alone.
    less, more = {key: tree[key] for key in list(tree)[1:]}, {**like, "more": torch.arange(3)}
    missing = []
    moved = statetree.reshard(less, more, strict=False, on_missing=missing.append, **options)
    assert {str(difference.path) for difference in missing} == {"0", "more"}
    assert all(moved[key] is more[key] for key in ("0", "more"))
    for key, leaf in statetree.reshard(less, {key: like[key] for key in less}, **options).items():
        assert same(moved[key]._local_tensor, leaf._local_tensor)

    # Keys that only some ranks hold are in the result of all.
    own = {**tree, f"rank {rank}": torch.arange(3) + rank}
    together = statetree.gather(own, union=True, **options)
    for key, leaf in statetree.gather(tree, **options).items():
        assert same(together[key], leaf)
    for other in range(dist.get_world_size()):
        assert torch.equal(together[f"rank {other}"], torch.arange(3) + other)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_options_give_what_the_plain_calls_give(world_size):
    ranks = st.integers(0, world_size - 1)
    moves = st.tuples(
        st.lists(pairs(world_size), min_size=1, max_size=3), BUCKETS, st.sets(ranks, min_size=1).map(sorted), ranks
    )

    @as_many()
    @hypothesis.given(batches(moves))
    def holds(batch):
        run_ranks(world_size, each, go_in_other_ways, batch)

    holds()


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_elements_arrive_where_they_belong(world_size):
    ranks = st.integers(0, world_size - 1)
    moves = st.tuples(
        st.lists(pairs(world_size), min_size=1, max_size=3), BUCKETS, st.sets(ranks, min_size=1).map(sorted), ranks
    )

    @as_many()
    @hypothesis.given(batches(moves))
    def holds(batch):
        run_ranks(world_size, each, go_there_and_back, batch)

    holds()


def move_large_boxes():
    """Move boxes that are too large to be packed with others, and no stretch of memory on one side or on both."""
    ranks = tuple(range(dist.get_world_size()))
    full = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)
    rows, columns = (Layout((1024, 1024), ranks, (placement,)).build() for placement in ("S0", "S1"))
    for layout in (rows, columns):
        statetree.distribute({"w": full}, {"w": layout}, in_place=True)
    for source, target, dim in ((rows, columns, 1), (columns, rows, 0)):
        found = statetree.reshard({"w": source}, {"w": target})["w"].to_local()
        assert torch.equal(found, full.chunk(len(ranks), dim)[dist.get_rank()])
    local = full.chunk(len(ranks), 1)[dist.get_rank()]
    strided = DTensor.from_local(local, columns.device_mesh, columns.placements, run_check=False)
    assert torch.equal(statetree.gather({"w": strided})["w"], full)


def test_large_boxes_arrive():
    run_ranks(2, move_large_boxes)


def move_large_boxes_with_bits():
    """Send boxes that lie in one stretch of memory, which does not hold what they read as."""
    numbers = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)
    for whole in (torch.complex(numbers, numbers + 0.5).conj(), torch._neg_view(numbers)):
        held = Layout((1024, 1024), (0, 1), ("S0",), whole.dtype).build()
        local = whole.chunk(2)[dist.get_rank()]
        rows = DTensor.from_local(local, held.device_mesh, held.placements, run_check=False)
        assert rows.to_local().is_conj() or rows.to_local().is_neg()
        assert torch.equal(statetree.gather({"w": rows})["w"], whole)


def test_large_boxes_with_conjugate_and_negative_bits_arrive():
    run_ranks(2, move_large_boxes_with_bits)
