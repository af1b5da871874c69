"""Sightings: what a collective is called with, as far as it takes to know it again, and aliases of its tensors."""

from __future__ import annotations

import sys
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.leaves.builtin import holds_tensor, leaf_type_of
from statetree.leaves.types.special import is_strided
from statetree.spans.columns import addresses, storage_sizes, storages_of
from statetree.spans.layout import holds_memory
from statetree.torch_internals import carry_tangents, is_zero_tensor, storage_at, storage_key, without_elements
from statetree.tree.spec import TreeSpec
from statetree.tree.traversal import traverse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.exchange.group import Group


#: Fewer leaves are described as quickly as they are recognised.
FEWEST: Final = 16
#: A call of more bytes is not kept: where so much moves, nobody notices what planning costs.
MOST_BYTES: Final = 64 << 20

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
#: Values that can hold nothing, and tell all that they are.
VALUES: Final = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
#: The names of a ``DTensor``'s attributes, with that of ``nn.Parameter``. Others may hold anything.
_ATTRIBUTES: Final = frozenset({"_local_tensor", "_spec", "_is_param"})

_local: Final = attrgetter("_local_tensor")
_spec: Final = attrgetter("_spec")
_placed: Final = attrgetter("mesh", "placements", "shard_order", "tensor_meta")


class Sighting:
    """What a call is given, as far as it takes to know it again.

    Attributes:
        group: The ranks.
        leaves: The leaves of all trees.
        specs: The structure of each tree.
        tensors: The tensors among the leaves, and the local ones of those that are distributed; each object once.
        parts: The plain ones of these.
        key: What calls are looked up by: the verb and its options, and where tensors lie.
    """

    def __init__(self, verb: str, trees: Sequence[Any], options: str, group: Group) -> None:
        found = [traverse(tree, verb=verb, holds_tensor=holds_tensor) for tree in trees]
        self.group = group
        self.leaves = [*chain.from_iterable(leaves for leaves, _ in found)]
        self.specs = [TreeSpec(tuple(nodes), len(leaves)) for leaves, nodes in found]
        self._classes = list(map(type, self.leaves))
        distributed_class = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        rows = list(zip(self.leaves, self._classes, strict=True))
        plain = [leaf for leaf, cls in rows if cls in _PLAIN]
        self._distributed = [leaf for leaf, cls in rows if cls is distributed_class]
        self.values = [leaf for leaf, cls in rows if cls not in _PLAIN and cls is not distributed_class]
        self.parts: list[torch.Tensor] = [*plain, *map(_local, self._distributed)]
        every = [*self.parts, *self._distributed]
        self.tensors: list[torch.Tensor] = list(dict(zip(map(id, every), every, strict=True)).values())
        self._attributes = list(map(tuple, map(vars, every)))
        first: dict[int, int] = {}
        self._ties = list(map(first.setdefault, map(id, every), range(len(every))))
        self._placed = list(map(_placed, map(_spec, self._distributed)))
        where = addresses(self.parts).tobytes(), storage_sizes(storages_of(self.parts)).tobytes()
        self.key = (verb, options, id(group.process_group), *where)

    def facts(self) -> tuple[Any, ...]:
        """Return what must be equal, beside addresses, structures, values, and what a guard looks at."""
        return self._classes, self._attributes, self._ties, self._placed

    @property
    def is_ordinary(self) -> bool:
        """Whether nothing else matters, and aliases can be made."""
        kinds = {cls: leaf_type_of(cls) for cls in set(self._classes)}
        return (
            len(self.leaves) >= FEWEST
            and sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, torch.Tensor)) <= MOST_BYTES
            and not any(leaf_type is not None and leaf_type.registered for leaf_type in kinds.values())
            and VALUES.issuperset(map(type, self.values))
            and all(type(tensor) is torch.Tensor for tensor in map(_local, self._distributed))
            and all(map(_has_memory, self.parts))
            and all(leaf.device.type == "cpu" for leaf in self._distributed)
            and not carry_tangents(self.parts)
            and not any(self._attributes[: len(self.parts)])
            and _ATTRIBUTES.issuperset(chain.from_iterable(self._attributes))
            and not any(node[0].compares_aux for spec in self.specs for node in spec.nodes)
        )

    def aliases(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Return the leaves on memory that is not held, and the plain tensors of these, in the order of ``parts``."""
        storages: dict[int, torch.UntypedStorage] = {}
        parts: dict[int, torch.Tensor] = {}
        for part in self.parts:
            storage = part.untyped_storage()
            key = storage_key(storage)
            if key not in storages:
                storages[key] = storage_at(storage.data_ptr(), storage.device, storage.nbytes())
            bare = without_elements(part.dtype, part.device)
            parts[id(part)] = bare.set_(storages[key], part.storage_offset(), part.shape, part.stride())
        made: dict[int, Any] = {}
        for leaf in self.leaves:
            leaf_type = leaf_type_of(type(leaf))
            if leaf_type is not None and id(leaf) not in made:
                (part,), context, attributes = leaf_type.contents(leaf)
                made[id(leaf)] = leaf_type.assemble(context, [parts[id(part)]], attributes)
        return [made.get(id(leaf), leaf) for leaf in self.leaves], [parts[id(part)] for part in self.parts]


def _has_memory(part: torch.Tensor) -> bool:
    return (
        part.is_cpu
        and is_strided(part)
        and holds_memory(part)
        and not (part.is_conj() or part.is_neg() or part.is_inference() or is_zero_tensor(part))
    )
