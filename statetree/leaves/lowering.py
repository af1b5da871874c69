"""Lowering: a tree down to the parts of its leaves, and lifting: the tree again, of other parts.

Most leaves are parts as they stand: plain tensors, and distributed ones whose local tensor is plain. A leaf that is
made of several distributed tensors (a ``DTensor`` of a quantized tensor, a quantized tensor of ``DTensor``, a
registered class with a ``layout``) is *divided*: in the lowered tree a container with its parts stands in its place. So
whatever takes a lowered tree knows strided tensors only, each with a dtype, a global shape and a layout of its own.

What the parts are put together to follows from the parts: if each rank has its own chunks of them, the leaf is
distributed as it was; if they are whole, it is the value that they make without ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.chunks.cuts import Cut
from statetree.errors import UnsupportedLeaf
from statetree.leaves.builtin import is_distributed, is_plain, leaf_type_of, settled
from statetree.leaves.leaf_numbers import value_text
from statetree.leaves.location import located_error
from statetree.leaves.parts import hides_distributed
from statetree.leaves.types.part import ListedPart, Part
from statetree.spans.sums import ALL, whole_sums
from statetree.tree.registry import register_container

if TYPE_CHECKING:
    from statetree.key_paths import Path
    from statetree.leaves.registry import LeafType
    from statetree.tree.spec import TreeSpec


class DividedLeaf:
    """A leaf by its parts, in the place of the leaf.

    Attributes:
        text: What the leaf is beside its parts, which must be the same on all ranks, and in trees that match.
        parts: The parts, by their names.
    """

    __slots__ = ("parts", "text")

    def __init__(self, text: str, parts: dict[str, Any]) -> None:
        self.text = text
        self.parts = parts

    def full_text(self) -> str:
        """Return the text, and those of parts that are divided themselves."""
        inside = [part.full_text() for part in self.parts.values() if isinstance(part, DividedLeaf)]
        return f"{self.text} {inside}" if inside else self.text


register_container(
    DividedLeaf,
    lambda divided: (tuple(divided.parts.values()), (divided.text, tuple(divided.parts)), tuple(divided.parts)),
    lambda metadata, children: DividedLeaf(metadata[0], dict(zip(metadata[1], children, strict=True))),
)


class Outline(NamedTuple):
    """Which leaves of a lowered tree are parts of one leaf.

    Attributes:
        spec: The structure of the tree, down to its leaves.
        counts: For each leaf that is divided how many leaves of the lowered tree stand for it.
    """

    spec: TreeSpec
    counts: Mapping[int, int]

    def owners(self) -> list[int]:
        """Return, for each leaf of the lowered tree, the leaf that it belongs to."""
        return [leaf for leaf in range(self.spec.num_leaves) for _ in range(self.counts.get(leaf, 1))]

    def lift(self, verb: str, parts: Sequence[Any], recipes: Mapping[Path, Recipe]) -> Any:
        """Return the tree again.

        Args:
            verb: On whose behalf, for messages.
            parts: The leaves of the lowered tree, or others in their places.
            recipes: How divided leaves are put together, by their paths.

        Raises:
            UnsupportedLeaf: If a leaf cannot be put together of its parts.
        """
        if not self.counts:
            return self.spec.unflatten(parts)
        paths = self.spec.paths()
        leaves: list[Any] = []
        position = 0
        for leaf in range(self.spec.num_leaves):
            count = self.counts.get(leaf)
            own = parts[position : position + (1 if count is None else count)]
            position += len(own)
            try:
                leaves.append(own[0] if count is None else recipes[paths[leaf]].lift(own))
            except Exception as error:
                whole = [recipes[path].leaf if path in recipes else None for path in paths]
                raise located_error(verb, "put together", error, lambda: paths, whole, leaf) from error
        return self.spec.unflatten(leaves)


class Kept(NamedTuple):
    """A plain value among what a leaf is unpacked into: an attribute, say. It is no part."""

    value: Any


@dataclass(slots=True, eq=False)
class Recipe:
    """How a divided leaf is put together of its parts.

    Attributes:
        leaf: The leaf.
        leaf_type: Its leaf type.
        context: What ``pack`` needs beside the parts.
        inner: For each value that it is unpacked into: how that is put together, if it is divided itself; the value,
            if it is no part; otherwise ``None``.
        parts: The leaf's own parts, in a flat list.
        whole: Its global shape and strides, if it is the local tensor of a ``DTensor``, or lies in one.
    """

    leaf: Any
    leaf_type: LeafType
    context: Any
    inner: Sequence[Recipe | Kept | None]
    parts: Sequence[Any]
    whole: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def lift(self, parts: Sequence[Any]) -> Any:
        """Return the leaf again, of other parts: each rank's own chunks, or whole tensors."""
        if all(new is old for new, old in zip(parts, self.parts, strict=True)):
            return self.leaf
        values: list[Any] = []
        position = 0
        for how in self.inner:
            if isinstance(how, Recipe):
                values.append(how.lift(parts[position : position + len(how.parts)]))
                position += len(how.parts)
            elif isinstance(how, Kept):
                values.append(how.value)
            else:
                values.append(_given(self.parts[position], parts[position]))
                position += 1
        are_chunks = any(isinstance(part, Part) for part in parts)
        if self.leaf_type.local_tensor is not None and not are_chunks:
            return self.leaf_type.gathered(self.leaf, self.context, values)
        context = self.context
        if self.whole is not None and not are_chunks:
            context = self.leaf_type.reshaped(context, *self.whole)
        made = self.leaf_type.pack(context, values)
        if self.whole is not None and not are_chunks and tuple(made.shape) != self.whole[0]:
            raise self._misfit(f"a shape of {self.whole[0]}", tuple(made.shape))
        if self.leaf_type.distributed and not are_chunks:
            self._check_whole(made)
        return made

    def _check_whole(self, made: Any) -> None:
        """Raise ``UnsupportedLeaf`` if a value of whole parts says that it holds other chunks."""
        for part in self.leaf_type.distributed_parts(made):
            chunks = None if part is None else [(tuple(tensor.shape), start) for tensor, start in _chunks(part)]
            expected = None if part is None else [(part.shape, (0,) * len(part.shape))]
            if chunks != expected:
                raise self._misfit(f"whole parts at {expected}", chunks)

    def _misfit(self, expected: str, got: Any) -> UnsupportedLeaf:
        cls = type(self.leaf).__qualname__
        msg = (
            f"the leaf at %PATH% ({cls}) is not whole when it is packed of whole parts: expected {expected}, got "
            f"{got}. Let its leaf type take shapes and offsets from the parts (see reshaped)."
        )
        return UnsupportedLeaf(msg)


