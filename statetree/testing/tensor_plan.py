"""Plans of tensors: their dtypes, shapes, geometries and classes, and views that share storages."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from statetree.testing.arguments import check_at_least, check_one_of, check_shape
from statetree.testing.plans import Printed
from statetree.testing.samples import TensorSubclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from statetree.testing.plans import Numbers

#: The dtypes of generated tensors.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.int8,
    torch.int16,
    torch.uint32,
    torch.uint64,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float4_e2m1fn_x2,
)
_COUNTABLE = frozenset(
    dtype for dtype in DTYPES if dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex)
)


@dataclasses.dataclass(frozen=True, repr=False)
class TensorPlan(Printed):
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

    def __post_init__(self) -> None:
        check_shape("TensorPlan: shape", self.shape)
        check_one_of("TensorPlan: dtype", self.dtype, DTYPES)
        check_one_of("TensorPlan: geometry", self.geometry, GEOMETRIES)
        check_one_of("TensorPlan: wrap", self.wrap, WRAPS)

    def make(self, numbers: Numbers) -> torch.Tensor:
        """Make the tensor."""
        made = WRAPS[self.wrap](GEOMETRIES[self.geometry](self, numbers), numbers)
        numbers.made.append(made)
        return made


def _contiguous(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    return numbers(plan.shape, plan.dtype)


def _transposed(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    return numbers(plan.shape[::-1], plan.dtype).permute(tuple(reversed(range(len(plan.shape)))))


def _gaps(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    return numbers([2 * side for side in plan.shape], plan.dtype)[(slice(1, None, 2),) * len(plan.shape)]


def _inside(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    count = math.prod(plan.shape)
    return numbers([count + 8], plan.dtype)[5 : 5 + count].view(plan.shape)


def _expanded(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    return numbers([1, *plan.shape[1:]] if plan.shape else [], plan.dtype).expand(plan.shape)


def _channels_last(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    if len(plan.shape) != 3:
        return _transposed(plan, numbers)
    return numbers((1, *plan.shape), plan.dtype).to(memory_format=torch.channels_last)


def _conjugated(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    tensor = numbers(plan.shape, plan.dtype)
    return tensor.conj() if plan.dtype.is_complex else tensor


def _negated(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    tensor = numbers(plan.shape, plan.dtype)
    return torch._neg_view(tensor) if plan.dtype in _COUNTABLE else tensor


def _meta(plan: TensorPlan, numbers: Numbers) -> torch.Tensor:
    return torch.empty(plan.shape, dtype=plan.dtype, device="meta")


GEOMETRIES: dict[str, Callable[[TensorPlan, Numbers], torch.Tensor]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "gaps": _gaps,
    "inside": _inside,
    "expanded": _expanded,
    "channels_last": _channels_last,
    "conjugated": _conjugated,
    "negated": _negated,
    "meta": _meta,
}


def _requires_grad(tensor: torch.Tensor, _: Numbers) -> torch.Tensor:
    return tensor.requires_grad_() if tensor.dtype in _COUNTABLE else tensor


def _computed(tensor: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    with torch.enable_grad():
        return _requires_grad(tensor, numbers)[...]


def _parameter(tensor: torch.Tensor, _: Numbers) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=tensor.dtype in _COUNTABLE)


def _attribute(tensor: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    vars(tensor)["note"] = ["note", numbers([2], torch.float32)]
    return tensor


WRAPS: dict[str, Callable[[torch.Tensor, Numbers], torch.Tensor]] = {
    "tensor": lambda tensor, _: tensor,
    "requires_grad": _requires_grad,
    "parameter": _parameter,
    "frozen": lambda tensor, _: torch.nn.Parameter(tensor, requires_grad=False),
    "buffer": lambda tensor, _: torch.nn.Buffer(tensor),
    "subclass": lambda tensor, _: torch.Tensor._make_subclass(TensorSubclass, tensor),
    "attribute": _attribute,
    "computed": _computed,
}
#: What is drawn if nothing else is asked for: leaves of autograd, as transforms return them.
USUAL_WRAPS = tuple(wrap for wrap in WRAPS if wrap != "computed")


@dataclasses.dataclass(frozen=True, repr=False)
class ViewPlan(Printed):
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

    def __post_init__(self) -> None:
        check_one_of("ViewPlan: kind", self.kind, VIEWS)
        for name in ("base", "start", "stop"):
            check_at_least(f"ViewPlan: {name}", getattr(self, name), 0)

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
