"""Stored tensors as a predicate sees them: a tensor that says what it is, and is read when its elements are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.torch_internals import as_class
from statetree.tree.flatten import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_OF: Final[Any] = torch.Tensor
#: What is known without elements. Everything else is answered by the tensor that is read.
_KNOWN: Final = frozenset(
    {
        *(getattr(_OF, name).__get__ for name in ("shape", "dtype", "ndim", "requires_grad", "layout", "itemsize")),
        *(getattr(_OF, name).__get__ for name in ("nbytes", "is_leaf", "is_sparse", "is_quantized", "is_nested")),
        *(_OF.size, _OF.dim, _OF.ndimension, _OF.numel, _OF.nelement, _OF.element_size, _OF.stride, _OF.__len__),
        *(_OF.is_contiguous, _OF.is_floating_point, _OF.is_complex, _OF.is_signed, _OF.is_conj, _OF.is_neg),
        *(torch.is_floating_point, torch.is_complex, torch.is_conj, torch.is_neg, torch.numel),
    }
)
#: What would be said of ``meta``, on which the outline lies.
_OF_DEVICE: Final = frozenset(getattr(_OF, name).__get__ for name in ("device", "is_meta", "is_cpu", "is_cuda"))


class UnreadTensor(torch.Tensor):
    """Stands for a stored tensor before a predicate, which may ask for its dtype or look at its elements."""

    _read: Callable[[], torch.Tensor]
    _elements: torch.Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's
        if func in _OF_DEVICE:
            return func(torch.empty(0, device="cpu"))
        leaves, spec = flatten((list(args), dict(kwargs or {})))
        args, kwargs = unflatten(spec, [leaf.elements() if isinstance(leaf, cls) else leaf for leaf in leaves])
        return func(*args, **kwargs)

    def elements(self) -> torch.Tensor:
        """Return the tensor, which is read once."""
        if self._elements is None:
            self._elements = self._read()
        return self._elements


def unread(outline: torch.Tensor, read: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a tensor that stands for one of which no element is read yet."""
    if not outline.is_meta:  # in memory that is mapped from the file: read where it is touched
        return outline
    found = as_class(outline.detach(), UnreadTensor, requires_grad=outline.requires_grad)
    assert isinstance(found, UnreadTensor)
    found._read = read  # noqa: SLF001 - made here
    if isinstance(outline, torch.nn.Parameter):
        found._is_param = True  # noqa: SLF001 - what ``isinstance`` asks for
    return found
