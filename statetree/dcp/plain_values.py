"""Plain values out of a checkpoint, which is not trusted: read as data.

What names other classes than ``statetree.files`` knows is left to ``torch.load(weights_only=True)``, which admits those
that the user named with ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import io
from typing import Any, Final

import torch

from statetree.files.ranges import FileRange
from statetree.files.torch_format import TorchArchive
from statetree.files.torch_format import gist as gist
from statetree.files.unpickling import BadPickle

#: Never left to torch, which admits it: making one starts a process group.
_REFUSED: Final = "torch.distributed.device_mesh.DeviceMesh"


def read_value(data: bytes) -> Any:
    """Return the value that ``torch.save`` wrote.

    Raises:
        Exception: If it is damaged, or of a class that is not admitted.
    """
    archive = TorchArchive(FileRange.of(data, "the value"))
    value = archive.read()
    if _REFUSED in archive.foreign:
        raise BadPickle(f"Unsupported class {_REFUSED}")
    return torch.load(io.BytesIO(data), weights_only=True) if archive.foreign else value


def why_not_restorable(data: bytes) -> str:
    """Say why a value that ``torch.save`` wrote does not come back by default; empty if it does."""
    try:
        read_value(data)
    except Exception as error:  # noqa: BLE001 - whatever it is, loading would raise it
        return gist(error)
    return ""
