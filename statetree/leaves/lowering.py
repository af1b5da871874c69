"""Lowering: a tree down to the parts of its leaves, and lifting: the tree again, of other parts.

Most leaves are parts as they stand: plain tensors, and distributed ones whose local tensor is plain. A leaf that is
made of several distributed tensors (a ``DTensor`` of a quantized tensor, a quantized tensor of ``DTensor``, a
registered class with a ``layout``) is *divided*: in the lowered tree a container with its parts stands in its place. So
whatever takes a lowered tree knows strided tensors only, each with a dtype, a global shape and a layout of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.chunks.cuts import Cut
from statetree.chunks.ranks import this_rank_alone
from statetree.errors import TreeMismatch, unsignalled
from statetree.leaves.builtin import is_distributed, leaf_type_of, materialized
from statetree.leaves.divided import DividedLeaf, Outline, Recipe
from statetree.leaves.engine_type import LeafPart, WholePart
from statetree.leaves.laid_out import laid_out
from statetree.leaves.location import located_error
from statetree.leaves.parts import hides_distributed
from statetree.leaves.value_texts import value_text
from statetree.spans.bits import as_plain
from statetree.spans.sums import whole_sums

if TYPE_CHECKING:
    from statetree.key_paths import Path
    from statetree.leaves.engine_type import EngineLeafType, LeafContents
    from statetree.tree.spec import TreeSpec


class Lowered(NamedTuple):
    """A tree down to the parts of its leaves."""

    leaves: list[Any]  # the parts and plain values
    spec: TreeSpec  # the structure down to these
    outline: Outline  # which of them belong to one leaf
    recipes: Mapping[Path, Recipe]  # how divided leaves are put together again, by their paths
    outer: list[Any]  # the leaves, undivided
    texts: Mapping[Path, str]  # what divided leaves are beside their parts, by their paths


def lower(
    verb: str,
    leaves: list[Any],
    spec: TreeSpec,
    flatten: Callable[[Any], tuple[list[Any], TreeSpec]],
    *,
    also: Mapping[Path, Recipe] | None = None,
    wanted: Callable[[Any], bool] | None = None,
) -> Lowered:
    """Divide those leaves of a tree that are made of several distributed tensors.

    ``flatten`` takes a tree apart as this one was. ``also`` is what is divided in a tree that this one is matched with,
    as it is there. ``wanted`` says of leaves that are made of tensors (``is_divisible``) whether they are, in any case.
    """
    recipes: dict[Path, Any] = {}
    divided: dict[int, DividedLeaf] = {}
    paths: list[Path] = spec.paths() if also else []
    alone = this_rank_alone() if also else None
    index = 0
    try:
        for index, leaf in enumerate(leaves):
            partner = also.get(paths[index]) if also else None
            found = None if partner is None or alone is None else laid_out(verb, leaf, paths[index], partner, alone)
            if found is not None:
                divided[index], recipes[paths[index]] = found
                continue
            chosen = partner is not None or (wanted is not None and wanted(leaf))
            if is_several(leaf) or (chosen and is_divisible(leaf)):
                paths = paths or spec.paths()
                divided[index], recipes[paths[index]] = _divide(leaf, wanted, partner)
    except TreeMismatch:
        raise
    except unsignalled(Exception) as error:
        raise located_error(verb, "take apart", error, spec.paths, leaves, index) from error
    if not divided:
        return Lowered(leaves, spec, Outline(spec, {}), recipes, leaves, {})
    counts = {index: len(recipes[paths[index]].parts) for index in divided}
    inner, inner_spec = flatten(spec.unflatten([divided.get(index, leaf) for index, leaf in enumerate(leaves)]))
    texts = {paths[index]: found.full_text() for index, found in divided.items()}
    return Lowered(inner, inner_spec, Outline(spec, counts), recipes, leaves, texts)


def lie_on_ranks(verb: str, leaves: list[Any], spec: TreeSpec) -> bool:
    """Whether the ranks of a group hold different chunks of a tree's leaves, or of parts of them."""
    for index, leaf in enumerate(leaves):
        try:
            if is_distributed(leaf) or is_several(leaf):
                return True
        except unsignalled(Exception) as error:
            raise located_error(verb, "take apart", error, spec.paths, leaves, index) from error
    return False


