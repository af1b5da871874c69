"""A tree as it is when it is staged: everything about it but the elements of its tensors, which are read later."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.leaves.builtin import holds_tensor
from statetree.leaves.parts import Unpacked, unpack
from statetree.spans.columns import Columns, interleaved, storage_sizes, storages_of
from statetree.spans.layout import check_memory, extents
from statetree.spans.memory import Memory
from statetree.spans.replicate import replicate_columns
from statetree.stager.streams import Moment, devices_of
from statetree.torch_internals import quietly
from statetree.tree.flatten import flatten_for_copy, unflatten_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from statetree.tree.spec import TreeSpec

#: Returns a tensor on the same memory, which no change to the other's storage or shape reaches. The caller may replace
#: ``tensor.data`` before the elements are read.
_alias: Final = attrgetter("data")


class CapturedTree(NamedTuple):
    """A tree taken apart."""

    spec: TreeSpec
    unpacked: Unpacked
    columns: Columns  # those of its plain tensors that have memory
    meta: list[int]  # the indices of the others among all plain tensors
    owners: Sequence[int]  # for each tensor in `columns`, the index of its leaf
    moment: Moment  # what the elements wait for, where they lie on an accelerator

    def check_memory(self, verb: str) -> None:
        """Raise ``UnsupportedLeaf`` if the storage of a tensor is freed or too small for it."""
        check_memory(verb, self.columns, lambda index: self.spec.paths()[self.owners[index]])

    def check_memory_again(self, verb: str) -> None:
        """Do as ``check_memory``, some time after it: copying from a storage freed meanwhile would crash."""
        if storage_sizes(storages_of(self.columns.tensors)) != self.columns.storage_bytes:
            self._replace(columns=Columns(self.columns.tensors)).check_memory(verb)

    def put_together(self, copies: list[torch.Tensor]) -> Any:
        """Return a tree with copies in place of ``columns``, and replicas of the meta tensors."""
        if self.meta:
            parts = self.unpacked.columns.tensors  # aside, if they were captured so
            part = Columns([parts[index] for index in self.meta])
            replicas = replicate_columns(part, extents(part), Memory("meta"), copy=False)
            copies = interleaved(len(parts), self.meta, replicas, copies)
        return unflatten_copy(self.spec, self.unpacked.pack(copies))


@quietly
def capture(verb: str, tree: Any, *, aside: bool = False) -> CapturedTree:
    """Take a tree apart.

    Args:
        verb: On whose behalf, for messages.
        tree: Any tree, also one with cycles and shared containers.
        aside: Whether to hold the memory of its tensors whatever becomes of these, which may be given other memory, and
            copies of arrays in opaque objects.

    Raises:
        UnsupportedLeaf: If a leaf cannot be taken apart, or the storage of a tensor is freed or too small for it.
    """
    leaves, spec = flatten_for_copy(tree, holds_tensor, verb=verb, shared=True)
    unpacked = unpack(verb, leaves, spec.paths, together=True)
    columns = unpacked.columns
    if aside:
        unpacked.detach()
        columns.tensors = list(map(_alias, columns.tensors))
    meta: list[int] = []
    owners = unpacked.owners
    if not columns.on_cpu:
        meta = [index for index, device in enumerate(columns.devices) if device.type == "meta"]
    if meta:
        without = set(meta)
        real = [index for index in range(len(columns.tensors)) if index not in without]
        columns = Columns([columns.tensors[index] for index in real])
        owners = [unpacked.owners[index] for index in real]
    moment = Moment(() if columns.on_cpu else devices_of(columns.devices))
    captured = CapturedTree(spec, unpacked, columns, meta, owners, moment)
    captured.check_memory(verb)
    return captured
