"""What has no parts: plain values, which are compared by their bits, and what is the same only if it is one object."""

from __future__ import annotations

import enum
import logging
import struct
import types
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any

import torch

#: Types whose instances cannot change and are compared as they are.
PLAIN: frozenset[type] = frozenset(
    {
        *(type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.qscheme),
        *(torch.finfo, torch.iinfo),
        *(PurePosixPath, PureWindowsPath, PosixPath),  # which cache their parts
    }
)
#: Passed by identity: what hangs on them is not part of a tree.
IDENTITIES = (
    type,
    enum.Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.CodeType,
    logging.Logger,  # every copy of one is the same
)


def same_plain(a: Any, b: Any) -> bool:
    """Whether two values are plain, of one type and equal, numbers to the bit: ``nan`` is ``nan``, 0.0 not -0.0."""
    if type(a) is not type(b) or type(a) not in PLAIN:
        return False
    if isinstance(a, (float, complex)):
        return bits_of_number(a) == bits_of_number(b)
    return bool(a == b)


def bits_of_number(number: complex) -> bytes:
    """Return the bits of a float or a complex number."""
    return struct.pack("<dd", number.real, number.imag)
