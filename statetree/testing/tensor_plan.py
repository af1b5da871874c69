"""Plans of tensors: their dtypes, shapes, geometries and classes, and views that share storages."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from statetree.testing.samples import TensorSubclass
from statetree.testing.source_code import PrintsAsCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from statetree.testing.numbered import Numbers

#: The dtypes of generated tensors.
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.int8, torch.int16),
    *(torch.uint32, torch.uint64, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float4_e2m1fn_x2,
)
#: Those of ordinary training states, of which torch can do arithmetic in all.
TRAINING_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
_COUNTABLE = frozenset(
    dtype for dtype in DTYPES if dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex)
)


@dataclasses.dataclass(frozen=True, repr=False)
class TensorPlan(PrintsAsCode):
    """How a tensor is made.

    Attributes:
        shape: Its shape. (``channels_last`` adds a dim of size 1 in front.)
        dtype: Its dtype.
        geometry: How it lies in its storage: one of ``GEOMETRIES``.
        wrap: What class it is of, and what else it has: one of ``WRAPS``.
    """

    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float32
    geometry: str = "contiguous"
    wrap: str = "tensor"

    def make(self, numbers: Numbers) -> torch.Tensor:
        """Make the tensor."""
        tensor = GEOMETRIES[self.geometry](self.shape, self.dtype, numbers)
        made = WRAPS[self.wrap](tensor, numbers)
        numbers.made.append(made)
        return made


def _gaps(shape: tuple[int, ...], dtype: torch.dtype, numbers: Numbers) -> torch.Tensor:
    return numbers([2 * side for side in shape], dtype)[(slice(1, None, 2),) * len(shape)]


def _channels_last(shape: tuple[int, ...], dtype: torch.dtype, numbers: Numbers) -> torch.Tensor:
    if len(shape) == 3:
        return numbers((1, *shape), dtype).to(memory_format=torch.channels_last)
    return GEOMETRIES["transposed"](shape, dtype, numbers)


def _negated(shape: tuple[int, ...], dtype: torch.dtype, numbers: Numbers) -> torch.Tensor:
    tensor = numbers(shape, dtype)
    return torch._neg_view(tensor) if dtype in _COUNTABLE else tensor


GEOMETRIES: dict[str, Callable[[tuple[int, ...], torch.dtype, Numbers], torch.Tensor]] = {
    "contiguous": lambda shape, dtype, numbers: numbers(shape, dtype),
    "transposed": lambda shape, dtype, numbers: numbers(shape[::-1], dtype).permute(tuple(range(len(shape)))[::-1]),
    "gaps": _gaps,
    "inside": lambda shape, dtype, numbers: numbers([math.prod(shape) + 8], dtype)[5:-3].view(shape),
    "expanded": lambda shape, dtype, numbers: numbers([1, *shape[1:]][: len(shape)], dtype).expand(shape),
    "channels_last": _channels_last,
    "conjugated": lambda shape, dtype, numbers: numbers(shape, dtype).conj(),
    "negated": _negated,
    "meta": lambda shape, dtype, numbers: torch.empty(shape, dtype=dtype, device="meta"),
}


def _requires_grad(tensor: torch.Tensor, _: Numbers) -> torch.Tensor:
    return tensor.requires_grad_() if tensor.dtype in _COUNTABLE else tensor


def _computed(tensor: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    with torch.enable_grad():
        return _requires_grad(tensor, numbers)[...]


def _attribute(tensor: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    vars(tensor)["note"] = ["note", numbers([2], torch.float32)]
    return tensor


WRAPS: dict[str, Callable[[torch.Tensor, Numbers], torch.Tensor]] = {
    "tensor": lambda tensor, _: tensor,
    "requires_grad": _requires_grad,
    "parameter": lambda tensor, _: torch.nn.Parameter(tensor, requires_grad=tensor.dtype in _COUNTABLE),
    "frozen": lambda tensor, _: torch.nn.Parameter(tensor, requires_grad=False),
    "buffer": lambda tensor, _: torch.nn.Buffer(tensor),
    "subclass": lambda tensor, _: torch.Tensor._make_subclass(TensorSubclass, tensor),
    "attribute": _attribute,
    "computed": _computed,
}
#: What is drawn if nothing else is asked for: leaves of autograd, as transforms return them.
USUAL_WRAPS = tuple(wrap for wrap in WRAPS if wrap != "computed")


@dataclasses.dataclass(frozen=True, repr=False)
class ViewPlan(PrintsAsCode):
    """How a view is made of a storage of 24 numbers that others share.

    Attributes:
        base: Which storage.
        kind: How it is looked at: one of ``VIEWS``.
        start: Where the view begins, for kinds that can begin anywhere.
        stop: Where it ends.
    """

    base: int = 0
    kind: str = "whole"
    start: int = 0
    stop: int = 24

    def make(self, numbers: Numbers) -> Any:
        """Make the view, and the storage if it is the first one on it."""
        base = numbers.base(self.base)
        made = VIEWS[self.kind](base, min(self.start, self.stop), max(self.start, self.stop))
        numbers.made.append(made)
        return made


VIEWS: dict[str, Callable[[torch.Tensor, int, int], Any]] = {
    "whole": lambda base, start, stop: base,
    "alias": lambda base, start, stop: base.view(24),
    "slice": lambda base, start, stop: base.view(24)[start:stop],
    "steps": lambda base, start, stop: base.view(24)[start:stop:3],
    "transposed": lambda base, start, stop: base.t(),
    "rows": lambda base, start, stop: base[start // 6 : stop // 6],
    "columns": lambda base, start, stop: base[:, start // 4 : stop // 4],
    "element": lambda base, start, stop: base.view(24)[min(start, 23)],
    "expanded": lambda base, start, stop: base.view(24)[start:stop].expand(2, stop - start),
    "overlapping": lambda base, start, stop: base.as_strided((3, 3), (1, 2), min(start, 16)),
    "bytes": lambda base, start, stop: base.view(24).view(torch.uint8)[start : stop + 3],
    "complex": lambda base, start, stop: torch.view_as_complex(base.view(12, 2)).conj(),
    "parameter": lambda base, start, stop: torch.nn.Parameter(base.view(24)[start:stop]),
    "detached": lambda base, start, stop: torch.nn.Parameter(base).detach(),
    "storage": lambda base, start, stop: base.untyped_storage(),
}
