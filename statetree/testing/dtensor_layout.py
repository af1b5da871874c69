"""Descriptions of DTensors that can be sent to ranks, and worked out without any collective."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import torch
import torch.distributed as dist

from statetree.testing.elements import ELEMENTS
from statetree.testing.samples import numbered

#: How the local tensors of a layout may lie in their storages.
LOCAL_GEOMETRIES = ("contiguous", "transposed", "inside")
#: Dtypes in which the sums of partial tensors are exact.
SUMMED = (torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64, torch.complex128)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A DTensor as seen from all ranks at once.

    Attributes:
        shape: The global shape.
        mesh: The ranks of the mesh, as nested tuples.
        placements: One for each dim of the mesh: ``R`` (replicate), ``S1`` (shard dim 1), ``S1/2`` (strided: dim 1 is
            cut in two, and each piece is sharded), ``P`` (partial sums, of a dtype in which they are exact).
        dtype: The dtype.
        geometry: How local tensors lie in their storages: ``contiguous``, ``transposed`` or ``inside``.
        elements: Which elements it has: ``counted`` (small whole numbers; partial sums have these alone), ``precise``
            (full mantissas, integers that a float rounds), ``zeros`` (negative ones, and subnormals), ``infinite`` or
            ``nan`` (with payloads).

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
    elements: str = "counted"

    def __post_init__(self) -> None:
        dims = len(mesh_shape(self.mesh))
        if len(self.placements) != dims:
            raise ValueError(f"Layout: placements: expected one for each of {dims} dims, got {self.placements!r}.")
        if "P" in self.placements and self.dtype not in SUMMED:
            expected = "one in which sums of placement P are exact, as torch.float32"
            raise ValueError(f"Layout: dtype: expected {expected}, got {self.dtype!r}.")
        if self.elements not in (ELEMENTS[:1] if "P" in self.placements else ELEMENTS):
            raise ValueError(f"Layout: elements: expected one of {ELEMENTS} (counted, of P), got {self.elements!r}.")

    def full(self) -> torch.Tensor:
        """Return the whole tensor. Its elements are unique by position, unless the dtype has too few values."""
        sizes = [size for size, kind in zip(mesh_shape(self.mesh), self.placements, strict=True) if kind == "P"]
        return self._weighted(math.prod(size * (size + 1) // 2 for size in sizes))

    def local(self, rank: int) -> torch.Tensor | None:
        """Return what a rank holds, or ``None`` if it is not in the mesh."""
        indices, coordinate = self.indices(rank), self._coordinate(rank)
        if indices is None or coordinate is None:
            return None
        # Of each partial dim, the n-th rank holds the n-fold.
        weight = math.prod(place + 1 for place, kind in zip(coordinate, self.placements, strict=True) if kind == "P")
        tensor = self._weighted(weight).flatten()[indices]
        if self.geometry == "transposed" and tensor.ndim > 1:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if self.geometry == "inside":
            larger = torch.full((tensor.numel() + 8,), 99, dtype=tensor.dtype, device="cpu")
            larger[5:-3] = tensor.flatten()
            return larger[5:-3].view(tensor.shape)
        return tensor

    def indices(self, rank: int) -> torch.Tensor | None:
        """Return where the elements that a rank holds are in the flattened whole, or ``None`` outside the mesh."""
        coordinate = self._coordinate(rank)
        if coordinate is None:
            return None
        held = torch.arange(math.prod(self.shape), device="cpu").reshape(self.shape)
        for place, size, kind in zip(coordinate, mesh_shape(self.mesh), self.placements, strict=True):
            if kind[0] == "S":
                dim, factor = _parsed(kind)
                pieces = held.chunk(factor, dim)
                # All shards are as long as the first, but for the last ones, which may be shorter or empty.
                lengths = [-(-piece.shape[dim] // size) for piece in pieces]
                chunks = [piece.split(max(length, 1), dim) for piece, length in zip(pieces, lengths, strict=True)]
                none = held.narrow(dim, 0, 0)
                held = torch.cat([chunk[place] if place < len(chunk) else none for chunk in chunks], dim)
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
        from torch.distributed.tensor import Partial, Replicate, Shard
        from torch.distributed.tensor.placement_types import _StridedShard  # private: tried with torch 2.11 and 2.13

        def placement(kind: str) -> Any:
            if kind[0] != "S":
                return Replicate() if kind == "R" else Partial()
            dim, factor = _parsed(kind)
            return _StridedShard(dim, split_factor=factor) if "/" in kind else Shard(dim)

        return list(map(placement, self.placements))

    def _weighted(self, weight: int) -> torch.Tensor:
        made = numbered(1, self.shape, self.dtype, self.elements)
        return made if weight == 1 else made * weight  # not every dtype can be multiplied

    def _coordinate(self, rank: int) -> tuple[int, ...] | None:
        found = (torch.tensor(self.mesh, device="cpu") == rank).nonzero().tolist()
        return tuple(found[0]) if found else None


def mesh_shape(mesh: tuple[Any, ...]) -> tuple[int, ...]:
    """Return how long a mesh is in each of its dims."""
    return tuple(torch.tensor(mesh, device="cpu").shape)


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


@functools.cache
def _device_mesh(mesh: tuple[Any, ...], group: int) -> Any:  # noqa: ARG001 - meshes of an earlier group are of no use
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.tensor(mesh, device="cpu"))


def _parsed(kind: str) -> tuple[int, int]:
    dim, _, factor = kind[1:].partition("/")
    return int(dim), int(factor or 1)
