"""Columns: what torch knows about many tensors, asked of all of them at once.

A Python loop that asks ten thousand tensors for their dtype, shape, strides and storage costs more than copying them.
``map`` over torch's C getters costs a fifth of that, so every check on the fast paths is written over columns.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from statetree.torch_internals import STORAGE_BASE, TENSOR_BASE, storage_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Columns:
    """The attributes of a list of plain tensors, each as a list in the same order."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        return list(map(TENSOR_BASE.dtype.__get__, self.tensors))

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
    def nbytes(self) -> list[int]:
        """Bytes of the elements of each tensor, whatever its strides."""
        return list(map(TENSOR_BASE.nbytes.__get__, self.tensors))

    @cached_property
    def requires_grad(self) -> list[bool]:
        return list(map(TENSOR_BASE.requires_grad.__get__, self.tensors))

    @cached_property
    def contiguous(self) -> list[bool]:
        return list(map(TENSOR_BASE.is_contiguous, self.tensors))

    @cached_property
    def inference(self) -> list[bool]:
        return list(map(TENSOR_BASE.is_inference, self.tensors))

    @cached_property
    def conj(self) -> list[bool]:
        """The conjugate bits; only complex tensors can have one."""
        return [dtype.is_complex and tensor.is_conj() for dtype, tensor in zip(self.dtypes, self.tensors, strict=True)]

    @cached_property
    def neg(self) -> list[bool]:
        return list(map(TENSOR_BASE.is_neg, self.tensors))

    @cached_property
    def storages(self) -> list[torch.UntypedStorage]:
        """The storages. Holding this list holds the memory."""
        return list(map(TENSOR_BASE.untyped_storage, self.tensors))

    @cached_property
    def pointers(self) -> list[int]:
        """The addresses of the first elements; 0 for tensors without memory (empty, meta, freed)."""
        return list(map(TENSOR_BASE.data_ptr, self.tensors))

    @cached_property
    def storage_keys(self) -> list[int]:
        """A number for each tensor's storage: equal exactly for tensors on one storage, while all are alive."""
        return list(map(storage_key, self.storages))

    @cached_property
    def storage_bytes(self) -> list[int]:
        return list(map(STORAGE_BASE.nbytes, self.storages))

    @cached_property
    def storage_pointers(self) -> list[int]:
        """The addresses of the storages; 0 for those without memory."""
        return list(map(STORAGE_BASE.data_ptr, self.storages))

    @cached_property
    def own_storages(self) -> bool:
        """Whether no two tensors share a storage."""
        return len(set(self.storage_keys)) == len(self.tensors)
