"""Descriptions: one rank's tree told to all, so that each can make the same and receive its elements.

They go between the ranks of one job by pickle, as ``torch.distributed`` sends objects; never are they read from a file.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import Counter, defaultdict
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.chunks.boxes import whole_box
from statetree.chunks.layouts import whole_on
from statetree.chunks.local import LocalChunks
from statetree.errors import RankMismatch, StateTreeError, UnsupportedLeaf, describe_leaf, unsignalled
from statetree.exchange.manifest import Manifest
from statetree.exchange.plan import Chunked, Transfer
from statetree.leaves.builtin import is_plain
from statetree.leaves.parts import Recipe, Unpacked, packed, unpack
from statetree.spans.columns import Columns
from statetree.spans.layout import as_bytes, check_memory, extents, lay_out, make_views
from statetree.spans.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from statetree.chunks.layouts import ChunkLayout
    from statetree.exchange.group import Group
    from statetree.key_paths import Path
    from statetree.leaves.divided import Outline
    from statetree.tree.spec import TreeSpec

#: The dtype and the global shape of a leaf.
Elements = tuple[torch.dtype, tuple[int, ...]]


#: What metadata says of tensors, by the names that ``Columns`` has for it.
_KNOWN = ("dtypes", "shapes", "strides", "offsets", "storage_keys", "contiguous", "nbytes", "conj", "neg")


class LeafMetadata(NamedTuple):
    """All of a list of leaves but their elements."""

    kept: list[Any]  # the leaves that are plain values, in their places
    bare: Sequence[int]  # the positions of leaves that are plain tensors
    recipes: dict[int, Recipe]  # how the other leaves are packed
    #: For each device, the indices of its plain tensors and what ``Columns`` knows about them. It goes by its type, and
    #: by its number only if there are several of that type: a lone one is each rank's own.
    tensors: dict[str, tuple[list[int], dict[str, list[Any]]]]

    def depends_on_elements(self) -> bool:
        """Whether leaves can only be put together once their elements are there."""
        for recipe in packed(self.recipes.values()):
            # Attributes may lie in containers of users, whose functions look at them.
            if recipe.attributes is not None or not recipe.leaf_type.elements_only(recipe.context):
                return True
        return False

    def allocate(self, verb: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the plain tensors that the leaves are packed from, and the spans on which their elements lie.

        The spans are ``uint8`` tensors without contents, in the order in which ``metadata_of`` gives the originals.
        """
        count = sum(len(indices) for indices, _ in self.tensors.values())
        parts: list[Any] = [None] * count
        spans: list[torch.Tensor] = []
        for name, (indices, known) in self.tensors.items():
            columns = Columns(parts[: len(indices)])
            columns.adopt({**known, "own_storages": len(set(known["storage_keys"])) == len(indices)})
            layout = lay_out(columns, extents(columns))
            memory = Memory(_device(verb, name))
            buffers = memory.carve([span.stop - span.start for span in layout.spans])
            for index, view in zip(indices, make_views(columns, layout, buffers, memory.device), strict=True):
                parts[index] = view
            if name != "meta":
                spans += [
                    as_bytes(buffer.storage, buffer.start, buffer.start + span.stop - span.start)
                    for buffer, span in zip(buffers, layout.spans, strict=True)
                ]
        return parts, spans

    def pack(self, verb: str, parts: list[torch.Tensor], paths: Callable[[], Sequence[Path]]) -> list[Any]:
        """Return leaves of what ``allocate`` returned, which has its elements by now if ``depends_on_elements``."""
        return Unpacked(verb, self.kept, paths, Columns(parts), (), self.bare, self.recipes).pack(parts)


def _device(verb: str, name: str) -> torch.device:
    """Return a device by its name, if this rank has it."""
    device = torch.device(name)
    if name != device.type:
        count = torch.get_device_module(device.type).device_count()
        if count <= device.index:
            raise UnsupportedLeaf(
                f"{verb}: the source's tensors lie on several devices: expected {device} on every rank, got {count} of "
                "its type. Bring them to one device first."
            )
    return device


