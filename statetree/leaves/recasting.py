"""Recasting: the elements of leaves in another dtype, with the geometry and the ties that they have."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from statetree.errors import Difference, TreeMismatch, UnsupportedLeaf, suppress
from statetree.leaves.builtin import facts, is_plain, is_stored, is_value, materialized
from statetree.leaves.casting import RANGE_REMEDY, castable, out_of_range
from statetree.leaves.parts import PackedRecipe, Recipe, Unpacked, unpack
from statetree.leaves.ties import sharing
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory, extents, lay_out
from statetree.torch_internals import quietly, set_bits

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from statetree.key_paths import Path
    from statetree.tree.spec import TreeSpec


@quietly
def converted(verb: str, spec: TreeSpec, leaves: Sequence[Any], mask: Sequence[bool], dtype: torch.dtype) -> list[Any]:
    """Return the leaves of a tree, with those floating-point tensors that ``mask`` means in another dtype.

    Raises:
        TreeMismatch: If ``castable`` does not allow it, a value is too large, or it would cut a tie.
        UnsupportedLeaf: If a leaf has no elements of one dtype.
    """
    paths = spec.paths()
    later = _converted_later(leaves, mask, dtype)
    now = {index: materialized(leaf) for index, leaf in enumerate(leaves) if index not in later and not is_plain(leaf)}
    at = [index for index, leaf in now.items() if not is_value(leaf)]
    unpacked = unpack(verb, [now[index] for index in at], lambda: [paths[index] for index in at])
    chosen = [place for place, index in enumerate(at) if mask[index] and _changes(unpacked.leaves[place], dtype)]
    refused = [
        Difference(paths[at[place]], "dtype", facts(unpacked.leaves[place])["dtype"], dtype)
        for place in chosen
        if not castable(facts(unpacked.leaves[place])["dtype"], dtype)
    ]
    if refused:
        raise TreeMismatch.between(verb, refused, "Leave them out with where, or convert them yourself.")
    result = list(leaves)
    for index, leaf in later.items():
        result[index] = leaf
    if not chosen:
        return result
    recipes: dict[int, Recipe] = {}  # only what is meant: packing other leaves would write to their attributes
    changing: dict[int, int] = {}  # the parts, and the leaf that each belongs to
    for place in chosen:
        recipe, parts = recast(verb, unpacked.recipe(place), dtype, paths[at[place]])
        changing.update((part, at[place]) for part in parts)
        if place in unpacked.recipes:
            recipes[place] = recipe
    objects = {index: leaf for index, leaf in now.items() if is_value(leaf)}
    changed = {at[place] for place in chosen}
    _check_ties(verb, unpacked, at, changed, changing, objects, paths)
    fresh = _converted(verb, unpacked.parts, changing, dtype, paths)
    packed = replace(unpacked, recipes=recipes).pack(fresh)
    for place in chosen:
        result[at[place]] = packed[place]
    return result


def _converted_later(leaves: Sequence[Any], mask: Sequence[bool], dtype: torch.dtype) -> dict[int, Any]:
    """Return the stored leaves that are not read now; those that are meant as ones converted when they are read."""
    stored = [index for index, leaf in enumerate(leaves) if is_stored(leaf)]
    rows = leaves[stored[0]].converted_later([leaves[index] for index in stored], dtype) if stored else []
    pairs = zip(stored, rows, strict=True)
    return {index: later if mask[index] else leaves[index] for index, later in pairs if later is not None}


def _changes(leaf: Any, dtype: torch.dtype) -> bool:
    own = facts(leaf).get("dtype")
    return isinstance(own, torch.dtype) and own.is_floating_point and own != dtype


def recast(verb: str, recipe: Recipe, dtype: torch.dtype, path: Path) -> tuple[Recipe, list[int]]:
    """Return how a leaf is packed of converted parts, and which parts these are."""
    if isinstance(recipe, int):
        return recipe, [recipe]
    # What indices, codes and scales stand for only a leaf's own class knows: to convert the parts, or to call an
    # elementwise function with them, is to do so with the values only where the parts hold these as they are.
    if not isinstance(recipe, PackedRecipe) or not recipe.leaf_type.elements_only(recipe.context):
        what = recipe.leaf_type.name if isinstance(recipe, PackedRecipe) else "a leaf"
        msg = (
            f"{verb}: cannot convert the leaf at {path}: expected a tensor that holds its elements as they are, got a "
            f"{what or 'leaf'} made of several. Leave it out with where, or convert it yourself."
        )
        raise UnsupportedLeaf(msg, path)
    inner = [recast(verb, part, dtype, path) for part in recipe.inner]
    parts = [part for _, found in inner for part in found]
    fresh = tuple([part for part, _ in inner])
    return replace(recipe, context=recipe.leaf_type.with_dtype(recipe.context, dtype), inner=fresh), parts


def _check_ties(
    verb: str,
    unpacked: Unpacked,
    at: Sequence[int],
    changed: Collection[int],
    changing: Mapping[int, int],
    objects: Mapping[int, Any],
    paths: Sequence[Path],
) -> None:
    """Raise ``TreeMismatch`` if tensors have elements in common that would get two dtypes.

    ``changed`` are leaves, and ``changing`` their parts. ``objects`` stay as they are, with all tensors that they hold.
    """
    tied: list[tuple[int, int]] = []
    for place, index in enumerate(at):
        if index not in changed:  # one tensor in two places, only one of which is meant
            tied += [(changing[part], index) for part in changing.keys() & unpacked.parts_of(place)]
    parts = zip(unpacked.owners, unpacked.parts, strict=True)
    rows = [((at[owner], part in changing, tensor.dtype), tensor) for part, (owner, tensor) in enumerate(parts)]
    for index, value in objects.items():
        with suppress(UnsupportedLeaf):  # what cannot be looked into is passed on
            held = unpack(verb, [value], lambda: paths, memory=False).parts
            rows += [((index, False, part.dtype), part) for part in held]
    for (one, changes, dtype), (other, also, other_dtype) in sharing(rows):
        if changes and not (also and dtype == other_dtype):
            tied.append((one, other))
    if tied:
        found = [Difference(paths[one], "ties", "another dtype", f"one tied to {paths[other]}") for one, other in tied]
        remedy = "Convert all leaves that share memory, or none."
        if any(other in objects for _, other in tied):
            remedy = f"{remedy} In the place of an object, pass its state_dict()."
        raise TreeMismatch.between(verb, found, remedy)


def _converted(
    verb: str, parts: Sequence[torch.Tensor], changing: dict[int, int], dtype: torch.dtype, paths: Sequence[Path]
) -> list[torch.Tensor]:
    """Return plain tensors, those that change on spans of another dtype, as they lie on theirs."""
    result = list(parts)
    refused: list[Difference] = []
    for own in {parts[part].dtype for part in changing}:
        members = [part for part in changing if parts[part].dtype == own]
        columns = Columns([parts[part] for part in members])
        check_memory(verb, columns, lambda index, members=members: paths[changing[members[index]]])  # type: ignore[misc]
        layout = lay_out(columns, extents(columns))
        spans = []
        for source, start, stop in layout.spans:
            tensor, size = parts[members[source]], own.itemsize
            whole = torch.empty(0, dtype=own, device=tensor.device)
            whole.set_(tensor.untyped_storage(), start // size, ((stop - start) // size,), (1,))
            spans.append(whole.to(dtype))
        for index, part in enumerate(members):
            view = spans[layout.span_of[index]].as_strided(
                columns.shapes[index], columns.strides[index], layout.offsets[index]
            )
            # Not of the whole span: what lies between views is no element of the tree.
            if not view.is_meta and (found := out_of_range(parts[part], dtype)):
                refused.append(Difference(paths[changing[part]], "range", *found))
            if columns.neg[index]:
                set_bits(view, conj=False, neg=True)
            result[part] = view
    if refused:
        raise TreeMismatch.between(verb, refused, RANGE_REMEDY)
    return result
