import pickle

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings

from statetree.testing import Layout, layouts, run_ranks
from statetree.testing.layout import meshes, over_later_dims


def built(layout):
    """Return what a rank has of a layout, and what torch makes of it."""
    tensor = layout.build()
    assert tensor.shape == layout.shape
    assert tensor.dtype == layout.dtype
    if layout.indices(dist.get_rank()) is None:
        return None, tensor.to_local()
    return tensor.full_tensor(), tensor.to_local()


def check(layout, world_size):
    for rank, (full, local) in enumerate(run_ranks(world_size, built, layout)):
        held = layout.local(rank)
        if held is None:
            assert full is None
            assert not local.numel()
            continue
        assert torch.equal(local, held), rank
        assert torch.equal(full, layout.full()), rank


@given(layout=layouts(2, partial=True))
@example(layout=Layout((3, 2), (0, 1), ("S1",), geometry="transposed"))
def test_torch_agrees_on_two_ranks(layout):
    check(layout, 2)


@given(layout=layouts(4, partial=True))
@settings(max_examples=60)
@example(layout=Layout((7,), ((0, 1), (2, 3)), ("S0/2", "S0")))
@example(layout=Layout((7, 3), ((0, 1), (2, 3)), ("P", "S0"), torch.bfloat16))
@example(layout=Layout((5,), (1, 2, 3), ("S0",), geometry="inside"))
def test_torch_agrees_on_four_ranks(layout):
    check(layout, 4)


@given(layout=layouts(4))
def test_what_the_ranks_hold_covers_the_whole(layout):
    held = [layout.indices(rank) for rank in range(4)]
    found = torch.cat([indices.flatten() for indices in held if indices is not None])
    assert sorted(set(found.tolist())) == list(range(layout.full().numel()))
    for rank, indices in enumerate(held):
        if indices is not None:
            assert torch.equal(layout.local(rank), layout.full().flatten()[indices])


@given(layout=layouts(4, dtypes=[torch.float32, torch.bfloat16, torch.int64]))
def test_elements_are_unique_by_position(layout):
    full = layout.full()
    assert len(full.flatten().unique()) == full.numel()


@given(layout=layouts(4, partial=True))
def test_layouts_can_be_sent_and_print_as_code(layout):
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert eval(repr(layout), {"Layout": Layout, "torch": torch}) == layout


def test_strided_shards_are_what_fsdp_makes_of_tensor_parallel_ones():
    layout = Layout((8,), ((0, 1), (2, 3)), over_later_dims(("S0", "S0"), ((0, 1), (2, 3))))
    assert layout.placements == ("S0/2", "S0")
    assert [layout.local(rank).tolist() for rank in range(4)] == [[1, 2], [5, 6], [3, 4], [7, 8]]


def test_partial_sums_add_up():
    layout = Layout((2,), ((0, 1),), ("R", "P"))
    assert [layout.local(rank).tolist() for rank in range(2)] == [[1, 2], [2, 4]]
    assert layout.full().tolist() == [3, 6]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_meshes_hold_each_rank_once(world_size):
    found = meshes(world_size)
    assert len(set(found)) == len(found)
    for mesh in found:
        ranks = torch.tensor(mesh).flatten().tolist()
        assert len(set(ranks)) == len(ranks)
        assert set(ranks) <= set(range(world_size))
        for dim in range(torch.tensor(mesh).ndim):
            assert torch.equal(torch.tensor(mesh), torch.tensor(mesh).sort(dim).values)
    assert all(torch.tensor(mesh).numel() == world_size for mesh in meshes(world_size, subsets=False))
