import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as hyp

from statetree.testing import Layout, layouts, run_ranks
from statetree.testing.dtensor_layout import SUMMED, over_later_dims
from statetree.testing.layout_strategies import meshes
from tests.pace import units


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


@pytest.mark.slow
@given(layout=layouts(4, partial=True))
@settings(max_examples=60)
@example(layout=Layout((7,), ((0, 1), (2, 3)), ("S0/2", "S0")))
@example(layout=Layout((7, 3), ((0, 1), (2, 3)), ("P", "S0"), torch.complex64))
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


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
@pytest.mark.parametrize("mesh", [tuple(range(6)), tuple(range(8)), ((0, 1, 2), (3, 4, 5))], ids=str)
@given(random=hyp.randoms(use_true_random=False))
@settings(max_examples=10)
def test_partial_sums_are_exact_in_every_order(dtype, mesh, random):
    layout = Layout((40,), mesh, ("P",) * torch.tensor(mesh).ndim, dtype)
    partials = [layout.local(rank) for rank in range(torch.tensor(mesh).numel())]
    random.shuffle(partials)
    found = partials[0].clone()
    for summand in partials[1:]:
        found += summand
    assert found.dtype is layout.full().dtype is dtype
    assert torch.equal(found, layout.full())
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert torch.equal(found.to(wide), sum(summand.to(wide) for summand in partials))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.uint16], ids=str)
def test_partial_sums_are_drawn_of_dtypes_that_hold_them(dtype):
    with pytest.raises(ValueError, match=f"Layout: dtype: expected one in which sums .*, got {dtype}"):
        Layout((2,), (0, 1), ("P",), dtype)

    @given(layout=layouts(3, dtypes=[dtype, torch.bfloat16], partial=True))
    def are_left_out(layout):
        assert "P" not in layout.placements

    are_left_out()


# What is drawn


def kinds_of(layout, world_size):
    """Say what is worth drawing in a layout."""
    plain = replace(layout, placements=tuple(kind.split("/")[0] for kind in layout.placements))
    held = [layout.indices(rank) for rank in range(world_size)]
    others = [plain.indices(rank) for rank in range(world_size)]
    sizes = {indices.numel() for indices in held if indices is not None}
    yield f"{len(layout.placements)} dims"
    if any(one is not None and not torch.equal(one, other) for one, other in zip(held, others, strict=True)):
        yield "strided"
        if len(sizes) > 1:
            yield "uneven and strided"
    if len(sizes) > 1:
        yield "uneven"
        if 0 in sizes:
            yield "empty"
    if None in held:
        yield "outside"
    if "P" in layout.placements:
        yield "partials"


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_what_is_special_about_layouts_comes_often(world_size):
    found = Counter()

    @settings(max_examples=300, phases=[Phase.generate], database=None, derandomize=True)
    @given(layouts(world_size, partial=True))
    def look(layout):
        found.update(kinds_of(layout, world_size))

    look()
    wanted = ["1 dims", "2 dims", "3 dims", "uneven", "outside", "partials"]
    wanted += ["empty"] if world_size > 2 else []
    wanted += ["strided", "uneven and strided"] if world_size >= 4 else []
    assert {kind: found[kind] for kind in wanted if found[kind] < 15} == {}  # five in 100


@pytest.mark.parametrize(
    ("holds", "smallest"),
    [
        (lambda layout: layout.shape, Layout((0,), (0, 1, 2, 3), ("R",))),
        (lambda layout: "S" in str(layout.placements), Layout((0,), (0, 1, 2, 3), ("S0",))),
        (lambda layout: "strided" in kinds_of(layout, 4), Layout((2,), ((0, 1), (2, 3)), ("S0/2", "S0"))),
    ],
    ids=["dims", "shards", "strided"],
)
def test_layouts_shrink_to_plain_ones(holds, smallest):
    found = find(layouts(4), holds, settings=settings(max_examples=2000, database=None), random=Random(0))
    assert found == smallest


def test_placements_are_one_for_each_dim():
    with pytest.raises(ValueError, match="Layout: placements: expected one for each of 1 dims"):
        Layout((5,), (0, 1), ("R", "R"))


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


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(32, marks=pytest.mark.slow)]
)
def test_layouts_agree_with_torch_on_many_ranks_in_one_process(count):
    mode = pytest.importorskip("torch.distributed._local_tensor", reason="this torch has no LocalTensorMode")
    from torch.distributed.tensor import distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():  # by a test before, in this process: another one has none
        name = f"{__file__}::test_layouts_agree_with_torch_on_many_ranks_in_one_process[{count}]"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=units(60))
        assert done.returncode == 0, done.stdout
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        with mode.LocalTensorMode(count):
            for placements in (("S0",), ("S1",), ("R",)):
                layout = Layout((7, 3), tuple(range(count)), placements)
                made = distribute_tensor(layout.full(), layout.device_mesh(), layout.torch_placements())
                found = made.to_local()._local_tensors
                assert len(found) == count
                for rank, local in found.items():
                    assert torch.equal(local, layout.local(rank)), (rank, placements)
    finally:
        dist.destroy_process_group()


@given(layout=layouts(2, dtypes=[torch.float32, torch.bfloat16], partial=True, elements=["nan"]))
def test_layouts_have_the_elements_that_are_asked_for(layout):
    assert layout.full().isnan().all() == ("P" not in layout.placements or not layout.full().numel())


def test_elements_that_there_are_not():
    with pytest.raises(ValueError, match="elements: expected a list or tuple of some of"):
        layouts(2, elements="precise")
    for placements, elements in ((("S0",), "rare"), (("P",), "precise")):
        with pytest.raises(ValueError, match="Layout: elements: expected one of"):
            Layout((2,), (0, 1), placements, elements=elements)
