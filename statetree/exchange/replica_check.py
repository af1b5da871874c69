"""Replicas: what ranks hold under one path, over meshes of their own, has the same bytes or is refused.

Ranks whose meshes differ may hold copies of one tensor. They may also hold two tensors that happen to have one key, as
the first layers of two pipeline stages do: taken for copies, one of them would be lost. So wherever boxes of two meshes
have elements in common, both ranks hash the bytes of these, and all compare. The elements of a box are hashed in
row-major order, however they lie in memory and whatever the mesh cuts beside.
"""

from __future__ import annotations

import ctypes
import json
from collections import defaultdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.chunks.boxes import Box, in_slabs
from statetree.chunks.layouts import layout_of
from statetree.chunks.ranks import ranks_named
from statetree.errors import RankMismatch
from statetree.spans.bits import bits_of
from statetree.spans.layout import holds_memory
from statetree.torch_internals import can_negate, negated_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from statetree.chunks.local import LocalChunks
    from statetree.exchange.call import Call
    from statetree.exchange.manifest import Manifest

#: So many bytes of a box are made contiguous, on the CPU, at a time.
_SLAB_BYTES: Final = 16 << 20


class Copies(NamedTuple):
    """Who holds what of a leaf.

    Attributes:
        meshes: For each rank a number of its mesh. Where meshes are not known, each rank is one of its own.
        boxes: For each rank its boxes.
    """

    meshes: Sequence[int]
    boxes: Sequence[Sequence[Box]]

    def holders(self) -> dict[tuple[int, Box], int]:
        """Return, for each box of each mesh, the first rank that holds it: replicas within a mesh are not compared."""
        found: dict[tuple[int, Box], int] = {}
        for rank, (mesh, boxes) in enumerate(zip(self.meshes, self.boxes, strict=True)):
            for box in boxes:
                found.setdefault((mesh, box), rank)
        return found

    def are_single(self, shape: Sequence[int]) -> bool:
        """Whether there is one of each element, without a look at pairs of boxes. It may be so if this is false."""
        held = [box for _, box in self.holders()]
        whole = Box((0,) * len(shape), tuple(shape)).volume
        return sum(box.volume for box in held) == whole and layout_of(shape, {0: held}).is_complete

    def in_common(self, rank: int) -> Iterator[tuple[Box, Box]]:
        """Yield what a rank compares with other meshes: its box, and the part of it that these hold, too."""
        mine = self.meshes[rank]
        meshes: defaultdict[Box, set[int]] = defaultdict(set)
        holders = self.holders()
        for mesh, box in holders:
            meshes[box].add(mesh)
        others = [box for box, found in meshes.items() if found != {mine}]
        bounds = torch.tensor(others, dtype=torch.int64).view(len(others), 2, -1)
        for (mesh, box), holder in holders.items():
            if mesh == mine and holder == rank and others:
                low = torch.maximum(bounds[:, 0], torch.tensor(box.start, dtype=torch.int64))
                high = torch.minimum(bounds[:, 1], torch.tensor(box.stop, dtype=torch.int64))
                chosen = (high > low).all(1)
                parts = zip(low[chosen].tolist(), high[chosen].tolist(), strict=True)
                for part in dict.fromkeys(Box(tuple(start), tuple(stop)) for start, stop in parts):
                    yield box, part


def first_copy(shape: Sequence[int], boxes: Mapping[int, Sequence[Box]]) -> dict[int, list[Box]]:
    """Return the boxes of the first ranks that hold all elements between them, each box on the first of these."""
    whole = Box((0,) * len(shape), tuple(shape)).volume
    kept: dict[int, list[Box]] = {}
    seen: set[Box] = set()
    volume = 0
    for rank, own in sorted(boxes.items()):
        if volume >= whole and layout_of(shape, kept).is_complete:
            break
        kept[rank] = [box for box in own if box not in seen]
        seen.update(own)
        volume += sum(box.volume for box in kept[rank])
    return kept


def check_replicas(call: Call, manifest: Manifest, copies: Mapping[int, Copies]) -> None:
    """Make sure that what several meshes hold of a leaf is the same.

    Args:
        call: The collective.
        manifest: The tree.
        copies: Of the leaves of which that is not certain, by their indices. The same on every rank.

    Raises:
        RankMismatch: If it is not. On every rank, before anything moves.
    """
    compared = {index: held for index, held in copies.items() if not held.are_single(manifest.chunks[index].shape)}
    if not compared:
        return

    call.expect()
    found = [
        (number, *part, _digest(piece))
        for number, (index, held) in enumerate(compared.items())
        for part, piece in _pieces(held, manifest.chunks[index], call.group.rank)
    ]
    told = json.dumps(found).encode()
    call.ready()
    ranks_by_digest: defaultdict[Any, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, row in enumerate(call.group.all_gather_bytes(told)):
        for number, start, stop, digest in json.loads(row):
            ranks_by_digest[number, tuple(start), tuple(stop)][digest].append(rank)
    unlike = {place: found for place, found in ranks_by_digest.items() if len(found) > 1}
    if unlike:
        first = min(unlike)
        index = list(compared)[first[0]]
        raise _unlike(manifest, index, list(unlike[first].values()), len({number for number, *_ in unlike}))


def _pieces(held: Copies, chunks: LocalChunks, rank: int) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the parts that this rank compares, with their tensors; none without elements, of which nothing is read."""
    by_box = dict(zip(chunks.boxes, chunks.pieces, strict=True))
    for box, part in held.in_common(rank):
        piece = by_box[box]
        if not piece.is_meta and holds_memory(piece):
            yield part, _within(piece, box, part)


def _within(piece: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """Return a part of the tensor of a box."""
    for dim, (first, start, stop) in enumerate(zip(box.start, part.start, part.stop, strict=True)):
        piece = piece.narrow(dim, start - first, stop - start)
    return piece


def _digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's elements, in row-major order."""
    found = blake2b(digest_size=16)
    tensor = tensor.detach()
    if tensor.is_neg() and not can_negate(tensor.dtype):  # (private functions set such bits)
        tensor = negated_view(tensor)
        found.update(b"negative")
    whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
    for slab in in_slabs(whole, -(-tensor.nbytes // _SLAB_BYTES)):
        bits = bits_of(_within(tensor, whole, slab))
        found.update((ctypes.c_char * bits.nbytes).from_address(bits.data_ptr()))
    return found.hexdigest()


def _unlike(manifest: Manifest, index: int, ranks: Sequence[Sequence[int]], count: int) -> RankMismatch:
    path = manifest.path(index)
    more = "" if count == 1 else f" (and at {count - 1} more paths)"
    msg = (
        f"{manifest.verb}: the ranks hold the leaf at {path or '<root>'} over meshes of their own, and not the same in "
        f"each{more}: expected copies with the same bytes, got different ones on "
        f"{' and on '.join(map(ranks_named, ranks))}. Nothing was moved. Give different tensors different paths, or "
        'pass the group of one mesh. With replicas="first", gather and reshard take what the first mesh holds.'
    )
    return RankMismatch(msg)
