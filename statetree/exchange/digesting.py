"""Digests: numbers for leaves, of which each rank knows its part; and replicas compared by them.

The sums of a distributed tensor (``spans.sums``) are those of its chunks, added up: each rank adds those that it owns,
and one small reduction over the ranks does the rest.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.errors import unsignalled
from statetree.exchange.replica_check import chunk_number, told_apart
from statetree.leaves.builtin import is_cuttable
from statetree.leaves.leaf_numbers import tensor_number, value_number
from statetree.leaves.location import located_error
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory
from statetree.spans.sums import ALL, piece_sums, signed, whole_sums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.chunks.boxes import Box
    from statetree.chunks.layouts import ChunkLayout
    from statetree.exchange.driver import Exchange
    from statetree.exchange.manifest import Manifest
    from statetree.key_paths import Path

#: How many leaves whose replicas differ the ranks tell each other of.
MAX_TOLD = 1000


def own_numbers(manifest: Manifest) -> dict[int, int]:
    """Return a number for every leaf that is not distributed."""
    found = {}
    own = [index for index in manifest.order if index not in manifest.chunks]
    tensors = [index for index in own if is_cuttable(manifest.leaves[index])]
    there = [index for index in tensors if not manifest.leaves[index].is_meta]
    columns = Columns([manifest.leaves[index] for index in there])
    check_memory(manifest.verb, columns, lambda place: manifest.path(there[place]))
    sums = dict(zip(there, whole_sums(columns.tensors), strict=True))
    for index in tensors:
        leaf = manifest.leaves[index]
        found[index] = tensor_number(leaf.dtype, tuple(leaf.shape), sums.get(index))
    for index in own:
        if index not in found:
            try:
                found[index] = value_number(manifest.leaves[index])
            except unsignalled(Exception) as error:
                raise located_error(
                    manifest.verb, "read", error, manifest.spec.paths, manifest.leaves, index
                ) from error
    return found


def global_numbers(run: Exchange, manifest: Manifest) -> dict[int, int]:
    """Agree with the other ranks on a tree, and return a number for every leaf of it, the same on every rank.

    (Those of leaves that are not distributed are this rank's own.)
    """
    (layouts,) = run.layouts(manifest)
    run.expect()
    refuse_partial(manifest)
    found = own_numbers(manifest)
    distributed = [index for index in manifest.order if index in manifest.chunks]
    sums = torch.zeros(len(distributed), ALL, dtype=torch.int64, device="cpu")
    for number, index in enumerate(distributed):
        chunks = manifest.chunks[index]
        _check_disjoint(manifest, index, layouts[index])
        held = layouts[index].sharing(run.group.rank)
        for box, piece in zip(chunks.boxes, chunks.pieces, strict=True):
            holders = held.get(box)  # none of a box on another mesh than the first
            # They take turns, leaf after leaf.
            if holders and holders[number % len(holders)] == run.group.rank and not piece.is_meta:
                sums[number] += piece_sums(piece, box, chunks.shape, ALL).cpu()
    run.ready()
    total = run.group.all_reduce(sums)
    for number, index in enumerate(distributed):
        chunks = manifest.chunks[index]
        known = None if chunks.device == "meta" else total[number]
        found[index] = tensor_number(chunks.dtype, chunks.shape, known)
    return found


def refuse_partial(manifest: Manifest) -> None:
    """Raise ``UnsupportedLeaf`` for a tensor of which the ranks hold partials."""
    for index, chunks in manifest.chunks.items():
        if chunks.partials is not None:
            msg = (
                "the leaf at %PATH% is Partial: expected elements, got partial values on each rank. Redistribute it, "
                "or gather the tree first."
            )
            raise manifest.unsupported(index, msg)


def _check_disjoint(manifest: Manifest, index: int, layout: ChunkLayout) -> None:
    if not layout.disjoint and int(layout.distinct.volumes.sum()) != layout.numel:
        msg = (
            "chunks of the leaf at %PATH% overlap: expected boxes that are the same or have no element in common, got "
            "others. Gather the tree first."
        )
        raise manifest.unsupported(index, msg)


class Copy(NamedTuple):
    """Replicas of one chunk of a leaf, or of a leaf that is not distributed."""

    path: Path  # of the leaf
    box: Box | None  # where the chunk lies in the global shape; ``None`` for a leaf that is not distributed
    #: The ranks that hold the same, for each of the different contents; most ranks first.
    ranks: tuple[tuple[int, ...], ...]


def differing_copies(run: Exchange, manifest: Manifest) -> tuple[list[Copy], int]:
    """Agree with the other ranks on a tree, and return which replicas differ, and in how many leaves.

    Each rank has a number for each of its chunks. Multiplied with weights whose sum over the holders of a chunk is
    zero, they add up to zero if all holders have the same one. Only of leaves for which they do not, more is told.
    """
    (layouts,) = run.layouts(manifest)
    run.expect()
    refuse_partial(manifest)
    rank, size = run.group.rank, run.group.size
    found: dict[int, list[tuple[Box | None, int]]] = {
        index: [(None, number)] for index, number in own_numbers(manifest).items()
    }
    for index, chunks in manifest.chunks.items():
        found[index] = [
            (box, chunk_number(piece, box, chunks.shape))
            for box, piece in zip(chunks.boxes, chunks.pieces, strict=True)
        ]
    holders: dict[int, Mapping[Any, list[int]]] = defaultdict(lambda: {None: list(range(size))})
    holders.update((index, layouts[index].sharing(rank)) for index in manifest.chunks)
    weighted = [
        sum(number * _weight(holders[index][box], rank) for box, number in found[index]) for index in manifest.order
    ]
    own = torch.tensor([signed(number) for number in weighted], dtype=torch.int64, device="cpu")
    run.ready()
    places = run.group.all_reduce(own).nonzero().view(-1).tolist()
    if not places:
        return [], 0
    told = [manifest.order[place] for place in places[:MAX_TOLD]]
    differing = told_apart(run.group, [found[index] for index in told])
    copies = [
        Copy(manifest.path(index), box, tuple(ranks))
        for index, parts in zip(told, differing, strict=True)
        for box, ranks in parts
    ]
    return copies, len(places)


def _weight(holders: Sequence[int], rank: int) -> int:
    """Return by what a rank multiplies its number of a box: minus one, and on the first holder what makes up for it."""
    return len(holders) - 1 if holders[0] == rank else -1
