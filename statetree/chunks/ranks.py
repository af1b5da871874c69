"""Ranks: who takes part in a collective, and where they are in a mesh."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from statetree.declare import cached_property

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh


class Positions(NamedTuple):
    """Where the ranks of a mesh are, in row-major order."""

    shape: tuple[int, ...]  # that of the mesh
    digest: str  # of its global ranks
    ranks: tuple[int, ...]  # these
    members: tuple[int, ...]  # their ranks within the group; -1 for those outside of it
    mesh: DeviceMesh  # so that its id is not handed out again


class Ranks:
    """The ranks of a group, as this process sees them: its own one, and all as the default group counts them."""

    def __init__(self, rank: int, global_ranks: Sequence[int]) -> None:
        self.rank = rank
        self.global_ranks = tuple(global_ranks)
        self.size = len(self.global_ranks)
        self.memo: dict[Any, Any] = {}  # what leaf types want to keep for the time of a call
        self._positions: dict[int, Positions] = {}

    @cached_property
    def index(self) -> dict[int, int]:
        """The group's rank for each global one."""
        return {rank: index for index, rank in enumerate(self.global_ranks)}

    def positions(self, mesh: DeviceMesh) -> Positions:
        """Return where the ranks of a mesh are."""
        known = self._positions.get(id(mesh))
        if known is None:
            shape, ranks = tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist())
            members = tuple([self.index.get(rank, -1) for rank in ranks])
            digest = blake2b(array("q", ranks).tobytes(), digest_size=16).hexdigest()  # every leaf states it
            known = self._positions[id(mesh)] = Positions(shape, digest, ranks, members, mesh)
        return known


def own_ranks() -> Ranks:
    """Return the ranks of the default group; this process alone where there is none."""
    import torch.distributed as dist  # which takes long to import

    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(0, [0])
    return Ranks(dist.get_rank(), range(dist.get_world_size()))


def this_rank_alone() -> Ranks:
    """Return this process as the only rank of a group. Kept for many tensors, it keeps what they have in common."""
    import torch.distributed as dist

    return Ranks(0, [dist.get_rank() if dist.is_available() and dist.is_initialized() else 0])


def ranks_named(ranks: Sequence[int]) -> str:
    """Name ranks in a message, the first ones if there are many."""
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {listed}"
