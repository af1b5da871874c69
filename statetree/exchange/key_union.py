"""Unions: where ranks hold different keys, they tell each other what they hold, and all see a tree that has everything.

What a rank does not hold is a leaf of which it has no chunk. What only some ranks hold is a distributed leaf, even if
it is a plain tensor there. Ranks that hold the same tell it once.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.chunks.boxes import whole_box
from statetree.chunks.local import LocalChunks, location_of
from statetree.chunks.ranks import ranks_named
from statetree.errors import RankMismatch, TreeMismatch, UnsupportedLeaf, shown
from statetree.exchange.consensus import Fingerprint, text_digest
from statetree.exchange.description import pickled
from statetree.exchange.manifest import ABSENT, PLAIN
from statetree.exchange.path_order import order_of
from statetree.exchange.transfers import as_sendable
from statetree.leaves.builtin import is_cuttable, is_plain
from statetree.leaves.divided import Outline
from statetree.tree.union import united

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.exchange.call import Call
    from statetree.exchange.manifest import Manifest
    from statetree.key_paths import Path
    from statetree.tree.spec import TreeSpec


class _Told(NamedTuple):
    """What a rank says of a leaf: what all that hold it must hold, and what the others need to know of it."""

    text: str  # what must be the same
    value: Any = None  # A plain value
    absent: LocalChunks | None = None  # what those know of a tensor who hold nothing of it, if it can be cut into boxes
    parameter: bool = False  # whether it is a parameter
    requires_grad: bool = False  # whether it records gradients
    summed: bool = False  # whether ranks hold partials of it


class _HeldKeys(NamedTuple):
    """What a rank says that it holds: the structure, its leaves in the order of the paths, and which are divided."""

    spec: TreeSpec
    told: list[_Told]
    divided: list[str]


def unite(call: Call, manifest: Manifest) -> None:
    """Make a manifest one of a tree that has every leaf that some rank holds. All ranks call this."""
    entries = zip(manifest.order, manifest.entries(), strict=False)  # of the leaves: those of containers follow
    told = [_told(manifest, index, entry.text) for index, entry in entries]
    outline = _HeldKeys(manifest.spec, told, sorted(map(str, manifest.recipes)))
    paths = manifest.spec.paths()
    plain = [index for index, leaf in enumerate(manifest.leaves) if is_plain(leaf)]
    values = [manifest.leaves[index] for index in plain]
    text = pickled(manifest.verb, outline, values, lambda: [paths[index] for index in plain])
    alike = text_digest([str(part) for entry in manifest.entries() for part in entry])
    call.agree(Fingerprint(f"keys of {call.described()}"))
    call.expect()
    heard = call.group.told_once(text, alike=alike)
    if len(heard) > 1:  # read after all were sent: that may fail on some ranks only
        _merge(manifest, [pickle.loads(said) for said, _ in heard], [ranks for _, ranks in heard], call.group.rank)


def _told(manifest: Manifest, index: int, text: str) -> _Told:
    leaf, chunks = manifest.leaves[index], manifest.chunks.get(index)
    if chunks is None and is_cuttable(leaf):
        chunks = partly_held(leaf, text)
    if chunks is None:
        return _Told(text, leaf if is_plain(leaf) else None)
    absent = LocalChunks(text, ABSENT, chunks.shape, chunks.dtype, None, [], [], ABSENT, chunks.device)
    kind = isinstance(leaf, torch.nn.Parameter), bool(getattr(leaf, "requires_grad", False))
    return _Told(text, None, absent, *kind, summed=chunks.partials is not None)


def _merge(manifest: Manifest, outlines: Sequence[_HeldKeys], ranks: Sequence[Sequence[int]], rank: int) -> None:
    """Put the union in the place of what this rank holds. Each of the outlines is true of some of the ranks."""
    union = united([outline.spec for outline in outlines])
    if union.differences:
        mismatch = TreeMismatch.between(manifest.verb, union.differences, "")
        msg = f"{mismatch} With union=True mappings may have different keys on different ranks, and nothing else."
        raise RankMismatch(msg)
    places = [{index: place for place, index in enumerate(order_of(outline.spec).order)} for outline in outlines]
    mine = manifest.order
    own = next(number for number, holders in enumerate(ranks) if rank in holders)
    leaves: list[Any] = []
    chunks: dict[int, LocalChunks] = {}
    paths = union.spec.paths()
    for index, found in enumerate(union.leaves):
        told = {number: outlines[number].told[places[number][leaf]] for number, leaf in found.items()}
        _check(manifest.verb, paths[index], told, ranks)
        first = next(iter(told.values()))
        here = mine[places[own][found[own]]] if own in found else None
        leaf = manifest.leaves[here] if here is not None else _placeholder(first)
        leaves.append(leaf)
        everywhere = len(told) == len(outlines)
        if here is not None and here in manifest.chunks:
            chunks[index] = manifest.chunks[here]
        elif first.absent is not None and not everywhere:
            absent = first.absent._replace(tie=(ABSENT, index))
            chunks[index] = partly_held(leaf, first.text) if here is not None else absent
    divided = sorted({name for outline in outlines for name in outline.divided})
    if divided:
        raise UnsupportedLeaf(
            f"{manifest.verb}: the leaf at {divided[0]} is "
            "made of several distributed tensors: expected the same keys on every rank then. Take it apart first."
        )
    manifest.outline, manifest.outer = Outline(union.spec, {}), leaves
    manifest.replace(union.spec, leaves, chunks.get)


def _check(verb: str, path: Path, told: Mapping[int, _Told], ranks: Sequence[Sequence[int]]) -> None:
    texts: defaultdict[str, list[int]] = defaultdict(list)
    for number, found in told.items():
        texts[found.text] += ranks[number]
    if len(texts) > 1:
        held = "; ".join(f"{text} on {ranks_named(sorted(where))}" for text, where in texts.items())
        raise RankMismatch(
            f"{verb}: the ranks do not hold the same at {path or '<root>'}: expected one layout, got {shown([held])}. "
            "Nothing was moved. Pass trees whose leaves have the same shapes and dtypes wherever ranks hold them."
        )
    first = next(iter(told.values()))
    if len(told) < len(ranks) and (first.summed or (first.absent is None and first.text != PLAIN)):
        what = f"{first.text} in partial values" if first.summed else first.text
        holders = ranks_named(sorted(rank for number in told for rank in ranks[number]))
        msg = (
            f"{verb}: the leaf at {path or '<root>'} is on {holders} alone: expected a tensor or a plain value, got "
            f"{what}. Take it apart first, or leave it out."
        )
        raise UnsupportedLeaf(msg, path)


def _placeholder(told: _Told) -> Any:
    """Return what stands for a leaf that this rank does not hold: the value, or a tensor on ``meta``."""
    if told.absent is None:
        return told.value
    fresh = torch.empty(told.absent.shape, dtype=told.absent.dtype, device="meta")
    if told.parameter:
        return torch.nn.Parameter(fresh, requires_grad=told.requires_grad)
    return fresh.requires_grad_() if told.requires_grad else fresh


def partly_held(leaf: torch.Tensor, text: str) -> LocalChunks:
    """Return what this rank knows of a plain tensor that some other ranks do not hold."""
    shape, filled = tuple(leaf.shape), bool(leaf.numel())
    boxes = [whole_box(shape)] if filled else []
    pieces = [as_sendable(leaf)] if filled else []
    return LocalChunks(text, "", shape, leaf.dtype, None, boxes, pieces, location_of(leaf), leaf.device.type)
