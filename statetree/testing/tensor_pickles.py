"""Pickles of values with tensors, in which storages stay what they are: shared, of their size, and of their device."""

from __future__ import annotations

import ctypes
import io
import pickle
from typing import Any

import torch

from statetree.testing.contents import elements as raw_bytes


def packed(value: Any) -> bytes:
    """Pickle a value. ``pickle.loads`` takes it out again.

    Torch's own way to pickle tensors gives each a storage of its own, and cannot pickle storages by themselves.
    """
    stream = io.BytesIO()
    _TensorPickler(stream).dump(value)
    return stream.getvalue()


class _TensorPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):
            return _typed, (value._untyped_storage, value.dtype)
        if type(value) is torch.UntypedStorage:
            on_host = None if value.device.type == "meta" else raw_bytes(value).cpu()
            content = b"" if on_host is None else ctypes.string_at(on_host.data_ptr(), value.nbytes())
            return _storage, (content, value.nbytes(), str(value.device))
        return NotImplemented


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _storage(content: bytes, nbytes: int, device: str) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(nbytes, device=device)
    if content:
        raw_bytes(storage).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return storage