def _chunks(part: Any) -> Sequence[tuple[torch.Tensor, tuple[int, ...]]]:
    return list(zip(part.tensors, part.offsets, strict=True))


def _given(old: Any, new: Any) -> Any:
    """Return what ``pack`` is given for a part, in the form in which ``unpack`` returned it."""
    as_list = isinstance(old, ListedPart) and old.listed.is_listed
    if isinstance(new, Part):
        return list(new.tensors) if as_list else new.tensors[0]
    return [new] if as_list else new


class Lowered(NamedTuple):
    """A tree down to the parts of its leaves.

    Attributes:
        leaves: The parts and plain values.
        spec: The structure down to these.
        outline: Which of them belong to one leaf.
        recipes: How divided leaves are put together again, by their paths.
        outer: The leaves, undivided.
        texts: What divided leaves are beside their parts, by their paths.
    """

    leaves: list[Any]
    spec: TreeSpec
    outline: Outline
    recipes: Mapping[Path, Recipe]
    outer: list[Any]
    texts: Mapping[Path, str]


def lower(
    verb: str,
    leaves: list[Any],
    spec: TreeSpec,
    flatten: Callable[[Any], tuple[list[Any], TreeSpec]],
    *,
    also: frozenset[Path] = frozenset(),
    wanted: Callable[[Any], bool] | None = None,
) -> Lowered:
    """Divide those leaves of a tree that are made of several distributed tensors.

    Args:
        verb: On whose behalf, for messages.
        leaves: The leaves of the tree.
        spec: Its structure.
        flatten: Takes a tree apart as this one was.
        also: The paths of others to divide: those that are divided in a tree that this one is matched with.
        wanted: Says of a leaf that is made of tensors (``is_divisible``) whether it is divided in any case.

    Raises:
        UnsupportedLeaf: If a leaf cannot be taken apart.
    """
    recipes: dict[Path, Recipe] = {}
    divided: dict[int, DividedLeaf] = {}
    paths: list[Path] = spec.paths() if also else []
    index = 0
    try:
        for index, leaf in enumerate(leaves):
            chosen = (bool(also) and paths[index] in also) or (wanted is not None and wanted(leaf))
            if _is_several(leaf) or (chosen and is_divisible(leaf)):
                paths = paths or spec.paths()
                divided[index], recipes[paths[index]] = _divide(leaf)
    except Exception as error:
        raise located_error(verb, "take apart", error, spec.paths, leaves, index) from error
    if not divided:
        return Lowered(leaves, spec, Outline(spec, {}), recipes, leaves, {})
    counts = {index: len(recipes[paths[index]].parts) for index in divided}
    inner, inner_spec = flatten(spec.unflatten([divided.get(index, leaf) for index, leaf in enumerate(leaves)]))
    texts = {paths[index]: found.full_text() for index, found in divided.items()}
    return Lowered(inner, inner_spec, Outline(spec, counts), recipes, leaves, texts)


