"""Tensors without elements: fake ones, and the uninitialized ones of lazy modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from statetree.leaves.engine_type import EngineLeafType
from statetree.leaves.types.tensor import attributes_of, set_attributes
from statetree.tree.flatten import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class FakeType(EngineLeafType):
    """Fake tensors: no bytes, only what they pretend to be."""

    name = "FakeTensor"
    has_elements = False

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        own = attributes_of(_like_fake(value))
        carried = {name: kept for name, kept in attributes_of(value).items() if name not in own}
        leaves, spec = flatten(carried)
        return leaves, (value, spec)

    def pack(self, context: Any, parts: Sequence[Any]) -> torch.Tensor:
        value, spec = context
        fresh = _like_fake(value)
        set_attributes(fresh, unflatten(spec, parts))
        return fresh

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        return {"dtype": value.dtype, "shape": value.shape}


def _like_fake(value: Any) -> torch.Tensor:
    # Made without an operation under its mode, which would count it.
    bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    fresh: torch.Tensor = type(value)(value.fake_mode, bare, value.fake_device)
    return fresh.requires_grad_(value.requires_grad)


class UninitializedType(EngineLeafType):
    """Parameters and buffers of lazy modules, which have no shape yet."""

    name = "uninitialized"
    has_elements = False

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        leaves, spec = flatten(dict(vars(value)))
        return leaves, (type(value), value.requires_grad, value.device, value.dtype, spec)

    def pack(self, context: Any, parts: Sequence[Any]) -> torch.Tensor:
        cls, requires_grad, device, dtype, spec = context
        fresh: torch.Tensor = cls(requires_grad=requires_grad, device=device, dtype=dtype)
        vars(fresh).update(unflatten(spec, parts))
        return fresh

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        return {"dtype": value.dtype}


FAKE = FakeType()
UNINITIALIZED = UninitializedType()
