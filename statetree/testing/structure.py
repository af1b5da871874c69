"""The containers of a tree, written down, so that they can be compared with what they are after a change."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import torch

from statetree.testing.anatomy import anatomy
from statetree.testing.judge import Judge
from statetree.testing.objects import stands_on_c
from statetree.testing.report import Report, Strictness
from statetree.testing.walk import walk


@dataclasses.dataclass(eq=False)
class Outline:
    """One place of a tree: a container and the places in it, or a leaf.

    Attributes:
        cls: The class of what is there.
        exact: Whether values are part of the structure here, as in attributes that hold nothing but plain data.
        is_container: Whether it is no leaf.
        value: The leaf, where values count.
        keys: Of a mapping.
        settings: Default factory or greatest length, with the steps that lead there.
        names: Of the attributes, in their order.
        items: What it contains, with the steps that lead there; of a mapping in the order of its keys.
        attributes: Likewise.
    """

    cls: type
    exact: bool
    is_container: bool
    value: Any = None
    keys: list[Any] = dataclasses.field(default_factory=list)
    settings: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    items: list[tuple[str, Outline]] = dataclasses.field(default_factory=list)
    attributes: list[tuple[str, Outline]] = dataclasses.field(default_factory=list)


def outline(tree: Any) -> Outline:
    """Write down the containers of a tree. What becomes of the tree does not change what was written."""
    pending: list[tuple[Any, Outline]] = []
    known: dict[tuple[int, bool], tuple[Any, Outline]] = {}  # with the objects, so that no id is handed out twice

    def place(value: Any, *, exact: bool) -> Outline:
        if (id(value), exact) not in known:
            made = Outline(type(value), exact=exact, is_container=_is_container(value))
            if made.is_container:
                pending.append((value, made))
            elif exact:
                made.value = value
            known[id(value), exact] = value, made
        return known[id(value), exact][1]

    root = place(tree, exact=False)
    while pending:
        value, made = pending.pop()
        body = anatomy(value)
        made.keys = [key for _, key in body.keys]
        made.settings = body.settings
        made.names = list(body.attributes)
        made.items = [(step, place(item, exact=made.exact)) for step, item in body.items]
        fields = body.attributes if getattr(value, "__dict__", None) is value else _fields(made.cls)
        for name, held in body.attributes.items():
            is_field = name.partition(" of ")[0] in fields  # slots are named with their class
            exact = made.exact or (not is_field and _is_plain_data(held))
            made.attributes.append((f".{name}", place(held, exact=exact)))
    return root


def structure_differences(left: Outline, right: Outline) -> list[str]:
    """Return where two structures differ, one line for each place."""
    report = Report(Strictness())
    pending, seen = [("", left, right)], set()
    while pending:
        path, a, b = pending.pop()
        if (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        pending += [(path + step, one, other) for step, one, other in reversed(_compare(report, path, a, b))]
    return report.found


def _compare(report: Report, path: str, a: Outline, b: Outline) -> list[tuple[str, Outline, Outline]]:
    """Compare two places without what lies in them; return what lies in both, with the step that leads there."""
    if not (a.exact or a.is_container or b.is_container):
        return []
    if a.cls is not b.cls:
        report.differ(path, "type differs", a.cls, b.cls)
        return []
    if not a.is_container:
        if not _is_same(a.value, b.value):
            report.differ(path, "value differs", a.value, b.value)
        return []
    if a.names != b.names:
        report.differ(path, "attributes differ", a.names, b.names)
        return []
    for (step, setting), (_, other) in zip(a.settings, b.settings, strict=True):
        if not _is_same(setting, other):
            report.differ(path + step, "value differs", setting, other)
    if issubclass(a.cls, dict):
        pairs = report.match(path, "key", a.keys, b.keys, _is_same, ordered=True)
        for left, right in pairs:
            if not _is_same(a.keys[left], b.keys[right]):
                report.differ(f"{path}<key {left}>", "value differs", a.keys[left], b.keys[right])
    else:
        if len(a.items) != len(b.items):
            report.differ(path, "length differs", len(a.items), len(b.items))
        pairs = [(index, index) for index in range(min(len(a.items), len(b.items)))]
    items = [(*a.items[left], b.items[right][1]) for left, right in pairs]
    return items + [(step, one, other) for (step, one), (_, other) in zip(a.attributes, b.attributes, strict=True)]


def _is_same(a: Any, b: Any) -> bool:
    return not Judge(Strictness(ties=False)).run(a, b).found


def _is_container(value: Any) -> bool:
    cls = type(value)
    if isinstance(value, (type, torch.Size)):
        return False
    if isinstance(value, (dict, list, tuple, deque)):
        return True
    return (dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__")) and not stands_on_c(cls)


def _fields(cls: type) -> set[str]:
    """Return the names of the fields of a dataclass or an attrs class."""
    if dataclasses.is_dataclass(cls):
        return {field.name for field in dataclasses.fields(cls)}
    return {attribute.name for attribute in getattr(cls, "__attrs_attrs__", ())}


def _is_plain_data(value: Any) -> bool:
    """Whether there is nothing in a value but containers and plain values."""
    return all(_is_container(held) for held in walk(value))
