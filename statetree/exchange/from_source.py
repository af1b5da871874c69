"""Spreading: one rank's tree is described to all, made by each of them, and filled with the source's elements."""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.chunks.layouts import ChunkLayout, whole_on
from statetree.errors import RankMismatch, StateTreeError
from statetree.exchange.consensus import Statement, agree, ready
from statetree.exchange.leaf_metadata import Blueprint, draw, pickled
from statetree.exchange.manifest import Survey, settle
from statetree.exchange.partial_reduction import Source
from statetree.exchange.transfers import Departure, Item, Receipt, Terms, communicating_device, depart
from statetree.leaves.builtin import holds_tensor
from statetree.tree.flatten import flatten_for_copy, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.exchange.group import Group
    from statetree.paths import Path
    from statetree.tree.spec import TreeSpec


#: The dtype and the global shape of a leaf.
Elements = tuple[torch.dtype, tuple[int, ...]]


class Parcel(NamedTuple):
    """What the source says of its tree.

    Attributes:
        spec: The structure.
        described: The indices of the leaves that the blueprint describes.
        blueprint: These leaves. Each rank makes them anew.
        shapes: For every other leaf, which each rank has in its own layout, dtype and global shape.
    """

    spec: TreeSpec
    described: list[int]
    blueprint: Blueprint
    shapes: dict[int, Elements]


class Sent(NamedTuple):
    """A parcel as bytes, and the bytes on the source that its blueprint describes."""

    message: bytes = b""
    spans: Sequence[torch.Tensor] = ()


class Made(NamedTuple):
    """What a rank makes of a parcel: the tree's leaves, what moves into others, and what is left to do at the end."""

    leaves: list[Any]
    items: Sequence[Item]
    finish: Callable[[], None] | None = None


def packed(verb: str, tree: Any, distributed: Callable[[list[Any], TreeSpec], dict[int, Elements]]) -> Sent:
    """Describe a tree. What is wrong with it is described as well, so that all ranks raise the same.

    Args:
        verb: The collective.
        tree: The source's tree.
        distributed: Given leaves and structure, says which leaves each rank has in a layout of its own, and their
            dtypes and global shapes.
    """
    try:
        leaves, spec = flatten_for_copy(tree, holds_tensor, verb=verb)
        shapes = distributed(leaves, spec)
        described = [index for index in range(len(leaves)) if index not in shapes]
        paths = partial(_paths, spec, described)
        chosen = [leaves[index] for index in described]
        blueprint, spans = draw(verb, chosen, paths)
        parcel = Parcel(spec, described, blueprint, shapes)
        return Sent(pickled(verb, parcel, chosen, paths), spans)
    except StateTreeError as error:
        return Sent(pickle.dumps(error))


def _paths(spec: TreeSpec, indices: Sequence[int]) -> Sequence[Path]:
    named = spec.paths()
    return [named[index] for index in indices]


def spread(
    verb: str,
    src: int,
    group: Group,
    bucket_bytes: int,
    prepare: Callable[[], tuple[Statement, tuple[Survey | None, Sent]]],
    make: Callable[[Parcel, Survey | None, dict[int, ChunkLayout], list[Any]], Made],
) -> Any:
    """Give every rank one rank's tree.

    Args:
        verb: The collective.
        src: The source.
        group: The ranks.
        bucket_bytes: As for ``Exchange``.
        prepare: Returns what this rank holds already (``None`` if nothing), and on the source the parcel.
        make: Given the parcel, what this rank holds, the layouts of that, and the leaves that the blueprint describes
            (others are ``None``), makes everything that elements are moved into.
    """
    agreed, (survey, sent) = agree(verb, group, prepare)
    layouts, seen = ({}, b"") if survey is None or agreed.absent else settle(group, survey, agreed, complete=False)
    message = group.broadcast_bytes(sent.message, agreed.nbytes[src], src)

    kinds = [] if survey is None else [holding.device for holding in survey.holdings.values()]

    def terms(key: Any, devices: Sequence[str]) -> Terms:
        return Terms((agreed.key, seen, key), group, communicating_device(group, devices), bucket_bytes, src)

    def receive() -> tuple[Statement, tuple[Parcel, list[torch.Tensor], Departure]]:
        parcel = _opened(verb, message)
        parts, places = parcel.blueprint.allocate()
        sizes = tuple(place.numel() for place in places)
        items = _filling(src, group, sent.spans, places)
        return ready(verb), (parcel, parts, depart(terms(sizes, [place.device.type for place in places]), items))

    _, (parcel, parts, spans) = agree(verb, group, receive)
    spans.move()
    del spans  # and its buckets

    def prepare_rest() -> tuple[Statement, tuple[Made, Departure]]:
        leaves: list[Any] = [None] * parcel.spec.num_leaves
        described = parcel.blueprint.pack(verb, parts, partial(_paths, parcel.spec, parcel.described))
        for index, leaf in zip(parcel.described, described, strict=True):
            leaves[index] = leaf
        made = make(parcel, survey, layouts, leaves)
        return ready(verb), (made, depart(terms("layouts", kinds), made.items))

    _, (made, chunks) = agree(verb, group, prepare_rest)
    chunks.move()
    if made.finish is not None:
        made.finish()
    return unflatten(parcel.spec, made.leaves)


def _opened(verb: str, message: bytes) -> Parcel:
    try:
        parcel = pickle.loads(message)
    except Exception as error:
        msg = (
            f"{verb}: cannot read what the source sent: {type(error).__name__}: {error}. Import what its classes need "
            "on every rank."
        )
        raise RankMismatch(msg) from error
    if isinstance(parcel, StateTreeError):
        raise parcel
    assert isinstance(parcel, Parcel)
    return parcel


def _filling(src: int, group: Group, spans: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> list[Item]:
    """Return how the source's bytes go to the places that every rank has for them."""
    items: list[Item] = []
    for number, place in enumerate(places):
        if place.numel():
            source = Source(whole_on(place.shape, [src]), spans[number : number + 1])
            items.append((source, Receipt(whole_on(place.shape, range(group.size)), [place]), place.dtype))
    return items
