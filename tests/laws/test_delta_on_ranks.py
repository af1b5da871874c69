"""The laws of ``delta`` and ``digest`` on real ranks: they hold whatever the layouts, and on other ones."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as hyp

import statetree
from statetree.testing import run_ranks
from tests.laws.batches import as_many, batches, each
from tests.laws.test_collectives import check_local, pairs, same


def changed(full, seed, share):
    """Return a tensor in which a share of the elements have another bit."""
    other = full.contiguous().clone()
    flat = other.view(-1).view(torch.uint8).view(full.numel(), full.itemsize)
    flat[torch.rand(full.numel(), generator=torch.Generator().manual_seed(seed)) < share, 0] ^= 1
    return other


def write_what_changed(drawn, seed, share):
    """Write deltas in the layout in which they were made and in another one, and undo them."""
    old = {str(index): source.full() for index, (source, _) in enumerate(drawn)}
    other = {key: changed(full, seed, share) for key, full in old.items()}
    base, like = ({str(index): pair[side].build() for index, pair in enumerate(drawn)} for side in (0, 1))
    new, expected = statetree.distribute(other, base), statetree.distribute(other, like)
    assert not statetree.delta(base, statetree.offload(base))

    change, target = statetree.delta(new, base), statetree.offload(base)
    for _ in range(2):  # it is idempotent
        target = statetree.apply_delta(change, target)
        assert statetree.similarity(target, new, values=True)
    target = statetree.apply_delta(change.inverse(base), target)
    assert statetree.similarity(target, base, values=True)

    moved, there = statetree.reshard(change, like), statetree.distribute(old, like)
    statetree.apply_delta(moved, there)
    for index, (_, layout) in enumerate(drawn):
        check_local(there[str(index)], layout, other[str(index)])

    digests = [statetree.digest(tree) for tree in (other, new, expected, base)]
    assert digests[0] == digests[1] == digests[2]
    assert digests[0].differing(digests[3]) == [key for key in old if not same(old[key], other[key])]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_deltas_and_digests_hold_in_every_layout(world_size):
    drawn = hyp.lists(pairs(world_size, sums=False), min_size=1, max_size=3)
    changes = hyp.tuples(drawn, hyp.integers(0, 1000), hyp.sampled_from([0.0, 0.1, 0.5, 1.0]))

    @as_many()
    @hypothesis.given(batches(changes))
    def holds(batch):
        run_ranks(world_size, each, write_what_changed, batch)

    holds()
