"""How partial values of elements (``Partial``) are put together."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from statetree.errors import unsignalled

if TYPE_CHECKING:
    from collections.abc import Callable

#: By the names that ``Partial`` has for them.
REDUCTIONS: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


@cache
def reduces(reduction: str, dtype: torch.dtype) -> bool:
    """Whether torch can put partials of a dtype together, and has that dtype again."""
    try:
        reduce_in_place(torch.ones(2, 1, dtype=dtype), reduction)
    except unsignalled(RuntimeError, NotImplementedError):
        return False
    return True


def reduce_in_place(stack: torch.Tensor, reduction: str) -> None:
    """Put partials together into the first."""
    result = stack[0]
    for partial in stack[1:]:
        REDUCTIONS[reduction](result, partial, out=result)
    if reduction == "avg":
        result.div_(len(stack))
