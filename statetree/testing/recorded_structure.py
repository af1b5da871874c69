"""The containers of a tree, written down, so that they can be compared with what they are after a change."""

from __future__ import annotations

import dataclasses
from typing import Any

from statetree.testing.findings import Finding, Findings, Strictness
from statetree.testing.judge import Judge
from statetree.testing.objects import Contents, contents_of, is_container
from statetree.testing.walk import has_no_parts

#: A place in two trees: its path, what is there, and whether values are part of the structure there.
_Pair = tuple[str, Any, Any, bool]


class RecordedStructure:
    """The containers of a tree, and what each held when this was made, whatever becomes of the tree."""

    def __init__(self, tree: Any) -> None:
        self.root = tree
        self._held: dict[int, tuple[Any, Contents]] = {}  # with the containers, so that no id is handed out twice
        pending = [tree]
        while pending:
            value = pending.pop()
            if is_container(value) and id(value) not in self._held:
                contents = contents_of(value)
                self._held[id(value)] = value, contents
                pending += [part for _, part in contents.parts()]

    def contents(self, value: Any) -> Contents | None:
        """Return what a container held; ``None`` of a leaf."""
        return self._held.get(id(value), (None, None))[1]

    def is_plain_data(self, value: Any) -> bool:
        """Whether there was nothing in a value but containers and plain values."""
        pending, seen = [value], set()
        while pending:
            value = pending.pop()
            if has_no_parts(value) or id(value) in seen:
                continue
            seen.add(id(value))
            if (contents := self.contents(value)) is None:
                return False
            pending += [part for _, part in contents.parts()]
        return True


def structure_differences(left: RecordedStructure, right: RecordedStructure) -> list[Finding]:
    """Return where two structures differ, one line for each place."""
    report = Findings(Strictness())
    pending: list[_Pair] = [("", left.root, right.root, False)]
    seen: set[tuple[int, int, bool]] = set()
    while pending:
        path, a, b, exact = pending.pop()
        if (pair := (id(a), id(b), exact)) not in seen:
            seen.add(pair)
            pending += reversed(_compare(report, (path, a, b, exact), left, right))
    return report.found


def _compare(report: Findings, pair: _Pair, left: RecordedStructure, right: RecordedStructure) -> list[_Pair]:
    """Compare one place without what lies in it; return what lies in it on both sides."""
    path, a, b, exact = pair
    one, other = left.contents(a), right.contents(b)
    if not (exact or one or other):
        return []
    classes = one.cls if one else type(a), other.cls if other else type(b)
    if classes[0] is not classes[1]:
        report.differ(path, "type differs", *classes)
        return []
    if one is None or other is None:
        _expect_same(report, path, a, b)
        return []
    if not report.expect(path, "attributes differ", list(one.attributes), list(other.attributes)):
        return []
    for (step, setting), (_, its) in zip(one.settings, other.settings, strict=True):
        _expect_same(report, path + step, setting, its)
    if issubclass(one.cls, dict):
        pairs = report.match(path, "key", one.keys, other.keys, _is_same, ordered=True)
        for at, its in pairs:
            _expect_same(report, f"{path}<key {at}>", one.keys[at], other.keys[its])
    else:
        report.expect(path, "length differs", len(one.items), len(other.items))
        pairs = [(index, index) for index in range(min(len(one.items), len(other.items)))]
    inside = [(path + one.items[at][0], one.items[at][1], other.items[its][1], exact) for at, its in pairs]
    fields = _fields(a, one)
    for name, held in one.attributes.items():
        data = exact or (name.partition(" of ")[0] not in fields and left.is_plain_data(held))  # slots name their class
        inside.append((f"{path}.{name}", held, other.attributes[name], data))
    return inside


def _expect_same(report: Findings, path: str, a: Any, b: Any) -> None:
    if not _is_same(a, b):
        report.differ(path, "value differs", a, b)


def _is_same(a: Any, b: Any) -> bool:
    return not Judge(Strictness(ties=False)).run(a, b).found


def _fields(value: Any, contents: Contents) -> set[str]:
    """Return which attributes are places of the tree: fields, and all of what is its own ``__dict__``."""
    if getattr(value, "__dict__", None) is value:
        return set(contents.attributes)
    described = dataclasses.fields(value) if dataclasses.is_dataclass(value) else getattr(value, "__attrs_attrs__", ())
    return {field.name for field in described}
