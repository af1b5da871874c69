"""A tree as a list of tensors in global shapes, of which this rank holds boxes, and of values that are taken whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.chunks.boxes import Box, whole_box
from statetree.errors import UnsupportedLeaf
from statetree.leaves.builtin import holds_tensor, leaf_type_of, settled
from statetree.leaves.leaf_numbers import text_number, value_number
from statetree.leaves.location import located_error
from statetree.leaves.parts import unpack
from statetree.leaves.types.special import special_layout
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory, holds_memory
from statetree.spans.overlaps import overlaps_itself
from statetree.spans.sums import FEW, piece_sums, whole_sums
from statetree.tree.flatten import flatten_for_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.chunks.local import LocalChunks
    from statetree.chunks.ranks import Ranks
    from statetree.key_paths import Path


#: Who holds what this rank holds of a leaf: every rank by itself, this rank before others, or others before this one.
#: No few flipped bits make one of another one.
HOLDERS: Final = (0x3A5C_96E1_0F27_D84B, 0x6C93_5A0E_E1D8_27B4, 0x563F_A5D2_B48E_7109)
EVERYBODYS, OWN, OTHERS = HOLDERS


class TensorEntry(NamedTuple):
    """A strided tensor, or what this rank holds of a distributed one.

    Attributes:
        dtype: Of its elements.
        shape: The global shape.
        boxes: The boxes in it that this rank holds.
        pieces: Their plain tensors.
        chunks: What is known of a distributed tensor.
        rank: This rank, in the group that it lies on.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Sequence[Box]
    pieces: Sequence[torch.Tensor]
    chunks: LocalChunks | None
    rank: int = 0

    @property
    def holder(self) -> int:
        """Who holds what this rank holds."""
        return EVERYBODYS if self.chunks is None else OTHERS if self.replica[0] else OWN

    @property
    def replica(self) -> tuple[int, int]:
        """The number of this rank among those that hold what it holds, and how many these are."""
        layout = None if self.chunks is None else self.chunks.layout
        if layout is None or not self.boxes:
            return 0, 1
        holders = layout.sharing(self.rank)[0]
        return holders.index(self.rank), len(holders)

    @property
    def on_meta(self) -> bool:
        """Whether there are no elements."""
        return any(piece.is_meta for piece in self.pieces)

    @property
    def text(self) -> str:
        """What must agree between two trees for the elements of one to be written over those of the other."""
        boxes = [] if self.is_whole else [(*map(tuple, box),) for box in self.boxes]
        return f"a tensor {self.dtype} {self.shape} {boxes}{' on meta' if self.on_meta else ''}"

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of it, in one piece."""
        return len(self.boxes) == 1 and self.boxes[0].sizes == self.shape

    @property
    def overlaps_itself(self) -> bool:
        """Whether several elements of a piece lie in one place."""
        return any(
            not piece.is_contiguous() and overlaps_itself(piece.shape, piece.stride())
            for piece in self.pieces
            if not piece.is_meta
        )

    @property
    def held(self) -> int:
        """How many elements this rank holds."""
        return sum(box.volume for box in self.boxes)

    @property
    def place(self) -> Any:
        """What entries have in common that are the same views on the same memory."""
        places = [
            (piece.data_ptr(), piece.shape, piece.stride(), piece.is_conj(), piece.is_neg()) for piece in self.pieces
        ]
        return (self.dtype, tuple(places)) if places and all(place[0] for place in places) else id(self.pieces)

    def sums(self, count: int = FEW) -> torch.Tensor:
        """Return the first sums of the elements that this rank holds, on the CPU."""
        total = torch.zeros(count, dtype=torch.int64, device="cpu")
        if not self.on_meta:
            for box, piece in zip(self.boxes, self.pieces, strict=True):
                total += piece_sums(piece, box, self.shape, count).cpu()
        return total


class TreeEntries:
    """The leaves of a tree: tensors, and values.

    Attributes:
        verb: On whose behalf, for messages.
        spec: The structure.
        leaves: The leaves, collectives under way waited for.
        keys: Their names in a flat dict.
        tensors: The strided and the distributed ones, by their indices.
        order: The indices of all leaves, in the order of their paths.
    """

    def __init__(self, verb: str, tree: Any, ranks: Ranks) -> None:
        leaves, self.spec = flatten_for_copy(tree, holds_tensor, verb=verb)
        self.verb = verb
        self.leaves = list(map(settled, leaves))
        self.keys = self.spec.flat_keys()
        self.tensors: dict[int, TensorEntry] = {}
        for index, leaf in enumerate(self.leaves):
            try:
                entry = _entry(leaf, ranks)
            except Exception as error:
                raise located_error(verb, "tell the chunks of", error, self.paths, self.leaves, index) from error
            if entry is not None:
                self.tensors[index] = entry
        paths = self.paths()
        self.order = sorted(range(len(leaves)), key=lambda index: paths[index].sort_key())
        self._check_memory()

    def sums(self) -> dict[int, torch.Tensor]:
        """Return the few sums of the elements that this rank holds of each tensor, on the CPU."""
        found = {index: entry.sums() for index, entry in self.tensors.items() if not entry.is_whole or entry.on_meta}
        whole = [index for index in self.tensors if index not in found]
        return found | dict(zip(whole, whole_sums([self.tensors[i].pieces[0] for i in whole], FEW), strict=True))

    def paths(self) -> Sequence[Path]:
        """Return the paths of the leaves."""
        return self.spec.paths()

    def _check_memory(self) -> None:
        owners, pieces = self._pieces()
        if all(map(holds_memory, pieces)):
            return
        check_memory(self.verb, Columns(pieces), lambda place: self.paths()[owners[place]])

    def parts_inside(self, indices: Sequence[int]) -> list[list[torch.Tensor]]:
        """Return the plain tensors inside each of some values."""
        chosen = [self.leaves[index] for index in indices]
        found = unpack(self.verb, chosen, lambda: [self.paths()[index] for index in indices], memory=False)
        return [[found.parts[part] for part in found.parts_of(place)] for place in range(len(indices))]

    def _pieces(self) -> tuple[list[int], list[torch.Tensor]]:
        """Return the pieces of all tensors, and before that the leaf of each."""
        pairs = [(index, piece) for index, entry in self.tensors.items() for piece in entry.pieces]
        return [index for index, _ in pairs], [piece for _, piece in pairs]

    def holds_tensors(self, index: int) -> bool:
        """Whether there are tensors in a leaf."""
        leaf_type = leaf_type_of(type(self.leaves[index]))
        return leaf_type is not None and leaf_type.has_elements

    def text(self, index: int) -> str:
        """Say what of a leaf must agree between trees."""
        entry = self.tensors.get(index)
        return "a value" if entry is None else entry.text

    def fingerprint(self, index: int) -> int:
        """Return a number for what of a leaf must agree between trees, its name included."""
        return text_number(self.keys[index], self.text(index))

    def row(self, index: int, sums: torch.Tensor | None) -> list[int]:
        """Return what a delta keeps of a leaf: ``sums`` are those of a tensor."""
        if sums is None:
            return [self.fingerprint(index), self.number(index), 0, EVERYBODYS]
        return [self.fingerprint(index), *sums.tolist(), self.tensors[index].holder]

    def number(self, index: int) -> int:
        """Return a number for a value."""
        try:
            return value_number(self.leaves[index])
        except Exception as error:
            raise located_error(self.verb, "take apart", error, self.paths, self.leaves, index) from error


def _entry(leaf: Any, ranks: Ranks) -> TensorEntry | None:
    leaf_type = leaf_type_of(type(leaf))
    if leaf_type is None or not leaf_type.has_elements:
        return None
    if leaf_type.is_distributed(leaf):
        chunks = leaf_type.local_chunks(leaf, ranks)
        if chunks.partials is not None:  # a summand is no value: what is made of it on other ranks would be wrong
            msg = (
                "the leaf at %PATH% is Partial: expected elements, got partial values on each rank. Redistribute it, "
                "or gather the tree first."
            )
            raise UnsupportedLeaf(msg)
        return TensorEntry(
            chunks.dtype, chunks.shape, chunks.boxes, list(map(_bare, chunks.pieces)), chunks, ranks.rank
        )
    if not leaf_type.bare or special_layout(leaf) is not None:
        return None
    shape = tuple(leaf.shape)
    return TensorEntry(leaf.dtype, shape, [whole_box(shape)], [_bare(leaf)], None)


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    bare = tensor.detach()
    return bare if type(bare) is torch.Tensor else bare.as_subclass(torch.Tensor)
