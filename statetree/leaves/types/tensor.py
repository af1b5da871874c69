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
    from statetree.tree.spec import TreeSpec


class Identity(NamedTuple):
    """What a tensor object is beside its elements: its class, and what it carries."""

    cls: type
    requires_grad: bool
    attributes: TreeSpec | None  # the structure of the attributes, whose leaves are further parts

    def restore(self, fresh: torch.Tensor, attribute_leaves: Sequence[Any]) -> torch.Tensor:
        """Turn a fresh tensor without identity into one with this."""
        if self.cls is not type(fresh):
            fresh = as_class(fresh, self.cls, requires_grad=self.requires_grad)
        elif self.requires_grad:
            fresh.requires_grad_()
        if self.attributes is not None:
            set_attributes(fresh, unflatten(self.attributes, attribute_leaves))
        return fresh


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


def set_attributes(value: torch.Tensor, attributes: Mapping[str, Any]) -> None:
    """Set Python attributes of a tensor, past any ``__setattr__``."""
    slots = _slots_of(type(value))
    for name, kept in attributes.items():
        if name in slots:
            slots[name].__set__(value, kept)
        else:
            value.__dict__[name] = kept


def identity_of(value: torch.Tensor) -> tuple[Identity | None, list[Any]]:
    """Return what a tensor is beside its elements (``None`` if nothing), and the leaves of its attributes."""
    attributes = attributes_of(value)
    if not attributes:
        plain = type(value) is torch.Tensor and not value.requires_grad
        return (None if plain else Identity(type(value), value.requires_grad, None)), []
    leaves, spec = flatten(attributes)
    return Identity(type(value), value.requires_grad, spec), leaves


class TensorType(EngineLeafType):
    """``torch.Tensor``, ``Parameter``, ``Buffer`` and plain subclasses, of every layout."""

    name = "Tensor"
    bare = True

    def unpack(self, value: torch.Tensor) -> tuple[Sequence[Any], Any]:
        _refuse_dual(value)
        identity, attributes = identity_of(value)
        layout = special_layout(value)
        if layout is None:
            value.untyped_storage().nbytes()  # raises where there is none, as for the tensors inside a vmap
            if is_zero_tensor(value):
                return [value.detach().clone(), *attributes], (identity, None, 1)
            return [value, *attributes], (None if identity is None else (identity, None, 1))
        inner, context = layout.unpack(value)
        return [*inner, *attributes], (identity, (layout, context), len(inner))

    def pack(self, context: Any, parts: Sequence[Any]) -> torch.Tensor:
        identity, special, count = context
        fresh: torch.Tensor = parts[0] if special is None else special[0].pack(special[1], parts[:count])
        return fresh if identity is None else identity.restore(fresh, parts[count:])

    def essential(self, context: Any, inner: Sequence[Any]) -> Sequence[Any]:
        """Return what holds the elements, without the attributes."""
        return inner[: context[2]]

    def is_distributed(self, value: torch.Tensor) -> bool:
        return holds_shards(value) or super().is_distributed(value)

    def local_chunks(self, value: torch.Tensor, ranks: Ranks) -> LocalChunks:
        return shards_of(value) if holds_shards(value) else super().local_chunks(value, ranks)

    def global_shape(self, value: Any) -> tuple[Sequence[int], torch.dtype]:
        return (value.global_shape, value.dtype) if holds_shards(value) else super().global_shape(value)

    def elements_only(self, context: Any) -> bool:
        """Whether the inner tensors hold nothing that putting them together depends on."""
        return context[1] is None

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        _refuse_dual(value)
        layout = special_layout(value)
        if layout is None:
            return {
                "layout": torch.strided,
                "dtype": value.dtype,
                "shape": value.shape,
                "memory": "meta" if value.is_meta else "present" if _is_there(value) else "freed",
            }
        return {"dtype": value.dtype, **layout.describe(value)}


def _refuse_dual(value: torch.Tensor) -> None:
    if carry_tangents([value]):
        msg = (
            "the leaf at %PATH% is a dual tensor of forward-mode differentiation: expected one without a tangent. Pass "
            "torch.autograd.forward_ad.unpack_dual(leaf).primal."
        )
        raise UnsupportedLeaf(msg)


def _is_there(value: torch.Tensor) -> bool:
    return holds_memory(value) and not is_zero_tensor(value)


TENSOR = TensorType()
