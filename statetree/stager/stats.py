"""What a stager says of itself."""

from __future__ import annotations

from typing import NamedTuple


class StagerStats(NamedTuple):
    """What a stager has done so far.

    Attributes:
        stages: Trees staged.
        allocations: Blocks of memory taken from the system: so many pinnings, and in shared memory descriptors.
        allocated_bytes: Bytes in them, freed ones included.
    """

    stages: int
    allocations: int
    allocated_bytes: int
