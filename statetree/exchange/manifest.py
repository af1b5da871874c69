"""The manifest of a tree: what this rank holds of every leaf, and what the ranks tell each other of that."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from statetree.chunks.local import location_of
from statetree.declare import without_collections
from statetree.errors import UnsupportedLeaf, unsignalled
from statetree.exchange.consensus import Alike, Entry
from statetree.exchange.path_order import order_of
from statetree.exchange.prepared import preparation_under_way
from statetree.leaves.builtin import (
    facts,
    holds_tensor,
    is_cuttable,
    is_distributed,
    is_stored,
    leaf_type_of,
    materialized,
    may_be_deferred,
)
from statetree.leaves.laid_out import LaidOutRecipe
from statetree.leaves.leaf_numbers import text_number
from statetree.leaves.location import located_error
from statetree.leaves.lowering import Lowered, assumed_sums, is_divisible, lower
from statetree.leaves.parts import hides_distributed
from statetree.leaves.types.special import is_strided
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory
from statetree.tree.flatten import flatten, flatten_for_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from statetree.chunks.layouts import ChunkLayout
    from statetree.chunks.local import LocalChunks
    from statetree.chunks.ranks import Ranks
    from statetree.exchange.group import Group
    from statetree.key_paths import Path
    from statetree.leaves.divided import Outline, Recipe
    from statetree.tree.spec import TreeSpec


#: The ``detail`` of a leaf that only other ranks hold.
ABSENT: Final = "absent"
#: What entries say of plain values.
PLAIN: Final = "a plain value"


class Manifest:
    """A tree, as a collective sees it.

    Attributes:
        leaves: Its leaves, collectives under way waited for, and the parts of those that are divided.
        spec: Its structure, down to these.
        outline: Which of these belong to one leaf.
        recipes: How divided leaves are put together, by their paths.
        outer: The leaves, undivided.
        texts: What divided leaves are beside their parts, by their paths.
        order: The indices of the leaves, in the order of their paths: the same on every rank.
        keys: The names of the leaves, in this order.
        structure: What the containers are, in the order of their paths.
        chunks: What this rank holds of each distributed leaf, by its index.
        canonical: For every distributed leaf the first one (in the order of the paths) that lies in the same memory;
            for others that elements are moved into, too.
        complete: Whether the ranks must hold every distributed leaf completely between them.
        written: Whether elements are moved into its leaves: then the ranks must see the same ties.
        replicas: Where meshes differ from rank to rank, whether their elements are compared (``"check"``), or the first
            mesh's taken (``"first"``). With ``None`` all keep what they have.
        received: How its elements move (a ``Received``), if another rank described the tree.
        unread: What stands in the places of leaves that are read later, by boxes, and these, by the ids of the first.
    """

    @without_collections
    def __init__(
        self,
        verb: str,
        tree: Any,
        ranks: Ranks,
        *,
        complete: bool = False,
        written: bool = False,
        replicas: str | None = None,
        every: bool = False,
        unread: bool = False,
    ) -> None:
        leaves, spec = flatten_for_copy(tree, holds_tensor, verb=verb)
        self.unread: dict[int, tuple[torch.Tensor, Any]] = {}
        self.stored: dict[int, torch.Tensor] = {}
        if any(map(may_be_deferred, set(map(type, leaves)))):
            leaves = [self._materialized(leaf, unread=unread) for leaf in leaves]
        self.verb = verb
        self.received: Any = None
        self.complete = complete
        self.written = written
        self.replicas = replicas
        self._lower(lower(verb, leaves, spec, self._flatten, wanted=is_divisible if every else None), ranks)

    def _materialized(self, leaf: Any, *, unread: bool) -> Any:
        if not (unread and is_stored(leaf) and leaf.is_made):
            tensor = materialized(leaf)
            if is_stored(leaf) and tensor.numel():
                self.stored[id(tensor)] = tensor
            return tensor
        found = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        self.unread[id(found)] = found, leaf
        return found

    def is_stored(self, index: int) -> bool:
        """Whether a leaf was read from a file, so that nothing can be written to it."""
        return id(self.leaves[index]) in self.stored

    def read(self, index: int) -> None:
        """Read the elements of a leaf, if they are not."""
        if self.is_unread(index):
            self.leaves[index] = materialized(self.unread[id(self.leaves[index])][1])

    def is_unread(self, index: int) -> bool:
        """Whether the elements of a leaf are not read yet."""
        return bool(self.unread) and id(self.leaves[index]) in self.unread

    def _flatten(self, tree: Any) -> tuple[list[Any], TreeSpec]:
        return flatten_for_copy(tree, holds_tensor, verb=self.verb)

    def _lower(self, lowered: Lowered, ranks: Ranks) -> None:
        self.outline, self.recipes = lowered.outline, lowered.recipes
        self.outer, self.texts = lowered.outer, lowered.texts
        self.replace(lowered.spec, lowered.leaves, lambda index: chunks_of(lowered.leaves[index], ranks))

    def divide(self, recipes: Mapping[Path, Recipe], ranks: Ranks) -> None:
        """Divide those leaves that are divided in a tree with which this one is matched, as they are there."""
        also = {**recipes, **self.recipes}
        if len(also) > len(self.recipes) and self.outer:
            self._lower(lower(self.verb, self.outer, self.outline.spec, self._flatten, also=also), ranks)

    def are_blocks_of_one(self, a: int, b: int) -> bool:
        """Whether two parts are blocks of one leaf: they are apart, though their addresses may not tell."""
        if not self.recipes:
            return False
        owners, paths = self.outline.owners(), self.outline.spec.paths()
        return owners[a] == owners[b] and isinstance(self.recipes.get(paths[owners[a]]), LaidOutRecipe)

    def lift(self, parts: Sequence[Any], recipes: Mapping[Path, Recipe] | None = None) -> Any:
        """Return the tree with others in the places of ``leaves``, divided ones put together by recipes."""
        bound = preparation_under_way() is not None
        return self.outline.lift(self.verb, parts, self.recipes if recipes is None else recipes, bound=bound)

    def leaf_numbers(self, numbers: Mapping[int, int]) -> dict[str, int]:
        """Return a number for each undivided leaf by its name, from those of its parts, in the order of the paths."""
        owners, keys, paths = self.outline.owners(), self.outline.spec.flat_keys(), self.outline.spec.paths()
        own: dict[int, list[str]] = {}
        found: dict[str, int] = {}
        for name, index in zip(self.keys, self.order, strict=True):
            owner = owners[index]
            found[keys[owner]] = numbers[index]
            if owner in self.outline.counts:
                own.setdefault(owner, []).append(f"{name} {numbers[index] % (1 << 64)}")
        for owner, texts in own.items():
            found[keys[owner]] = text_number(self.texts[paths[owner]], *texts)
        return found

    def largest_parts(self) -> dict[int, int]:
        """Return, for each distributed part of a leaf that is divided, the largest part of that leaf."""
        if not self.recipes:
            return {}
        parts: dict[int, list[int]] = {}
        for index, owner in enumerate(self.outline.owners()):
            if owner in self.outline.counts and index in self.chunks:
                parts.setdefault(owner, []).append(index)
        sizes = {index: prod(chunks.shape) * chunks.dtype.itemsize for index, chunks in self.chunks.items()}
        return {index: max(own, key=sizes.__getitem__) for own in parts.values() for index in own}

    def replace(self, spec: TreeSpec, leaves: list[Any], held: Callable[[int], LocalChunks | None]) -> None:
        """Describe another tree. What this rank holds of each leaf that is distributed, a function says."""
        self.spec, self.leaves = spec, leaves
        outline = order_of(spec)
        self.order = outline.order
        self.keys = outline.keys
        self.structure = outline.structure
        self.chunks: dict[int, LocalChunks] = {}
        self.canonical: dict[int, int] = {}
        first: dict[Any, int] = {}
        index = 0
        try:
            for index in self.order:
                chunks = held(index)
                if chunks is not None:
                    self.chunks[index] = chunks
                    key = (chunks.text, chunks.detail, tuple(chunks.boxes), chunks.tie)
                    self.canonical[index] = first.setdefault(key, index)
        except unsignalled(Exception) as error:
            raise located_error(self.verb, "tell the chunks of", error, spec.paths, leaves, index) from error

    @classmethod
    def described(
        cls,
        verb: str,
        outline: Outline,
        spec: TreeSpec,
        leaves: list[Any],
        chunks: Mapping[int, LocalChunks],
        received: Any,
    ) -> Self:
        """Return the manifest of a tree that another rank described: ``chunks`` are what this one holds of it."""
        found = cls.__new__(cls)
        found.received = received
        found.verb, found.complete, found.written, found.replicas, found.unread = verb, False, False, None, {}
        found.outline, found.recipes, found.outer, found.texts, found.stored = outline, {}, [], {}, {}
        found.replace(spec, leaves, chunks.get)
        return found

    def is_absent(self, index: int) -> bool:
        """Whether other ranks hold a leaf, and this one has only something in its place."""
        return index in self.chunks and self.chunks[index].detail == ABSENT

    def entries(self) -> list[Entry]:
        """Return what must be the same on all ranks."""
        held = self.chunks
        texts = [held[index].text if index in held else self._text(index) for index in self.order]
        found = [*map(Entry, self.keys, texts), *self.structure]
        divided = sorted(self.texts, key=lambda path: path.sort_key())
        found += [Entry(f"{path} (leaf)", self.texts[path]) for path in divided]
        return found

    def alike(self, group: Group) -> list[Alike]:
        """Return the parts that ranks with different chunks are taken to hold alike, where they hold the same boxes."""
        if not self.recipes or self.written:
            return []
        sums = assumed_sums(self.leaves)
        found = []
        for name, index in zip(self.keys, self.order, strict=True):
            if index in sums and self.chunks[index].boxes:
                chunks = self.chunks[index]
                # A part whose layout is not known is whole on every rank.
                holders = (
                    range(group.size) if chunks.layout is None else chunks.layout.sharing(group.rank)[chunks.boxes[0]]
                )
                boxes, elements = ", ".join(map(str, chunks.boxes)), text_number(str(sums[index]))
                found.append(Alike(name, boxes, list(holders), elements))
        return found

    def _text(self, index: int) -> str:
        try:
            return f"{_text_of(self.leaves[index])}{' (stored)' if self.is_unread(index) else ''}"
        except unsignalled(Exception) as error:
            raise located_error(self.verb, "describe", error, self.spec.paths, self.leaves, index) from error

    def details(self) -> list[str]:
        """Return what usually is the same on all ranks: which of them hold what, and ties."""
        return [*(chunks.detail for chunks in self.chunks.values()), str(self.ties())]

    def ties(self) -> list[int]:
        """Return, for every leaf that has a canonical one, the number of that one."""
        number = {index: number for number, index in enumerate(self.canonical)}
        return [number[first] for first in self.canonical.values()]

    def own_layouts(self) -> dict[int, ChunkLayout] | None:
        """Return the layouts of the distributed leaves, if this rank knows all of them without asking the others."""
        found = {index: layout for index, chunks in self.chunks.items() if (layout := chunks.layout) is not None}
        return found if len(found) == len(self.chunks) else None

    def known_layouts(self) -> dict[int, ChunkLayout] | None:
        """Do as ``own_layouts``; return ``None`` too where the ranks must hold every leaf completely, and do not."""
        layouts = self.own_layouts()
        return None if layouts is None or (self.complete and self.incomplete(layouts) is not None) else layouts

    def check_readable(self) -> None:
        """Raise ``UnsupportedLeaf`` if the elements of a distributed leaf cannot be read."""
        rows = [(index, chunks, piece) for index, chunks in self.chunks.items() for piece in chunks.memory]
        for index, chunks, piece in rows:
            if piece.is_meta and (chunks.layout is None or chunks.device != "meta"):  # or not so on every rank
                msg = "a chunk of the leaf at %PATH% is on meta: expected elements. Load it first."
                raise self.unsupported(index, msg)
        check_memory(self.verb, Columns([piece for *_, piece in rows]), lambda place: self.path(rows[place][0]))

    def incomplete(self, layouts: dict[int, ChunkLayout]) -> int | None:
        """Return the first leaf of which the ranks hold only a part."""
        for index, layout in layouts.items():
            partials = self.chunks[index].partials
            if not all(held.is_complete for held in (layout, *(partials[1] if partials else ()))):
                return index
        return None

    def check_complete(self, layouts: dict[int, ChunkLayout]) -> None:
        """Raise ``UnsupportedLeaf`` if there is a leaf of which the ranks hold only a part."""
        lacking = self.incomplete(layouts)
        if lacking is not None:
            msg = (
                "the ranks of the group hold only a part of the leaf at %PATH%: expected all of "
                f"{self.chunks[lacking].text[2:]}. Pass the group of all ranks that hold it."
            )
            raise self.unsupported(lacking, msg)

    def moving(self) -> list[int]:
        """Return the distributed leaves to move: one of those that lie in the same memory, and none without memory."""
        return [
            index
            for index, canonical in self.canonical.items()
            if index == canonical and index in self.chunks and self.chunks[index].device != "meta"
        ]

    def add_ties(self, indices: Sequence[int]) -> None:
        """Note which of the leaves that elements are moved into lie in the same memory, distributed or not.

        What is moved depends on these ties, so the ranks have to agree on them. They are in the order of the paths.
        """
        first: dict[Any, int] = {}
        for index in indices:
            if index not in self.chunks:
                leaf = self.leaves[index]
                in_memory = is_cuttable(leaf) and not leaf.is_meta and leaf.numel()
                self.canonical[index] = first.setdefault(location_of(leaf), index) if in_memory else index

    def path(self, index: int) -> Path:
        """Return the path of a leaf."""
        return self.spec.paths()[index]

    def unsupported(self, index: int, message: str) -> UnsupportedLeaf:
        """Return the error for a leaf. ``%PATH%`` in the message stands for its path."""
        path = self.path(index)
        return UnsupportedLeaf(f"{self.verb}: {message.replace('%PATH%', str(path) or '<root>')}", path)


def chunks_of(leaf: Any, ranks: Ranks) -> LocalChunks | None:
    """Return what this rank of a group holds of a distributed leaf; ``None`` if a leaf is not distributed."""
    leaf_type = leaf_type_of(type(leaf))
    if leaf_type is None:
        return None
    plain = type(leaf) in (torch.Tensor, torch.nn.Parameter)
    if plain and not leaf.__dict__:
        return None
    if leaf_type.is_distributed(leaf):
        return leaf_type.local_chunks(leaf, ranks)
    if plain:
        hides = any(map(is_distributed, flatten(leaf.__dict__)[0]))
    else:  # leaves of other types are divided if there are distributed tensors inside
        hides = (leaf_type.opaque or leaf_type.native) and hides_distributed(leaf)
    if hides:
        raise UnsupportedLeaf(
            f"the leaf at %PATH% (a {type(leaf).__qualname__}) holds a distributed tensor inside: expected it as a "
            "leaf of its own. Register the class as a container, or give it a leaf type."
        )
    return None


def _text_of(leaf: Any) -> str:
    """Say what a leaf that is not distributed must have in common on all ranks."""
    cls = type(leaf)
    if (cls is torch.Tensor or cls is torch.nn.Parameter) and is_strided(leaf):
        return _tensor_text(leaf.dtype, leaf.shape)
    if leaf_type_of(cls) is None:
        return PLAIN
    known = facts(leaf)
    named = [str(known[name]) for name in ("dtype", "shape", "layout") if name in known]
    return " ".join([f"a {known['leaf type']}", *named])


@lru_cache(maxsize=4096)
def _tensor_text(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"a tensor {dtype} {tuple(shape)}"
