"""Leaves taken apart into plain tensors, and packed again: many at once, each tensor object once."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.errors import UnsupportedLeaf, describe_leaf, unsignalled
from statetree.leaves.builtin import OPAQUE, leaf_type_of
from statetree.leaves.location import located_error
from statetree.leaves.types.opaque import Rest
from statetree.leaves.types.special import QUANTIZED
from statetree.spans.columns import Columns
from statetree.spans.geometry_cache import recognise, remember
from statetree.torch_internals import carry_tangents, is_zero_tensor
from statetree.tree.flatten import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from statetree.key_paths import Path
    from statetree.leaves.engine_type import EngineLeafType
    from statetree.leaves.types.opaque import Members
    from statetree.tree.spec import TreeSpec


@dataclass(slots=True, eq=False)
class PackedRecipe:
    """The recipe of a leaf that is more than one plain tensor."""

    leaf_type: EngineLeafType
    context: Any  # what putting it together needs beside its parts
    inner: tuple[Any, ...]  # the recipe of each of its parts, which hold its elements; a list for one in several chunks
    identity: int  # leaves that were one object become one object again
    attributes: AttributesRecipe | None = None  # what it carries beside its elements

    def within(self) -> list[Recipe]:
        """Return all recipes in this one, those of attributes last."""
        found: list[Recipe] = []
        for part in self.inner:
            found += part if isinstance(part, list) else [part]
        return found if self.attributes is None else found + self.attributes.leaves


class AttributesRecipe(NamedTuple):
    """What a leaf carries beside its elements: a tree, by its structure and the recipes of its leaves."""

    spec: TreeSpec
    leaves: list[Recipe]


class AtomRecipe(NamedTuple):
    """The recipe of an atom: the value itself."""

    value: Any


class MemberRecipe(NamedTuple):
    """The recipe of one of several opaque leaves that are taken apart together, so that they go on sharing objects."""

    whole: PackedRecipe
    position: int
    members: Members


Recipe = PackedRecipe | AtomRecipe | MemberRecipe | int


@dataclass(slots=True, eq=False)
class Unpacked:
    """The leaves of a tree, taken apart into plain tensors."""

    verb: str  # on whose behalf, for messages
    leaves: list[Any]  # as they were given
    paths: Callable[[], Sequence[Path]]
    columns: Columns  # what torch knows about the parts
    owners: Sequence[int]  # for each part, the index of the leaf that it was first found in
    #: The indices of the leaves that are plain tensors as they stand. They are the first parts, in this order.
    plain: Sequence[int]
    recipes: Mapping[int, Recipe]  # those of the other leaves, by their indices; leaves in neither are atoms, and kept
    parts: Sequence[torch.Tensor] = field(init=False)  # the plain tensors inside the leaves, each tensor object once
    _part_of: dict[int, int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.parts = self.columns.tensors

    def recipe(self, leaf: int) -> Recipe:
        """Return how a leaf is packed again."""
        if self._part_of is None:
            self._part_of = {index: part for part, index in enumerate(self.plain)}
        part = self._part_of.get(leaf)
        return self.recipes.get(leaf, AtomRecipe(self.leaves[leaf])) if part is None else part

    def parts_of(self, leaf: int) -> list[int]:
        """Return the indices of all parts that a leaf consists of, those that it shares with others included."""
        pending = [self.recipe(leaf)]
        found = []
        while pending:
            recipe = pending.pop()
            if isinstance(recipe, int):
                found.append(recipe)
            elif not isinstance(recipe, AtomRecipe):
                pending += [recipe.whole] if isinstance(recipe, MemberRecipe) else recipe.within()
        return found

    def held_by(self, leaves: Iterable[int]) -> set[int]:
        """Return the indices of the parts that some leaves hold: of objects taken apart together, only these."""
        recipes = list(map(self.recipe, leaves))
        together = [recipe for recipe in recipes if isinstance(recipe, MemberRecipe)]
        alone: list[Recipe] = [recipe for recipe in recipes if not isinstance(recipe, MemberRecipe)]
        for whole, _, members in together[:1]:  # which is that of all
            alone += map(whole.inner.__getitem__, members.held_by([recipe.position for recipe in together]))
        alone += chain.from_iterable([recipe.within() for recipe in packed(alone)])
        return {recipe for recipe in alone if isinstance(recipe, int)}

    def metadata_parts(self, *, attributes: bool) -> list[int]:
        """Return the indices of parts on whose elements leaves depend: offsets, objects, and ``attributes``."""
        chosen: list[Recipe] = []
        for recipe in packed(self.recipes.values()):
            if not recipe.leaf_type.elements_only(recipe.context):
                chosen += recipe.within()
            if attributes and recipe.attributes is not None:
                carried = recipe.attributes.leaves
                chosen += chain(carried, *[inside.within() for inside in packed(carried)])
        return list(dict.fromkeys(part for part in chosen if isinstance(part, int)))

    def registered(self, leaf: int) -> list[PackedRecipe]:
        """Return a leaf's recipes of registered leaf types, from the outside in: parts do not say their contexts."""
        return [recipe for recipe in packed([self.recipe(leaf)]) if recipe.leaf_type.registered]

    def holds_distributed(self) -> bool:
        """Whether a distributed tensor lies inside a leaf that is taken apart."""
        return any(recipe.leaf_type.distributed for recipe in packed(self.recipes.values()))

    def detach(self) -> None:
        """Let no writing to opaque leaves change any more what they are packed of, which is done once."""
        for recipe in packed(self.recipes.values()):
            if isinstance(recipe.context, Rest):
                recipe.context.detach()

    def pack(self, parts: Sequence[torch.Tensor], made: Mapping[int, Any] | None = None) -> list[Any]:
        """Return the leaves with other plain tensors in place of the parts.

        Args:
            parts: These tensors.
            made: What takes the place of objects, by their ``id``.

        Raises:
            UnsupportedLeaf: If a leaf cannot be put together again, with its path.
        """
        if len(self.plain) == len(self.leaves):
            return list(parts)
        result = list(self.leaves)
        for index, part in zip(self.plain, parts, strict=False):  # plain leaves come first
            result[index] = part
        packer = _Packer(parts, made or {})
        for index, recipe in self.recipes.items():
            try:
                result[index] = packer.pack(recipe)
            except unsignalled(Exception) as error:
                raise located_error(self.verb, "put together", error, self.paths, self.leaves, index) from error
        return result


