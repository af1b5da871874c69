"""Columns: what torch knows about many tensors, asked of all of them at once.

A Python loop that asks ten thousand tensors for their dtype, shape, strides and storage costs more than copying them.
``map`` over torch's C getters costs a fifth of that, so every check on the fast paths is written over columns.
"""

from __future__ import annotations

import weakref
from array import array
from operator import add, le
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.declare import cached_property
from statetree.errors import unsignalled
from statetree.torch_internals import TENSOR_BASE, is_functional, storage_key_of, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


_TENSOR_ONLY: Final = frozenset({torch.Tensor})


# Addresses and sizes are kept, and compared again and again: arrays take a fifth of the memory of lists, and no time.


def addresses(tensors: Sequence[torch.Tensor]) -> array[int]:
    """Return the addresses of the first elements; 0 for tensors without memory (empty, meta, freed)."""
    return array("Q", list(map(TENSOR_BASE.data_ptr, tensors)))


def storages_of(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the tensors' storages. Holding this list holds the memory."""
    return list(map(TENSOR_BASE.untyped_storage, tensors))


def storage_sizes(storages: Sequence[torch.UntypedStorage]) -> array[int]:
    """Return how many bytes storages hold."""
    return array("Q", list(map(len, storages)))


def interleaved(count: int, chosen: Sequence[int], taken: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return so many values in their order, from those in some places and those in all others."""
    found, rest = dict(zip(chosen, taken, strict=True)), iter(others)
    return [found[index] if index in found else next(rest) for index in range(count)]


class Columns:
    """The attributes of a list of plain tensors, each as a list in the same order."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        #: What is known of the addresses of these tensors, if they were seen before.
        self.known_addresses: KnownAddresses | None = None

    def adopt(self, columns: Mapping[str, Any]) -> None:
        """Take over columns that are known to hold for these tensors."""
        self.__dict__.update(columns)  # where cached_property looks

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        return list(map(TENSOR_BASE.dtype.__get__, self.tensors))

    @cached_property
    def no_subclasses(self) -> bool:
        """Whether all are of class ``torch.Tensor``, and none of a subclass."""
        return _TENSOR_ONLY.issuperset(map(type, self.tensors))

    @cached_property
    def shapes(self) -> list[torch.Size]:
        return list(map(TENSOR_BASE.size, self.tensors))

    @cached_property
    def strides(self) -> list[tuple[int, ...]]:
        return list(map(TENSOR_BASE.stride, self.tensors))

    @cached_property
    def offsets(self) -> list[int]:
        """Where each tensor begins in its storage, in elements."""
        return list(map(TENSOR_BASE.storage_offset, self.tensors))

    @cached_property
    def devices(self) -> list[torch.device]:
        return list(map(TENSOR_BASE.device.__get__, self.tensors))

    @cached_property
    def on_cpu(self) -> bool:
        """Whether all tensors lie in host memory."""
        return all(map(TENSOR_BASE.is_cpu.__get__, self.tensors))

    @cached_property
    def nbytes(self) -> list[int]:
        """Bytes of the elements of each tensor, whatever its strides."""
        if len(set(self.dtypes)) == 1:
            itemsize = self.dtypes[0].itemsize
            return [count * itemsize for count in map(TENSOR_BASE.numel, self.tensors)]
        return list(map(TENSOR_BASE.nbytes.__get__, self.tensors))

    @cached_property
    def requires_grad(self) -> list[bool]:
        return list(map(TENSOR_BASE.requires_grad.__get__, self.tensors))

    @cached_property
    def nested(self) -> list[bool]:
        return list(map(TENSOR_BASE.is_nested.__get__, self.tensors))

    @cached_property
    def contiguous(self) -> list[bool]:
        return list(map(TENSOR_BASE.is_contiguous, self.tensors))

    @cached_property
    def inference(self) -> list[bool]:
        try:
            list(map(version_of, self.tensors))  # inference tensors refuse, and it is quicker to ask
        except unsignalled(RuntimeError):
            return list(map(TENSOR_BASE.is_inference, self.tensors))
        return [False] * len(self.tensors)

    @cached_property
    def conj(self) -> list[bool]:
        """The conjugate bits; only complex tensors can have one."""
        if not any(dtype.is_complex for dtype in set(self.dtypes)):
            return [False] * len(self.tensors)
        return [dtype.is_complex and tensor.is_conj() for dtype, tensor in zip(self.dtypes, self.tensors, strict=True)]

    @cached_property
    def neg(self) -> list[bool]:
        return list(map(TENSOR_BASE.is_neg, self.tensors))

    @cached_property
    def storages(self) -> list[torch.UntypedStorage]:
        """The storages. Holding this list holds the memory."""
        return storages_of(self.tensors)

    @cached_property
    def pointers(self) -> array[int]:
        return addresses(self.tensors)

    @cached_property
    def pointers_distinct(self) -> bool:
        """Whether all tensors have memory, and no two begin at one address."""
        if self.known_addresses is not None:
            return self.known_addresses.distinct
        return 0 not in self.pointers and len(set(self.pointers)) == len(self.tensors)

    @cached_property
    def storage_keys(self) -> list[int]:
        """A number for each tensor's storage: equal exactly for tensors on one storage, while all are alive."""
        return list(map(storage_key_of, self.storages))

    @cached_property
    def storage_bytes(self) -> array[int]:
        return storage_sizes(self.storages)

    @cached_property
    def whole(self) -> bool:
        """Whether every tensor is contiguous and covers its storage from the first byte to the last."""
        known = self.known_addresses
        if known is not None and known.storage_bytes == self.storage_bytes:
            return True
        whole = all(self.contiguous) and self.storage_bytes.tolist() == self.nbytes and not any(self.offsets)
        whole = whole and not self.have_no_address
        if whole and known is not None:
            known.storage_bytes = self.storage_bytes
        return whole

    @property
    def have_no_address(self) -> bool:
        """Whether some are wrappers of ``torch.func.functionalize``, whose storage says nothing of that."""
        return 0 in self.pointers and any(map(is_functional, self.tensors))

    @cached_property
    def disjoint(self) -> bool:
        """Whether no two tensors lie over each other, by their addresses. It may say no where none do."""
        if not all(self.contiguous):
            return False
        size = dict(zip(self.pointers, self.nbytes, strict=True))
        if len(size) != len(self.tensors):
            return False
        order = sorted(size)
        ends = map(add, order, map(size.__getitem__, order))
        return all(map(le, ends, order[1:]))

    @cached_property
    def own_storages(self) -> bool:
        """Whether no two tensors share a storage."""
        # Tensors that begin where their storages do, at different addresses, lie on different storages.
        known = self.known_addresses
        if known is not None and "storages" in self.__dict__ and self.pointers_distinct and self.whole:
            return True
        if "storage_keys" not in self.__dict__ and not any(self.offsets) and self.pointers_distinct:
            return True
        return len(set(self.storage_keys)) == len(self.tensors)


# Some answers depend on addresses alone, and take sorting them: whether any two tensors overlap. A state that is
# copied into every hundred steps lies where it lay, and its snapshots take turns at two lists of addresses. So the
# answer is kept with the addresses that it was found for, and what concerns two lists (a source and a destination) with
# the other one as a weak reference: addresses mean nothing once the other list is forgotten, and an equal list seen
# later is another `KnownAddresses`. An answer is right for as long as dtypes, shapes and strides are those of the
# `KnownGeometry` that it hangs on; it would be wrong if addresses alone were compared.
class KnownAddresses:
    """Where tensors of one geometry lie, and what follows from that.

    ``storage_bytes`` are the sizes of their storages when these were found to reach as far as the tensors do.
    """

    __slots__ = ("__weakref__", "_disjoint", "_partner", "distinct", "pointers", "storage_bytes", "with_memory")

    def __init__(self, columns: Columns) -> None:
        self.pointers = columns.pointers
        self.with_memory = 0 not in self.pointers
        self.distinct = columns.pointers_distinct
        self.storage_bytes: array[int] | None = None
        self._disjoint: bool | None = None
        self._partner: tuple[weakref.ref[KnownAddresses], bool] | None = None

    def disjoint(self, columns: Columns) -> bool:
        """Whether no two of these tensors lie over each other (see ``Columns.disjoint``)."""
        if self._disjoint is None:
            self._disjoint = columns.disjoint
        return self._disjoint

    def disjoint_from(self, other: KnownAddresses, judge: Callable[[], bool]) -> bool:
        """Return what ``judge`` says about the tensors here and those at other addresses. The last answer is kept."""
        known = self._partner
        if known is None or known[0]() is not other:
            known = self._partner = (weakref.ref(other), judge())
        return known[1]
