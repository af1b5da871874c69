"""Converted leaves: tensors made of blocks of distributed ones, which no placement can express."""

from __future__ import annotations

from copy import copy
from itertools import product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from statetree.chunks.axis_blocks import AxisBlock, AxisRegion, block_layout, view_over
from statetree.chunks.boxes import Box
from statetree.chunks.layouts import add_interval
from statetree.chunks.local import LocalChunks, MadePieces, location_of
from statetree.errors import UnsupportedLeaf
from statetree.leaves.engine_type import EngineLeafType, LeafPart
from statetree.leaves.types.tensor import set_attributes
from statetree.torch_internals import copy_each, storage_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from statetree.chunks.boxes import Interval
    from statetree.chunks.layouts import ChunkLayout
    from statetree.chunks.ranks import Ranks
    from statetree.leaves.engine_type import LeafContents


class AxisPart(LeafPart):
    """A block of a distributed tensor, in its axes: ranks hold the boxes that their chunks have of it.

    The block lies at ``region`` in ``leaf``. This rank holds ``boxes`` of it, in tensors that lie elsewhere than in the
    leaf if ``is_moved``. Where it is made whole, it lies at its place in what is made of it, ``target``, and not by
    itself: then nothing is left to copy, and what arrives later is in the result, too. It is made with this rank,
    ``alone``: what other ranks have does not matter.
    """

    __slots__ = ("boxes", "is_moved", "leaf", "leaf_type", "region", "target")
    stays_part = True

    def __init__(
        self, leaf: Any, leaf_type: EngineLeafType, region: AxisRegion, sizes: Sequence[int], alone: Ranks
    ) -> None:
        own = leaf_type.local_chunks(leaf, alone)
        if own.partials is not None:
            raise UnsupportedLeaf("the leaf at %PATH% is Partial: expected elements to convert. Redistribute it first.")
        self.boxes: list[Box] = []
        tensors = []
        if 0 in sizes:
            own = own._replace(boxes=[], pieces=[])
        for held, piece in zip(own.boxes, own.pieces, strict=True):
            for box, inside in region.parts_within(held, sizes):
                self.boxes.append(box)
                tensors.append(inside.view(piece.detach(), box.sizes))
        super().__init__(tensors, own.dtype, sizes)
        self.region = region
        self.leaf, self.leaf_type = leaf, leaf_type
        self.is_moved = False
        self.target: tuple[ConvertedLeaf, AxisRegion] | None = None

    def whole(self, empty: Callable[[tuple[int, ...]], torch.Tensor], made: dict[Any, torch.Tensor]) -> torch.Tensor:
        """Return memory for all of its elements, in that of the tensor that it is a block of."""
        if self.target is None or 0 in self.shape:
            return empty(self.shape)
        leaf, region = self.target
        if id(leaf) not in made:
            made[id(leaf)] = empty(tuple(leaf.shape))
        return region.view(made[id(leaf)], self.shape)

    def within(self, leaf: ConvertedLeaf, region: AxisRegion) -> AxisPart:
        """Return the same part as one of a tensor that is made of it."""
        made = copy(self)
        made.target = leaf, region
        return made

    def of(self, tensors: Sequence[torch.Tensor]) -> AxisPart:
        """Return the same part of other tensors."""
        made = super().of(tensors)
        made.is_moved = True
        return made

    def local_chunks(self, ranks: Ranks) -> LocalChunks:
        """Return which boxes this rank holds, and where the others are, if that is known."""
        whole = self.leaf_type.local_chunks(self.leaf, ranks)
        layout = None if whole.layout is None else block_layout(whole.layout, self.region, self.shape)
        on_meta = " on meta" if any(tensor.is_meta for tensor in self.tensors) else ""
        text = f"a block{on_meta} {self.dtype} {self.shape} at {tuple(self.region)} of {whole.text}"
        places = tuple([location_of(tensor) for tensor in self.tensors])
        tie = (places or id(self), self.shape)
        device = self.tensors[0].device.type if self.tensors else whole.device
        return LocalChunks(text, whole.detail, self.shape, self.dtype, layout, self.boxes, self.tensors, tie, device)


