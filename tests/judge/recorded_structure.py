"""The containers of a tree, written down, so that they can be compared with what they are after a change."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.judge.findings import Strictness
from tests.judge.judge import Judge
from tests.judge.objects import Contents, contents_of, is_container
from tests.judge.walk import walk

if TYPE_CHECKING:
    from tests.judge.findings import Finding


class AnyLeaf(NamedTuple):
    """Stands for a leaf, which may become any other leaf."""

    cls: type


def recorded_structure(tree: Any, *, leaves: bool) -> Any:
    """Return what a tree holds now, whatever becomes of it: containers as their ``Contents``.

    Args:
        tree: Any value.
        leaves: Whether leaves stay what they are. If not, those are ``AnyLeaf`` that are not plain data in an attribute
            beside the fields.
    """
    found: dict[tuple[int, bool], tuple[Any, Contents]] = {}  # with the containers: no id is handed out twice
    pending: list[tuple[Any, Contents, bool]] = []

    def recorded(value: Any, *, leaves: bool) -> Any:
        if not is_container(value):
            return value if leaves else AnyLeaf(type(value))
        if (id(value), leaves) not in found:
            found[id(value), leaves] = value, contents_of(value)
            pending.append((*found[id(value), leaves], leaves))
        return found[id(value), leaves][1]

    root = recorded(tree, leaves=leaves)
    while pending:
        value, contents, kept = pending.pop()
        contents.items[:] = [(step, recorded(part, leaves=kept)) for step, part in contents.items]
        fields = _fields(value, contents)
        for name, held in contents.attributes.items():
            is_field = name.partition(" of ")[0] in fields  # slots name their class
            is_data = not is_field and all(map(is_container, walk(held)))
            contents.attributes[name] = recorded(held, leaves=kept or is_data)
    return root


def _fields(value: Any, contents: Contents) -> set[str]:
    """Return which attributes are places of the tree: fields, and all of what is its own ``__dict__``."""
    if getattr(value, "__dict__", None) is value:
        return set(contents.attributes)
    described = dataclasses.fields(value) if dataclasses.is_dataclass(value) else getattr(value, "__attrs_attrs__", ())
    return {field.name for field in described}


def structure_differences(left: Any, right: Any) -> list[Finding]:
    """Return where two structures differ, one line for each place: one without leaves, and one with them."""
    return _StructureJudge(Strictness(ties=False)).run(left, right).found


class _StructureJudge(Judge):
    """Compares containers that were recorded; the leaves of one side may be any on the other."""

    def _judge(self, path: str, a: Any, b: Any) -> None:
        if isinstance(a, Contents) and isinstance(b, Contents) and a.cls is b.cls:
            if (id(a), id(b)) not in self._seen:
                self._seen.add((id(a), id(b)))
                self.judge_contents(path, a, b)
        elif isinstance(a, Contents) or isinstance(b, Contents):
            classes = [side.cls if isinstance(side, (Contents, AnyLeaf)) else type(side) for side in (a, b)]
            self.differ(path, "type differs", *classes)
        elif not isinstance(a, AnyLeaf):
            super()._judge(path, a, b)
