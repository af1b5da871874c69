"""Regions: boxes of a tensor in the axes of a block, and views over the memory of blocks, against brute force."""

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as hyp

from statetree.chunks.axis_blocks import AxisBlock, AxisRegion, block_layout, view_over
from statetree.chunks.boxes import Box
from statetree.chunks.layouts import layout_of


@hyp.composite
def regions(draw):
    """Draw a region, the sizes of its axes, and the shape of a tensor that it lies in."""
    dims = draw(hyp.integers(1, 3))
    axes = []
    start, shape = [], []
    for dim in range(dims):
        reach = 1
        for _ in range(draw(hyp.integers(0, 3))):
            step, size = reach + draw(hyp.integers(0, 2)), draw(hyp.integers(1, 4))
            axes.append((dim, step, size))
            reach += (size - 1) * step
        start.append(draw(hyp.integers(0, 2)))
        shape.append(start[-1] + reach + draw(hyp.integers(0, 2)))
    axes = draw(hyp.permutations(axes))
    region = AxisRegion(tuple(start), tuple([dim for dim, *_ in axes]), tuple([step for _, step, _ in axes]))
    return region, tuple([size for *_, size in axes]), tuple(shape)


@given(regions(), hyp.data())
def test_parts_within_hold_what_lies_in_a_box_of_the_tensor(drawn, data):
    region, sizes, shape = drawn
    bounds = [sorted(data.draw(hyp.tuples(hyp.integers(0, size), hyp.integers(0, size)))) for size in shape]
    box = Box(*(tuple([bound[side] for bound in bounds]) for side in (0, 1)))
    parts = region.parts_within(box, sizes)
    got = [index for found, _ in parts for index in product(*map(range, found.start, found.stop))]
    inside = [
        index
        for index in product(*map(range, sizes))
        if all(low <= place < high for low, place, high in zip(box.start, region.at(index), box.stop, strict=True))
    ]
    assert sorted(got) == inside
    most = 1
    for dim in range(len(shape)):
        most *= max(1, 2 * region.dims.count(dim) - 1)
    assert len(parts) <= most
    for found, place in parts:
        assert [*map(sum, zip(place.start, box.start, strict=True))] == [*region.at(found.start)]
        assert (place.dims, place.steps) == (region.dims, region.steps)


@given(regions(), hyp.data())
def test_the_layout_of_a_block_has_the_boxes_of_each_rank(drawn, data):
    region, sizes, shape = drawn
    held = {}
    for rank in range(data.draw(hyp.integers(1, 4))):
        bounds = [sorted(data.draw(hyp.tuples(hyp.integers(0, size), hyp.integers(0, size)))) for size in shape]
        held[rank] = [Box(*(tuple([bound[side] for bound in bounds]) for side in (0, 1)))]
    layout = layout_of(shape, held)
    found = block_layout(layout, region, sizes)
    assert found.shape == sizes
    for rank in held:
        boxes = [box for own in layout.boxes_of(rank) for box, _ in region.parts_within(own, sizes)]
        assert sorted(found.boxes_of(rank)) == sorted(boxes)
    assert block_layout(layout, region, sizes) is found


@given(regions())
def test_a_view_has_the_elements_of_the_block(drawn):
    region, sizes, shape = drawn
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    view = region.view(tensor, sizes)
    for index in product(*map(range, sizes)):
        assert view[index] == tensor[region.at(index)]
    hull = region.hull(sizes)
    assert all(0 <= low < high <= size for low, high, size in zip(*hull, shape, strict=True))
    assert region.moved([size - 1 for size in sizes]).start == tuple([high - 1 for high in hull.stop])


@given(regions(), regions(), hyp.booleans())
def test_a_block_is_simplified_to_the_same_elements(one, other, again):
    count = min(len(one[1]), len(other[1]))
    sizes = tuple(map(min, one[1][:count], other[1][:count]))
    source, target = (
        region._replace(dims=region.dims[:count], steps=region.steps[:count]) for region, *_ in (one, other)
    )
    block = AxisBlock(sizes, source, source if again else target)
    simple = block.simplified()

    def pairs(block):
        return {(block.source.at(index), block.target.at(index)) for index in product(*map(range, block.sizes))}

    assert pairs(simple) == pairs(block)
    assert len(simple.sizes) <= len(block.sizes)


@given(regions())
def test_a_tensor_of_one_block_is_a_view_if_its_strides_say_so(drawn):
    region, sizes, shape = drawn
    memory = torch.arange(torch.Size(shape).numel()).view(shape)
    target = AxisRegion((0,) * len(sizes), tuple(range(len(sizes))), (1,) * len(sizes))
    strides, offset = view_over(sizes, [(AxisBlock(sizes, region, target), 0, memory.stride())])
    assert torch.equal(memory.as_strided(sizes, strides, offset), region.view(memory, sizes))
