"""``pool``: blocks that go round between snapshots."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hyp

from statetree.spans import memory as buffers
from statetree.spans.memory import LARGE_BYTES, Memory
from statetree.stager.pool import Pool
from tests.unit.spans.test_memory import CONTAINERS, assert_apart, places


@pytest.fixture(params=CONTAINERS)
def memory(request):
    return Memory(**CONTAINERS[request.param])


def addresses(blocks):
    return [block.data_ptr() for block in blocks]


def take_block(pool, size):
    """Take one large block from a pool, and return it."""
    _, (block,) = pool.take([size])
    assert block.nbytes >= size
    return block


def test_large_buffers_get_a_block_each_and_small_ones_share_slabs(memory):
    sizes = [10, LARGE_BYTES, 64, LARGE_BYTES + 5, 0]
    buffers, blocks = Pool(memory).take(sizes)
    assert sorted(block.nbytes for block in blocks) == [128, LARGE_BYTES, LARGE_BYTES + 5]
    assert all(block.dtype == torch.uint8 for block in blocks)
    assert_apart(places(buffers, sizes))
    for (storage, start), size in zip(buffers, sizes, strict=True):
        begin = storage.data_ptr() + start
        assert not size or any(at <= begin and begin + size <= at + block.nbytes for at, block in _placed(blocks))


def _placed(blocks):
    return zip(addresses(blocks), blocks, strict=True)


def test_plain_buffers_are_storages_of_their_own_and_shared_ones_are_the_blocks_storages(memory):
    buffers, blocks = Pool(memory).take([10, 20, LARGE_BYTES])
    keys = [buffer.storage._cdata for buffer in buffers]
    of_blocks = {block.untyped_storage()._cdata for block in blocks}
    if memory.share_memory:
        assert keys[0] == keys[1] != keys[2]
        assert set(keys) == of_blocks
        assert [buffer.start for buffer in buffers] == [0, 64, 0]
    else:
        assert len(set(keys)) == 3
        assert [(buffer.storage.nbytes(), buffer.start) for buffer in buffers] == [(10, 0), (20, 0), (LARGE_BYTES, 0)]


def test_slabs_are_bounded(memory, monkeypatch):
    monkeypatch.setattr(buffers, "SLAB_BYTES", 256)
    taken, blocks = Pool(memory).take([100, 128, 1, 300, 256, 1])
    assert [block.nbytes for block in blocks] == [256, 64, 320, 256, 64]
    assert_apart(places(taken, [100, 128, 1, 300, 256, 1]))


def test_nothing_asked_for_nothing_taken(memory):
    assert Pool(memory).take([]) == ([], [])
    buffers, blocks = Pool(memory).take([0, 0])
    assert len(buffers) == 2
    assert sum(block.nbytes for block in blocks) == 0


def test_blocks_that_were_given_are_used_again(memory):
    pool = Pool(memory)
    sizes = [10, LARGE_BYTES, 64, LARGE_BYTES + 5]
    _, blocks = pool.take(sizes)
    assert pool.nbytes == 0
    pool.give(blocks)
    assert pool.nbytes == sum(block.nbytes for block in blocks)
    _, again = pool.take(sizes)
    assert sorted(addresses(again)) == sorted(addresses(blocks))
    assert pool.nbytes == 0


def test_no_block_is_handed_out_twice(memory):
    pool = Pool(memory)
    pool.give([take_block(pool, LARGE_BYTES)])
    first, second = take_block(pool, LARGE_BYTES), take_block(pool, LARGE_BYTES)
    assert first.data_ptr() != second.data_ptr()


def test_the_smallest_block_that_fits_is_taken():
    pool = Pool(Memory())
    sizes = [LARGE_BYTES + 300, LARGE_BYTES + 100, LARGE_BYTES + 200]
    blocks = [take_block(pool, size) for size in sizes]
    pool.give(blocks)
    assert take_block(pool, LARGE_BYTES + 150).data_ptr() == blocks[2].data_ptr()
    assert take_block(pool, LARGE_BYTES + 150).data_ptr() == blocks[0].data_ptr()
    assert pool.nbytes == LARGE_BYTES + 100


def test_a_block_is_taken_only_if_three_quarters_of_it_are_filled():
    pool = Pool(Memory())
    block = take_block(pool, 4 * LARGE_BYTES)
    pool.give([block])
    assert take_block(pool, 3 * LARGE_BYTES - 1).nbytes == 3 * LARGE_BYTES - 1
    assert pool.nbytes == 4 * LARGE_BYTES
    assert take_block(pool, 3 * LARGE_BYTES).data_ptr() == block.data_ptr()


def test_a_shared_block_is_taken_only_for_exactly_what_it_holds():
    """Its storage is what other processes and ``torch.save`` see: all of it."""
    pool = Pool(Memory(share_memory=True))
    block = take_block(pool, LARGE_BYTES + 64)
    pool.give([block])
    buffers, blocks = pool.take([LARGE_BYTES])
    assert buffers[0].storage.nbytes() == LARGE_BYTES
    assert addresses(blocks) != [block.data_ptr()]
    assert take_block(pool, LARGE_BYTES + 64).data_ptr() == block.data_ptr()


def test_idle_blocks_are_freed_where_memory_is_short(memory, monkeypatch):
    pool = Pool(memory)
    pool.give([take_block(pool, LARGE_BYTES)])

    def block(self, size):
        if pool.nbytes:
            raise MemoryError
        return real(self, size)

    real = Memory.block
    monkeypatch.setattr(Memory, "block", block)
    assert take_block(pool, 2 * LARGE_BYTES).nbytes == 2 * LARGE_BYTES
    assert pool.nbytes == 0


def test_clear_frees_the_blocks(memory):
    pool = Pool(memory)
    pool.give(pool.take([LARGE_BYTES, 5])[1])
    pool.clear()
    assert pool.nbytes == 0


def test_blocks_are_compared_by_identity():
    """A block holds bytes: ``==`` would compare them."""
    pool = Pool(Memory())
    blocks = [take_block(pool, LARGE_BYTES).zero_() for _ in range(3)]
    pool.give(blocks)
    for count in (2, 1, 0):
        take_block(pool, LARGE_BYTES)
        assert pool.nbytes == count * LARGE_BYTES


rounds = hyp.lists(
    hyp.lists(hyp.sampled_from([0, 3, 64, 1000, LARGE_BYTES, LARGE_BYTES + 7, 2 * LARGE_BYTES]), max_size=6),
    max_size=4,
)


@given(rounds=rounds, kind=hyp.sampled_from(sorted(CONTAINERS)), keep=hyp.booleans())
def test_whatever_came_before_buffers_fit_and_lie_apart(rounds, kind, keep):
    pool = Pool(Memory(**CONTAINERS[kind]))
    live, sizes_of_live = [], []
    for sizes in rounds:
        buffers, blocks = pool.take(sizes)
        live += buffers
        sizes_of_live += sizes
        assert_apart(places(live, sizes_of_live))
        if not keep:
            pool.give(blocks)
            assert pool.nbytes >= sum(sizes)
            live, sizes_of_live = [], []
