"""``similarity``: whether two states fit each other, and where they do not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.declare import phase
from statetree.errors import (
    USERS_OWN,
    CyclicTree,
    Difference,
    StateTreeError,
    TreeTooDeep,
    prefix_hint,
    shown,
    unsignalled,
)
from statetree.key_paths import Path
from statetree.leaves.builtin import is_value, materialized
from statetree.leaves.copying import parts_text
from statetree.leaves.pairing import (
    LeafPairing,
    inner_differences,
    is_made_of_views,
    leave_out_differences,
    paired_parts,
)
from statetree.leaves.parts import AtomRecipe, PackedRecipe, Recipe, Unpacked, unpack
from statetree.leaves.ties import object_ties
from statetree.leaves.value_texts import equal_values
from statetree.spans.bits import is_unreadable, safely_equal, same_bytes, without_elements
from statetree.spans.columns import Columns
from statetree.spans.element_differences import Tolerance, Unequal, tensor_difference
from statetree.spans.overlaps import are_disjoint, conflicts, once
from statetree.torch_internals import quietly
from statetree.tree.html_fragments import cell, html_escaped, table

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from statetree.tree.selection import Where

#: How many differences a ``Similarity`` keeps; it counts all of them.
MAX_DIFFERENCES: Final = 1_000


@dataclass(frozen=True)
class Similarity:
    """The result of ``similarity``: true if nothing differs.

    Attributes:
        differences: Where the trees differ and how: structure first, then values, of tensors the largest differences
            first. A thousand at most.
        count: How many differences there are.
        values: Whether values were compared, and not structure alone.
        hint: What mends all of it, if names differ by a prefix alone.
    """

    differences: tuple[Difference, ...]
    count: int
    values: bool = True
    hint: str = ""

    def __bool__(self) -> bool:
        return self.count == 0

    def _repr_html_(self) -> str:
        rows = [(found.path or "<root>", found.kind, found.left, found.right) for found in self.differences]
        heading = html_escaped(str(self).partition(":")[0])
        hint = [f"<p>{html_escaped(self.hint)}</p>"] if self.hint else []
        titles = ("path", "what", "left", "right")
        return cell([f"<b>{heading}</b>", *hint, *table(titles, rows, ("", "", "gone", "new"))])

    def __str__(self) -> str:
        scope = "" if self.values else " in structure (values were not compared)"
        if not self.count:
            return f"similar{scope}"
        places = "1 difference" if self.count == 1 else f"{self.count} differences"
        lines = shown([str(difference) for difference in self.differences], self.count)
        return f"{places}{scope}:\n  {lines}" + (f"\n  {self.hint}" if self.hint else "")


def similarity(
    a: Any, b: Any, *, where: Where | None = None, values: bool = True, rtol: float = 0.0, atol: float = 0.0
) -> Similarity:
    """Compare two trees: structure, leaf types, dtypes, shapes, layouts, and every element.

    Mappings are compared by their keys, whatever their type and order; lists, tuples and other containers must be of
    the same kind. Devices, strides, instance attributes and ``requires_grad`` are not compared. Any two values can be
    compared. A value that raises when it is read differs from everything, itself included. Neither tree is changed.

    Nothing communicates: of distributed tensors each rank compares what it holds, and may find another answer than
    others. ``digest(a).differing(digest(b))`` tells every rank the same, ``audit`` compares replicas.

    If the trees are similar, ``copy_into`` succeeds in either direction (on tensors that can be written). So trees
    differ if tensors overlap in only one of them; but a view that appears twice may correspond to two tensors with
    equal values.

    Args:
        a: Any tree.
        b: Any tree.
        where: Which leaves are compared, as for ``select``: those that match in one of the trees.
        values: Whether the elements of tensors must agree, bit by bit, and plain values in value; objects must be
            pickled alike, or be equal and hold values of the same types and bits. Otherwise plain
            values are compared by type (``1``, ``1.0`` and ``True`` differ), opaque objects by their classes and the
            dtypes and shapes of the tensors inside, and the report says so. Comparing elements takes a few megabytes.
        rtol: Floating-point and complex elements may differ by ``atol + rtol * max(abs(a), abs(b))``.
        atol: See ``rtol``. If either is not zero, NaNs are equal, whatever their payload; infinities are equal to
            themselves alone.

    Returns:
        A ``Similarity``: true or false, with every difference, and a report as its ``str``. Where the names of the
        trees differ by a prefix alone (``module.``), the report says which ``rename`` mends it.

    Raises:
        TreeMismatch: If a glob in ``where`` matches nothing in either tree.
        CyclicTree: If a container holds itself.
        ValueError: If a tolerance is negative or NaN.

    Example:
        >>> import statetree as st, torch
        >>> report = st.similarity({"w": torch.zeros(2, 3)}, {"w": torch.zeros(3, 2)})
        >>> bool(report)
        False
        >>> print(report)
        1 difference:
          shape differs at w: (2, 3) against (3, 2)
        >>> print(st.similarity({"w": torch.zeros(3)}, {"w": torch.tensor([0.0, 0.5, 0.0])}))
        1 difference:
          value differs at w: 0.0 at index (1,) (1 of 3 elements differ) against 0.5 at index (1,), by at most 0.5
    """
    tolerance = Tolerance(rtol, atol)
    tolerance.check("similarity")
    with phase("similarity.compare"):
        return _similarity(a, b, where, tolerance if values else None)


@quietly
def _similarity(a: Any, b: Any, where: Where | None, tolerance: Tolerance | None) -> Similarity:
    hint = ""
    try:
        pairing = LeafPairing("similarity", a, b, where=where, either=True)
        found = [*leave_out_differences(pairing, plain=True), *_byte_differences(pairing, tolerance)]
        if any(difference.kind == "missing" for difference in pairing.differences):
            hint = prefix_hint(pairing.spec.rendered_paths(), pairing.right_spec.rendered_paths())
    except (CyclicTree, TreeTooDeep, MemoryError):
        raise
    except unsignalled(*USERS_OWN) as error:  # total: what cannot be looked at is like nothing
        if where is not None:  # a predicate's own error, or a glob that matches nothing
            raise
        path = getattr(error, "path", None) or Path()
        found = [Difference(path, "leaf type", "cannot be taken apart", f"{type(error).__name__}: {error}")]
    return Similarity(tuple(found[:MAX_DIFFERENCES]), len(found), tolerance is not None, hint)


def _byte_differences(pairing: LeafPairing, tolerance: Tolerance | None) -> list[Difference]:
    """Compare leaves that agree in everything but their elements; without a tolerance, not these."""
    values = tolerance is not None
    paths = cache(pairing.spec.paths)
    found: list[Difference] = []

    def differ(index: int, kind: str, left: Any, right: Any) -> None:
        found.append(Difference(paths()[index], kind, left, right))

    left, right = (_Parts(columns.tensors, pairing.ordinary) for columns in pairing.columns)
    for index in pairing.atoms if values else ():
        if not safely_equal(pairing.left[index], pairing.right[index]):
            differ(index, "value", short_repr(pairing.left[index]), short_repr(pairing.right[index]))
    if pairing.others:
        left, right = _Parts(list(left.tensors), list(left.leaves)), _Parts(list(right.tensors), list(right.leaves))
        _unpack_both(pairing, pairing.others, left, right, differ, values=values)
    for index, other, on_left, on_right in _tie_conflicts(pairing, left, right):
        differ(index, "ties", on_left, f"{on_right} (with {paths()[other]})")
    if tolerance is not None:
        unequal: list[tuple[float, Difference]] = []
        for index, a, b in zip(left.leaves, left.tensors, right.tensors, strict=True):
            if a is not b and not same_bytes(a, b):
                elements = tensor_difference(a, b, tolerance)
                if elements is not None:
                    largest = math.inf if elements.max_abs is None else elements.max_abs
                    unequal.append((-largest, _of_elements(paths()[index], elements, a.numel())))
        found += [difference for _, difference in sorted(unequal, key=itemgetter(0))]
    return found


def _of_elements(path: Path, found: Unequal, count: int) -> Difference:
    if not found.first and found.max_abs is None and count != 1:  # there are no elements to show
        return Difference(path, "value", found.left, found.right)
    left = f"{found.left} at index {found.first} ({found.how_many} of {count} elements differ)"
    return Difference(path, "value", left, f"{found.right} at index {found.first}", found.max_abs)


class _Parts(NamedTuple):
    """Plain tensors, and the leaves that they come from."""

    tensors: Any
    leaves: Any


def short_repr(value: Any, limit: int = 60) -> str:
    """Return the representation of any value, cut off at a limit."""
    try:
        text = repr(value)
    except unsignalled(*USERS_OWN):  # a hostile __repr__
        text = object.__repr__(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _unpack_both(
    pairing: LeafPairing, indices: Sequence[int], left: _Parts, right: _Parts, differ: Any, *, values: bool
) -> None:
    """Take apart the leaves that are not ordinary tensors, and put their plain tensors beside each other."""
    sides: list[Unpacked] = []
    for leaves in (pairing.left, pairing.right):
        chosen = [materialized(leaves[index]) for index in indices]
        try:
            sides.append(unpack("similarity", chosen, lambda: [pairing.spec.paths()[index] for index in indices]))
        except unsignalled(StateTreeError, SystemExit) as error:
            # similarity is total: what cannot be taken apart is like nothing, not even itself. The rest goes on.
            if len(indices) == 1:
                differ(indices[0], "leaf type", "cannot be taken apart", str(error) or type(error).__name__)
            else:
                for index in indices:
                    _unpack_both(pairing, [index], left, right, differ, values=values)
            return
    for position, part_a, part_b in paired_parts(*sides):
        index = indices[position]
        if part_a is None or part_b is None:
            differ(index, "parts", *(parts_text(side, position) for side in sides))
            continue
        a, b = sides[0].parts[part_a], sides[1].parts[part_b]
        if a.dtype != b.dtype or a.shape != b.shape:
            differ(index, "parts", f"{a.dtype} {tuple(a.shape)}", f"{b.dtype} {tuple(b.shape)}")
        elif a.numel():
            for parts, tensor in ((left, a), (right, b)):
                parts.tensors.append(tensor)
                parts.leaves.append(index)
    for position, index in enumerate(indices):
        a, b = pairing.left[index], pairing.right[index]
        if is_value(a) and not all(is_made_of_views(side.recipe(position)) for side in sides):
            for row in inner_differences(a, b):
                differ(index, *row)
        if values:
            same = _same_contexts(sides[0].recipe(position), sides[1].recipe(position))
            # Equal sets may have been filled in different orders, and then look different when taken apart.
            if not same and (sides[0].parts_of(position) or not equal_values(a, b)):
                differ(index, "value", short_repr(a), short_repr(b))


def _same_contexts(a: Recipe, b: Recipe) -> bool:
    """Whether opaque objects agree in everything but the tensors inside, which are compared on their own."""
    if isinstance(a, AtomRecipe) or isinstance(b, AtomRecipe):
        return isinstance(a, AtomRecipe) and isinstance(b, AtomRecipe) and safely_equal(a.value, b.value)
    if not isinstance(a, PackedRecipe) or not isinstance(b, PackedRecipe):
        return True
    return a.leaf_type is b.leaf_type and (not a.leaf_type.opaque or a.context == b.context)


def _tie_conflicts(pairing: LeafPairing, left: _Parts, right: _Parts) -> list[tuple[int, int, str, str]]:
    """Return leaves that are tied on one side, and on the other hold what ``copy_into`` would not write there."""
    a, b = pairing.columns
    if len(left.tensors) > len(pairing.ordinary):
        a, b = Columns(left.tensors), Columns(right.tensors)
    if are_disjoint(a) and are_disjoint(b):
        return []
    opaque = {index for index in pairing.others if is_value(pairing.left[index])}  # copied, not written to
    readable = [
        index
        for index, (x, y) in enumerate(zip(a.tensors, b.tensors, strict=True))
        if left.leaves[index] not in opaque
        and not without_elements(x)
        and not without_elements(y)
        and not is_unreadable(x, y)
    ]
    found = []
    for targets, sources, told in ((b, a, ("different values", "tied")), (a, b, ("tied", "different values"))):
        pairs = [(index, once(targets.tensors[index], sources.tensors[index])) for index in readable]
        kept = [(left.leaves[index], *pair) for index, pair in pairs if pair is not None]
        conflicting = conflicts(Columns([target for _, target, _ in kept]), Columns([source for *_, source in kept]))
        found += [(kept[first][0], kept[second][0], *told) for first, second in conflicting]
    return found + _lost_ties(opaque, left, right)


def _lost_ties(opaque: Collection[int], left: _Parts, right: _Parts) -> list[tuple[int, int, str, str]]:
    """Return the objects of which ``copy_into`` would refuse to copy a view, and whose memory it is a view on."""
    inside = [index for index, leaf in enumerate(left.leaves) if leaf in opaque]
    outside = [index for index, leaf in enumerate(left.leaves) if leaf not in opaque]
    found: list[tuple[int, int, str, str]] = []
    if not inside or not outside:
        return found
    for sources, targets, told in ((left, right, ("a view", "none")), (right, left, ("none", "a view"))):
        parts = Columns([sources.tensors[index] for index in inside])
        copied, written = (Columns([side.tensors[index] for index in outside]) for side in (sources, targets))
        partners = {place: targets.tensors[index] for place, index in enumerate(inside)}
        ties = object_ties(parts, copied, written, partners.copy)
        memory = [*outside, *(inside[part] for part in ties.written)]  # in the order in which ``lost`` counts
        found += [(left.leaves[inside[part]], left.leaves[memory[source]], *told) for part, source in ties.lost]
    return found
