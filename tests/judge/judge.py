"""A strict judge of whether two trees are the same.

It uses nothing of statetree's engines, so that it can judge them: every rule about containers, tensors and ties is
written down here a second time.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from tests.judge.aliasing import Met, changed_identities, changed_ties
from tests.judge.findings import GEOMETRY, STRUCTURE, TIES, VALUES
from tests.judge.messages import place
from tests.judge.objects import contents_of, is_collection, is_container, is_record
from tests.judge.pickled_state import holds_attributes_only, reduced, refuses_pickle
from tests.judge.tensor_judge import TensorJudge
from tests.judge.values import IDENTITIES, PLAIN, same_plain
from tests.judge.walk import has_no_parts

if TYPE_CHECKING:
    from tests.judge.findings import Strictness
    from tests.judge.objects import Contents


class Judge(TensorJudge):
    """Compares two trees, and collects where they differ.

    Args:
        strictness: What is compared.
    """

    def __init__(self, strictness: Strictness) -> None:
        super().__init__(strictness)
        self._seen: set[tuple[int, int]] = set()

    def run(self, left: Any, right: Any, path: str = "") -> Judge:
        """Compare two trees, or what lies at a path; ``found`` says afterwards where they differ."""
        pending = [(path, left, right)]
        while pending:
            path, a, b = pending.pop()
            try:
                self._judge(path, a, b)
            except Exception as error:
                error.add_note(f"statetree.testing: while comparing what is at {place(path)}")
                raise
            # What one value brings up is judged before its next sibling, so that the report reads top down.
            pending += reversed(self.inside)
            self.inside.clear()
        wanted = self.strictness
        if wanted.ties:
            # Bytes between tensors mean nothing where these have become longer or shorter.
            distances = wanted.strides and not (wanted.further and self.has_other_geometry)
            for line in changed_ties(self.views, storages=wanted.storages, distances=distances):
                self.note(line, TIES)
            for line in changed_identities(self.tensors, "tensor object"):
                self.note(line, TIES)
        if wanted.containers:
            for line in changed_identities(self.objects, "object"):
                self.note(line, TIES)
        return self

    # Values of any kind

    def _judge(self, path: str, a: Any, b: Any) -> None:
        cls = type(a)
        if cls is not type(b):
            self._judge_other_type(path, a, b)
            return
        if cls in PLAIN:
            if not same_plain(a, b):
                self.differ(path, "value differs", a, b)
            return
        if _is_of_numpy("dtype", a):
            self.expect(path, "dtype differs", a, b)
            return
        if isinstance(a, IDENTITIES):
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
        elif isinstance(a, (dict, list, tuple, deque)):
            self._judge_container(path, a, b)
        elif isinstance(a, (set, frozenset)):
            self._judge_set(path, list(a), list(b))
            self.judge_attributes(path, a, b)
        elif isinstance(a, weakref.ref):
            if a() is not b():
                self.differ(path, "referent differs", a(), b())
        elif is_record(cls):
            self.judge_attributes(path, a, b)
        else:
            self._judge_object(path, a, b)

    def _judge_other_type(self, path: str, a: Any, b: Any) -> None:
        kinds = [_kind(value) for value in (a, b)]
        aspect = STRUCTURE if STRUCTURE in kinds else GEOMETRY if GEOMETRY in kinds else VALUES
        self.differ(path, "type differs", type(a), type(b), aspect=aspect)
        if not self.strictness.further or kinds[0] != kinds[1] or (id(a), id(b)) in self._seen:
            return
        self._seen.add((id(a), id(b)))
        self.alive.update({id(a): a, id(b): b})
        if isinstance(a, torch.Tensor):
            self._meet(path, a, b)
            self.judge_unlike(path, a, b)
        elif isinstance(a, dict) == isinstance(b, dict) and is_collection(a) and is_collection(b):
            self._judge_container(path, a, b)

    def _meet(self, path: str, a: Any, b: Any) -> None:
        if type(a) in (tuple, frozenset):  # equal ones may be one object by interning
            return
        (self.tensors if isinstance(a, torch.Tensor) else self.objects).append(Met(place(path), id(a), id(b)))

    # Containers

    def _judge_container(self, path: str, a: Any, b: Any) -> None:
        self.judge_contents(path, contents_of(a), contents_of(b))
        if hasattr(type(a), "n_sequence_fields") and type(a) is type(b):  # may have fields beyond the sequence
            self.later(f"{path}.__reduce__()", a.__reduce__()[1], b.__reduce__()[1])

    def judge_contents(self, path: str, one: Contents, other: Contents) -> None:
        """Compare what two containers hold."""
        if issubclass(one.cls, dict):
            for left, right in self.match(path, "key", one.keys, other.keys, self._same_value, ordered=True):
                self.later(f"{path}<key {left}>", one.keys[left], other.keys[right])
                self.later(path + one.items[left][0], one.items[left][1], other.items[right][1])
        else:
            if len(one.items) != len(other.items):
                self.differ(path, "length differs", len(one.items), len(other.items))
            for (step, part), (_, its) in zip(one.items, other.items, strict=False):
                self.later(path + step, part, its)
        for (step, part), (_, its) in zip(one.settings, other.settings, strict=False):
            self.later(path + step, part, its)
        self.compare_attributes(path, one.attributes, other.attributes)

    def _judge_set(self, path: str, left: list[Any], right: list[Any]) -> None:
        for index, partner in self.match(path, "element", left, right, self._same_value):
            mine = left[index]
            # Which of several equal elements belong together, nobody can say: their ties are not compared.
            if not has_no_parts(mine) and sum(self._same_value(mine, other) for other in right) == 1:
                self.later(f"{path}{{{index}}}", mine, right[partner])

    def _same_value(self, a: Any, b: Any) -> bool:
        """Whether two elements are the same in themselves."""
        return not Judge(dataclasses.replace(self.strictness, ties=False, containers=False)).run(a, b).found

    def _judge_object(self, path: str, a: Any, b: Any) -> None:
        one, other = reduced(a), reduced(b)
        if (one and other and holds_attributes_only(type(a))) or (one is other is None and refuses_pickle(type(a))):
            self.judge_attributes(path, a, b)
        elif isinstance(one, list) and isinstance(other, list):
            self.later(f"{path}.__reduce__", one, other)
        elif a is not b:
            cannot = "cannot be compared and " if one is None or other is None else ""
            self.differ(path, f"object {cannot}differs", a, b)


def _kind(value: Any) -> str:
    """Return which aspect of a tree the type of a value belongs to."""
    if isinstance(value, (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage)):
        return GEOMETRY
    return STRUCTURE if is_container(value) else VALUES


def _is_of_numpy(name: str, value: Any) -> bool:
    """Whether a value is of a class of NumPy's, which nobody has to have installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, name))
