"""Trees of subclasses of torch.Tensor."""

from __future__ import annotations

from typing import Any

import torch

from tests.trees.corpus import Held, Ramp, a_function, tree
from tests.trees.fields import State


class PlainSubclass(torch.Tensor):
    pass


class SlottedSubclass(torch.Tensor):
    __slots__ = ("note", "other", "unset")


class SubclassOfParameter(torch.nn.Parameter):
    pass


def subclassed(cls: type, values: torch.Tensor, *, grad: bool = False) -> Any:
    return torch.Tensor._make_subclass(cls, values, grad)


@tree()
def parameters_and_buffers(new: Ramp) -> Any:
    return {
        "parameter": torch.nn.Parameter(new(2, 3)),
        "frozen": torch.nn.Parameter(new(2), requires_grad=False),
        "int": torch.nn.Parameter(new(2, dtype=torch.int64), requires_grad=False),
        "transposed": torch.nn.Parameter(new(2, 3).t()),
        "buffer": torch.nn.Buffer(new(3)),
        "not_persistent": torch.nn.Buffer(new(3), persistent=False),
        "derived": SubclassOfParameter(new(2)),
    }


@tree()
def tensor_subclasses(new: Ramp) -> Any:
    slotted = subclassed(SlottedSubclass, new(2))
    slotted.note, slotted.other, slotted.beside = "note", new(1), [new(1)]
    return [subclassed(PlainSubclass, new(2, 3).t(), grad=True), slotted, subclassed(PlainSubclass, new(0))]


@tree()
def tensors_with_attributes(new: Ramp) -> Any:
    plain, parameter, tagged = new(3), torch.nn.Parameter(new(2)), new(1)
    plain.note, plain.nested = "note", {"a": [1, new(2)], "view": parameter.detach()}
    parameter.partition_dim, parameter.main = 0, plain
    tagged.held = Held()
    tagged.held.tensor = tagged.view(1)
    tagged.fn, tagged.cls, tagged.none = a_function, State, None
    return {"plain": plain, "parameter": parameter, "tagged": tagged}


@tree(refused="holds itself")
def tensor_that_is_its_own_attribute(new: Ramp) -> Any:
    result = new(3)
    result.me = result
    result.note = "note"
    return [result]


class TwoTensors(torch.Tensor):
    """A traceable wrapper of two tensors of one shape."""

    a: torch.Tensor
    b: torch.Tensor
    note: Any

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor, note: Any = None) -> TwoTensors:
        return torch.Tensor._make_wrapper_subclass(
            cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device, requires_grad=a.requires_grad
        )

    def __init__(self, a: torch.Tensor, b: torch.Tensor, note: Any = None) -> None:
        self.a, self.b, self.note = a, b, note

    def __repr__(self) -> str:
        return f"TwoTensors({self.a}, {self.b})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b"], self.note

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> TwoTensors:
        return TwoTensors(inner["a"], inner["b"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run(name: str) -> Any:
            inner = [getattr(arg, name) if isinstance(arg, TwoTensors) else arg for arg in args]
            return func(*inner, **(kwargs or {}))

        a, b = run("a"), run("b")
        return TwoTensors(a, b, args[0].note) if isinstance(a, torch.Tensor) else a


class Unflattened(torch.Tensor):
    """A wrapper of a tensor, without memory of its own, that does not say how it is taken apart."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Unflattened:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = [arg.inner if isinstance(arg, Unflattened) else arg for arg in args]
        return func(*bare, **(kwargs or {}))


@tree()
def wrappers(new: Ramp) -> Any:
    same, inner = new(2), TwoTensors(new(2), new(2), "inner")
    return {
        "plain": TwoTensors(new(2, 3), new(2, 3), {"note": [1]}),
        "transposed": TwoTensors(new(2, 3).t(), new(2, 3).t()),
        "nested": TwoTensors(inner, TwoTensors(new(2), new(2)), "outer"),
        "tied_inside": TwoTensors(same, same),
        "tied_outside": same[1:],
        "inner_again": inner,
        "grad": TwoTensors(new(2), new(2)).requires_grad_(),
        "parameter": torch.nn.Parameter(TwoTensors(new(2), new(2))),
        "conj": TwoTensors(new(2, dtype=torch.complex64).conj(), new(2, dtype=torch.complex64)),
    }


@tree()
def wrappers_with_attributes(new: Ramp) -> Any:
    result = TwoTensors(new(2), new(2))
    result.plain, result.tensor, result.nested = 3, new(1), {"a": [1, new(1)]}
    return [result]
