"""What a judge has found so far, and what it still has to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statetree.testing.objects import attributes_of, brief

if TYPE_CHECKING:
    from statetree.testing.regions import View
    from statetree.testing.ties import Met


@dataclass(frozen=True)
class Strictness:
    """What is compared besides containers and leaves; ``assert_trees_equal`` describes the fields of the same names."""

    ties: bool = True
    strides: bool = True
    device: bool = False
    containers: bool = False
    storages: bool = True


class Report:
    """Collects differences between two trees, and the tensors and objects that were met on both sides."""

    def __init__(self, strictness: Strictness) -> None:
        self.strictness = strictness
        self.found: list[str] = []
        self.views: list[View] = []
        self.tensors: list[Met] = []
        self.objects: list[Met] = []
        self.alive: dict[int, Any] = {}  # no id is handed out twice
        self.inside: list[tuple[str, Any, Any]] = []  # what the value under judgement holds

    def differ(self, path: str, what: str, a: Any = None, b: Any = None) -> None:
        """Note a difference, with what each side holds."""
        sides = "" if a is None and b is None else f": {brief(a)} against {brief(b)}"
        self.found.append(f"{what} at {path or '<root>'}{sides}")

    def expect(self, path: str, what: str, a: Any, b: Any) -> bool:
        """Note a difference unless two values are equal and of one type; return whether they are."""
        same = type(a) is type(b) and bool(a == b)
        if not same:
            self.differ(path, what, a, b)
        return same

    def later(self, path: str, a: Any, b: Any) -> None:
        """Have two values judged that the present ones hold."""
        self.inside.append((path, a, b))

    def judge_attributes(self, path: str, a: Any, b: Any, *, skip: frozenset[str] = frozenset()) -> None:
        """Compare instance attributes, and their order."""
        mine, others = attributes_of(a, skip), attributes_of(b, skip)
        if list(mine) != list(others):
            self.differ(path, "attributes differ", list(mine), list(others))
        for name in mine:
            if name in others:
                self.later(f"{path}.{name}", mine[name], others[name])
