"""Notes on other people's exceptions: where in the tree they came up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from statetree.paths import Path


def describe_leaf(leaf: Any) -> str:
    """Say what a leaf is: dtype, shape and device of a tensor, the class of anything else. Never raises."""
    if isinstance(leaf, torch.Tensor):
        try:
            return f"{type(leaf).__qualname__} {leaf.dtype} {tuple(leaf.shape)} on {leaf.device}"
        except Exception:  # noqa: BLE001 - half-initialised tensors refuse to say
            return type(leaf).__qualname__
    return type(leaf).__qualname__


def note_leaf(error: BaseException, path: Path, leaf: Any) -> None:
    """Add to an exception which leaf it concerns."""
    error.add_note(f"statetree: at {str(path) or '<root>'}, {describe_leaf(leaf)}")