def unpack(
    verb: str, leaves: list[Any], paths: Callable[[], Sequence[Path]], *, memory: bool = True, together: bool = False
) -> Unpacked:
    """Take leaves apart into plain tensors.

    Args:
        verb: On whose behalf, for messages.
        leaves: Any leaves.
        paths: Gives their paths.
        memory: Whether their memory will be read or written.
        together: Whether objects that several opaque leaves hold are to be one again when they are packed.

    Raises:
        UnsupportedLeaf: If a leaf cannot be taken apart, with its path.
    """
    plain, rest, columns = _plain_tensors(leaves, memory=memory)
    owners: Sequence[int] = plain
    recipes: dict[int, Recipe] = {}
    if rest:
        unpacker = _Unpacker(list(columns.tensors), _local_views([leaves[index] for index in rest]))
        owners = list(plain)
        if together:
            unpacker, recipes, more = _unpack_together(leaves, rest, unpacker)
            owners += more
        for index in rest:
            if index in recipes:
                continue
            try:
                recipes[index] = unpacker.unpack(leaves[index])
            except unsignalled(Exception) as error:
                raise located_error(verb, "take apart", error, paths, leaves, index) from error
            owners += [index] * (len(unpacker.parts) - len(owners))
        if len(owners) > len(plain):
            columns = Columns(unpacker.parts)
            if unpacker.views and not recognise(columns, memory=memory):
                are_views(columns)  # and are recognised the next time
    return Unpacked(verb, leaves, paths, columns, owners, plain, recipes)


