"""A strict judge of whether two trees are the same.

It uses nothing of statetree's engines, so that it can judge them: every rule about containers, tensors and ties is
written down here a second time.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

from statetree.testing.objects import brief, number_bits, reduced
from statetree.testing.report import Strictness
from statetree.testing.tensor_judge import TensorJudge
from statetree.testing.ties import Met, changed_identities, changed_ties

BY_VALUE = (bool, int, str, bytes, bytearray, range, type(None), type(...), type(NotImplemented), torch.Size, slice)
BY_IDENTITY = (
    type,
    enum.Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.CodeType,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.qscheme,
)
#: What a tree's structure is made of; a ``torch.Size`` is a value.
CONTAINERS = (dict, list, tuple, deque)


class Judge(TensorJudge):
    """Compares two trees, and collects where they differ."""

    def __init__(self, strictness: Strictness) -> None:
        super().__init__(strictness)
        self._seen: set[tuple[int, int]] = set()

    def run(self, left: Any, right: Any) -> Judge:
        """Compare two trees; ``found`` says afterwards where they differ."""
        pending = [("", left, right)]
        while pending:
            path, a, b = pending.pop()
            try:
                self._judge(path, a, b)
            except Exception as error:
                error.add_note(f"statetree.testing: while comparing what is at {path or '<root>'}")
                raise
            # What one value brings up is judged before its next sibling, so that the report reads top down.
            pending += reversed(self.inside)
            self.inside.clear()
        wanted = self.strictness
        if wanted.ties:
            self.found += changed_ties(self.views, storages=wanted.storages, distances=wanted.strides)
            self.found += changed_identities(self.tensors, "tensor object")
        if wanted.containers:
            self.found += changed_identities(self.objects, "object")
        return self

    # Values of any kind

    def _judge(self, path: str, a: Any, b: Any) -> None:
        if not self.strictness.leaves and not (_is_container(a) or _is_container(b)):
            return
        cls = type(a)
        if cls is not type(b):
            self.differ(path, "type differs", cls, type(b))
            return
        if cls in BY_VALUE:
            if a != b:
                self.differ(path, "value differs", a, b)
            return
        if _is_of_numpy("dtype", a):
            self.expect(path, "dtype differs", a, b)
            return
        if cls is float or cls is complex:
            if number_bits(a) != number_bits(b):
                self.differ(path, "value differs", a, b)
            return
        if isinstance(a, BY_IDENTITY):
            if a is not b:
                self.differ(path, "object differs", a, b)
            return
        if (id(a), id(b)) in self._seen:
            self._meet(path, a, b)
            return
        self._seen.add((id(a), id(b)))
        self.alive.update({id(a): a, id(b): b})
        self._meet(path, a, b)
        if isinstance(a, torch.Tensor):
            self.judge_tensor(path, a, b)
        elif isinstance(a, (torch.UntypedStorage, torch.storage.TypedStorage)):
            self.judge_storage(path, a, b)
        elif _is_of_numpy("ndarray", a):
            self.judge_array(path, a, b)
        elif isinstance(a, dict):
            self._judge_dict(path, a, b)
        elif isinstance(a, (list, tuple, deque)):
            self._judge_sequence(path, a, b)
        elif isinstance(a, (set, frozenset)):
            self._judge_set(path, a, b)
        elif isinstance(a, weakref.ref):
            if a() is not b():
                self.differ(path, "referent differs", a(), b())
        elif dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__"):
            self.judge_attributes(path, a, b)
        else:
            self._judge_object(path, a, b)

    def _meet(self, path: str, a: Any, b: Any) -> None:
        if isinstance(a, torch.Tensor):
            self.tensors.append(Met(path, id(a), id(b)))
        elif type(a) is not tuple:  # equal tuples may be one object by interning
            self.objects.append(Met(path, id(a), id(b)))

    # Containers

    def _judge_dict(self, path: str, a: Any, b: Any) -> None:
        base = OrderedDict if isinstance(a, OrderedDict) else dict
        keys, others = list(base.__iter__(a)), list(base.__iter__(b))
        if len(keys) != len(others):
            self.differ(path, "number of keys differs", keys, others)
        for index, (key, other) in enumerate(zip(keys, others, strict=False)):
            self._judge_structure(f"{path}<key {index}>", key, other)
        for key, other in zip(keys, others, strict=False):
            self.later(f"{path}[{brief(key)}]", dict.__getitem__(a, key), dict.__getitem__(b, other))
        if isinstance(a, defaultdict):
            factory: Any = vars(defaultdict)["default_factory"].__get__
            self._judge_structure(f"{path}.default_factory", factory(a), factory(b))
        self.judge_attributes(path, a, b)

    def _judge_structure(self, path: str, a: Any, b: Any) -> None:
        """Have two values judged that belong to the structure, whether or not leaves are looked at."""
        if self.strictness.leaves:
            self.later(path, a, b)
        else:
            judge = Judge(Strictness(ties=False)).run(a, b)
            if judge.found:
                self.differ(path, "value differs", a, b)

    def _judge_sequence(self, path: str, a: Any, b: Any) -> None:
        base = next(base for base in (list, tuple, deque) if isinstance(a, base))
        items, others = list(base.__iter__(a)), list(base.__iter__(b))
        if len(items) != len(others):
            self.differ(path, "length differs", len(items), len(others))
        if base is deque:
            self.expect(path, "maxlen differs", deque.maxlen.__get__(a), deque.maxlen.__get__(b))
        for index, (item, other) in enumerate(zip(items, others, strict=False)):
            self.later(f"{path}[{index}]", item, other)
        if base is tuple and hasattr(type(a), "n_sequence_fields"):  # may have fields beyond the sequence
            self.later(f"{path}.__reduce__()", a.__reduce__()[1], b.__reduce__()[1])
        self.judge_attributes(path, a, b)

    def _judge_set(self, path: str, a: Any, b: Any) -> None:
        left, right = list(a), list(b)
        elements = dataclasses.replace(self.strictness, ties=False, containers=False)
        if len(left) != len(right):
            self.differ(path, "number of elements differs", len(left), len(right))
            return
        for index, element in enumerate(left):
            fits = [
                position
                for position, other in enumerate(right)
                if other is element or not Judge(elements).run(element, other).found
            ]
            if not fits:
                self.differ(path, "element differs", element, right)
                return
            self.later(f"{path}{{{index}}}", element, right.pop(fits[0]))
        self.judge_attributes(path, a, b)

    def _judge_object(self, path: str, a: Any, b: Any) -> None:
        one, other = reduced(a), reduced(b)
        if one is None or other is None:
            if a is not b:
                self.differ(path, "object cannot be compared and differs", a, b)
        elif isinstance(one, str) or isinstance(other, str):
            if a is not b:
                self.differ(path, "object differs", a, b)
        else:
            self.later(f"{path}.__reduce__", one, other)


def _is_of_numpy(name: str, value: Any) -> bool:
    """Whether a value is of a class of NumPy's, which nobody has to have installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, name))


def _is_container(value: Any) -> bool:
    cls = type(value)
    if cls in BY_VALUE or isinstance(value, type):
        return False
    return isinstance(value, CONTAINERS) or dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__")
