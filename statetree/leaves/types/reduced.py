"""Tensor subclasses with ``__torch_dispatch__`` that say what they are made of to pickle alone.

Transformer Engine's ``Float8Tensor`` is one: it has no ``__tensor_flatten__``, but a ``__reduce_ex__`` that gives out
the tensors inside.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from statetree.errors import UnsupportedLeaf
from statetree.leaves.types.opaque import OpaqueType, TakeApart
from statetree.leaves.types.tensor import attributes_of, set_attributes
from statetree.tree.flatten import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.leaves.types.opaque import LookUp, Rest


class _TakeTensorApart(TakeApart):
    """Takes one tensor apart as any object, and sets those inside it aside."""

    def __init__(self, root: torch.Tensor, leaf_type_of: LookUp) -> None:
        super().__init__(io.BytesIO(), leaf_type_of)
        self._root = root

    def persistent_id(self, obj: Any) -> int | tuple[int] | None:
        return None if obj is self._root else super().persistent_id(obj)


class ReducedType(OpaqueType):
    """Tensors that are taken apart by ``__reduce_ex__``, as opaque objects are, and written to as tensors are.

    That is exact only if ``__reduce_ex__`` gives out the very tensors inside, and what it makes of them is what it was
    given: others are refused.

    Args:
        leaf_type_of: Looks up the leaf type of a class.
    """

    opaque = False

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        tensors, rest = self._reduced(value)
        twins, twin = self._reduced(value)
        _, nothing = flatten({})
        again = self.pack((rest, len(tensors), value.requires_grad, nothing), tensors)
        same = isinstance(again, torch.Tensor) and _facts(again) == _facts(value)
        others, other = self._reduced(again) if same else ([], rest)
        same = same and rest == twin == other
        if not same or not _are_same(tensors, twins) or not _are_same(tensors, others):
            cls = type(value).__qualname__
            msg = (
                f"the leaf at %PATH% ({cls}) cannot be taken apart: expected a __reduce_ex__ that gives out the "
                "tensors inside and makes the same of them, got others. Define __tensor_flatten__ and "
                f"__tensor_unflatten__, or use register_leaf_type({cls}, ...)."
            )
            raise UnsupportedLeaf(msg)
        own = attributes_of(again)
        carried = {name: held for name, held in attributes_of(value).items() if name not in own}
        leaves, spec = flatten(carried)
        return [*tensors, *leaves], (rest, len(tensors), value.requires_grad, spec)

    def pack(self, context: Any, parts: Sequence[Any]) -> Any:
        rest, count, requires_grad, attributes = context
        fresh = super().pack(rest, parts[:count])
        if isinstance(fresh, torch.Tensor):
            if fresh.requires_grad != requires_grad:
                fresh = fresh.detach().requires_grad_(requires_grad)
            set_attributes(fresh, unflatten(attributes, parts[count:]))
        return fresh

    def essential(self, context: Any, inner: Sequence[Any]) -> Sequence[Any]:
        """Return what holds the elements, without the attributes."""
        return inner[: context[1]]

    def same_context(self, a: Any, b: Any) -> bool:
        """Whether two values agree in everything but the tensors inside them."""
        return super().same_context(a[0], b[0])

    def detach(self, context: Any) -> None:
        super().detach(context[0])

    def describe(self, value: Any) -> Mapping[str, Any]:
        _, (rest, *_) = self.unpack(value)
        return {"class": type(value), "dtype": value.dtype, "shape": value.shape, "metadata": rest}

    def _reduced(self, value: torch.Tensor) -> tuple[list[Any], Rest]:
        return self.taken_apart(value, _TakeTensorApart(value, self._leaf_type_of))


def _facts(value: torch.Tensor) -> tuple[Any, ...]:
    return type(value), value.dtype, value.shape, value.stride(), value.device, value.requires_grad


def _are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether tensors are the same ones, or lie in the same places."""
    return len(a) == len(b) and all(
        x is y or (x.dtype, x.shape, x.data_ptr()) == (y.dtype, y.shape, y.data_ptr())
        for x, y in zip(a, b, strict=True)
    )


def says_it_to_pickle(cls: type) -> bool:
    """Whether a subclass of ``torch.Tensor`` has a ``__reduce_ex__`` of its own."""
    own: Any = cls
    return own.__reduce_ex__ is not torch.Tensor.__reduce_ex__ or own.__reduce__ is not torch.Tensor.__reduce__
