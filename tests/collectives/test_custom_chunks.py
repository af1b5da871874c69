"""Tensors whose chunks only their own ranks know: leaf types with a ``layout``, and ``__create_chunk_list__``."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import statetree
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, check_in_step

RANKS = pytest.mark.parametrize("world_size", [1, 2, 4])


class Blocks:
    """A distributed tensor of the user's own: blocks with their offsets."""

    def __init__(self, shape, blocks):
        self.shape = shape
        self.blocks = blocks


class BlocksType:
    def unpack(self, value):
        return [[block for _, block in value.blocks]], (value.shape, [offsets for offsets, _ in value.blocks])

    def pack(self, context, parts):
        (blocks,) = parts
        shape, offsets = context
        return Blocks(shape, list(zip(offsets, blocks, strict=True)))

    def layout(self, value):
        return [(value.shape, [offsets for offsets, _ in value.blocks])]


FULL = torch.arange(1.0, 71).view(10, 7)


def blocks_of(full=FULL, *, start=0, copies=1):
    """Return blocks of 3 by 2, dealt out to the ranks in turn."""
    statetree.register_leaf_type(Blocks, BlocksType())
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    corners = [(row, column) for row in range(0, 10, 3) for column in range(0, 7, 2)]
    for number, (row, column) in enumerate(corners):
        if any((number + start + copy) % size == rank for copy in range(copies)):
            found.append(((row, column), full[row : row + 3, column : column + 2].clone()))
    return Blocks((10, 7), found)


def check_blocks(found, expected):
    assert type(found) is Blocks
    assert [offsets for offsets, _ in found.blocks] == [offsets for offsets, _ in expected.blocks]
    for (_, block), (_, wanted) in zip(found.blocks, expected.blocks, strict=True):
        assert torch.equal(block, wanted)


def zeroed(blocks):
    return Blocks(blocks.shape, [(offsets, torch.zeros_like(block)) for offsets, block in blocks.blocks])


def move_blocks():
    ranks = tuple(range(dist.get_world_size()))
    blocks, layout = blocks_of(), Layout((10, 7), ranks, ("S1",))
    shards = layout.build()
    tree = {"a": blocks, "b": shards, "again": blocks}
    for bucket_bytes in (1, 100, 64 << 20):
        whole = statetree.gather(tree, bucket_bytes=bucket_bytes)
        assert torch.equal(whole["a"], FULL)
        assert whole["again"] is whole["a"]
        assert torch.equal(whole["b"], layout.full())
        for src in (None, 0):
            like = {"a": zeroed(blocks), "b": zeroed(blocks_of(start=1)), "again": 0}
            full = {"a": FULL, "b": layout.full(), "again": 0}
            given = full if src is None or dist.get_rank() == src else None
            found = statetree.distribute(given, like, src=src, bucket_bytes=bucket_bytes)
            check_blocks(found["a"], blocks)
            check_blocks(found["b"], blocks_of(layout.full(), start=1))
            for _, block in like["a"].blocks:  # nothing was written
                assert not block.any()
            written = statetree.distribute(given, like, src=src, in_place=True)
            assert written["a"] is like["a"]
            check_blocks(like["a"], blocks)
        moved = statetree.reshard({"a": blocks, "b": shards}, {"a": shards, "b": zeroed(blocks)})
        assert torch.equal(moved["a"]._local_tensor, FULL.flatten()[layout.indices(dist.get_rank())])
        check_blocks(moved["b"], blocks_of(layout.full()))
    streamed = {str(path): leaf for path, leaf in statetree.stream(tree, statetree.gather)}
    assert torch.equal(streamed["a"], FULL)
    assert streamed["again"] is streamed["a"]
    there = statetree.gather(tree, dst=0)
    assert there["a"].is_meta == (dist.get_rank() != 0)
    assert there["a"].shape == (10, 7)
    sent = blocks_of() if dist.get_rank() else zeroed(blocks_of())
    check_blocks(statetree.broadcast({"a": sent})["a"], sent)  # nobody else has the source's blocks


@RANKS
def test_blocks_are_moved(world_size):
    run_ranks(world_size, move_blocks)


def keep_blocks():
    found = statetree.partition_replicas({"a": blocks_of(copies=2)})["a"]
    return [(offsets, block.is_meta) for offsets, block in found.blocks]


