"""Replicas: what ranks hold under one path, over meshes of their own, has the same bytes or is refused.

Ranks whose meshes differ may hold copies of one tensor. They may also hold two tensors that happen to have one key, as
the first layers of two pipeline stages do: taken for copies, one of them would be lost. So wherever boxes of two meshes
have elements in common, both ranks make a number of these, and all compare. It follows from the elements and from where
they lie in the global shape, however they lie in memory and whatever the mesh cuts beside.
"""

from __future__ import annotations

import json
from collections import defaultdict
from operator import sub
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.chunks.boxes import Box, cut_out, whole_box
from statetree.chunks.layouts import layout_of
from statetree.chunks.ranks import ranks_named
from statetree.declare import cached_property
from statetree.errors import RankMismatch
from statetree.exchange.routes import overlaps
from statetree.leaves.leaf_numbers import text_number
from statetree.spans.layout import holds_memory
from statetree.spans.sums import piece_sums, signed
from statetree.torch_internals import can_negate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.exchange.call import Call
    from statetree.exchange.group import Group
    from statetree.exchange.manifest import Manifest

#: Of so many leaves, where some differ, the ranks tell each other which: 32 KiB.
_LEAVES_AT_ONCE: Final = 4096


class Copies:
    """Who holds what of leaves of one shape, as one rank sees it: for each rank a number of its mesh, and its boxes.

    Where meshes are not known, each rank is one of its own.
    """

    def __init__(self, rank: int, shape: Sequence[int], meshes: Sequence[int], boxes: Sequence[Sequence[Box]]) -> None:
        self._rank, self._shape = rank, shape
        self.meshes = meshes
        self.boxes = boxes

    @cached_property
    def holders(self) -> dict[tuple[int, Box], int]:
        """Return, for each box of each mesh, the first rank that holds it: replicas within a mesh are not compared."""
        found: dict[tuple[int, Box], int] = {}
        for rank, (mesh, boxes) in enumerate(zip(self.meshes, self.boxes, strict=True)):
            for box in boxes:
                found.setdefault((mesh, box), rank)
        return found

    @cached_property
    def are_single(self) -> bool:
        """Whether there is one of each element, without a look at pairs of boxes. It may be so if this is false."""
        held = [box for _, box in self.holders]
        alone = sum(box.volume for box in held) == whole_box(self._shape).volume
        return alone and layout_of(self._shape, {0: held}).is_complete

    @cached_property
    def in_common(self) -> dict[tuple[Box, Box], int]:
        """What the rank compares with other meshes: those of its elements that these hold, too.

        For each of its boxes and each part of it the weight of that part's number. Those of all ranks add up to
        nothing, whatever the number is that they have in common.
        """
        mine = self.meshes[self._rank]
        own = [held for held, holder in self.holders.items() if held[0] == mine and holder == self._rank]
        others = [held for held in self.holders if held[0] != mine]
        bounds = [
            torch.tensor([box for _, box in held], dtype=torch.int64).view(len(held), 2, len(self._shape))
            for held in (own, others)
        ]
        meeting = overlaps(*bounds[0].unbind(1), *bounds[1].unbind(1))
        found: defaultdict[tuple[Box, Box], int] = defaultdict(int)
        for one, other, start, stop in zip(*[column.tolist() for column in meeting], strict=True):
            found[own[one][1], Box(tuple(start), tuple(stop))] += _weight(own[one], others[other])
        return dict(found)


def _weight(own: tuple[int, Box], other: tuple[int, Box]) -> int:
    """Return the weight of a number that two boxes have in common, for the one; for the other it is the negative.

    Each pair has another one, and an odd one: of a pair no difference is lost, of several it is but for chance.
    """
    first, second = sorted((own, other))
    weight = text_number("pair", str(first), str(second)) | 1
    return weight if own == first else -weight


