"""Descriptions of DTensors that can be sent to ranks, drawn by hypothesis, and worked out without any collective."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import torch
import torch.distributed as dist

from statetree.testing.plans import Numbers, Printed

#: How the local tensors of a layout may lie in their storages.
LOCAL_GEOMETRIES = ("contiguous", "transposed", "inside")


@dataclasses.dataclass(frozen=True, repr=False)
class Layout(Printed):
    """A DTensor as seen from all ranks at once.

    Attributes:
        shape: The global shape.
        mesh: The ranks of the mesh, as nested tuples.
        placements: One for each dim of the mesh: ``R`` (replicate), ``S1`` (shard dim 1), ``S1/2`` (strided: dim 1 is
            cut in two, and each piece is sharded), ``P`` (partial sums).
        dtype: The dtype.
        geometry: How local tensors lie in their storages: one of ``LOCAL_GEOMETRIES``.

    Example:
        >>> import torch
        >>> from statetree.testing import Layout
        >>> layout = Layout((5,), mesh=(0, 1), placements=("S0",))
        >>> layout.full()
        tensor([1., 2., 3., 4., 5.])
        >>> layout.local(1)
        tensor([4., 5.])
    """

    shape: tuple[int, ...]
    mesh: tuple[Any, ...]
    placements: tuple[str, ...]
    dtype: torch.dtype = torch.float32
    geometry: str = "contiguous"

    def full(self) -> torch.Tensor:
        """Return the whole tensor. Its elements are unique by position, but for partial sums in short dtypes."""
        return _times(self._elements(), math.prod(_total(size) for size in self._partial_sizes()))

    def local(self, rank: int) -> torch.Tensor | None:
        """Return what a rank holds, or ``None`` if it is not in the mesh."""
        indices = self.indices(rank)
        if indices is None:
            return None
        weight = math.prod(
            place + 1 for place, kind in zip(self._coordinate(rank) or (), self.placements, strict=True) if kind == "P"
        )
        return _laid_out(_times(self._elements(), weight).flatten()[indices], self.geometry)

    def indices(self, rank: int) -> torch.Tensor | None:
        """Return where the elements that a rank holds are in the flattened whole, or ``None`` outside the mesh."""
        coordinate = self._coordinate(rank)
        if coordinate is None:
            return None
        held = torch.arange(math.prod(self.shape), device="cpu").reshape(self.shape)
        for place, size, kind in zip(coordinate, self._mesh_tensor().shape, self.placements, strict=True):
            if kind[0] == "S":
                dim, factor = _parsed(kind)
                pieces = [_chunk(piece, size, place, dim) for piece in held.chunk(factor, dim)]
                held = torch.cat(pieces, dim)
        return held

    def build(self) -> Any:
        """Make the DTensor. All ranks of the default group call it, those outside the mesh too."""
        from torch.distributed.tensor import DTensor

        local = self.local(dist.get_rank())
        return DTensor.from_local(
            torch.empty(0, dtype=self.dtype, device="cpu") if local is None else local,
            self.device_mesh(),
            self.torch_placements(),
            run_check=False,
            shape=torch.Size(self.shape),
            stride=torch.empty(self.shape, device="meta").stride(),
        )

    def device_mesh(self) -> Any:
        """Return the mesh, which is made once in a process. All ranks of the default group call it."""
        return _device_mesh(self.mesh, id(dist.group.WORLD))

    def torch_placements(self) -> list[Any]:
        """Return the placements as torch has them."""
        return [_torch_placement(kind) for kind in self.placements]

    def _elements(self) -> torch.Tensor:
        if "P" in self.placements and self.dtype.itemsize <= 2:  # so that sums are exact
            count = math.prod(self.shape)
            return (torch.arange(count, device="cpu") % 16 + 1).to(self.dtype).reshape(self.shape)
        return Numbers()(self.shape, self.dtype)

    def _mesh_tensor(self) -> torch.Tensor:
        return torch.tensor(self.mesh, device="cpu")

    def _partial_sizes(self) -> list[int]:
        sizes = self._mesh_tensor().shape
        return [size for size, kind in zip(sizes, self.placements, strict=True) if kind == "P"]

    def _coordinate(self, rank: int) -> tuple[int, ...] | None:
        found = (self._mesh_tensor() == rank).nonzero().tolist()
        return tuple(found[0]) if found else None


def meshes(world_size: int, *, subsets: bool = True) -> list[tuple[Any, ...]]:
    """Return meshes of up to three dims over some ranks, as nested tuples; the plainest first.

    The ranks rise in every dim: torch's own collectives take a dim's ranks for sorted, whatever their coordinates are.

    Args:
        world_size: How many ranks there are.
        subsets: Whether there are meshes that leave ranks out.
    """
    everyone = tuple(range(world_size))
    found = [everyone, (everyone,), tuple((rank,) for rank in everyone)]
    for rows in range(2, world_size // 2 + 1):
        columns = world_size // rows
        if rows * columns == world_size:
            grid = tuple(everyone[row * columns : (row + 1) * columns] for row in range(rows))
            found += [grid, tuple(zip(*grid, strict=True))]
            if rows % 2 == 0 and rows > 2:
                found.append(tuple(zip(grid[::2], grid[1::2], strict=True)))
    if subsets and world_size > 1:
        found += [everyone[:-1], everyone[1:], (0, world_size - 1), (everyone[-1:],)]
    return list(dict.fromkeys(found))


def mesh_shape(mesh: tuple[Any, ...]) -> tuple[int, ...]:
    """Return how long a mesh is in each of its dims."""
    return tuple(torch.tensor(mesh, device="cpu").shape)


@functools.cache
def _device_mesh(mesh: tuple[Any, ...], group: int) -> Any:  # noqa: ARG001 - meshes of an earlier group are of no use
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.tensor(mesh, device="cpu"))


def _torch_placement(kind: str) -> Any:
    """Return a placement of torch. Strided ones are private: tried with torch 2.11 and 2.13."""
    from torch.distributed.tensor import Partial, Replicate, Shard, placement_types

    if kind == "R":
        return Replicate()
    if kind == "P":
        return Partial()
    dim, factor = _parsed(kind)
    return placement_types._StridedShard(dim, split_factor=factor) if "/" in kind else Shard(dim)


def _parsed(kind: str) -> tuple[int, int]:
    dim, _, factor = kind[1:].partition("/")
    return int(dim), int(factor or 1)


def _chunk(tensor: torch.Tensor, count: int, index: int, dim: int) -> torch.Tensor:
    """Return a shard: all are as long as the first, but for the last ones, which may be shorter or empty."""
    length = -(-tensor.shape[dim] // count)
    start = min(index * length, tensor.shape[dim])
    return tensor.narrow(dim, start, min(length, tensor.shape[dim] - start))


def _laid_out(tensor: torch.Tensor, geometry: str) -> torch.Tensor:
    if geometry == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if geometry == "inside":
        larger = torch.full((tensor.numel() + 8,), 99, dtype=tensor.dtype, device="cpu")
        larger[5 : 5 + tensor.numel()] = tensor.flatten()
        return larger[5 : 5 + tensor.numel()].view(tensor.shape)
    return tensor


def _times(tensor: torch.Tensor, factor: int) -> torch.Tensor:
    return tensor if factor == 1 else tensor * factor  # not every dtype can be multiplied


def _total(size: int) -> int:
    return size * (size + 1) // 2


def over_later_dims(placements: tuple[str, ...], mesh: tuple[Any, ...]) -> tuple[str, ...]:
    """Return placements in which, of two dims of the mesh that shard one dim, the earlier shards what the later cuts.

    This is how FSDP shards what tensor parallelism has sharded.
    """
    sizes = mesh_shape(mesh)
    result = list(placements)
    for one, other in itertools.combinations(range(len(placements)), 2):
        if placements[one] == placements[other] and placements[one][0] == "S":
            _, factor = _parsed(result[one])
            result[one] = f"{placements[one]}/{factor * sizes[other]}"
    return tuple(result)
