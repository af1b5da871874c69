"""What a rank knows of a distributed leaf: its own chunks, the tensors they lie in, and where the others are."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.chunks.boxes import Box, Interval, cut_out
from statetree.errors import UnsupportedLeaf
from statetree.torch_internals import storage_key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from statetree.chunks.layouts import ChunkLayout, Split


class MeshSplits(NamedTuple):
    """What the layout of a tensor of any shape over a mesh follows from."""

    shape: tuple[int, ...]  # that of the mesh
    ranks: tuple[int, ...]  # its global ranks, in row-major order
    splits: tuple[Split, ...]  # how it cuts the tensor


class MadePieces(Sequence["torch.Tensor"]):
    """Pieces that are made of others, each when it is looked at and anew: all at a time would be another copy."""

    def __init__(self, sources: Sequence[torch.Tensor], count: int, make: Callable[[int], torch.Tensor]) -> None:
        self.sources = sources
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._make(range(self._count)[index])


class LocalChunks(NamedTuple):
    """What a rank knows of a distributed leaf."""

    text: str  # what must be the same on all ranks: dtype, shape, placements
    detail: str  # what usually is: exactly which ranks hold what
    shape: tuple[int, ...]  # the global one
    dtype: torch.dtype
    layout: ChunkLayout | None  # which rank holds which boxes; ``None`` where a rank knows only its own
    boxes: Sequence[Box]  # this rank's
    pieces: Sequence[torch.Tensor]  # the plain tensors of these boxes
    tie: Hashable  # equal for leaves of this rank that lie in the same memory
    device: str  # the type of the device that the elements lie on
    #: Where ranks hold partial values of the elements: how they are reduced, and the layout of each of them.
    partials: tuple[str, tuple[ChunkLayout, ...]] | None = None
    mesh: MeshSplits | None = None  # what the layout follows from, if it follows from a mesh

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """The tensors in whose memory the elements lie: the pieces, or what these are made of."""
        return self.pieces.sources if isinstance(self.pieces, MadePieces) else self.pieces


def location_of(piece: torch.Tensor) -> Hashable:
    """Return what is equal for tensors that are the same view on the same memory. Only strided ones have any."""
    if piece.is_quantized or piece.layout is not torch.strided or piece.is_nested:
        kind = "nested" if piece.is_nested else piece.dtype if piece.is_quantized else piece.layout
        raise UnsupportedLeaf(
            f"the leaf at %PATH% is distributed, and what this rank holds is a {kind} tensor: expected strided ones. "
            "Convert it first, or hold its values as a tensor of their own."
        )
    return (
        storage_key(piece.untyped_storage()),
        piece.dtype,  # in elements of which the offset is counted
        piece.storage_offset(),
        piece.shape,
        piece.stride(),
        piece.is_conj(),
        piece.is_neg(),
    )


def local_pieces(local: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor] | None:
    """Return the views of a local tensor that hold a rank's boxes, which it has side by side, without the gaps.

    The boxes are the product of intervals in each dim, as ``mesh_layout`` gives them: in the order of the local
    elements, the last dim varying first. ``None`` if the local tensor has another shape than they make up.
    """
    if not boxes:
        return [] if not local.numel() else None
    if len(boxes) == 1:
        return [local] if boxes[0].sizes == tuple(local.shape) else None
    offsets: list[dict[Interval, int]] = []
    for dim in range(local.dim()):
        position = 0
        placed: dict[Interval, int] = {}
        for box in boxes:
            interval = (box.start[dim], box.stop[dim])
            if interval not in placed:
                placed[interval] = position
                position += interval[1] - interval[0]
        if position != local.shape[dim]:
            return None
        offsets.append(placed)
    pieces = []
    for box in boxes:
        start = [placed[bounds] for placed, bounds in zip(offsets, zip(*box, strict=True), strict=True)]
        pieces.append(cut_out(local, start, box.sizes))
    return pieces


def listed_chunks(value: Any, local: Any = None) -> LocalChunks:
    """Return the chunks of a tensor that lists them itself, by the protocol of ``torch.distributed.checkpoint``.

    If its local tensor is what lists them, that may do so without saying how to get them: there is one then, itself.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex

    listed = list((value if local is None else local).__create_chunk_list__())
    is_only = local is not None and not hasattr(local, "__get_tensor_shard__")
    if is_only and (len(listed) > 1 or any(tuple(chunk.sizes) != tuple(local.shape) for chunk in listed)):
        raise UnsupportedLeaf(
            "the local tensor of the leaf at %PATH% lists chunks that are not all of the tensor: expected one of "
            f"{tuple(local.shape)}, got {[tuple(chunk.sizes) for chunk in listed]}. Give it __get_tensor_shard__."
        )
    found: list[tuple[Box, torch.Tensor]] = []
    for number, chunk in enumerate(listed):
        piece = local if is_only else value.__get_tensor_shard__(MetadataIndex("", chunk.offsets, number))
        found.append((Box.at(chunk.offsets, chunk.sizes), piece))
    return checked_chunks(value, tuple(value.shape), value.dtype, found)


def chunks_at(
    value: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[Sequence[int]],
) -> LocalChunks:
    """Return what is known of a distributed tensor of which this rank holds chunks that begin at some offsets."""
    found: list[tuple[Box, torch.Tensor]] = []
    for start, tensor in zip(offsets, tensors, strict=True):
        box = Box.at(start, tensor.shape)
        is_inside = len(start) == len(shape) == tensor.dim() and min(start, default=0) >= 0
        if not is_inside or any(map(gt, box.stop, shape)):
            raise UnsupportedLeaf(
                f"a chunk of the leaf at %PATH% lies outside of its tensor: expected one in {tuple(shape)}, got "
                f"{tuple(tensor.shape)} at {tuple(start)}. Correct the leaf type."
            )
        found.append((box, tensor))
    return checked_chunks(value, tuple(shape), dtype, found)


def checked_chunks(
    value: Any, shape: tuple[int, ...], dtype: torch.dtype, found: Sequence[tuple[Box, torch.Tensor]]
) -> LocalChunks:
    """Return what is known of a distributed tensor of which each rank knows its own (filled) chunks only."""
    boxes = [box for box, _ in found if box.volume]
    pieces = [piece.detach() for box, piece in found if box.volume]
    for box, piece in zip(boxes, pieces, strict=True):
        if tuple(piece.shape) != box.sizes or piece.dtype != dtype:
            raise UnsupportedLeaf(
                f"a chunk of the leaf at %PATH% is not what its leaf type says: expected {dtype} {box.sizes}, got "
                f"{piece.dtype} {tuple(piece.shape)}. Correct the leaf type."
            )
    if len(set(boxes)) < len(boxes):
        msg = "the leaf at %PATH% lists a chunk twice on one rank: expected each once. Correct the leaf type."
        raise UnsupportedLeaf(msg)
    text = f"a {type(value).__qualname__} {dtype} {shape}"
    tie = (*map(location_of, pieces),), shape if pieces else id(value)
    device = pieces[0].device.type if pieces else ""
    return LocalChunks(text, "", shape, dtype, None, boxes, pieces, tie, device)