def _unpack_together(
    leaves: list[Any], rest: Sequence[int], unpacker: _Unpacker
) -> tuple[_Unpacker, dict[int, Recipe], list[int]]:
    """Unpack all opaque leaves as one; none at all if that fails, and each has to be tried by itself, to name it.

    Returns the unpacker to go on with, the recipes by leaf, and the owners of the parts.
    """
    chosen = [index for index in rest if leaf_type_of(type(leaves[index])) is OPAQUE]
    if len(chosen) < 2:
        return unpacker, {}, []
    attempt = _Unpacker(list(unpacker.parts), unpacker.views)
    owners: list[int] = []
    try:
        tensors, context, members = OPAQUE.unpack_together([leaves[index] for index in chosen])
        inner = []
        for tensor, owner in zip(tensors, members.owners, strict=True):
            inner.append(attempt.unpack(tensor))
            owners += [chosen[owner]] * (len(attempt.parts) - len(unpacker.parts) - len(owners))
    except unsignalled(Exception):  # user code raises it, and will do so again
        return unpacker, {}, []
    whole = PackedRecipe(OPAQUE, context, tuple(inner), -1)
    return attempt, {index: MemberRecipe(whole, at, members) for at, index in enumerate(chosen)}, owners


def hides_distributed(leaf: Any) -> bool:
    """Whether there is a distributed tensor inside a leaf (``UnsupportedLeaf`` for ``%PATH%``, if nobody can tell)."""
    return any(recipe.leaf_type.distributed for recipe in packed([_Unpacker([]).unpack(leaf)]))


def packed(recipes: Iterable[Recipe]) -> Iterator[PackedRecipe]:
    """Yield the recipes of leaves that are taken apart, and of tensors inside them, each once, from the outside in."""
    pending = list(recipes)[::-1]
    seen: set[int] = set()
    while pending:
        recipe = pending.pop()
        whole = recipe.whole if isinstance(recipe, MemberRecipe) else recipe
        if isinstance(whole, PackedRecipe) and whole.identity not in seen:
            seen.add(whole.identity)
            pending += reversed(whole.within())
            yield whole


_attributes_of: Final = attrgetter("__dict__")


# Nearly all leaves of nearly all states are tensors that need no recipe: of class torch.Tensor, strided, without
# attributes or gradients, each given once. To find that out leaf by leaf costs more than to copy them, so the
# question is put to all leaves at once, the cheapest first:
#
# 1. Does the whole list look like one that was seen before (`recognise`)? Then its leaves were views, all of them.
# 2. If not: leave out what is of another class, and ask all the others together (`are_views`).
# 3. If that is a no, some of them are sparse, nested, quantized, appear twice, or have attributes or gradients. Those
# that say so cheaply are left to their leaf types, and the rest is asked once more. If even one of these is no view,
# none is taken for plain: it is not worth it to look for it, as the leaf types will.
def _plain_tensors(leaves: list[Any], *, memory: bool) -> tuple[Sequence[int], list[int], Columns]:
    """Return the positions of leaves that are distinct plain tensors, those of all others but atoms; and their columns.

    The columns are those of the plain tensors.
    """
    columns = Columns(leaves)
    if recognise(columns, memory=memory) and _need_no_packing(columns):
        return range(len(leaves)), [], columns
    classes = list(map(type, leaves))
    atoms = {cls for cls in set(classes) if leaf_type_of(cls) is None}
    positions = [index for index, cls in enumerate(classes) if cls is torch.Tensor]
    rest = [index for index, cls in enumerate(classes) if cls is not torch.Tensor and cls not in atoms]
    tensors = [leaves[index] for index in positions]
    columns = Columns(tensors)
    if (recognise(columns, memory=memory) or are_views(columns)) and _need_no_packing(columns):
        return positions, rest, columns
    first = {
        id(tensor): index
        for index, tensor in zip(reversed(positions), reversed(tensors), strict=True)
        if not tensor.__dict__ and not tensor.requires_grad
    }
    plain = sorted(first.values())
    columns = Columns([leaves[index] for index in plain])
    if not are_views(columns):
        plain, columns = [], Columns([])
    return plain, sorted([*rest, *set(positions).difference(plain)]), columns


def _local_views(leaves: Sequence[Any]) -> Collection[int]:
    """Return the ids of the local tensors of distributed leaves, if none of them needs packing."""
    types = {cls: leaf_type_of(cls) for cls in set(map(type, leaves))}
    names = {cls: found.local_tensor for cls, found in types.items() if found and found.local_tensor}
    columns = Columns([getattr(leaf, names[type(leaf)]) for leaf in leaves if type(leaf) in names])
    is_plain = columns.tensors and columns.no_subclasses and (recognise(columns, memory=False) or are_views(columns))
    return set(map(id, columns.tensors)) if is_plain and _need_no_packing(columns) else ()


