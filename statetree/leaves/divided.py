"""Divided leaves: containers with the parts of leaves in their places, and how leaves are put together of parts again.

What the parts are put together to follows from the parts: if each rank has its own chunks of them, the leaf is
distributed as it was; if they are whole, it is the value that they make without ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from statetree.errors import UnsupportedLeaf, unsignalled
from statetree.leaves.engine_type import LeafPart, ListedPart
from statetree.leaves.location import located_error
from statetree.leaves.parts import unpack
from statetree.leaves.replicas import replicated
from statetree.spans.memory import Memory
from statetree.torch_internals import storage_key
from statetree.tree.registry import register_container

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.key_paths import Path
    from statetree.leaves.engine_type import EngineLeafType
    from statetree.tree.spec import TreeSpec


class DividedLeaf:
    """A leaf by its parts, in the place of the leaf."""

    __slots__ = ("parts", "text")

    def __init__(self, text: str, parts: dict[str, Any]) -> None:
        self.text = text  # what it is beside its parts, which must be the same on all ranks, and in trees that match
        self.parts = parts  # by their names

    @staticmethod
    def _statetree_text(metadata: tuple[str, Sequence[str]]) -> str:
        """Say what stands in a lowered tree, in the words of somebody who knows the leaf alone."""
        text = metadata[0].replace("torch.dtype torch.", "torch.").replace("NoneType None", "None")
        return f"a leaf ({text}) made of {', '.join(metadata[1])}"

    def full_text(self) -> str:
        """Return the text, and those of parts that are divided themselves."""
        inside = [part.full_text() for part in self.parts.values() if isinstance(part, DividedLeaf)]
        return f"{self.text} {inside}" if inside else self.text


register_container(
    DividedLeaf,
    lambda divided: ([*divided.parts.values()], (divided.text, (*divided.parts,)), [*divided.parts]),
    lambda metadata, children: DividedLeaf(metadata[0], dict(zip(metadata[1], children, strict=True))),
)


class Outline(NamedTuple):
    """Which leaves of a lowered tree are parts of one leaf."""

    spec: TreeSpec  # the structure of the tree, down to its leaves
    counts: Mapping[int, int]  # for each leaf that is divided how many leaves of the lowered tree stand for it

    def owners(self) -> list[int]:
        """Return, for each leaf of the lowered tree, the leaf that it belongs to."""
        return [leaf for leaf in range(self.spec.num_leaves) for _ in range(self.counts.get(leaf, 1))]

    def lift(self, verb: str, parts: Sequence[Any], recipes: Mapping[Path, Recipe], *, bound: bool = False) -> Any:
        """Return the tree again, of the leaves of the lowered tree, or others in their places, by recipes for paths.

        With ``bound``, elements will be written into the parts later, so that leaves may not be copies of them.
        """
        if not self.counts:
            return self.spec.unflatten(parts)
        paths = self.spec.paths()
        leaves: list[Any] = []
        made: dict[Any, Any] = {}
        position = 0
        for leaf in range(self.spec.num_leaves):
            count = self.counts.get(leaf)
            own = parts[position : position + (1 if count is None else count)]
            position += len(own)
            if count is None:
                leaves.append(own[0])
                continue
            recipe = recipes[paths[leaf]]
            key = (id(recipe.leaf), *map(id, own))  # a leaf in two places is one again
            try:
                if key not in made:
                    made[key] = recipe.lift(own)
                    if bound and made[key] is not recipe.leaf:
                        _check_bound(made[key], own)
            except unsignalled(Exception) as error:
                whole = [recipes[path].leaf if path in recipes else None for path in paths]
                raise located_error(verb, "put together", error, lambda: paths, whole, leaf) from error
            leaves.append(made[key])
        return self.spec.unflatten(leaves)


def _check_bound(leaf: Any, parts: Sequence[Any]) -> None:
    """Raise ``UnsupportedLeaf`` if some elements of a leaf lie elsewhere than in the parts that it was made of."""
    tensors = [tensor for part in parts for tensor in (part.tensors if isinstance(part, LeafPart) else [part])]
    inside, held = (
        {
            storage_key(part.untyped_storage())
            for part in unpack("", [value], list, memory=False).parts
            if not part.is_meta and part.numel()
        }
        for value in (leaf, tensors)
    )
    if not inside <= held:
        raise UnsupportedLeaf(
            f"the leaf at %PATH% ({type(leaf).__qualname__}) is a copy of the parts that it is put together of: "
            "expected views of them, in which later elements are seen. Do not prepare the call."
        )


@dataclass(slots=True, eq=False)
class Recipe:
    """How a divided leaf is put together of its parts."""

    leaf: Any
    leaf_type: EngineLeafType
    context: Any  # what putting it together needs beside the parts
    attributes: Any  # what it carries beside its elements: no part of it, and copied
    inner: Sequence[Recipe | None]  # for each value that it is made of how that is put together, if it is divided, too
    parts: Sequence[Any]  # the leaf's own parts, in a flat list
    #: Its global shape and strides, if it is a ``DTensor``, or lies in the local tensor of one.
    whole: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    text: str = ""  # what it is beside its parts

    def lift(self, parts: Sequence[Any]) -> Any:
        """Return the leaf again, of other parts: each rank's own chunks, or whole tensors."""
        if all(new is old for new, old in zip(parts, self.parts, strict=True)):
            return self.leaf
        values: list[Any] = []
        position = 0
        for inside in self.inner:
            if inside is None:
                values.append(_given(self.parts[position], parts[position]))
                position += 1
            else:
                values.append(inside.lift(parts[position : position + len(inside.parts)]))
                position += len(inside.parts)
        are_chunks = any(isinstance(part, LeafPart) for part in parts)
        context, leaf_type = self.context, self.leaf_type
        if self.whole is not None and not are_chunks:
            context = leaf_type.reshaped(context, *self.whole)
        attributes = replicated("copy", self.attributes, Memory(), copy=True) if self.attributes else None
        made = leaf_type.assemble(context, values, attributes)
        if are_chunks:
            return made
        if self.whole is not None and tuple(made.shape) != self.whole[0]:
            raise self._misfit(f"a shape of {self.whole[0]}", tuple(made.shape))
        if leaf_type.distributed and leaf_type.local_tensor is None:
            self._check_whole(made)
        return made

    def _check_whole(self, made: Any) -> None:
        """Raise ``UnsupportedLeaf`` if a value of whole parts says that it holds other chunks."""
        for part in self.leaf_type.distributed_parts(made, self.leaf_type.contents(made)[0]):
            if part is None:
                continue
            chunks = [(tuple(tensor.shape), start) for tensor, start in zip(part.tensors, part.offsets, strict=True)]
            expected = [(part.shape, (0,) * len(part.shape))]
            if chunks != expected:
                raise self._misfit(f"whole parts at {expected}", chunks)

    def _misfit(self, expected: str, got: Any) -> UnsupportedLeaf:
        cls = type(self.leaf).__qualname__
        return UnsupportedLeaf(
            f"the leaf at %PATH% ({cls}) is not whole when it is packed of whole parts: expected {expected}, got "
            f"{got}. Let its leaf type take shapes and offsets from the parts (see reshaped)."
        )


def _given(old: Any, new: Any) -> Any:
    """Return what ``pack`` is given for a part, in the form in which ``unpack`` returned it."""
    if isinstance(new, LeafPart) and new.stays_part:
        return new
    tensors = list(new.tensors) if isinstance(new, LeafPart) else [new]
    return tensors if isinstance(old, ListedPart) and old.is_listed else tensors[0]
