"""Tensors without elements: fake ones, and the uninitialized ones of lazy modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from statetree.leaves.engine_type import EngineLeafType
from statetree.leaves.types.tensor import attributes_of, set_attributes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.leaves.engine_type import LeafContents


class FakeType(EngineLeafType):
    """Fake tensors: no bytes, only what they pretend to be."""

    name = "FakeTensor"
    has_elements = False

    def contents(self, value: Any) -> LeafContents:
        own = attributes_of(_like_fake(value))
        return [], value, {name: kept for name, kept in attributes_of(value).items() if name not in own}

    def assemble(self, context: Any, parts: Sequence[Any], attributes: Any) -> torch.Tensor:
        fresh = _like_fake(context)
        set_attributes(fresh, attributes)
        return fresh

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        return {"dtype": value.dtype, "shape": value.shape}


def _like_fake(value: Any) -> torch.Tensor:
    # Made without an operation under its mode, which would count it.
    outline = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    fresh: torch.Tensor = type(value)(value.fake_mode, outline, value.fake_device)
    return fresh.requires_grad_(value.requires_grad)


class UninitializedType(EngineLeafType):
    """Parameters and buffers of lazy modules, which have no shape yet."""

    name = "uninitialized"
    has_elements = False

    def contents(self, value: Any) -> LeafContents:
        context = type(value), value.requires_grad, value.device, value.dtype
        return [], context, dict(vars(value))

    def assemble(self, context: Any, parts: Sequence[Any], attributes: Any) -> torch.Tensor:
        cls, requires_grad, device, dtype = context
        fresh: torch.Tensor = cls(requires_grad=requires_grad, device=device, dtype=dtype)
        set_attributes(fresh, attributes)
        return fresh

    def describe(self, value: torch.Tensor) -> Mapping[str, Any]:
        return {"dtype": value.dtype}


FAKE = FakeType()
UNINITIALIZED = UninitializedType()