def _need_no_packing(columns: Columns) -> bool:
    """Whether strided tensors are distinct, of no subclass, and without attributes and gradients."""
    if not columns.no_subclasses or any(columns.requires_grad) or any(map(_attributes_of, columns.tensors)):
        return False
    known = columns.known_addresses
    return (known is not None and known.distinct) or len(set(map(id, columns.tensors))) == len(columns.tensors)


def are_views(columns: Columns) -> bool:
    """Whether tensors are strided views on storages, and not sparse, nested or quantized. If so, it remembers them."""
    try:
        plain = (
            QUANTIZED.isdisjoint(columns.dtypes)
            and len(columns.pointers) == len(columns.tensors)  # sparse tensors have no storage and refuse
            and not any(columns.nested)
            and not (0 in columns.pointers and any(map(is_zero_tensor, columns.tensors)))
            and not carry_tangents(columns.tensors)
        )
    except unsignalled(RuntimeError, NotImplementedError):
        return False
    if plain:
        remember(columns)
    return plain


class _Unpacker:
    def __init__(self, parts: list[torch.Tensor], views: Collection[int] = ()) -> None:
        self.parts = parts
        self.views = views  # the ids of tensors inside leaves that are known to need no packing
        self._seen: dict[int, Recipe] = {id(part): index for index, part in enumerate(parts)}
        self._open: set[int] = set()  # what is being unpacked
        self._alive: list[Any] = []  # keeps the ids in _seen from being handed out again

    def unpack(self, value: Any) -> Recipe:
        """Unpack a leaf, or a tensor inside one."""
        leaf_type = leaf_type_of(type(value))
        if leaf_type is None:
            return AtomRecipe(value)
        identity = id(value)
        seen = self._seen.get(identity)
        if seen is not None:
            return seen
        if identity in self.views:
            self._seen[identity] = part = self._plain(value)
            return part
        if identity in self._open:
            raise UnsupportedLeaf(
                f"the leaf at %PATH% ({describe_leaf(value)}) holds itself, in its attributes or its inner tensors: "
                "expected no cycle. Remove the attribute."
            )
        self._alive.append(value)
        self._open.add(identity)
        parts, context, attributes = leaf_type.contents(value)
        if context is None and not attributes and len(parts) == 1 and parts[0] is value:
            recipe: Recipe = self._plain(value)
        else:
            inner: list[Any] = []
            for position, part in enumerate(parts):
                # Only the first part may be the value itself: that is its own memory. Anywhere else it is a cycle.
                if part is value and not position:
                    inner.append(self._plain(part))
                elif leaf_type.registered and isinstance(part, (list, tuple)):  # several chunks of it
                    inner.append(list(map(self.unpack, part)))
                else:
                    inner.append(self.unpack(part))
            carried = None
            if attributes:
                leaves, spec = flatten(attributes)
                carried = AttributesRecipe(spec, list(map(self.unpack, leaves)))
            recipe = PackedRecipe(leaf_type, context, tuple(inner), identity, carried)
        self._open.discard(identity)
        self._seen[identity] = recipe
        return recipe

    def _plain(self, value: torch.Tensor) -> int:
        self.parts.append(value)
        return len(self.parts) - 1


class _Packer:
    def __init__(self, parts: Sequence[torch.Tensor], made: Mapping[int, Any]) -> None:
        self._parts = parts
        self._made: dict[int, Any] = {**made}

    def pack(self, recipe: Recipe | list[Recipe]) -> Any:
        if isinstance(recipe, int):
            return self._parts[recipe]
        if isinstance(recipe, AtomRecipe):
            return recipe.value
        if isinstance(recipe, list):  # of the chunks of one part
            return list(map(self.pack, recipe))
        if isinstance(recipe, MemberRecipe):
            return self.pack(recipe.whole)[recipe.position]
        if recipe.identity in self._made:
            return self._made[recipe.identity]
        inner = list(map(self.pack, recipe.inner))
        attributes = None
        if recipe.attributes is not None:
            attributes = unflatten(recipe.attributes.spec, list(map(self.pack, recipe.attributes.leaves)))
        value = self._made[recipe.identity] = recipe.leaf_type.assemble(recipe.context, inner, attributes)
        return value