@pytest.mark.slow
def test_copies_of_blocks_are_kept_once():
    # Ranks 0 to 3 hold the blocks n and n - 1, so that they hold different sets of blocks: all are kept.
    rows = run_ranks(4, keep_blocks)
    kept = [offsets for row in rows for offsets, on_meta in row if not on_meta]
    assert set(kept) == {(row, column) for row in range(0, 10, 3) for column in range(0, 7, 2)}
    # On two ranks the sets are the same: exactly one rank keeps them.
    rows = run_ranks(2, keep_blocks)
    assert sorted({on_meta for _, on_meta in row} == {True} for row in rows) == [False, True]


def refuse_blocks():
    rank = dist.get_rank()
    blocks = blocks_of()
    wrong = Blocks((10, 7), blocks.blocks[1:]) if rank == 1 else blocks
    for call in (
        statetree.gather,
        lambda tree: statetree.reshard(tree, {"a": FULL}),
    ):
        name, message = attempt(lambda call=call: call({"a": wrong}))
        assert name == "UnsupportedLeaf"  # on every rank
        assert "only a part of the leaf at a" in message
        check_in_step()
    other = Blocks((10, 7), [((0, 0), torch.zeros(2, 2, dtype=torch.float64))]) if rank == 1 else blocks
    name, message = attempt(lambda: statetree.gather({"a": other}))
    assert name == "RankMismatch"
    assert "torch.float64" in message
    check_in_step()
    mixed = Blocks((10, 7), [*blocks.blocks[:-1], (blocks.blocks[-1][0], blocks.blocks[-1][1].double())])
    name, message = attempt(lambda: statetree.gather({"a": mixed if rank == 1 else blocks}))
    assert name == ("UnsupportedLeaf" if rank == 1 else "RankMismatch")
    assert "a chunk of the leaf at a is not what its leaf type says" in message
    check_in_step()
    on_meta = Blocks((10, 7), [(offsets, block.to("meta")) for offsets, block in blocks.blocks]) if rank else blocks
    name, message = attempt(lambda: statetree.gather({"a": on_meta}))
    assert name == ("UnsupportedLeaf" if rank else "RankMismatch")
    assert "is on meta" in message
    check_in_step()


@pytest.mark.parametrize("world_size", [2, 4])
def test_blocks_that_do_not_fit_are_refused(world_size):
    run_ranks(world_size, refuse_blocks)


def wrap_shards():
    """Return a DTensor whose local tensor is several shards: rows of the whole, in pieces of uneven sizes."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = Layout((size,), tuple(range(size)), ("S0",)).device_mesh()
    bounds = [0, 4, 10] if size == 2 else [0, 1, 3, 6, 10] if size == 4 else [0, 10]
    start, stop = bounds[rank], bounds[rank + 1]
    columns = [(0, 3), (3, 7)]
    local = LocalShardsWrapper(
        [FULL[start:stop, low:high].clone() for low, high in columns], [(start, low) for low, _ in columns]
    )
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=FULL.shape, stride=FULL.stride())


def move_wrapped():
    wrapped = wrap_shards()
    layout = Layout((10, 7), tuple(range(dist.get_world_size())), ("S1",))
    assert torch.equal(statetree.gather({"a": wrapped})["a"], FULL)
    moved = statetree.reshard({"a": wrapped}, {"a": layout.build()})["a"]
    assert torch.equal(moved._local_tensor, FULL.flatten()[layout.indices(dist.get_rank())])
    found = statetree.chain(functools.partial(statetree.gather, dst=0), statetree.offload)({"a": wrapped})["a"]
    assert found.is_meta if dist.get_rank() else torch.equal(found, FULL)


@RANKS
def test_wrapped_shards_are_moved(world_size):
    run_ranks(world_size, move_wrapped)


def fill_wrapped():
    wrapped = wrap_shards()
    like = wrap_shards()
    for shard in like._local_tensor.local_shards():
        shard.zero_()
    for src in (None, 0):
        full = {"a": FULL} if src is None or dist.get_rank() == src else None
        found = statetree.distribute(full, {"a": like}, src=src)["a"]
        pairs = zip(found._local_tensor.local_shards(), wrapped._local_tensor.local_shards(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        assert not any(shard.any() for shard in like._local_tensor.local_shards())
    statetree.distribute({"a": FULL}, {"a": like}, in_place=True)
    assert torch.equal(statetree.gather({"a": like})["a"], FULL)


@RANKS
def test_wrapped_shards_are_filled(world_size):
    run_ranks(world_size, fill_wrapped)