def lies_on_ranks(leaf: Any) -> bool:
    """Whether the ranks of a group hold different chunks of a leaf, or of parts of it."""
    return is_distributed(leaf) or _is_several(leaf)


def _is_several(leaf: Any) -> bool:
    """Whether a leaf is made of several tensors that are distributed, or one, but not as it stands."""
    if type(leaf) is torch.Tensor:
        return False
    leaf_type = leaf_type_of(type(leaf))
    if leaf_type is None or leaf_type.opaque or leaf_type.bare or leaf_type.settles or not leaf_type.has_elements:
        return False
    if leaf_type.is_distributed(leaf):
        return leaf_type.local_tensor is not None and _is_made_of_parts(getattr(leaf, leaf_type.local_tensor))
    return hides_distributed(leaf)


def _is_made_of_parts(local: Any) -> bool:
    if type(local) is torch.Tensor or hasattr(local, "__create_chunk_list__"):
        return False
    leaf_type = leaf_type_of(type(settled(local)))
    return leaf_type is not None and not leaf_type.bare and leaf_type.has_elements


def is_made_of_tensors(leaf: Any) -> bool:
    """Whether a leaf is a tensor subclass whose class says what it is made of, and all that it is beside."""
    if type(leaf) is torch.Tensor or not isinstance(leaf, torch.Tensor):
        return False
    leaf_type = leaf_type_of(type(leaf))
    return leaf_type is not None and not leaf_type.registered and is_divisible(leaf)


def is_divisible(leaf: Any) -> bool:
    """Whether a leaf is made of tensors that are found in it by its own class."""
    leaf_type = leaf_type_of(type(leaf))
    if leaf_type is None or leaf_type.opaque or leaf_type.bare or leaf_type.settles or not leaf_type.has_elements:
        return False
    return not leaf_type.is_distributed(leaf) and getattr(leaf, "layout", None) is not torch.jagged


def _divide(leaf: Any) -> tuple[DividedLeaf, Recipe]:
    leaf_type = leaf_type_of(type(leaf))
    assert leaf_type is not None
    inner, context = leaf_type.unpack(leaf)
    if leaf_type.local_tensor is None:
        rows = leaf_type.distributed_parts(leaf) if leaf_type.distributed else [None] * len(inner)
        given = [part if row is None else ListedPart(row) for part, row in zip(inner, rows, strict=True)]
        return _assembled(leaf, leaf_type, context, given)
    from statetree.leaves.types.dtensor import part_maker

    inside = _divide_local(settled(inner[0]), part_maker(leaf), tuple(map(Cut, range(leaf.dim()))), leaf.stride())
    found, recipe = _assembled(leaf, leaf_type, context, [inside, *inner[1:]])
    local = found.parts.pop("<local>")  # its parts are those of the leaf
    return DividedLeaf(local.text, {**local.parts, **found.parts}), recipe


