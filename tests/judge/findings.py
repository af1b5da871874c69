"""What a judge has found so far, and what it still has to look at.

Every difference belongs to one aspect of a tree: its structure, the geometry of its tensors, its values or its ties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.judge.element_pairs import pair_up
from tests.judge.messages import SHOWN_ALONE, brief, contrast, place
from tests.judge.objects import attributes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.judge.aliasing import Met
    from tests.judge.regions import View

STRUCTURE, GEOMETRY, VALUES, TIES = "structure", "geometry", "values", "ties"
#: What a difference begins with that is none of geometry.
_ASPECTS = {
    **dict.fromkeys(("length", "order of keys", "attributes"), STRUCTURE),
    **dict.fromkeys(("value", "object", "object cannot be compared and", "referent", "elements"), VALUES),
    **dict.fromkeys(("one storage is freed", "scale", "zero point"), VALUES),
}


class Finding(str):
    """A difference, as a line of text, with the aspect of the tree that it belongs to."""

    aspect: str

    def __new__(cls, text: str, aspect: str) -> Finding:
        made = super().__new__(cls, text)
        made.aspect = aspect
        return made


@dataclass(frozen=True)
class Strictness:
    """What is compared besides containers and leaves; ``assert_trees_equal`` describes the fields of the same names.

    Attributes:
        further: Whether to look further where types or geometries differ, so that every aspect is judged by itself.
    """

    ties: bool = True
    strides: bool = True
    device: bool = False
    containers: bool = False
    storages: bool = True
    further: bool = False


class Findings:
    """Collects differences between two trees, and the tensors and objects that were met on both sides."""

    def __init__(self, strictness: Strictness) -> None:
        self.strictness = strictness
        self.found: list[Finding] = []
        self.views: list[View] = []
        self.tensors: list[Met] = []
        self.objects: list[Met] = []
        self.has_other_geometry = False
        self.alive: dict[int, Any] = {}  # no id is handed out twice
        self.inside: list[tuple[str, Any, Any]] = []  # what the value under judgement holds

    def differ(self, path: str, what: str, a: Any = None, b: Any = None, *, aspect: str | None = None) -> None:
        """Note a difference, with what each side holds."""
        sides = "" if a is None and b is None else f": {contrast(a, b)}"
        self.note(f"{what} at {place(path)}{sides}", aspect or _ASPECTS.get(what.removesuffix(" differs"), GEOMETRY))

    def note(self, text: str, aspect: str) -> None:
        """Note a difference in words of its own."""
        self.found.append(Finding(text, aspect))

    def expect(self, path: str, what: str, a: Any, b: Any) -> bool:
        """Note a difference unless two values are equal and of one type; return whether they are."""
        same = type(a) is type(b) and bool(a == b)
        if not same:
            self.differ(path, what, a, b)
        return same

    def later(self, path: str, a: Any, b: Any) -> None:
        """Have two values judged that the present ones hold."""
        self.inside.append((path, a, b))

    def match(
        self,
        path: str,
        what: str,
        left: Sequence[Any],
        right: Sequence[Any],
        same: Callable[[Any, Any], bool],
        *,
        ordered: bool = False,
    ) -> list[tuple[int, int]]:
        """Pair the elements of two collections as ``pair_up`` does; note those on one side only, and another order."""
        pairing = pair_up(left, right, same, ordered=ordered)
        for side, elements, alone in (("left", left, pairing.only_left), ("right", right, pairing.only_right)):
            if alone:
                count = f"{len(alone)} {what}s are" if len(alone) > 1 else f"1 {what} is"
                shown = ", ".join(brief(elements[position]) for position in alone[:SHOWN_ALONE])
                more = ", ..." if len(alone) > SHOWN_ALONE else ""
                self.note(
                    f"{count} only on the {side} at {place(path)}: {shown}{more}",
                    STRUCTURE if what == "key" else VALUES,
                )
        if ordered and (places := pairing.first_out_of_order()) is not None:
            self.differ(path, f"order of {what}s differs", left[places[0]], right[places[1]])
        return pairing.pairs

    def judge_attributes(self, path: str, a: Any, b: Any, *, skip: frozenset[str] = frozenset()) -> None:
        """Compare instance attributes, and their order."""
        aspect = GEOMETRY if isinstance(a, torch.Tensor) else STRUCTURE
        self.compare_attributes(path, attributes_of(a, skip), attributes_of(b, skip), aspect)

    def compare_attributes(
        self, path: str, mine: dict[str, Any], others: dict[str, Any], aspect: str = STRUCTURE
    ) -> None:
        """Compare attributes by their names, and the order of these."""
        if list(mine) != list(others):
            self.differ(path, "attributes differ", list(mine), list(others), aspect=aspect)
        for name in mine:
            if name in others:
                self.later(f"{path}.{name}", mine[name], others[name])
