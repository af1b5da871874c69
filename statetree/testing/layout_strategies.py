"""Strategies for DTensors: meshes, placements, and shapes of any size, even or not."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from statetree.testing.dtensor_layout import LOCAL_GEOMETRIES, SUMMED, Layout, mesh_shape, over_later_dims
from statetree.testing.elements import ELEMENTS
from statetree.testing.strategies import check_some_of, shapes

if TYPE_CHECKING:
    from collections.abc import Sequence


def layouts(
    world_size: int = 2,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.int64, torch.bfloat16, torch.complex64),
    max_dims: int = 3,
    max_side: int = 7,
    partial: bool = False,
    strided: bool = True,
    subsets: bool = True,
    elements: Sequence[str] = ELEMENTS[:1],
) -> st.SearchStrategy[Layout]:
    """Descriptions of DTensors: a mesh, placements, and a global shape of any size, even or not.

    They can be pickled; ``layout.build()`` makes the DTensor on each rank, and ``layout.full()`` the whole tensor.

    Args:
        world_size: How many ranks there are.
        dtypes: Dtypes of the tensors.
        max_dims: How many dims they have at most.
        max_side: How long each is at most.
        partial: Whether there are ``Partial`` placements, where the dtype can hold their sums exactly.
        strided: Whether there are strided shards, as FSDP makes over tensor parallelism. They hold other elements than
            plain ones where two dims of the mesh are longer than 1, for which there must be four ranks.
        subsets: Whether meshes may leave ranks out.
        elements: Which elements they may have, as ``Layout`` has them. By default they are counted, so that two
            layouts of one shape have the same. (``torch.equal`` does not take ``nan`` for itself.)
    """
    check_some_of("elements", elements, ELEMENTS)
    found = meshes(world_size, subsets=subsets)
    deep = [mesh for mesh in found if len(mesh_shape(mesh)) > 1]
    wide = [mesh for mesh in deep if sum(size > 1 for size in mesh_shape(mesh)) > 1] or deep

    @st.composite
    def drawn(draw: st.DrawFn) -> Layout:
        is_strided = draw(st.integers(0, 2)) == 2 and strided and max_dims > 0
        shape = draw(shapes(min_dims=int(is_strided), max_dims=max_dims, max_side=max_side))
        # Drawn from one list, most meshes would have as many dims as can be: there are more such.
        by_dims = itertools.groupby(wide if is_strided else found, lambda mesh: len(mesh_shape(mesh)))
        mesh = draw(st.one_of(*(st.sampled_from(list(alike)) for _, alike in by_dims)))
        dtype = draw(st.sampled_from(dtypes))
        if not shape and math.prod(mesh_shape(mesh)) < world_size:
            shape = (1,)  # DTensor.from_local does not take the shape of a scalar outside the mesh
        kinds = ["R", *(f"S{dim}" for dim in range(len(shape))), *(["P"] if partial and dtype in SUMMED else [])]
        placements = draw(st.tuples(*[st.sampled_from(kinds) for _ in mesh_shape(mesh)]))
        layout = Layout(shape, mesh, placements, dtype, draw(st.sampled_from(LOCAL_GEOMETRIES)))
        layout = draw(_strided(layout, max_side)) if is_strided else layout
        known = ELEMENTS[:1] if "P" in layout.placements else elements
        return dataclasses.replace(layout, elements=known[0] if len(known) == 1 else draw(st.sampled_from(known)))

    return drawn()


@st.composite
def _strided(draw: st.DrawFn, layout: Layout, max_side: int) -> Layout:
    dim = draw(st.integers(0, len(layout.shape) - 1))
    shape = list(layout.shape)
    shape[dim] = draw(st.integers(min(2, max_side), max_side))
    # One pair of dims of the mesh: torch's own collectives do not take three that shard one dim unevenly.
    pair = draw(st.sampled_from(list(itertools.combinations(range(len(layout.placements)), 2))))
    others = ("R" if kind == f"S{dim}" else kind for kind in layout.placements)
    placements = tuple(f"S{dim}" if place in pair else kind for place, kind in enumerate(others))
    return dataclasses.replace(layout, shape=tuple(shape), placements=over_later_dims(placements, layout.mesh))


def meshes(world_size: int, *, subsets: bool = True) -> list[tuple[Any, ...]]:
    """Return meshes of up to three dims over some ranks, as nested tuples; the plainest first.

    The ranks rise in every dim: torch's own collectives take a dim's ranks for sorted, whatever their coordinates are.
    """
    everyone = range(world_size)
    groups = [(everyone, 3)]
    if subsets and world_size > 1:
        groups += [(ranks, 2) for ranks in (everyone[:-1], everyone[1:], everyone[:: world_size - 1], everyone[-1:])]
    found: dict[tuple[Any, ...], None] = {}
    for ranks, most_dims in groups:
        flat, count = torch.tensor(ranks, device="cpu"), len(ranks)
        shapes = [s for dims in range(1, most_dims + 1) for s in itertools.product(range(1, count + 1), repeat=dims)]
        for shape in (shape for shape in shapes if math.prod(shape) == count):
            by_columns = flat.reshape(shape[::-1]).permute(*reversed(range(len(shape))))
            found |= {_nested(flat.reshape(shape).tolist()): None, _nested(by_columns.tolist()): None}
    return sorted(found, key=lambda mesh: len(mesh_shape(mesh)))


def _nested(ranks: Any) -> Any:
    return tuple(map(_nested, ranks)) if isinstance(ranks, list) else ranks