def first_copy(shape: Sequence[int], boxes: Mapping[int, Sequence[Box]]) -> dict[int, list[Box]]:
    """Return the boxes of the first ranks that hold all elements between them, each box on the first of these."""
    whole = whole_box(shape).volume
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
    """Make sure that what several meshes hold of a leaf is the same; otherwise all ranks raise ``RankMismatch``.

    ``copies`` are those of which that is not certain, by their indices: the same on every rank.
    """
    compared = {index: held for index, held in copies.items() if not held.are_single}
    if not compared:
        return

    call.expect()
    # For each leaf a sum over all ranks, which is zero exactly if (but for chance) what is compared is the same.
    sums = torch.zeros(len(compared), dtype=torch.int64, device="cpu")
    found: list[list[tuple[Box | None, int]]] = [[] for _ in compared]
    for place, (index, held) in enumerate(compared.items()):
        chunks = manifest.chunks[index]
        pieces = dict(zip(chunks.boxes, chunks.pieces, strict=True))
        total = 0
        for (box, part), weight in held.in_common.items():
            piece = pieces[box]
            if not piece.is_meta and holds_memory(piece):  # otherwise there are no elements, and nothing is read
                own = cut_out(piece, (*map(sub, part.start, box.start),), part.sizes)
                number = chunk_number(own, part, chunks.shape)
                found[place].append((part, number))
                total += weight * number
        sums[place] = signed(total)
    weights = torch.arange(1, 2 * len(sums), 2, device="cpu")  # odd numbers: no leaf's sum is lost
    mixed = torch.stack([part.sum() for part in (sums * weights).split(_LEAVES_AT_ONCE)])
    call.ready()
    for part in call.group.all_reduce(mixed).nonzero()[:, 0].tolist():
        first = part * _LEAVES_AT_ONCE
        unlike = call.group.all_reduce(sums[first : first + _LEAVES_AT_ONCE]).nonzero()[:, 0].tolist()
        for place in unlike:
            (differing,) = told_apart(call.group, found[first + place : first + place + 1])
            if differing:  # and not only a rank without elements
                raise _unlike(manifest, list(compared)[first + place], differing[0][1], len(unlike))


def chunk_number(piece: torch.Tensor, box: Box, shape: Sequence[int]) -> int:
    """Return a number for the elements of a box, and for where they lie in a global shape."""
    unreadable = piece.is_neg() and not can_negate(piece.dtype)  # (private functions set such bits)
    sums = [] if piece.is_meta else piece_sums(piece, box, shape).tolist()
    return text_number("chunk", str(box), str(unreadable), str(sums))


def told_apart(
    group: Group, found: Sequence[Sequence[tuple[Box | None, int]]]
) -> list[list[tuple[Box | None, list[tuple[int, ...]]]]]:
    """Have the ranks tell each other numbers of parts of leaves (the same leaves on every rank).

    Return for each leaf the parts of which ranks have different numbers, and the ranks of each: most ranks first.
    """
    said = [(json.loads(text), ranks) for text, ranks in group.told_once(json.dumps(found).encode())]
    result = []
    for place in range(len(found)):
        holders: defaultdict[Any, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for leaves, ranks in said:
            for box, number in leaves[place]:
                holders[box and Box(*[tuple(corner) for corner in box])][number] += ranks
        rows = sorted(holders.items(), key=lambda item: item[0] or ((), ()))
        alike = [(box, [tuple(sorted(ranks)) for ranks in numbers.values()]) for box, numbers in rows]
        result.append(
            [(box, sorted(ranks, key=lambda held: (-len(held), held))) for box, ranks in alike if len(ranks) > 1]
        )
    return result


def _unlike(manifest: Manifest, index: int, ranks: Sequence[Sequence[int]], count: int) -> RankMismatch:
    path = manifest.path(index)
    more = "" if count == 1 else f" (and at {count - 1} more paths at least)"
    return RankMismatch(
        f"{manifest.verb}: the ranks hold the leaf at {path or '<root>'} over meshes of their own, and not the same in "
        f"each{more}: expected copies with the same bytes, got different ones on "
        f"{' and on '.join(map(ranks_named, ranks))}. Nothing was moved. Give different tensors different paths, or "
        'pass the group of one mesh. With replicas="first", gather and reshard take what the first mesh holds.'
    )
