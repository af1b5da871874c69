"""Plain values as DCP keeps them: each is what ``torch.save`` writes."""

from __future__ import annotations

import io
from typing import Any, Final

import torch

from statetree.errors import unsignalled
from statetree.files.ranges import FileRange
from statetree.files.torch_format import TorchArchive, gist

#: Never left to torch, which admits it: making one starts a process group.
_REFUSED: Final = "torch.distributed.device_mesh.DeviceMesh"


class NotAdmitted(Exception):
    """A value is whole, but torch does not load it either. The text says what it is of."""


def read_value(data: bytes) -> Any:
    """Return the value that ``torch.save`` wrote. Any exception but ``NotAdmitted`` says that it is damaged.

    What names other classes than are known here is left to ``torch.load(weights_only=True)``, which admits those that
    the user named with ``torch.serialization.add_safe_globals``.
    """
    archive = TorchArchive(FileRange.of(data, "the value"))
    value = archive.read()
    if not archive.foreign:
        return value
    if _REFUSED in archive.foreign:
        raise NotAdmitted(f"Unsupported class {_REFUSED}")
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except unsignalled(Exception) as error:
        if not torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)):
            raise  # all of its classes are admitted
        raise NotAdmitted(gist(error)) from error


def why_not_restorable(data: bytes) -> str:
    """Say why a value that ``torch.save`` wrote does not come back by default; empty if it does."""
    try:
        read_value(data)
    except unsignalled(Exception) as error:  # whatever it is, loading would raise it
        return gist(error)
    return ""