def metadata_of(
    verb: str, leaves: list[Any], paths: Callable[[], Sequence[Path]]
) -> tuple[LeafMetadata, list[torch.Tensor]]:
    """Return the metadata of leaves, and the spans on which their elements lie, as ``uint8`` tensors."""
    unpacked = unpack(verb, leaves, paths, together=True)
    check_memory(verb, unpacked.columns, lambda index: paths()[unpacked.owners[index]])
    devices = unpacked.columns.devices
    of_type = Counter(device.type for device in set(devices))
    by_device: defaultdict[str, list[int]] = defaultdict(list)
    for index, device in enumerate(devices):
        by_device[device.type if of_type[device.type] == 1 else str(device)].append(index)
    tensors = {}
    spans: list[torch.Tensor] = []
    for name, indices in sorted(by_device.items()):
        columns = Columns([unpacked.parts[index] for index in indices])
        numbers: dict[int, int] = {}
        keys = [numbers.setdefault(key, len(numbers)) for key in columns.storage_keys]
        known = {**{name: list(getattr(columns, name)) for name in _KNOWN}, "storage_keys": keys}
        tensors[name] = indices, known
        if name != "meta":
            layout = lay_out(columns, extents(columns))
            spans += [as_bytes(columns.storages[span.source], span.start, span.stop) for span in layout.spans]
    kept = [leaf if is_plain(leaf) else None for leaf in leaves]
    return LeafMetadata(kept, list(unpacked.plain), dict(unpacked.recipes), tensors), spans


class _ModulePickler(pickle.Pickler):
    """Knows modules, which pickle does not: they go by their names, as functions and classes do."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
            return import_module, (value.__name__,)
        return NotImplemented


def _dumps(message: Any) -> bytes:
    file = io.BytesIO()
    _ModulePickler(file, protocol=5).dump(message)  # buffers of opaque objects take this one
    return file.getvalue()


def pickled(verb: str, message: Any, leaves: Sequence[Any], paths: Callable[[], Sequence[Path]]) -> bytes:
    """Return a message with metadata of leaves as bytes; ``UnsupportedLeaf`` names the first plain value to blame."""
    try:
        return _dumps(message)
    except unsignalled(Exception) as error:
        for index, leaf in enumerate(leaves):
            try:
                if not isinstance(leaf, torch.Tensor):
                    _dumps(leaf)
            except unsignalled(Exception) as own:
                path = paths()[index]
                msg = (
                    f"{verb}: cannot send the leaf at {path or '<root>'} ({describe_leaf(leaf)}) to other ranks: "
                    f"expected what can be pickled, got {type(own).__name__}: {own}. Leave it out."
                )
                raise UnsupportedLeaf(msg, path) from own
        msg = f"{verb}: cannot send the tree's structure to other ranks: {type(error).__name__}: {error}. Simplify it."
        raise UnsupportedLeaf(msg) from error


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


def described(make: Callable[[], SourceTree]) -> tuple[bytes, Sequence[torch.Tensor], Manifest | None]:
    """Return a tree's description as bytes, the spans that hold the elements of what it describes, and the tree.

    If something is wrong with the tree, that is described instead, so that all ranks raise it.
    """
    try:
        manifest, exchanged = make()
        spec, leaves = manifest.spec, manifest.leaves
        indices = [index for index in range(len(leaves)) if index not in exchanged]
        paths = partial(_paths, spec, indices)
        chosen = [leaves[index] for index in indices]
        metadata, spans = metadata_of(manifest.verb, chosen, paths)
        by_users = any(node[0].compares_aux for node in spec.nodes)  # whose functions may look at elements
        depends = by_users or metadata.depends_on_elements()
        description = Description(spec, manifest.outline, indices, metadata, exchanged, depends)
        return pickled(manifest.verb, description, chosen, paths), spans, manifest
    except StateTreeError as error:
        return pickle.dumps(error), (), None


def _paths(spec: TreeSpec, indices: Sequence[int]) -> Sequence[Path]:
    named = spec.paths()
    return [named[index] for index in indices]


def read_description(verb: str, text: bytes) -> Description:
    """Return the description that was received, or raise what the source found wrong with its tree."""
    try:
        found: Description | StateTreeError = pickle.loads(text)
    except unsignalled(Exception) as error:
        raise RankMismatch(
            f"{verb}: cannot read what the source sent: {type(error).__name__}: {error}. Import what its classes need "
            "on every rank."
        ) from error
    if isinstance(found, StateTreeError):
        raise found
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
        held = None if own is None else own.chunks.get(index)
        if own is None or 0 in shape:
            pieces = []
        elif held is None:
            pieces = [own.leaves[index].detach()]
        else:  # of a leaf type that says so of all that it has
            pieces = [*held.pieces] if [*held.boxes] == [whole_box(shape)] else []
        boxes = [whole_box(shape)] * len(pieces)
        chunks[index] = LocalChunks("", "", shape, dtype, whole_on(shape, [src]), boxes, pieces, index, "")
    return Manifest.described(verb, description.outline, description.spec, leaves, chunks, received)
