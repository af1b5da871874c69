"""A tree as a delta sees it: parts in global shapes, of which this rank holds boxes, and leaves taken whole."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.chunks.boxes import Box, whole_box
from statetree.errors import Difference, TreeMismatch, unsignalled
from statetree.exchange.digesting import refuse_partial
from statetree.exchange.manifest import Manifest
from statetree.leaves.builtin import OPAQUE, is_cuttable, leaf_type_of
from statetree.leaves.copying import copied_leaves
from statetree.leaves.leaf_numbers import text_number, value_number
from statetree.leaves.location import located_error
from statetree.leaves.pairing import paired_parts
from statetree.leaves.parts import Unpacked, unpack
from statetree.leaves.ties import sharing
from statetree.spans.bits import as_bits, as_plain, from_bits
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory, extent_bytes
from statetree.spans.overlaps import overlaps_itself
from statetree.spans.sums import FEW, piece_sums, sums_at
from statetree.torch_internals import copy_all, copy_each, negated_view, plain_pair
from statetree.transforms.deltas.change import (
    EVERYBODYS,
    OTHERS,
    OWN,
    TensorChange,
    damaged,
    in_box,
    mismatch,
    places_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from statetree.chunks.layouts import ChunkLayout
    from statetree.chunks.ranks import Ranks
    from statetree.key_paths import Path


class HeldPart(NamedTuple):
    """One box that this rank holds of a part."""

    leaf: int
    shape: tuple[int, ...]  # the global one
    box: Box
    piece: torch.Tensor  # the plain tensor of its elements
    #: The number of this rank among those that hold the box, and how many these are; none where each has it by itself.
    replica: tuple[int, int] | None = None

    @property
    def holder(self) -> int:
        """Who holds it: one of ``HOLDERS``."""
        return EVERYBODYS if self.replica is None else OTHERS if self.replica[0] else OWN

    @property
    def place(self) -> Any:
        """What those have in common that are the same views on the same memory."""
        piece = self.piece
        view = piece.data_ptr(), piece.shape, piece.stride(), piece.is_conj(), piece.is_neg(), piece.dtype
        return view if view[0] else id(piece)

    def places(self, local: torch.Tensor) -> torch.Tensor:
        """Return where elements lie in the memory of the piece, by their positions in the box."""
        if self.piece.is_contiguous():
            return local
        return places_of(local, self.piece.shape, self.piece.stride())

    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Return the elements at some places, bit by bit as they read."""
        found = _memory(self.piece).index_select(0, places)  # several times as fast as take
        return _read(from_bits(found, self.piece.dtype), self.piece)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from a tensor's first element to its last, as one dim of elements that copies do not change."""
    reach = extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize) // tensor.itemsize
    view = negated_view(tensor) if tensor.is_neg() else tensor
    view = torch.conj(view) if view.is_conj() else view
    return as_bits(view.as_strided((reach,), (1,)))


