"""Tensors in the axes of another leaf's blocks: the layout of ``like`` for a leaf that was converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from statetree.errors import Difference, TreeMismatch
from statetree.leaves.builtin import leaf_type_of
from statetree.leaves.divided import DividedLeaf, Recipe
from statetree.leaves.engine_type import LeafPart
from statetree.leaves.parts import Unpacked, unpack
from statetree.leaves.replicas import replicated
from statetree.leaves.types.converted import AxisPart, ConvertedLeaf
from statetree.spans.bits import as_plain
from statetree.spans.memory import Memory
from statetree.torch_internals import copy_each, storage_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.chunks.ranks import Ranks
    from statetree.key_paths import Path


@dataclass(slots=True, eq=False)
class LaidOutRecipe:
    """How a tensor is put together of blocks, which are views of it."""

    leaf: Any  # the tensor, distributed or not
    parts: Sequence[Any]  # its blocks

    def lift(self, parts: Sequence[Any]) -> Any:
        """Return the tensor again, on the memory of other blocks."""
        if all(new is old for new, old in zip(parts, self.parts, strict=True)):
            return self.leaf
        pairs = [
            pair
            for old, new in zip(self.parts, parts, strict=True)
            for pair in zip(_held(old), _held(new), strict=True)
        ]
        found: Unpacked = unpack("reshard", [self.leaf], list, memory=False)
        return found.pack([_relocated(tensor, pairs) for tensor in found.parts])[0]


def _held(part: Any) -> Sequence[torch.Tensor]:
    return part.tensors if isinstance(part, LeafPart) else [part]


def _relocated(tensor: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return a tensor that lies in the memory of other views as it lies in that of the views of it.

    ``pairs`` are views, of this tensor and others, and what they have become. Fresh memory is laid out as the old was,
    so that one distance leads from each old view to its new one. If that does not hold, the tensor is copied together.
    """
    key = storage_key(tensor.untyped_storage())
    own = [(old, new) for old, new in pairs if storage_key(old.untyped_storage()) == key]
    if not own:  # no elements of it are here, or it is an attribute
        made: torch.Tensor = replicated("reshard", tensor, Memory(tensor.device), copy=True)
        return made
    places = {(storage_key(new.untyped_storage()), new.storage_offset() - old.storage_offset()) for old, new in own}
    first = own[0][1]
    if len(places) == 1:
        _, distance = places.pop()
        return first.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + distance)
    whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=first.dtype, device=first.device)
    views = [
        whole.as_strided(old.shape, old.stride(), old.storage_offset() - tensor.storage_offset()) for old, _ in own
    ]
    copy_each(views, [new for _, new in own])
    return whole


def laid_out(
    verb: str, leaf: Any, path: Path, recipe: Recipe, alone: Ranks
) -> tuple[DividedLeaf, LaidOutRecipe] | None:
    """Divide a tensor into the blocks that another leaf is made of; ``None`` if that is not, or it is no tensor.

    ``alone`` is this rank, without the others.
    """
    leaf_type = leaf_type_of(type(leaf))
    if not isinstance(recipe.leaf, ConvertedLeaf) or leaf_type is None:
        return None
    is_spread = leaf_type.is_distributed(leaf)
    if not is_spread and not (leaf_type.native and leaf.layout is torch.strided and not leaf.is_nested):
        return None
    shape = tuple(leaf_type.global_shape(leaf)[0] if is_spread else leaf.shape)
    if shape != tuple(recipe.leaf.shape):
        difference = Difference(path, "shape", tuple(recipe.leaf.shape), shape)
        raise TreeMismatch.between(verb, [difference], "Convert to the shape that is expected.")
    blocks = recipe.leaf.blocks()
    parts: list[Any] = [AxisPart(leaf, leaf_type, *block, alone) for block in blocks] if is_spread else []
    if not is_spread:
        parts = [region.view(as_plain(leaf), sizes) for region, sizes in blocks]
    names = recipe.leaf_type.part_names(recipe.context, len(parts))
    return DividedLeaf(recipe.text, dict(zip(names, parts, strict=True))), LaidOutRecipe(leaf, parts)
