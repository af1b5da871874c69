"""What the elements of a tensor are like, a bucket at a time: for ``show --stats``, and for pages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from statetree.files.stored import StoredTensor
from statetree.spans.bits import without_elements
from statetree.spans.element_differences import as_wide

if TYPE_CHECKING:
    from collections.abc import Iterator


_BINS: Final = 16
#: How many elements of a tensor in memory are looked at together.
_BUCKET: Final = 1 << 22
_BARS: Final = " ▁▂▃▄▅▆▇█"


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


def bars(stored: StoredTensor) -> str:
    """Return a histogram in bars."""
    counts = histogram(stored)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // max(counts))] for count in counts)


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
    yield from torch.zeros(1, 0) if has_none else tensor.detach().to_dense().flatten().split(_BUCKET)


def stats_text(found: Statistics | None) -> str:
    """Return statistics in words."""
    if found is None:
        return "no numbers"
    numbers = zip(("min", "max", "mean", "std"), found[:4], strict=True)
    words = [f"{name} {value:.4g}" for name, value in numbers if value is not None]
    counts = zip(("NaN", "inf", "zero"), found[4:], strict=True)
    return ", ".join(words + [f"{count:,} {name}" for name, count in counts if count])
