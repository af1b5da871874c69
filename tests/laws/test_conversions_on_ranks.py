"""Conversions of shards: from any layout to any other, through any pattern, they are what whole tensors become."""

from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as hyp

import statetree as st
from statetree.testing import Layout, run_ranks
from tests.laws.batches import as_many, batches, each
from tests.laws.drawn_conversions import conversions


def spread(state, seed, *, values=True):
    """Return a state whose tensors lie over meshes at random, those that are one as one."""
    random = Random(seed)
    ranks = tuple(range(dist.get_world_size()))
    made = {}
    for leaf in state.values():
        if id(leaf) in made:
            continue
        mesh = ranks if len(ranks) < 4 or random.random() < 0.5 else (ranks[:2], ranks[2:])
        kinds = ["R", *(f"S{dim}" for dim in range(leaf.dim())), *(f"S{dim}" for dim in range(leaf.dim()))]
        placements = tuple(random.choice(kinds) for _ in range(2 if isinstance(mesh[0], tuple) else 1))
        made[id(leaf)] = Layout(tuple(leaf.shape), mesh, placements, leaf.dtype).build()
    if values:
        whole = {str(number): leaf for number, leaf in enumerate({id(leaf): leaf for leaf in state.values()}.values())}
        st.distribute(whole, dict(zip(whole, made.values(), strict=True)), in_place=True)
    return {key: made[id(leaf)] for key, leaf in state.items()}


def check(found, whole):
    gathered = st.gather(found)
    assert gathered.keys() == whole.keys()
    for key, leaf in gathered.items():
        assert leaf.shape == whole[key].shape, key
        assert torch.equal(*(tensor.flatten().clone().view(torch.uint8) for tensor in (leaf, whole[key]))), key


def convert(rules, sizes, left, right, seed):
    conversion = st.Conversion(rules, sizes=sizes)
    for there, (before, after) in ((conversion, (left, right)), (conversion.inverse, (right, left))):
        state = spread(before, seed)
        converted = there(state)
        check(converted, after)
        assert st.digest(converted) == st.digest(after)
        again = there.inverse(converted)
        assert all(again[key] is leaf for key, leaf in state.items() if leaf.numel())
        check(again, before)  # what is empty may come back as blocks of another
        check(st.reshard(converted, spread(after, seed + 1, values=False)), after)
        place = spread(after, seed + 2, values=False)
        st.reshard(converted, place, in_place=True)
        check(place, after)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
@given(batch=batches(hyp.tuples(conversions(), hyp.integers(0, 99))))
@as_many()
def test_shards_go_through_conversions_as_whole_tensors_do(world_size, batch):
    examples = [(drawn.rules, drawn.sizes, drawn.left, drawn.right, seed) for drawn, seed in batch]
    run_ranks(world_size, each, convert, examples)