class ConvertedLeaf:
    """A tensor made of blocks of distributed ones (``parts``), each at a region: what moves leaves takes it as one.

    Where it is whole it becomes a parameter, requires gradients, and has attributes, as is said.
    """

    def __init__(
        self,
        shape: Sequence[int],
        regions: Sequence[AxisRegion],
        parts: Sequence[AxisPart],
        *,
        is_parameter: bool = False,
        requires_grad: bool = False,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        self.shape = torch.Size(shape)
        self.regions = regions
        self.parts = [part.within(self, region) for part, region in zip(parts, regions, strict=True)]
        self.is_parameter = is_parameter
        self.requires_grad = requires_grad
        self.attributes = attributes or {}

    def __repr__(self) -> str:
        return f"ConvertedLeaf({str(self.dtype).removeprefix('torch.')}, {list(self.shape)})"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.parts[0].dtype

    def blocks(self) -> Sequence[tuple[AxisRegion, tuple[int, ...]]]:
        """Return where its blocks lie in it, and their sizes."""
        return [(region, part.shape) for region, part in zip(self.regions, self.parts, strict=True)]

    def of(self, parts: Sequence[Any]) -> Any:
        """Return the same of other parts; of whole ones, a tensor."""
        if all(isinstance(part, AxisPart) for part in parts):
            made = copy(self)
            made.parts = [part.within(made, region) for part, region in zip(parts, self.regions, strict=True)]
            return made
        blocks = [
            (AxisBlock(tuple(part.shape), AxisRegion.box([0] * part.dim()), region), part)
            for region, part in zip(self.regions, parts, strict=True)
        ]
        whole = assembled(self.shape, blocks)
        if self.is_parameter:
            return torch.nn.Parameter(whole, requires_grad=self.requires_grad)
        return whole.requires_grad_(self.requires_grad)


def assembled(shape: Sequence[int], blocks: Sequence[tuple[AxisBlock, torch.Tensor]]) -> torch.Tensor:
    """Return a tensor made of blocks of others: a view, or a copy where they do not lie as one would."""
    filled = [(block, tensor) for block, tensor in blocks if 0 not in block.sizes]
    memory = {(storage_key(tensor.untyped_storage()), tensor.is_conj(), tensor.is_neg()) for _, tensor in filled}
    first = (filled or blocks)[0][1]
    if len(memory) == 1:
        rows = [(block, int(tensor.storage_offset()), tensor.stride()) for block, tensor in filled]
        view = view_over(shape, rows)
        if view is not None:
            return first.as_strided(shape, *view)
    made = torch.empty(tuple(shape), dtype=first.dtype, device=first.device)
    copy_each(
        [block.target.view(made, block.sizes) for block, _ in filled],
        [block.source.view(tensor, block.sizes) for block, tensor in filled],
    )
    return made


#: Copies that conversions made of plain tensors, with the storages of these.
_COPIES: Final = WeakTensorKeyDictionary()


def note_copy(made: torch.Tensor, copied: Sequence[torch.Tensor], parts: Sequence[Any]) -> None:
    """Remember of what a tensor is a copy: of plain tensors, and of what its parts are copies of."""
    sources = [StorageWeakRef(tensor.untyped_storage()) for tensor in copied]
    sources += [source for part in parts if isinstance(part, torch.Tensor) for source in _COPIES.get(part, ())]
    if sources:
        _COPIES[made] = sources


def is_copy(leaf: Any) -> bool:
    """Whether a leaf is such a copy of tensors that are still there, and may hold something else by now."""
    sources = _COPIES.get(leaf, ()) if isinstance(leaf, torch.Tensor) else ()
    return not all(source.expired() for source in sources)


class JoinedPart(LeafPart):
    """A converted tensor as one, by boxes of it: what is written or counted is not looked at block by block.

    Of what several ranks hold, one has it. Blocks that this rank has side by side are one box, so that what alternates
    (the rows of two tensors, say) makes no box for each row.
    """

    __slots__ = ("leaf",)
    _statetree_text = "a converted tensor"

    def __init__(self, leaf: ConvertedLeaf) -> None:
        super().__init__([], leaf.dtype, leaf.shape)
        self.leaf = leaf

    def local_chunks(self, ranks: Ranks) -> LocalChunks:
        """Return the boxes that are this rank's alone. Each is put together when it is looked at."""
        own: list[_Held] = []
        text, device = "", ""
        for region, part in zip(self.leaf.regions, self.leaf.parts, strict=True):
            chunks = part.local_chunks(ranks)
            text, device = f"{text}, {chunks.text}" if text else chunks.text, chunks.device
            owners = {} if chunks.layout is None else _owners(chunks.layout, ranks.rank)
            for box, tensor in zip(chunks.boxes, chunks.pieces, strict=True):
                if owners.get(box, ranks.rank) == ranks.rank:
                    own.append(_Held(region.moved(box.start), box.sizes, tensor))
        boxes = _joined([held.region.intervals(held.sizes) for held in own])
        pieces = MadePieces([held.tensor for held in own], len(boxes), lambda index: _piece(own, boxes[index]))
        return LocalChunks(text, "", self.shape, self.dtype, None, boxes, pieces, id(self), device)


class _Held(NamedTuple):
    """Elements of a converted tensor: where they lie in it, and a tensor with a dim for each axis."""

    region: AxisRegion
    sizes: tuple[int, ...]
    tensor: torch.Tensor


def _piece(held: Sequence[_Held], box: Box) -> torch.Tensor:
    blocks = []
    for region, sizes, tensor in held:
        for part, place in region.parts_within(box, sizes):
            blocks.append((AxisBlock(part.sizes, AxisRegion.box(part.start), place), tensor))
    return assembled(box.sizes, blocks)


def _owners(layout: ChunkLayout, rank: int) -> dict[Box, int]:
    """Return which of the ranks that hold the same is to have it, for the boxes of one of them: they take turns.

    Blocks of one leaf that begin alike have one owner, so that they lie side by side.
    """
    rows = layout.sharing(rank).items()
    return {box: holders[hash((box.start[:1], box.sizes[-1:])) % len(holders)] for box, holders in rows}


def _joined(products: Sequence[tuple[tuple[Interval, ...], ...]]) -> list[Box]:
    """Return boxes that together have the elements of products of intervals, which have none in common."""
    rows = list(products)
    for dim in reversed(range(len(rows[0]) if rows else 0)):
        alike: dict[Any, list[Interval]] = {}
        for row in rows:
            alike.setdefault((row[:dim], row[dim + 1 :]), []).extend(row[dim])
        rows = [(*before, _merged(own), *after) for (before, after), own in alike.items()]
    return [Box.between(chosen) for row in rows for chosen in product(*row)]


def _merged(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        add_interval(merged, start, stop)
    return tuple(merged)


def joined(leaf: Any) -> Any:
    """Return a leaf, or if it was converted, what stands for it as one distributed tensor."""
    return JoinedPart(leaf) if isinstance(leaf, ConvertedLeaf) else leaf


class ConvertedType(EngineLeafType):
    """``ConvertedLeaf``: its blocks."""

    name = "converted tensor"

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        return value.parts, value

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        return context.of(parts)

    def contents(self, value: Any) -> LeafContents:
        return value.parts, value, value.attributes or None

    def assemble(self, context: Any, parts: Sequence[Any], attributes: Any) -> Any:
        made = context.of(parts)
        if isinstance(made, ConvertedLeaf):
            made.attributes = attributes or {}
        else:
            set_attributes(made, attributes)
        return made

    def elements_only(self, context: Any) -> bool:
        return True

    def describe(self, value: Any) -> Mapping[str, Any]:
        return {"dtype": value.dtype, "shape": value.shape, "blocks": [*map(tuple, value.regions)]}


CONVERTED = ConvertedType()
