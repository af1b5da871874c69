"""HeldMemory: where the tensors of leaves lie, and whether they still do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from statetree.leaves.builtin import leaf_type_of
from statetree.leaves.parts import unpack
from statetree.spans.columns import Columns, addresses
from statetree.torch_internals import geometry_guard

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from statetree.paths import Path
    from statetree.tree.spec import TreeSpec


class HeldMemory:
    """The memory of leaves. It is held: nothing else comes to lie where it lies.

    Args:
        spec: The structure that the leaves belong to.
        leaves: All leaves of it.
        indices: Those to look at.
        opaque: Whether tensors inside of opaque leaves are looked at as well.
    """

    def __init__(self, spec: TreeSpec, leaves: Sequence[Any], indices: Sequence[int], *, opaque: bool = False) -> None:
        self._spec = spec
        self._single: list[tuple[Any, Any]] = []  # leaves of one plain tensor, with their leaf types
        self._others: list[Any] = []
        single, others = [], []
        for index in indices:
            leaf_type = leaf_type_of(type(leaves[index]))
            if leaf_type is None or not leaf_type.has_elements or (leaf_type.opaque and not opaque):
                continue
            if leaf_type.only_part(leaves[index]) is not None:
                self._single.append((leaf_type, leaves[index]))
                single.append(index)
            else:
                self._others.append(leaves[index])
                others.append(index)
        self._indices = [*single, *others]
        parts, self._owners = self._parts()
        self._known = _facts(parts)
        self._storages = Columns(parts).storages
        self._sizes = list(map(len, self._storages))
        self._looks_alike = geometry_guard(parts, self._known.shapes, self._known.strides)

    def _parts(self) -> tuple[list[torch.Tensor], list[int]]:
        """Return the plain tensors of the leaves, and for each the place of its leaf."""
        parts: list[Any] = [leaf_type.only_part(leaf) for leaf_type, leaf in self._single]
        if not self._others:
            return parts, list(range(len(parts)))
        unpacked = unpack("prepare", self._others, self._paths_of_others, memory=False)
        count = len(parts)
        return [*parts, *unpacked.parts], [*range(count), *(count + owner for owner in unpacked.owners)]

    def _paths_of_others(self) -> Sequence[Path]:
        paths = self._spec.paths()
        return [paths[index] for index in self._indices[len(self._single) :]]

    def moved(self) -> Path | None:
        """Return the path of the first leaf whose memory, or look on it, is another one by now; ``None`` if none is."""
        parts, owners = self._parts()
        sizes = list(map(len, self._storages))
        missing = [place for place, part in enumerate(parts) if part is None]
        if missing or owners != self._owners:
            return self._path(missing[0] if missing else len(self._single))
        if sizes == self._sizes and self._looks_alike is not None and self._looks_alike(parts):
            if addresses(parts) == self._known.addresses:
                return None
        facts = _facts(parts)
        if facts == self._known and sizes == self._sizes:
            return None
        rows = zip(*facts, sizes, strict=True), zip(*self._known, self._sizes, strict=True)
        place = next(place for place, (now, then) in enumerate(zip(*rows, strict=True)) if now != then)
        return self._path(self._owners[place])

    def _path(self, place: int) -> Path:
        return self._spec.paths()[self._indices[place]]


class _Facts(NamedTuple):
    addresses: Sequence[int]
    shapes: Sequence[Any]
    strides: Sequence[Any]
    dtypes: Sequence[Any]
    neg: Sequence[bool]
    conj: Sequence[bool]


def _facts(parts: Sequence[torch.Tensor]) -> _Facts:
    columns = Columns(parts)
    return _Facts(columns.pointers, columns.shapes, columns.strides, columns.dtypes, columns.neg, columns.conj)
