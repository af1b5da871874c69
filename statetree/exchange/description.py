"""Descriptions: one rank's tree told to all, so that each can make the same and receive its elements."""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from statetree.chunks.boxes import whole_box
from statetree.chunks.layouts import whole_on
from statetree.chunks.local import LocalChunks
from statetree.errors import RankMismatch, StateTreeError
from statetree.exchange.leaf_metadata import LeafMetadata, metadata_of, pickled
from statetree.exchange.manifest import Manifest
from statetree.exchange.partial_reduction import Chunked
from statetree.exchange.transfers import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from statetree.chunks.layouts import ChunkLayout
    from statetree.exchange.group import Group
    from statetree.key_paths import Path
    from statetree.leaves.divided import Outline
    from statetree.tree.spec import TreeSpec

P = ParamSpec("P")
T = TypeVar("T")

#: The dtype and the global shape of a leaf.
Elements = tuple["torch.dtype", tuple[int, ...]]


class Description(NamedTuple):
    """What one rank says of its tree."""

    spec: TreeSpec  # the structure, down to the parts of leaves
    outline: Outline  # which of these belong to one leaf
    described: list[int]  # the indices of the leaves that each rank makes anew
    metadata: LeafMetadata  # these leaves, without their elements
    #: For every other leaf, which each rank has in its own layout, dtype and global shape.
    exchanged: Mapping[int, Elements]
    depends_on_elements: bool  # whether the tree can only be put together once its elements are there

    def paths(self) -> Sequence[Path]:
        """Return the paths of the described leaves."""
        return _paths(self.spec, self.described)

    def put_together(self, verb: str, parts: list[torch.Tensor]) -> list[Any]:
        """Return the leaves of the tree, made from the parts that hold their elements; ``None`` for exchanged ones."""
        leaves: list[Any] = [None] * self.spec.num_leaves
        for index, leaf in zip(self.described, self.metadata.pack(verb, parts, self.paths), strict=True):
            leaves[index] = leaf
        return leaves


class SourceTree(NamedTuple):
    """A tree that one rank sends to all."""

    manifest: Manifest  # the tree
    #: Which of its leaves each rank has in a layout of its own, with their dtypes and global shapes.
    exchanged: Mapping[int, Elements]


class Message(NamedTuple):
    """A description as bytes, and the spans that hold the elements of what it describes; nothing on other ranks."""

    text: bytes = b""
    spans: Sequence[torch.Tensor] = ()


def caught(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | StateTreeError:
    """Return what a function does, or what it finds wrong: that is sent instead, so that all ranks raise it."""
    try:
        return function(*args, **kwargs)
    except StateTreeError as error:
        return error


def described(sent: SourceTree | StateTreeError) -> Message:
    """Describe a tree, or what is wrong with it."""
    found = caught(_described, sent) if isinstance(sent, SourceTree) else sent
    return found if isinstance(found, Message) else Message(pickle.dumps(found))


def _described(sent: SourceTree) -> Message:
    manifest, exchanged = sent
    spec, leaves = manifest.spec, manifest.leaves
    indices = [index for index in range(len(leaves)) if index not in exchanged]
    paths = partial(_paths, spec, indices)
    chosen = [leaves[index] for index in indices]
    metadata, spans = metadata_of(manifest.verb, chosen, paths)
    by_users = any(node[0].compares_aux for node in spec.nodes)  # whose functions may look at elements
    depends = by_users or metadata.depends_on_elements()
    description = Description(spec, manifest.outline, indices, metadata, exchanged, depends)
    return Message(pickled(manifest.verb, description, chosen, paths), spans)


def _paths(spec: TreeSpec, indices: Sequence[int]) -> Sequence[Path]:
    named = spec.paths()
    return [named[index] for index in indices]


def read_description(verb: str, text: bytes) -> Description:
    """Return the description that was received, or raise what the source found wrong with its tree."""
    try:
        found = pickle.loads(text)
    except Exception as error:
        msg = (
            f"{verb}: cannot read what the source sent: {type(error).__name__}: {error}. Import what its classes need "
            "on every rank."
        )
        raise RankMismatch(msg) from error
    if isinstance(found, StateTreeError):
        raise found
    assert isinstance(found, Description)
    return found


def span_transfers(
    src: int, group: Group, spans: Sequence[torch.Tensor], places: Sequence[torch.Tensor]
) -> list[Transfer]:
    """Return how the source's spans go to the places that every rank has for them."""
    found: list[Transfer] = []
    for number, place in enumerate(places):
        if place.numel():
            source = Chunked(whole_on(place.shape, [src]), spans[number : number + 1])
            found.append(Transfer(source, Chunked(whole_on(place.shape, range(group.size)), [place]), place.dtype))
    return found


class Received(NamedTuple):
    """What comes with a tree that another rank described: how its elements move."""

    own: Manifest | None  # the tree itself, on the rank that described it
    #: What moves the elements of leaves that were described, unless they were needed to put them together.
    pending: Sequence[Transfer]
    layouts: dict[int, ChunkLayout]  # those of the leaves that this rank held already
    key: Any  # what the ranks agreed on
    device: str  # the type of device that elements still move from
    reads: bool  # whether some rank looks at elements before it writes them


def manifest_of(verb: str, src: int, description: Description, leaves: list[Any], received: Received) -> Manifest:
    """Return the manifest of a tree that a rank described, which alone has the elements of what is exchanged.

    ``leaves`` are those that it described, with ``None`` in the places of those that are exchanged.
    """
    chunks, own = {}, received.own
    for index, (dtype, shape) in description.exchanged.items():
        pieces = [] if own is None or index in own.chunks or 0 in shape else [own.leaves[index].detach()]
        boxes = [whole_box(shape)] * len(pieces)
        chunks[index] = LocalChunks("", "", shape, dtype, whole_on(shape, [src]), boxes, pieces, index, "")
    return Manifest.described(verb, description.outline, description.spec, leaves, chunks, received)
