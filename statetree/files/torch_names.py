"""Torch's classes and functions that its files name, some of them private, each behind one function.

Tried with torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def storage_dtypes() -> dict[str, torch.dtype | None]:
    """Return the classes of storages that torch's files name, and the dtypes of their elements."""
    typed = {f"torch.{name}": dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()}
    return {**typed, "torch.storage.UntypedStorage": None, "torch.UntypedStorage": None}


@cache
def storage_class(dtype: torch.dtype | None) -> type | None:
    """Return the class that torch writes for a storage of a dtype; ``None`` if it writes untyped ones only."""
    if dtype is None:
        return torch.UntypedStorage
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return None if name is None or dtype in torch.storage._new_dtypes() else getattr(torch, name)


def rebuild_function(name: str) -> Any:
    """Return a function or class of torch that its own files name."""
    known = {
        "torch.Tensor": torch.Tensor,
        "torch.nn.parameter.Parameter": torch.nn.Parameter,
        "torch._tensor._rebuild_from_type_v2": torch._tensor._rebuild_from_type_v2,
    }
    if name in known:
        return known[name]
    module, _, function = name.rpartition(".")
    assert module == "torch._utils"
    return getattr(torch._utils, function)
