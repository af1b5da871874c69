"""Replicas: what ranks hold under one path, over meshes of their own, has the same bytes or is refused.

Ranks whose meshes differ may hold copies of one tensor. They may also hold two tensors that happen to have one key, as
the first layers of two pipeline stages do: taken for copies, one of them would be lost. So wherever boxes of two meshes
have elements in common, both ranks hash the bytes of these, and all compare. The elements of a box are hashed in
row-major order, however they lie in memory and whatever the mesh cuts beside.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections import defaultdict
from functools import cached_property
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
#: Of so many leaves, where some differ, the ranks tell each other which: 64 KiB.
_LEAVES_AT_ONCE: Final = 4096


class SharedPart(NamedTuple):
    """Elements that a rank compares with other meshes.

    Attributes:
        box: The rank's box that they are in.
        part: Where they are.
        weight: How often this rank's digest counts: those of all ranks that compare these elements add up to nothing.
    """

    box: Box
    part: Box
    weight: int


class Copies:
    """Who holds what of leaves.

    Args:
        meshes: For each rank a number of its mesh. Where meshes are not known, each rank is one of its own.
        boxes: For each rank its boxes.
    """

    def __init__(self, meshes: Sequence[int], boxes: Sequence[Sequence[Box]]) -> None:
        self.meshes = meshes
        self.boxes = boxes
        self._parts: dict[int, list[SharedPart]] = {}
        self._are_single: bool | None = None

    @cached_property
    def holders(self) -> dict[tuple[int, Box], int]:
        """Return, for each box of each mesh, the first rank that holds it: replicas within a mesh are not compared."""
        found: dict[tuple[int, Box], int] = {}
        for rank, (mesh, boxes) in enumerate(zip(self.meshes, self.boxes, strict=True)):
            for box in boxes:
                found.setdefault((mesh, box), rank)
        return found

    def are_single(self, shape: Sequence[int]) -> bool:
        """Whether there is one of each element, without a look at pairs of boxes. It may be so if this is false."""
        if self._are_single is None:
            held = [box for _, box in self.holders]
            whole = Box((0,) * len(shape), tuple(shape)).volume
            alone = sum(box.volume for box in held) == whole
            self._are_single = alone and layout_of(shape, {0: held}).is_complete
        return self._are_single

    def in_common(self, rank: int) -> list[SharedPart]:
        """Return what a rank compares with other meshes: those of its elements that these hold, too."""
        if rank not in self._parts:
            mine = self.meshes[rank]
            own = [box for (mesh, box), holder in self.holders.items() if mesh == mine and holder == rank]
            found: dict[SharedPart, None] = {}
            for box in own:
                for part in dict.fromkeys(part for mesh, _, part in self._meeting(box) if mesh != mine):
                    comparing = sorted(self._comparing(part))
                    found[SharedPart(box, part, len(comparing) - 1 if comparing[0] == (rank, box) else -1)] = None
            self._parts[rank] = list(found)
        return self._parts[rank]

    def _comparing(self, part: Box) -> set[tuple[int, Box]]:
        """Return the ranks that compare these very elements, with the boxes that they are in."""
        around = [(mesh, box) for mesh, box, met in self._meeting(part) if met == part]
        return {
            (self.holders[mesh, box], box)
            for mesh, box in around
            if any(other != mesh and _met(box, beside) == part for other, beside in around)
        }

    def _meeting(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yield the boxes of all meshes that have elements in common with one, with the place of these elements."""
        bounds = self._bounds
        low = torch.maximum(bounds[:, 0], torch.tensor(box.start, dtype=torch.int64))
        high = torch.minimum(bounds[:, 1], torch.tensor(box.stop, dtype=torch.int64))
        rows = (high > low).all(1).nonzero()[:, 0]
        listed = self._listed
        for row, start, stop in zip(rows.tolist(), low[rows].tolist(), high[rows].tolist(), strict=True):
            yield *listed[row], Box(tuple(start), tuple(stop))

    @cached_property
    def _listed(self) -> list[tuple[int, Box]]:
        return list(self.holders)

    @cached_property
    def _bounds(self) -> torch.Tensor:
        return torch.tensor([box for _, box in self._listed], dtype=torch.int64).view(len(self._listed), 2, -1)


