"""The transforms, in the variants that every promise of DESIGN 3.2 is checked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from unittest import mock

import torch

import statetree as st
from statetree import compose
from statetree.leaves.builtin import holds_tensor
from statetree.spans.layout import holds_memory
from statetree.testing import Law
from statetree.torch_internals import quietly
from statetree.tree.atoms import is_atom_type
from statetree.tree.flatten import flatten_for_copy, unflatten
from tests.judge import laws
from tests.judge.regions import raw_bytes, storage_of


class Verb(NamedTuple):
    """A transform as a function of one tree.

    Attributes:
        name: For the test ids.
        apply: The transform. It takes the tree, and what ``prepare`` made of it.
        fresh: Whether the result shares no memory with the tree.
        copies: Whether the result holds the same elements; with ``fresh`` alone they are undefined.
        looks: Whether leaves are looked into, so that what cannot be copied exactly is refused.
        slabs: Whether several small storages may become pieces of one.
        deep: Whether containers that occur twice do so again in the result.
        prepare: Makes what else the transform needs.
    """

    name: str
    apply: Callable[..., Any]
    fresh: bool = True
    copies: bool = True
    looks: bool = True
    slabs: bool = False
    deep: bool = False
    prepare: Callable[[Any], Any] | None = None

    def __str__(self) -> str:
        return self.name

    def laws(self, *, ties: bool = True) -> list[Law]:
        """Return what holds of the transform for every tree that it takes.

        Args:
            ties: Whether leaves of the tree that share a storage without overlapping do so in a result.
        """
        found = [laws.pure, laws.structure, laws.geometry]
        if self.fresh:
            found += [laws.independent]
        if self.copies:
            found += [laws.values]
        if self.prepare is None:
            # What copy_into takes from the source, its opaque objects, is tied to nothing of the destination's.
            found += [laws.overlaps if self.slabs or not ties else laws.ties]
        return found

    def ready(self, tree: Any) -> Callable[[], Any]:
        """Return the call of the transform, with everything prepared."""
        return partial(self.apply, tree) if self.prepare is None else partial(self.apply, tree, self.prepare(tree))


def identity(value: Any) -> Any:
    return value


def target_for(tree: Any) -> Any:
    """Make a tree like another one, with other elements where these mean nothing to the geometry."""
    target = st.offload(tree)
    leaves = [leaf for leaf in st.flatten(target)[0] if isinstance(leaf, torch.Tensor)]
    if all(map(_is_ordinary, leaves)):
        for storage in {leaf.untyped_storage()._cdata: leaf.untyped_storage() for leaf in leaves}.values():
            raw_bytes(storage).bitwise_not_()
    return target


def _is_ordinary(leaf: torch.Tensor) -> bool:
    if leaf.is_quantized:  # its scales may be leaves, too
        return False
    return type(leaf) in (torch.Tensor, torch.nn.Parameter) and storage_of(leaf) is not None


def in_small_buckets(tree: Any) -> Any:
    with mock.patch.object(compose, "BUCKET_BYTES", 1):
        return st.chain(st.offload, st.offload)(tree)


def leaf_by_leaf(transform: Callable[[Any], Any], tree: Any) -> Any:
    """Return what ``stream`` makes of a tree, put together again."""
    leaves, spec = flatten_for_copy(tree, holds_tensor)
    paths = spec.paths()
    order = sorted(range(len(leaves)), key=lambda index: paths[index].sort_key())
    results: list[Any] = [None] * len(leaves)
    for index, (path, leaf) in zip(order, compose.stream(tree, transform), strict=True):
        assert path == paths[index]
        results[index] = leaf
    return unflatten(spec, results)


def streamed(tree: Any) -> Any:
    with mock.patch.object(compose, "BUCKET_BYTES", 100):
        return leaf_by_leaf(st.offload, tree)


def staged(tree: Any, **options: Any) -> Any:
    with st.Stager(**options) as stager:
        return stager.stage(tree)


def staged_again(tree: Any) -> Any:
    """Stage a tree for the third time, into memory that was used before."""
    with st.Stager(max_snapshots=1) as stager:
        stager.stage(tree)
        stager.stage(tree)
        return stager.stage(tree)


def _every_other() -> Callable[..., bool]:
    turns = count()
    return lambda *_: next(turns) % 2 == 0


def cast_and_back(tree: Any) -> Any:
    """Convert tensors to a dtype that holds all their values, and back; not trees with tensors in objects or keys."""
    rows = list(zip(st.paths(tree), st.flatten(tree)[0], strict=True))
    if not all(_is_known(leaf) and not any(map(torch.is_tensor, path)) for path, leaf in rows):
        return tree
    where = [path for path, leaf in rows if _is_ordinary_float(leaf)]
    try:
        return st.cast(st.cast(tree, torch.float64, where=where), torch.float32, where=where)
    except (st.TreeMismatch, st.UnsupportedLeaf) as error:
        assert isinstance(error, st.UnsupportedLeaf) or "ties at" in str(error)
        return tree


def _is_known(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or is_atom_type(type(leaf))


@quietly  # modes of the user's are to hear nothing of the transform, and nothing of this either
def _is_ordinary_float(leaf: Any) -> bool:
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or not _is_ordinary(leaf):
        return False
    if leaf.dtype != torch.float32 or leaf.layout is not torch.strided or not holds_memory(leaf):
        return False
    return not bool(leaf.detach().isnan().any())  # a NaN becomes a quiet one


def renamed_and_back(tree: Any) -> Any:
    """Rename every leaf, and give each its name back. Paths that read alike are refused."""
    rules = st.Renaming({"model.**": "other.model.**"})
    try:
        return st.rename(st.rename({"model": tree}, rules, missing_ok=True), rules.inverse, missing_ok=True)["model"]
    except st.TreeMismatch as error:
        assert "two leaves would get one path" in str(error)
        return tree


VERBS = [
    Verb("offload", st.offload),
    Verb("offload to shared memory", partial(st.offload, share_memory=True), slabs=True),
    Verb("allocate_like", st.allocate_like, copies=False),
    Verb("allocate_like in shared memory", partial(st.allocate_like, share_memory=True), copies=False, slabs=True),
    Verb("copy_into", st.copy_into, prepare=target_for),
    Verb("chain", st.chain(st.offload, partial(st.offload, copy=False), st.offload)),
    Verb("chain in small buckets", in_small_buckets),
    Verb("stream", streamed),
    Verb("stage", staged, deep=True),
    Verb("stage into shared memory", partial(staged, share_memory=True), slabs=True, deep=True),
    Verb("stage again", staged_again, deep=True),
    Verb("offload without copy", partial(st.offload, copy=False), fresh=False),
    Verb("map_leaves", partial(st.map_leaves, identity), fresh=False, looks=False),
    Verb("partition and merge", lambda tree: st.merge(*st.partition(tree, _every_other())), fresh=False, looks=False),
    Verb("select all", lambda tree: st.select(tree, lambda *_: True), fresh=False, looks=False),
    Verb("update with itself", lambda tree: st.update(tree, lambda *_: True, identity), fresh=False, looks=False),
    Verb("cast and back", cast_and_back, fresh=False, looks=False),
    Verb("rename and back", renamed_and_back, fresh=False, looks=False),
    Verb("flatten and unflatten", lambda tree: st.unflatten(*reversed(st.flatten(tree))), fresh=False, looks=False),
    Verb("to_flat and from_flat", lambda tree: st.from_flat(*st.to_flat(tree)), fresh=False, looks=False),
]