def _assembled(
    leaf: Any, leaf_type: LeafType, context: Any, given: Sequence[Any], whole: Any = None
) -> tuple[DividedLeaf, Recipe]:
    """Divide a leaf that is unpacked: ``given`` are its parts, or what they are divided into, and plain values."""
    parts: dict[str, Any] = {}
    inner: list[Recipe | Kept | None] = []
    flat: list[Any] = []
    for name, part in zip(leaf_type.part_names(context, len(given)), given, strict=True):
        if is_plain(part) and type(part) is not tuple:
            inner.append(Kept(part))
            continue
        inside, recipe = part if type(part) is tuple else _divide(part) if _is_several(part) else (part, None)
        parts[name] = inside
        inner.append(recipe)
        flat += [inside] if recipe is None else recipe.parts
    return DividedLeaf(_text(leaf, leaf_type), parts), Recipe(leaf, leaf_type, context, inner, flat, whole)


def _divide_local(
    local: torch.Tensor,
    as_part: Callable[[torch.Tensor, tuple[Cut | None, ...]], Part],
    cuts: tuple[Cut | None, ...],
    stride: Sequence[int] | None = None,
) -> tuple[DividedLeaf, Recipe]:
    """Divide the local tensor of a ``DTensor``, or a tensor inside it.

    Args:
        local: The tensor.
        as_part: Makes parts of the ``DTensor``.
        cuts: How the dims of ``local`` follow those of the ``DTensor``.
        stride: The strides of what ``local`` is the chunk of; by default dense ones, in the same order.
    """
    leaf_type = leaf_type_of(type(local))
    assert leaf_type is not None
    inner, context = leaf_type.unpack(local)
    given: list[Any] = list(inner)
    tensors = leaf_type.essential(context, inner)
    for place, (tensor, own) in enumerate(zip(tensors, leaf_type.cuts(local, tensors), strict=True)):
        followed = tuple([None if cut is None else _through(cuts[cut.dim], cut) for cut in own])
        if _is_made_of_parts(tensor):
            given[place] = _divide_local(tensor, as_part, followed)
        else:
            plain = tensor.detach() if type(tensor) is torch.Tensor else tensor.detach().as_subclass(torch.Tensor)
            given[place] = as_part(plain, followed)
    shape = as_part(local, cuts).shape
    strides = _dense(shape, local.stride()) if stride is None else tuple(stride)
    return _assembled(local, leaf_type, context, given, (shape, strides))


def _through(outer: Cut | None, cut: Cut) -> Cut | None:
    """Return how a dim follows that of the outermost tensor, if it follows one that does."""
    if outer is None:
        return None
    return cut._replace(
        dim=outer.dim, times=cut.times * outer.times, over=cut.over * outer.over, is_flat=cut.is_flat or outer.is_flat
    )


def _dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return strides without gaps, in the order of others."""
    found = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):
        found[dim] = step
        step *= max(1, shape[dim])
    return tuple(found)


def _text(leaf: Any, leaf_type: LeafType) -> str:
    """Say what a leaf is beside its parts: its class, and its facts but shapes, which differ from rank to rank."""
    shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None

    def named(value: Any) -> Any:
        if shape is not None and isinstance(value, (list, tuple)) and tuple(value) == shape:
            return "its shape"
        if type(value) in (list, tuple):
            return [named(item) for item in value]
        if isinstance(value, Mapping):
            return {key: named(item) for key, item in value.items()}
        return value

    facts = {name: named(fact) for name, fact in leaf_type.describe(leaf).items() if name not in ("shape", "class")}
    told = ", ".join(f"{name} {value_text(fact)}" for name, fact in facts.items())
    return f"{type(leaf).__qualname__} {told}".replace("builtins.", "").rstrip()


def assumed_sums(parts: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """Return numbers for the elements of those parts that ranks are taken to hold the same of, by their places.

    An inner tensor none of whose dims is cut with the ``DTensor`` (a scale of the whole tensor, say) must have the same
    elements on ranks that hold different chunks: nobody could tell which one's is meant.
    """
    found = [
        place
        for place, part in enumerate(parts)
        if isinstance(part, Part) and part.is_assumed_equal and not part.tensors[0].is_meta
    ]
    sums = whole_sums([parts[place].tensors[0] for place in found], ALL) if found else []
    return {place: tuple(row.tolist()) for place, row in zip(found, sums, strict=True)}