def _met(one: Box, other: Box) -> Box:
    """Return the elements that two boxes have in common."""
    return Box((*map(max, one.start, other.start),), (*map(min, one.stop, other.stop),))


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
    # For each leaf a sum over all ranks, which is nothing exactly if (but for chance) what is compared is the same.
    sums = torch.zeros(len(compared), 2, dtype=torch.int64)
    found: list[list[tuple[Box, bytes]]] = [[] for _ in compared]
    for number, (index, held) in enumerate(compared.items()):
        for place, piece in _pieces(held, manifest.chunks[index], call.group.rank):
            digest = _digest(piece)
            found[number].append((place.part, digest))
            sums[number] += _weighed(place, digest)
    weights = torch.arange(1, 2 * len(sums), 2)[:, None]  # odd numbers: no leaf's sum is lost
    mixed = torch.stack([part.sum(0) for part in (sums * weights).split(_LEAVES_AT_ONCE)])
    call.ready()
    for part in call.group.all_reduce(mixed).any(1).nonzero()[:, 0].tolist():
        first = part * _LEAVES_AT_ONCE
        unlike = call.group.all_reduce(sums[first : first + _LEAVES_AT_ONCE]).any(1).nonzero()[:, 0].tolist()
        for number in unlike:
            ranks = _unlike_ranks(call, found[first + number])
            if ranks:  # and not only a rank without elements
                raise _unlike(manifest, list(compared)[first + number], ranks, len(unlike))


def _unlike_ranks(call: Call, found: Sequence[tuple[Box, bytes]]) -> list[list[int]]:
    """Have the ranks tell each other their digests of a leaf, and return those that do not agree at some place."""
    told = call.group.told_once(json.dumps([(*part, digest.hex()) for part, digest in found]).encode())
    ranks_by_digest: defaultdict[Any, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for text, ranks in told:
        for start, stop, digest in json.loads(text):
            ranks_by_digest[tuple(start), tuple(stop)][digest] += ranks
    unlike = [sorted(map(sorted, listed.values())) for _, listed in sorted(ranks_by_digest.items()) if len(listed) > 1]
    return unlike[0] if unlike else []


def _weighed(place: SharedPart, digest: bytes) -> torch.Tensor:
    """Return what a rank adds to the sum of a leaf: two numbers of 64 bits that stand for elements and their place."""
    words = struct.unpack("<qq", blake2b(repr(place.part).encode() + digest, digest_size=16).digest())
    return torch.tensor(words, dtype=torch.int64) * place.weight


def _pieces(held: Copies, chunks: LocalChunks, rank: int) -> Iterator[tuple[SharedPart, torch.Tensor]]:
    """Yield the parts that this rank compares, with their tensors; none without elements, of which nothing is read."""
    by_box = dict(zip(chunks.boxes, chunks.pieces, strict=True))
    for place in held.in_common(rank):
        piece = by_box[place.box]
        if not piece.is_meta and holds_memory(piece):
            yield place, _within(piece, place.box, place.part)


def _within(piece: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """Return a part of the tensor of a box."""
    for dim, (first, start, stop) in enumerate(zip(box.start, part.start, part.stop, strict=True)):
        piece = piece.narrow(dim, start - first, stop - start)
    return piece


def _digest(tensor: torch.Tensor) -> bytes:
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
    return found.digest()


def _unlike(manifest: Manifest, index: int, ranks: Sequence[Sequence[int]], count: int) -> RankMismatch:
    path = manifest.path(index)
    more = "" if count == 1 else f" (and at {count - 1} more paths at least)"
    msg = (
        f"{manifest.verb}: the ranks hold the leaf at {path or '<root>'} over meshes of their own, and not the same in "
        f"each{more}: expected copies with the same bytes, got different ones on "
        f"{' and on '.join(map(ranks_named, ranks))}. Nothing was moved. Give different tensors different paths, or "
        'pass the group of one mesh. With replicas="first", gather and reshard take what the first mesh holds.'
    )
    return RankMismatch(msg)
