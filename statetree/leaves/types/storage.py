"""``UntypedStorage`` and ``TypedStorage``: all their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from statetree.leaves.engine_type import EngineLeafType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class StorageType(EngineLeafType):
    """``UntypedStorage`` and ``TypedStorage``: all their bytes."""

    name = "storage"

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        storage, dtype = _untyped(value)
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
        return [view], dtype

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        view: torch.Tensor = parts[0]
        storage = view.untyped_storage()
        if storage.nbytes() != view.nbytes:  # a piece of a slab
            storage = storage[view.storage_offset() : view.storage_offset() + view.nbytes]
        if context is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=context, _internal=True)

    def describe(self, value: Any) -> Mapping[str, Any]:
        storage, dtype = _untyped(value)
        return {
            "bytes": storage.nbytes(),
            "dtype": dtype,
            "memory": "meta" if storage.device.type == "meta" else "present",
        }


def _untyped(value: Any) -> tuple[torch.UntypedStorage, torch.dtype | None]:
    is_typed = isinstance(value, torch.storage.TypedStorage)
    return (value._untyped_storage, value.dtype) if is_typed else (value, None)


STORAGE = StorageType()