def is_several(leaf: Any) -> bool:
    """Whether a leaf is made of several tensors that are distributed, or one, but not as it stands."""
    if type(leaf) is torch.Tensor:
        return False
    leaf_type = leaf_type_of(type(leaf))
    if leaf_type is None or not _has_parts(leaf_type):
        return False
    if leaf_type.is_distributed(leaf):
        return leaf_type.local_tensor is not None and _is_made_of_parts(getattr(leaf, leaf_type.local_tensor))
    return hides_distributed(leaf)


def _has_parts(leaf_type: EngineLeafType) -> bool:
    """Whether values are found to be made of tensors by their own class, and are none themselves."""
    return leaf_type.has_elements and not (leaf_type.opaque or leaf_type.native or leaf_type.deferred)


def _is_made_of_parts(local: Any) -> bool:
    if type(local) is torch.Tensor or hasattr(local, "__create_chunk_list__"):
        return False
    leaf_type = leaf_type_of(type(materialized(local)))
    return leaf_type is not None and not leaf_type.native and leaf_type.has_elements


def is_made_of_tensors(leaf: Any) -> bool:
    """Whether a leaf is a tensor subclass whose class says what it is made of, and all that it is beside."""
    leaf_type = leaf_type_of(type(leaf))
    is_told = leaf_type is not None and not leaf_type.registered
    return is_told and isinstance(leaf, torch.Tensor) and is_divisible(leaf)


def is_divisible(leaf: Any) -> bool:
    """Whether a leaf is made of tensors that are found in it by its own class."""
    leaf_type = leaf_type_of(type(leaf))
    if leaf_type is None or not _has_parts(leaf_type):
        return False
    return not leaf_type.is_distributed(leaf) and getattr(leaf, "layout", None) is not torch.jagged


def _divide(
    leaf: Any, wanted: Callable[[Any], bool] | None = None, partner: Recipe | None = None
) -> tuple[DividedLeaf, Recipe]:
    """Divide a leaf, and of what it is made what is ``wanted``, or divided in its partner in another tree.

    Of the local tensor of a ``DTensor``, everything is divided.
    """
    leaf_type = leaf_type_of(type(leaf))
    assert leaf_type is not None
    contents = leaf_type.contents(leaf)
    inner = list(map(materialized, contents[0]))
    if leaf_type.local_tensor is None:
        rows = leaf_type.distributed_parts(leaf, inner)
        parts: list[Any] = []
        for part, row in zip(inner, rows, strict=True):
            is_whole = any(rows) and type(part) is torch.Tensor and part.layout is torch.strided
            parts.append(row or (WholePart([part], part.shape, [(0,) * part.dim()]) if is_whole else part))
        return _assembled(leaf, leaf_type, contents, parts, wanted=wanted, partner=partner)
    from statetree.leaves.types.dtensor import part_maker

    whole = tuple(leaf.shape), leaf.stride()
    inside = _divide_local(inner[0], part_maker(leaf), (*map(Cut, range(leaf.dim())),), whole[1])
    return inside[0], _assembled(leaf, leaf_type, contents, [inside], whole)[1]


