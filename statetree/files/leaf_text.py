"""Leaves of checkpoints in words, and what their elements are like: for the command and for pages."""

from __future__ import annotations

import math
import reprlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.errors import unsignalled
from statetree.files.stored import StoredTensor
from statetree.files.unpickling import StoredObject
from statetree.files.untrusted import brief, printable, shape_text
from statetree.spans.bits import without_elements
from statetree.spans.element_differences import as_wide

if TYPE_CHECKING:
    from collections.abc import Iterator

_REPR: Final = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = 60
_LONGEST: Final = 48
_BINS: Final = 16
#: How many elements of a tensor in memory are looked at together.
_BUCKET: Final = 1 << 22


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
    except unsignalled(ValueError):  # an integer of thousands of digits
        return f"<{type(value).__name__}>"


def kind_of(leaf: Any) -> str:
    """Return what a leaf is: ``tensor``, the layout of one that is not strided, or ``value``."""
    if not isinstance(leaf, StoredTensor):
        return "value"
    outline = leaf.outline
    if leaf.is_strided:
        return "tensor"
    known = (("nested", outline.is_nested), ("quantized", outline.is_quantized), ("meta", outline.is_meta))
    word = next((name for name, is_so in known if is_so), str(outline.layout).removeprefix("torch."))
    return f"{word} tensor"


def type_text(value: Any) -> str:
    """Return the type of a plain value."""
    return printable(value.name) if isinstance(value, StoredObject) else type(value).__name__


def leaf_text(leaf: Any) -> str:
    """Return a leaf in a few words."""
    if kind_of(leaf) == "value":
        return f"{type_text(leaf)} {short_value(leaf)}"
    words = (kind_of(leaf) if kind_of(leaf) != "tensor" else "", dtype_text(leaf.dtype), shape_text(leaf.shape))
    return " ".join(filter(None, words))


class Statistics(NamedTuple):
    """What the finite elements of a tensor (of complex ones, their magnitudes) are like, and how many are special."""

    least: float | None
    most: float | None
    mean: float | None
    std: float | None
    num_nan: int
    num_inf: int
    num_zero: int


def statistics_of(tensor: StoredTensor | torch.Tensor) -> Statistics | None:
    """Return what a tensor's elements are like; ``None`` if they are no numbers."""
    nan = inf = zero = count = 0
    least, most, mean, squares = math.inf, -math.inf, 0.0, 0.0
    for elements in pieces_of(tensor):
        wide = as_wide(elements)
        if wide is None:
            return None
        wide = wide.abs() if wide.is_complex() else wide
        nan += int(wide.isnan().sum())
        inf += int(wide.isinf().sum())
        zero += int((wide == 0).sum())
        finite = wide[wide.isfinite()]
        if finite.numel():  # means and squares of parts are put together as Chan et al. do
            least, most = min(least, float(finite.min())), max(most, float(finite.max()))
            apart, added = float(finite.mean()) - mean, finite.numel()
            mean += apart * added / (count + added)
            squares += float(finite.var(correction=0)) * added + apart * apart * count * added / (count + added)
            count += added
    if not count:
        return Statistics(None, None, None, None, nan, inf, zero)
    return Statistics(least, most, mean, math.sqrt(squares / count), nan, inf, zero)


def histogram(tensor: StoredTensor | torch.Tensor, found: Statistics | None = None) -> list[int]:
    """Return how many finite elements lie in each of 16 intervals of one size between the least and the most."""
    found = found or statistics_of(tensor)
    if found is None or found.least is None or found.most is None:
        return []
    counts = torch.zeros(_BINS, dtype=torch.float64, device="cpu")
    for elements in pieces_of(tensor):
        wide = as_wide(elements)
        assert wide is not None, "they have statistics"
        wide = wide.abs() if wide.is_complex() else wide
        counts += torch.histc(wide[wide.isfinite()], _BINS, found.least, found.most).to(counts)
    return [int(count) for count in counts]


def pieces_of(tensor: StoredTensor | torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield all elements of a tensor, a bucket at a time, in row-major order."""
    has_none = False
    if isinstance(tensor, StoredTensor):
        if tensor.is_strided and not tensor.is_repetitive:
            yield from (tensor.read(index).flatten() for index in tensor.boxes())
            return
        has_none, tensor = tensor.is_repetitive, tensor.tensor()
    has_none = has_none or tensor.is_meta or tensor.is_nested or tensor.is_quantized
    has_none = has_none or (tensor.layout is torch.strided and without_elements(tensor) != "")
    yield from torch.zeros(1, 0, device="cpu") if has_none else tensor.detach().to_dense().flatten().split(_BUCKET)


def stats_text(found: Statistics | None) -> str:
    """Return statistics in words."""
    if found is None:
        return "no numbers"
    numbers = zip(("min", "max", "mean", "std"), found[:4], strict=True)
    words = [f"{name} {value:.4g}" for name, value in numbers if value is not None]
    counts = zip(("NaN", "inf", "zero"), found[4:], strict=True)
    return ", ".join(words + [f"{count:,} {name}" for name, count in counts if count])
