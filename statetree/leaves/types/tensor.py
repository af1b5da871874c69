"""Tensors of torch itself: ``torch.Tensor``, ``Parameter``, ``Buffer`` and plain subclasses, of every layout."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.errors import UnsupportedLeaf
from statetree.leaves.engine_type import EngineLeafType
from statetree.leaves.types.checkpointable import holds_shards, shards_of
from statetree.leaves.types.special import special_layout
from statetree.spans.layout import holds_memory
from statetree.torch_internals import as_class, carry_tangents, is_zero_tensor
from statetree.tree.flatten import flatten, unflatten
from statetree.tree.instances import slots_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.chunks.local import LocalChunks
    from statetree.chunks.ranks import Ranks
    from statetree.leaves.engine_type import LeafContents

_slots_of = lru_cache(maxsize=1024)(slots_of)
#: Lets go of the classes whose slots are known.
forget_slots = _slots_of.cache_clear


def attributes_of(value: torch.Tensor) -> dict[str, Any]:
    """Return the Python attributes of a tensor, those in slots included."""
    attributes = dict(vars(value))
    if type(value) is not torch.Tensor:
        for name, slot in _slots_of(type(value)).items():
            try:
                attributes[name] = slot.__get__(value)
            except AttributeError:  # the slot was never set
                continue
    return attributes


def set_attributes(value: torch.Tensor, attributes: Mapping[str, Any] | None) -> None:
    """Set Python attributes of a tensor, past any ``__setattr__``."""
    if not attributes:
        return
    slots = _slots_of(type(value))
    for name, kept in attributes.items():
        if name in slots:
            slots[name].__set__(value, kept)
        else:
            value.__dict__[name] = kept


class _TensorContext(NamedTuple):
    """What a tensor is beside its elements, if it is no ``torch.Tensor`` without gradients, on one storage."""

    cls: type
    requires_grad: bool
    special: tuple[EngineLeafType, Any] | None  # its layout, if it is not strided, with the context that this needs

    def restore(self, fresh: torch.Tensor) -> torch.Tensor:
        if self.cls is not type(fresh):
            return as_class(fresh, self.cls, requires_grad=self.requires_grad)
        return fresh.requires_grad_() if self.requires_grad else fresh


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a tensor is beside its elements, but for the values of its attributes: another one may differ."""
    return type(tensor), tensor.requires_grad, frozenset(vars(tensor))


def identified(fresh: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Turn a fresh tensor into what another one is beside its elements: its class, gradients and attributes."""
    fresh = _TensorContext(type(like), like.requires_grad, None).restore(fresh)
    leaves, spec = flatten(attributes_of(like))
    set_attributes(fresh, unflatten(spec, leaves))  # in containers of its own
    return fresh


class TensorType(EngineLeafType):
    """``torch.Tensor``, ``Parameter``, ``Buffer`` and plain subclasses, of every layout."""

    name = "Tensor"
    native = True

    def contents(self, value: torch.Tensor) -> LeafContents:
        _refuse_dual(value)
        layout = special_layout(value)
        special = None
        parts: Sequence[Any] = [value]
        if layout is not None:
            parts, inside = layout.unpack(value)
            special = (layout, inside)
        else:
            value.untyped_storage().nbytes()  # raises where there is none, as for the tensors inside a vmap
            if is_zero_tensor(value):
                parts = [value.detach().clone()]
        is_usual = special is None and type(value) is torch.Tensor and not value.requires_grad
        context = None if is_usual else _TensorContext(type(value), value.requires_grad, special)
        return parts, context, attributes_of(value)

    def assemble(self, context: _TensorContext | None, parts: Sequence[Any], attributes: Any) -> torch.Tensor:
        fresh: torch.Tensor = parts[0]
        if context is not None:
            fresh = context.restore(context.special[0].pack(context.special[1], parts) if context.special else fresh)
        set_attributes(fresh, attributes)
        return fresh

    def is_distributed(self, value: torch.Tensor) -> bool:
        return holds_shards(value) or super().is_distributed(value)

    def local_chunks(self, value: torch.Tensor, ranks: Ranks) -> LocalChunks:
        return shards_of(value) if holds_shards(value) else super().local_chunks(value, ranks)

    def global_shape(self, value: Any) -> tuple[Sequence[int], torch.dtype]:
        return (value.global_shape, value.dtype) if holds_shards(value) else super().global_shape(value)

    def elements_only(self, context: _TensorContext | None) -> bool:
        return context is None or context.special is None

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        _refuse_dual(value)
        layout = special_layout(value)
        if layout is not None:
            return {"dtype": value.dtype, **layout.describe(value)}
        is_there = holds_memory(value) and not is_zero_tensor(value)
        return {
            "layout": torch.strided,
            "dtype": value.dtype,
            "shape": value.shape,
            "memory": "meta" if value.is_meta else "present" if is_there else "freed",
        }


def _refuse_dual(value: torch.Tensor) -> None:
    if carry_tangents([value]):
        raise UnsupportedLeaf(
            "the leaf at %PATH% is a dual tensor of forward-mode differentiation: expected one without a tangent. Pass "
            "torch.autograd.forward_ad.unpack_dual(leaf).primal."
        )


TENSOR = TensorType()
