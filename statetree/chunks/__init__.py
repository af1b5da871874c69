"""The geometry of distributed tensors: *chunks* are boxes in a global shape, each held by some rank.

All of it follows from metadata, offsets and sizes, and nothing communicates. From the top to the bottom:

- ``local``: what a rank knows of one leaf: its own chunks, the tensors that they lie in, and where the others are.
- ``layouts``: which boxes the ranks of a group hold, from a mesh and placements or from a list.
- ``ranks``: who takes part in a collective, and where these ranks are in a mesh.
- ``reductions``: how partial values of elements (`Partial`) are put together.
- ``cuts``: how the dims of an inner tensor follow those of the distributed tensor around it.
- ``patterns``: axes in the notation of einops and einx; ``axis_blocks``: where blocks of axes lie in tensors.
- ``boxes``: boxes cut into slabs, and whether some cover a whole.
"""

from statetree.chunks.boxes import Box
from statetree.chunks.layouts import ChunkLayout, layout_of, mesh_layout, whole_on
from statetree.chunks.local import LocalChunks
from statetree.chunks.ranks import Ranks

__all__ = ["Box", "ChunkLayout", "LocalChunks", "Ranks", "layout_of", "mesh_layout", "whole_on"]
