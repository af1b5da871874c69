"""Leaves of checkpoints in words, for the command and for pages."""

from __future__ import annotations

import reprlib
from typing import Any, Final

import torch

from statetree.files.stored import StoredTensor
from statetree.files.unpickling import StoredObject
from statetree.files.untrusted import brief, printable, shape_text

_REPR: Final = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = 60
_LONGEST: Final = 48


def dtype_text(dtype: torch.dtype) -> str:
    """Return a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def short_value(value: Any) -> str:
    """Return a plain value, cut short."""
    if isinstance(value, (bytes, bytearray)):
        value = value[:_LONGEST]
    if isinstance(value, (torch.UntypedStorage, torch.storage.TypedStorage)):
        return f"<{value.nbytes()} bytes>"
    try:
        return brief(_REPR.repr(value), _LONGEST)
    except ValueError:  # an integer of thousands of digits
        return f"<{type(value).__name__}>"


def kind_of(leaf: Any) -> str:
    """Return what a leaf is: ``tensor``, the layout of one that is not strided, or ``value``."""
    if not isinstance(leaf, StoredTensor):
        return "value"
    outline = leaf.outline
    if leaf.is_strided:
        return "tensor"
    if outline.is_nested or outline.is_quantized or outline.is_meta:
        return "nested tensor" if outline.is_nested else "quantized tensor" if outline.is_quantized else "meta tensor"
    return f"{str(outline.layout).removeprefix('torch.')} tensor"


def type_text(value: Any) -> str:
    """Return the type of a plain value."""
    return printable(value.name) if isinstance(value, StoredObject) else type(value).__name__


def leaf_text(leaf: Any) -> str:
    """Return a leaf in a few words."""
    if kind_of(leaf) == "value":
        return f"{type_text(leaf)} {short_value(leaf)}"
    words = (kind_of(leaf) if kind_of(leaf) != "tensor" else "", dtype_text(leaf.dtype), shape_text(leaf.shape))
    return " ".join(filter(None, words))
