"""Strategies for DTensors: meshes, placements, and shapes of any size, even or not."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from statetree.testing.arguments import check_at_least, check_some_of
from statetree.testing.dtensor_layout import (
    LOCAL_GEOMETRIES,
    Layout,
    largest_sum,
    mesh_shape,
    meshes,
    over_later_dims,
    total,
)
from statetree.testing.elements import DTYPES
from statetree.testing.plan_strategies import shapes

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
    """
    check_at_least("world_size", world_size, 1)
    check_some_of("dtypes", dtypes, DTYPES)
    found = meshes(world_size, subsets=subsets)
    drawn = functools.partial(_layouts, world_size, dtypes=st.sampled_from(dtypes), partial=partial)
    plain = [drawn(shapes(max_dims=max_dims, max_side=max_side), _by_dims(found)) for _ in range(2)]
    if not strided or max_dims == 0:
        return plain[0]
    deep = [mesh for mesh in found if len(mesh_shape(mesh)) > 1]
    wide = [mesh for mesh in deep if sum(size > 1 for size in mesh_shape(mesh)) > 1]
    sharded = drawn(shapes(min_dims=1, max_dims=max_dims, max_side=max_side), _by_dims(wide or deep))
    return st.one_of(*plain, _strided(sharded, max_side))  # a third; one that is given twice would count once


def _by_dims(found: list[tuple[Any, ...]]) -> st.SearchStrategy[tuple[Any, ...]]:
    # Drawn from one list, most meshes would have as many dims as can be: there are more such.
    return st.one_of(
        *(st.sampled_from(list(meshes)) for _, meshes in itertools.groupby(found, lambda mesh: len(mesh_shape(mesh))))
    )


@st.composite
def _layouts(
    draw: st.DrawFn,
    world_size: int,
    shapes: st.SearchStrategy[Any],
    meshes: st.SearchStrategy[Any],
    *,
    dtypes: st.SearchStrategy[torch.dtype],
    partial: bool,
) -> Layout:
    shape, mesh, dtype = draw(shapes), draw(meshes), draw(dtypes)
    count = math.prod(mesh_shape(mesh))
    if not shape and count < world_size:
        shape = (1,)  # DTensor.from_local does not take the shape of a scalar outside the mesh
    sums = partial and largest_sum(dtype) >= total(count)
    kinds = ["R", *(f"S{dim}" for dim in range(len(shape))), *(["P"] if sums else [])]
    placements = draw(st.tuples(*[st.sampled_from(kinds) for _ in mesh_shape(mesh)]))
    return Layout(shape, mesh, placements, dtype, draw(st.sampled_from(LOCAL_GEOMETRIES)))


@st.composite
def _strided(draw: st.DrawFn, layouts: st.SearchStrategy[Layout], max_side: int) -> Layout:
    layout = draw(layouts)
    dim = draw(st.integers(0, len(layout.shape) - 1))
    shape = list(layout.shape)
    shape[dim] = draw(st.integers(min(2, max_side), max_side))
    # One pair of dims of the mesh: torch's own collectives do not take three that shard one dim unevenly.
    pair = draw(st.sampled_from(list(itertools.combinations(range(len(layout.placements)), 2))))
    others = ("R" if kind == f"S{dim}" else kind for kind in layout.placements)
    placements = tuple(f"S{dim}" if place in pair else kind for place, kind in enumerate(others))
    placements = over_later_dims(placements, layout.mesh)
    return dataclasses.replace(layout, shape=tuple(shape), placements=placements)
