"""HeldMemory: where the tensors of leaves lie, and whether they still do."""

from __future__ import annotations

from functools import partial
from itertools import zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.leaves.builtin import leaf_type_of
from statetree.leaves.parts import unpack
from statetree.leaves.types.special import special_layout
from statetree.spans.columns import Columns, addresses
from statetree.torch_internals import geometry_guard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.key_paths import Path
    from statetree.tree.spec import TreeSpec


#: What must stay as it is, of ``Columns``.
_facts: Final = attrgetter("pointers", "shapes", "strides", "dtypes", "neg", "conj")


class HeldMemory:
    """The memory of some leaves of a tree. It is held, so that nothing else comes to lie where it lies.

    Asked again and again, this has to be quick: leaves that are plain tensors, or hold one in an attribute, are not
    taken apart. Tensors inside of opaque leaves are looked at if ``opaque``.
    """

    def __init__(self, spec: TreeSpec, leaves: Sequence[Any], indices: Sequence[int], *, opaque: bool = False) -> None:
        self._spec = spec
        self._by_kind: dict[str | None, list[int]] = {}
        for index in indices:
            leaf = leaves[index]
            leaf_type = leaf_type_of(type(leaf))
            if leaf_type is None or not leaf_type.has_elements or (leaf_type.opaque and not opaque):
                continue
            kind = "" if leaf_type.native and special_layout(leaf) is None else leaf_type.local_tensor
            if kind and type(getattr(leaf, kind)) is not torch.Tensor:
                kind = None
            self._by_kind.setdefault(kind, []).append(index)
        self._leaves = {kind: [leaves[index] for index in chosen] for kind, chosen in self._by_kind.items()}
        parts, self._owners = self._parts()
        columns = Columns(parts)
        self._known = _facts(columns)
        self._addresses, self._storages = columns.pointers, columns.storages
        self._sizes = list(map(len, self._storages))
        self._looks_alike: Callable[[Sequence[torch.Tensor]], bool] | None = geometry_guard(
            parts, columns.shapes, columns.strides
        )

    def _parts(self) -> tuple[list[torch.Tensor], list[int]]:
        """Return the plain tensors of the leaves, and for each the leaf that it belongs to."""
        parts: list[torch.Tensor] = []
        owners: list[int] = []
        for kind, held in self._leaves.items():
            own = self._by_kind[kind]
            if kind is None:
                unpacked = unpack("prepare", held, partial(self._paths, own), memory=False)
                parts += unpacked.parts
                owners += [own[place] for place in unpacked.owners]
            else:
                parts += map(attrgetter(kind), held) if kind else held
                owners += own
        return parts, owners

    def _paths(self, indices: Sequence[int]) -> Sequence[Path]:
        paths = self._spec.paths()
        return [paths[index] for index in indices]

    def moved(self) -> Path | None:
        """Return the path of the first leaf whose memory, or look on it, is another one by now; ``None`` if none is."""
        parts, owners = self._parts()
        sizes = list(map(len, self._storages))
        same_memory = (owners, sizes) == (self._owners, self._sizes) and addresses(parts) == self._addresses
        if same_memory and self._looks_alike is not None and self._looks_alike(parts):
            return None
        facts = _facts(Columns(parts))
        if same_memory and facts == self._known:
            return None
        now = [*zip_longest(owners, sizes, *facts)]
        then = [*zip(self._owners, self._sizes, *self._known, strict=True)]
        changed = next((index for index, pair in enumerate(zip_longest(now, then)) if pair[0] != pair[1]), None)
        return None if changed is None else self._spec.paths()[self._owners[min(changed, len(then) - 1)]]
