"""Trees of opaque objects and atoms."""

from __future__ import annotations

import array
import datetime
import decimal
import fractions
import functools
import io
import math
import pathlib
import random
import re
import threading
import types
import typing
import uuid
import weakref
from collections import ChainMap, UserDict
from typing import Any

import numpy as np
import torch

from tests.trees.corpus import A_LAMBDA, Color, Held, Level, Ramp, a_function, refuse, tree
from tests.trees.fields import State


class HeldInSlots:
    __slots__ = ("_HeldInSlots__private", "__weakref__", "tensor", "unset")


class Reduced:
    def __init__(self, tensor: Any, *, by_reduce: bool = False) -> None:
        assert by_reduce
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return functools.partial(Reduced, by_reduce=True), (self.tensor,)


class Stateful:
    def __init__(self, tensor: Any) -> None:
        self.tensor, self.cache = tensor, 1

    def __getstate__(self) -> Any:
        return {"kept": self.tensor}

    def __setstate__(self, state: Any) -> None:
        self.tensor, self.cache = state["kept"], 1


class HidesTensors:
    """Its own ``__deepcopy__`` would share everything."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: Any) -> HidesTensors:
        return self

    __copy__ = refuse


class NeedsArguments:
    def __new__(cls, tensor: Any, *, required: int) -> NeedsArguments:
        result = super().__new__(cls)
        result.tensor, result.required = tensor, required
        return result

    def __getnewargs_ex__(self) -> Any:
        return (self.tensor,), {"required": self.required}


class IntWithAttributes(int):
    pass


class StrWithAttributes(str):
    __slots__ = ("tensor",)


def a_hook(*values: Any) -> None:
    """Do nothing, as a hook of a module."""


class Network(torch.nn.Module):
    """A module with hooks, tied weights, a lambda, and buffers of both kinds."""

    def __init__(self, new: Ramp) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 3)
        self.second = torch.nn.Linear(2, 3)
        self.second.weight = self.first.weight
        self.register_buffer("running", new(3))
        self.register_buffer("passing", new(3), persistent=False)
        self.activation = A_LAMBDA
        self.register_forward_hook(a_hook)
        self.register_state_dict_post_hook(a_hook)
        for hooks in (self._forward_hooks, self._state_dict_hooks):
            hooks[0] = hooks.popitem()[1]  # torch numbers the hooks of the whole process
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(new(*parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x) + self.first(x)


def trained(new: Ramp) -> tuple[Network, torch.optim.Optimizer]:
    network = Network(new)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.5)
    network(new(1, 2)).sum().backward()
    optimizer.step()
    return network, optimizer


@tree()
def state_dicts(new: Ramp) -> Any:
    network, optimizer = trained(new)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


@tree()
def module_and_optimizer(new: Ramp) -> Any:
    network, optimizer = trained(new)
    return {"model": network, "optimizer": optimizer, "state": network.state_dict()}


@tree(keyed_by_identity=True)
def optimizer_state_keyed_by_parameters(new: Ramp) -> Any:
    network, optimizer = trained(new)
    return {"parameters": list(network.parameters()), "state": optimizer.state}


@tree()
def module_with_hooks(new: Ramp) -> Any:
    return {"module": Network(new), "modules": [torch.nn.Sequential(torch.nn.ReLU())]}


@tree()
def objects(new: Ramp) -> Any:
    held, slotted = Held(), HeldInSlots()
    held.tensor, held.nested, held.fn = new(2), {"a": [new(1), (new(2),)]}, A_LAMBDA
    slotted.tensor, slotted._HeldInSlots__private = new(3), [new(1)]
    return {"held": held, "slotted": slotted, "none": Held()}


@tree()
def objects_in_circles(new: Ramp) -> Any:
    first, second = Held(), Held()
    first.other, second.other, first.me = second, first, [first]
    first.tensor = second.tensor = new(2)
    first.tensor.note = "tensor"
    return {"first": first, "list": [1]}


@tree()
def objects_that_reduce(new: Ramp) -> Any:
    return {
        "reduce": Reduced(new(2), by_reduce=True),
        "state": Stateful(new(2)),
        "deepcopy": HidesTensors(new(2)),
        "newargs": NeedsArguments(new(2), required=3),
        "partial": functools.partial(a_function, new(2), key=new(1)),
        "method": torch.nn.ReLU().forward,
        "error": ValueError("text", 3),
    }


@tree()
def objects_of_the_library(new: Ramp) -> Any:
    generator = torch.Generator().manual_seed(new.number())
    number, text = IntWithAttributes(3), StrWithAttributes("text")
    number.tensor, text.tensor = new(1), new(1)
    return {
        "generator": generator,
        "random": random.Random(new.number()),
        "numpy_random": np.random.default_rng(new.number()),
        "namespace": types.SimpleNamespace(tensor=new(1), nested=[1]),
        "user_dict": UserDict(a=new(1)),
        "chain": ChainMap({"a": new(1)}, {"a": 2}),
        "bytes_io": io.BytesIO(b"abc"),
        "array": array.array("d", [1.0, 2.0]),
        "bytearray": bytearray(b"abc"),
        "int": number,
        "str": text,
    }


@tree()
def sets(new: Ramp) -> Any:
    tensor = new(1)
    return {"plain": {1, "a", None, 2.0}, "frozen": frozenset({1, (2, 3)}), "tensors": {tensor}, "tensor": tensor}


@tree()
def numpy_values(new: Ramp) -> Any:
    objects = np.empty(2, dtype=object)
    objects[0], objects[1] = new(2), {"a": 1}
    return {
        "array": new(2, 3).numpy().copy(),
        "transposed": new(2, 3).numpy().copy().T,
        "empty": np.zeros((0, 3), dtype=np.int8),
        "zero_dims": np.array(3.0),
        "structured": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "strings": np.array(["a", "bc"]),
        "objects": objects,
        "scalars": [np.float64(3.5), np.int8(3), np.bool_(True), np.float32("nan")],
        "dtype": np.dtype("f4"),
    }


INFO = [torch.finfo(torch.float32), torch.iinfo(torch.int8)]


@tree()
def atoms(new: Ramp) -> Any:
    return {
        "numbers": [True, 1, 1.0, 1j, 1 << 100, float("inf")],
        "text": ["", "a", b"b", ..., NotImplemented, None],
        "torch": [torch.float32, torch.device("cpu"), torch.strided, torch.channels_last, torch.Size([1, 2])],
        "info": [*INFO, torch.per_tensor_affine],
        "python": [Color.RED, Level.LOW, a_function, A_LAMBDA, len, State, int, math, torch, list[int], int | str],
        "library": [
            range(3),
            datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
            datetime.timedelta(1),
            decimal.Decimal("1.50"),
            fractions.Fraction(1, 3),
            uuid.UUID(int=5),
            re.compile("a+", re.IGNORECASE),
            pathlib.PurePosixPath("/a"),
            weakref.ref(State),
            typing.Any,
            slice(1, 2),
        ],
    }


LOCK = threading.Lock()


@tree(refused="Lock|lock")
def unpicklable(new: Ramp) -> Any:
    held = Held()
    held.lock, held.tensor = LOCK, new(1)
    return {"fine": new(1), "held": [held]}