def _read(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return what values that lie in a tensor's memory read like, or the other way about: both bits are involutions."""
    if tensor.is_conj():
        values = torch.conj(values).resolve_conj()
    return negated_view(values).resolve_neg() if tensor.is_neg() else values


def put(piece: torch.Tensor, places: torch.Tensor, bits: torch.Tensor) -> None:
    """Write to some places of a tensor's memory, in one call."""
    _memory(piece).scatter_(0, places, bits)


def plain_copy(piece: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor."""
    copy = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
    copy_each([copy], [piece])
    return copy


class LocatedChange:
    """A change of a part, and where in the memory of its piece it is read from or written to."""

    def __init__(self, verb: str, name: str, change: TensorChange, part: HeldPart) -> None:
        change.check(verb, name)
        self.change, self.part, piece = change, part, part.piece
        numel, count = prod(part.shape), change.values.numel()
        if change.shape != part.shape or (change.is_whole and count != piece.numel()):
            raise mismatch(verb, name, f"a tensor of shape {change.shape}", f"one of {part.shape}")
        if change.values.dtype != piece.dtype:
            raise damaged(verb, name, f"expected values of {piece.dtype}, got {change.values.dtype}")
        self.positions = self._places = None
        if not change.is_whole:
            self.positions = change.positions()
            if count and not 0 <= self.positions.min() <= self.positions.max() < numel:
                raise damaged(verb, name, f"expected positions below {numel}")
            _, local = in_box(self.positions, part.box, part.shape)
            if local.numel() < count:
                got = f"{count - local.numel()} positions elsewhere"
                raise mismatch(verb, name, "what this rank holds", got, "Use reshard to bring the delta here.")
            self._places = part.places(local.to(piece.device))

    def read(self) -> torch.Tensor:
        """Return a copy of the elements that the change writes over, in the order of its values."""
        found = plain_copy(self.part.piece) if self._places is None else self.part.take(self._places)
        return found.view(self.change.values.shape)

    def sums(self) -> torch.Tensor:
        """Return two rows: sums of the elements that the change writes over, as they are now, and of its values."""
        if self.positions is None:
            pieces = self.part.piece, self.change.values.reshape(self.part.piece.shape)
            return torch.stack([piece_sums(each, self.part.box, self.part.shape, FEW).cpu() for each in pieces])
        return torch.stack(sums_at(self.positions.to(self.part.piece.device), self.read(), self._values())).cpu()

    def write(self) -> Callable[[], None]:
        """Return the function that writes the change, in one call of torch. Its memory is taken now."""
        piece = self.part.piece
        if self._places is not None:
            return partial(put, piece, self._places, as_bits(_read(self._values(), piece)))
        target, source = plain_pair(piece, self._values().view(piece.shape))
        return partial(copy_all, [target], [source])

    def _values(self) -> torch.Tensor:
        """Return the values where the piece lies."""
        values, piece = self.change.values.reshape(-1), self.part.piece
        return from_bits(as_bits(values).to(piece.device), piece.dtype)


class StateParts:
    """The parts of a tree, by their names, and its leaves that are taken whole.

    A leaf that is made of several tensors, or of which this rank holds several boxes, has several: ``w#0``, ``w#1``.
    ``texts`` says of each leaf what must agree between trees. (Parts of a value may have other sizes.)
    """

    def __init__(self, verb: str, tree: Any, ranks: Ranks) -> None:
        self.verb, self.manifest = verb, Manifest(verb, tree, ranks)
        refuse_partial(self.manifest)
        self.leaves, outline = self.manifest.leaves, self.manifest.outline
        self.keys = outline.spec.flat_keys()
        if counts := outline.counts:  # the parts of divided leaves are called like those of leaves that need not be
            named = set(self.keys)
            keys = [_named(key, counts[at], named) if at in counts else [key] for at, key in enumerate(self.keys)]
            self.keys = [name for names in keys for name in names]
        parts: dict[int, list[HeldPart]] = {}
        local: list[int] = []
        self.texts = dict.fromkeys(self.manifest.order, "a value")
        for index in self.manifest.order:
            leaf, chunks = self.leaves[index], self.manifest.chunks.get(index)
            if chunks is not None:
                shape, rank = tuple(chunks.shape), ranks.rank
                held_by = {} if chunks.layout is None else _replicas(chunks.layout, rank)
                parts[index] = [
                    HeldPart(index, shape, box, as_plain(piece), held_by.get(box, (0, 1)))
                    for box, piece in zip(chunks.boxes, chunks.pieces, strict=True)
                ]
                self.texts[index] = f"a tensor {chunks.dtype} {shape} {[(*map(tuple, box),) for box in chunks.boxes]}"
            elif (kind := leaf_type_of(type(leaf))) is not None and kind.has_elements and not kind.opaque:
                parts[index] = []
                local.append(index)
                if is_cuttable(leaf):
                    self.texts[index] = f"a tensor {leaf.dtype} {tuple(leaf.shape)}{' on meta' if leaf.is_meta else ''}"
        found = self._unpacked(local)
        for place, number, _ in paired_parts(found, found):
            assert number is not None  # it faces itself
            parts[local[place]].append(_whole(local[place], found.parts[number]))
        self.tensors: dict[str, HeldPart] = {}
        self.parts_of: dict[int, list[str]] = {}
        taken = set(self.keys)
        for index, held in parts.items():
            alone = len(held) == 1 and not self.is_value(index)
            self.parts_of[index] = [self.keys[index]] if alone else _named(self.keys[index], len(held), taken)
            self.tensors.update(zip(self.parts_of[index], held, strict=True))
        if self.manifest.texts:  # what divided leaves are beside their parts
            paths = outline.spec.paths()
            for index, owner in enumerate(outline.owners()):
                self.texts[index] += self.manifest.texts.get(paths[owner], "")
        owners = [part.leaf for part in self.tensors.values()]
        pieces = Columns([part.piece for part in self.tensors.values()])
        check_memory(verb, pieces, lambda row: self.manifest.path(owners[row]))

    def _unpacked(self, leaves: Sequence[int]) -> Unpacked:
        chosen = [self.leaves[leaf] for leaf in leaves]
        return unpack(self.verb, chosen, lambda: [self.paths()[leaf] for leaf in leaves], memory=False)

    def _inside(self) -> list[tuple[int, torch.Tensor]]:
        """Return the plain tensors in leaves that have no parts of their own, each with its leaf."""
        opaque = [leaf for leaf in self.manifest.order if leaf not in self.parts_of]
        found = self._unpacked(opaque)
        return [(leaf, as_plain(found.parts[part])) for at, leaf in enumerate(opaque) for part in found.parts_of(at)]

    def share(self, layouts: Mapping[int, ChunkLayout], rank: int) -> None:
        """Say of each box who holds it among all ranks: this one knows those over its own mesh alone."""
        for leaf, layout in layouts.items():
            if layout is not self.manifest.chunks[leaf].layout:
                held_by = _replicas(layout, rank)
                for name in self.parts_of[leaf]:
                    self.tensors[name] = self.tensors[name]._replace(replica=held_by[self.tensors[name].box])

    def is_value(self, leaf: int) -> bool:
        """Whether a leaf is neither a strided nor a distributed tensor: then it may be taken whole."""
        return self.texts[leaf].startswith("a value")

    def is_object(self, leaf: int) -> bool:
        """Whether a leaf is an opaque object."""
        return leaf_type_of(type(self.leaves[leaf])) is OPAQUE

    def sharing_objects(self) -> list[set[int]]:
        """Return the leaves that hold an object or a tensor which several of them hold."""
        objects = [leaf for leaf in self.manifest.order if self.is_object(leaf)]
        return [{objects[at] for at in own} for own in OPAQUE.shared_by([self.leaves[leaf] for leaf in objects])]

    def paths(self) -> Sequence[Path]:
        """Return the paths of the leaves."""
        return self.manifest.spec.paths()

    def table(self) -> torch.Tensor:
        """Return a number for each leaf, in the order of the paths, for its name and what must agree."""
        numbers = [text_number(self.keys[leaf], self.texts[leaf]) for leaf in self.manifest.order]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def number(self, leaf: int) -> int:
        """Return a number for a leaf that is taken whole."""
        try:
            return value_number(self.leaves[leaf])
        except unsignalled(Exception) as error:
            raise located_error(self.verb, "take apart", error, self.paths, self.leaves, leaf) from error

    def entangled(self, changes: Mapping[str, TensorChange], replaced: Collection[int]) -> list[tuple[int, str, str]]:
        """Return the leaves that would not become what they shall, because of what else lies in their memory.

        With each come the kind of difference, and a text for messages. What changes may share memory only with the
        same view that changes alike, which is written once.
        """
        rows: dict[Any, tuple[str, HeldPart]] = {}
        for name, part in self.tensors.items():
            change = changes.get(name)
            known = [] if change is None else [*change.written(), *change.sums.view(-1).tolist()]
            if part.leaf not in replaced:
                rows.setdefault((part.place, *known), (name, part))
        objects = [("", _whole(leaf, part)) for leaf, part in self._inside() if leaf not in replaced]
        held = [*rows.values(), *objects]
        refused = {
            part.leaf: ("overlap", "memory in which it overlaps itself")
            for name, part in held
            if name in changes and overlaps_itself(part.piece.shape, part.piece.stride())
        }
        for one, other in sharing([(at, part.piece) for at, (_, part) in enumerate(held)]):
            name, part = held[one]
            if name in changes:
                partner = self.paths()[held[other][1].leaf]
                refused.setdefault(part.leaf, ("ties", f"memory that it shares with {partner}"))
        return sorted((leaf, kind, memory) for leaf, (kind, memory) in refused.items())

    def copies(self, leaves: Sequence[int]) -> list[Any]:
        """Return copies of leaves that are taken whole. Objects that hold views on others are refused."""
        objects = {leaf for leaf in leaves if leaf not in self.parts_of}
        rows = [*[(part.leaf, part.piece) for part in self.tensors.values()], *self._inside()] if objects else []
        paths = self.paths() if objects else []
        found = [
            Difference(paths[leaf], "ties", f"a view on {paths[other]}", "a copy")
            for leaf, other in sharing(rows)
            if leaf in objects and other not in objects
        ]
        if found:
            raise TreeMismatch.between(self.verb, found, "Leave it out (select), or pass what its state_dict() has.")
        where = lambda: [self.paths()[leaf] for leaf in leaves]  # noqa: E731 - paths are rendered for errors alone
        return copied_leaves(self.verb, [self.leaves[leaf] for leaf in leaves], where)


def _replicas(layout: ChunkLayout, rank: int) -> dict[Box, tuple[int, int]]:
    """Return, for each box of a rank, its number among those that hold the box, and how many these are."""
    return {box: (holders.index(rank), len(holders)) for box, holders in layout.sharing(rank).items()}


def _named(key: str, count: int, taken: set[str]) -> list[str]:
    """Return names for the parts of a leaf, other ones than any leaf or part has."""
    names = [f"{key}#{number}" for number in range(count)]
    while not taken.isdisjoint(names):
        names = [f"{name}#" for name in names]
    taken.update(names)
    return names


def _whole(leaf: int, tensor: torch.Tensor) -> HeldPart:
    shape = tuple(tensor.shape)
    return HeldPart(leaf, shape, whole_box(shape), as_plain(tensor))