def _assembled(
    leaf: Any,
    leaf_type: EngineLeafType,
    contents: LeafContents,
    given: Sequence[Any],
    whole: Any = None,
    *,
    wanted: Callable[[Any], bool] | None = None,
    partner: Recipe | None = None,
) -> tuple[DividedLeaf, Recipe]:
    """Divide a leaf: ``given`` are its parts, or what they are divided into."""
    _, context, attributes = contents
    parts: dict[str, Any] = {}
    inner: list[Recipe | None] = []
    flat: list[Any] = []
    names = leaf_type.part_names(context, len(given))
    if partner is not None and partner.leaf_type.local_tensor is not None:
        partner = partner.inner[0]  # of its local tensor
    partners = [None] * len(given) if partner is None or len(partner.inner) != len(given) else partner.inner
    for name, part, other in zip(names, given, partners, strict=True):
        chosen = other is not None or (wanted is not None and wanted(part))
        if type(part) is tuple:
            inside, recipe = part
        else:
            is_divided = is_several(part) or (chosen and is_divisible(part))
            inside, recipe = _divide(part, wanted, other) if is_divided else (part, None)
        parts[name] = inside
        inner.append(recipe)
        flat += [inside] if recipe is None else recipe.parts
    text = _text(leaf, leaf_type)
    recipe = Recipe(leaf, leaf_type, context, attributes, inner, flat, whole, text)
    return DividedLeaf(text, parts), recipe


def _divide_local(
    local: torch.Tensor,
    as_part: Callable[[torch.Tensor, tuple[Cut | None, ...]], LeafPart],
    cuts: tuple[Cut | None, ...],
    stride: Sequence[int] | None = None,
) -> tuple[DividedLeaf, Recipe]:
    """Divide the local tensor of a ``DTensor``, or a tensor inside it, whose dims follow those of the ``DTensor``.

    The strides of what it is the chunk of are by default dense, in the same order.
    """
    leaf_type = leaf_type_of(type(local))
    assert leaf_type is not None
    contents = leaf_type.contents(local)
    given: list[Any] = []
    inner = list(map(materialized, contents[0]))
    for tensor, own in zip(inner, leaf_type.cuts(local, inner), strict=True):
        followed = tuple([None if cut is None else _through(cuts[cut.dim], cut) for cut in own])
        if _is_made_of_parts(tensor):
            given.append(_divide_local(tensor, as_part, followed))
        else:
            given.append(as_part(as_plain(tensor), followed))
    shape = as_part(local, cuts).shape
    strides = _dense(shape, local.stride()) if stride is None else tuple(stride)
    return _assembled(local, leaf_type, contents, given, (shape, strides))


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


def _text(leaf: Any, leaf_type: EngineLeafType) -> str:
    """Say what a leaf is beside its parts: its class and facts, without shapes and devices: ranks have their own."""
    dims = leaf.dim() if isinstance(leaf, torch.Tensor) else -1

    def without_shape(value: Any) -> Any:
        # A number for each dim is its shape, or depends on that: the blocks of a row, where a rank holds one row.
        if isinstance(value, (list, tuple)) and len(value) == dims and all(type(size) is int for size in value):
            return "sizes"
        if isinstance(value, (list, tuple)):
            return [without_shape(item) for item in value]
        if isinstance(value, Mapping):
            return {key: without_shape(value[key]) for key in sorted(value, key=repr)}
        return value

    facts = leaf_type.describe(leaf).items()
    told = [
        f"{name} {value_text(without_shape(fact), devices=False)}"
        for name, fact in facts
        if name not in ("shape", "class")
    ]
    return f"{type(leaf).__qualname__} {', '.join(told)}".replace("builtins.", "").rstrip()


def assumed_sums(parts: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """Return numbers for the elements of those parts that ranks are taken to hold the same of, by their indices.

    An inner tensor that is not cut along all dims of the ``DTensor`` that are cut (a scale of the whole tensor, or of
    each row, say) must have the same elements on ranks that hold different chunks, but the same boxes of it: nobody
    could tell which one's is meant.
    """
    chosen = [
        index
        for index, part in enumerate(parts)
        if isinstance(part, LeafPart) and part.is_assumed_equal and not part.tensors[0].is_meta
    ]
    sums = whole_sums([parts[index].tensors[0] for index in chosen]) if chosen else []
    return {index: (*row.tolist(),) for index, row in zip(chosen, sums, strict=True)}
