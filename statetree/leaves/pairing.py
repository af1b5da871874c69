"""Comparing two trees leaf by leaf: what ``similarity`` reports is what ``copy_into`` refuses.

Leaves that are plain tensors on both sides are compared over columns, the others by the facts that their leaf types
give. Nothing is written and no value's ``__eq__`` is trusted to work.
"""

from __future__ import annotations

from operator import and_, itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.errors import Difference, unsignalled
from statetree.leaves.builtin import facts, is_cuttable, is_value, leaf_type_of, materialized
from statetree.leaves.location import located_error
from statetree.leaves.parts import AtomRecipe, PackedRecipe, Recipe, Unpacked, are_views
from statetree.spans.bits import safely_equal
from statetree.spans.columns import Columns
from statetree.spans.geometry_cache import recognise
from statetree.spans.layout import holds_memory
from statetree.tree.flatten import flatten_for, unflatten
from statetree.tree.matching import matched, matched_where

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from statetree.tree.selection import Where

_ORDINARY: Final = frozenset({torch.Tensor, torch.nn.Parameter})


class LeafPairing:
    """The leaves of two trees, side by side: ``right`` in the order of ``left``, ``None`` where there is no partner.

    Attributes:
        spec: The structure of the left tree.
        right_spec: The structure of the right tree.
        differences: Differences of structure. The leaves that they concern have no partner, and no position below.
        missing: Leaves that only one side has, where that is allowed.
        ordinary: The positions at which both sides hold ordinary strided tensors with memory, or distributed ones that
            differ in nothing but the elements of such local tensors.
        atoms: The positions at which both sides hold atoms.
        others: All other positions.
        columns: The columns of the ordinary tensors, or local tensors, left and right.
    """

    def __init__(
        self, verb: str, left: Any, right: Any, *, where: Where | None = None, strict: bool = True, either: bool = False
    ) -> None:
        self.verb = verb
        self.left, self.spec = flatten_for(verb, left)
        right_leaves, self.right_spec = flatten_for(verb, right)
        order: list[int] | None
        self.missing: list[Difference] = []
        sides = (self.spec, self.left), (self.right_spec, right_leaves)
        if where is None and strict:
            order, self.differences = matched(*sides[0], *sides[1])
        else:
            found = matched_where(verb, *sides, where=where, strict=strict, either=either)
            order, self.differences, self.missing = found
        self._order, self._all_right = order, right_leaves
        self.right = right_leaves
        if order is not None:
            self.right = [right_leaves[index] if index >= 0 else None for index in order]
        self.ordinary: Sequence[int] = ()
        self.atoms: Sequence[int] = ()
        self.others: Sequence[int] = ()
        self._tensors = self.left, self.right  # local tensors in the place of ordinary leaves that are distributed
        self._find_ordinary([index for index, partner in enumerate(order or ()) if partner < 0])

    def _find_ordinary(self, lonely: Sequence[int]) -> None:
        left, right = self.left, self.right
        self.columns = Columns(left), Columns(right)
        if not lonely and recognise(self.columns[0], memory=True) and recognise(self.columns[1], memory=True):
            self.ordinary = range(len(left))
        else:
            classes = list(zip(map(type, left), map(type, right), strict=True))
            kinds = {pair: _kind(*pair) for pair in set(classes)}
            named = list(map(kinds.__getitem__, classes))
            for index in lonely:
                named[index] = "lonely"
            if "local" in named:
                self._find_local([index for index, kind in enumerate(named) if kind == "local"], named)
            self.ordinary, self.atoms, self.others = (
                [index for index, kind in enumerate(named) if kind == wanted]
                for wanted in ("ordinary", "atoms", "others")
            )
            self._find_columns()
            if not all([recognise(side, memory=True) or are_views(side) for side in self.columns]):  # noqa: C419 - interrupts
                self._keep_ordinary([False] * len(self.ordinary))
                return
        if not all(map(_have_memory, self.columns)):
            self._keep_ordinary(list(map(and_, *(map(_has_memory, side.tensors) for side in self.columns))))

    def _find_local(self, candidates: Sequence[int], named: list[str]) -> None:
        left, right = self._tensors = list(self.left), list(self.right)
        for index in candidates:
            leaf_type = leaf_type_of(type(left[index]))
            pair = None if leaf_type is None else leaf_type.local_pair(left[index], right[index])
            named[index] = "others" if pair is None else "ordinary"
            left[index], right[index] = pair or (left[index], right[index])

    def completed(self, leaves: Sequence[Any]) -> Any:
        """Return the right tree in fresh containers, with other leaves, of the left tree, where that has a partner."""
        result = list(self._all_right)
        for index, leaf in enumerate(leaves):
            partner = index if self._order is None else self._order[index]
            if partner >= 0:
                result[partner] = leaf
        return unflatten(self.right_spec, result)

    def leave_out(self, positions: Collection[int]) -> None:
        """Drop pairs of leaves, whose tensors need not be compared any more."""
        self.ordinary, self.atoms, self.others = (
            [index for index in kept if index not in positions] for kept in (self.ordinary, self.atoms, self.others)
        )
        self._find_columns()

    def _keep_ordinary(self, ordinary: Sequence[bool]) -> None:
        rest = [index for index, flag in zip(self.ordinary, ordinary, strict=True) if not flag]
        self.others = sorted([*self.others, *rest])
        self.ordinary = [index for index, flag in zip(self.ordinary, ordinary, strict=True) if flag]
        self._find_columns()

    def _find_columns(self) -> None:
        left, right = self._tensors
        self.columns = (
            Columns([left[index] for index in self.ordinary]),
            Columns([right[index] for index in self.ordinary]),
        )


def _have_memory(columns: Columns) -> bool:
    """Whether all tensors have elements, in memory that is there. It may say no where they do."""
    if not columns.on_cpu and any(device.type == "meta" for device in set(columns.devices)):
        return False
    known = columns.known_addresses
    return (0 not in columns.pointers if known is None else known.with_memory) and columns.whole


def _has_memory(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and tensor.data_ptr() != 0 and holds_memory(tensor)


def _kind(left: type, right: type) -> str:
    if left in _ORDINARY and right in _ORDINARY:
        return "ordinary"
    leaf_type = leaf_type_of(left)
    if left is right and leaf_type is not None and leaf_type.local_tensor is not None:
        return "local"
    return "atoms" if leaf_type_of(left) is None and leaf_type_of(right) is None else "others"


def leave_out_differences(pairing: LeafPairing, *, plain: bool, dtypes: bool = True) -> list[Difference]:
    """Return where trees differ in structure, leaf types, dtypes, shapes and layouts, and leave those leaves out.

    What is left of the pairing, which is changed, differs in nothing but the elements of tensors, and what they lie in.
    With ``plain``, plain and opaque values must agree in type, and what cannot be taken apart is a difference.
    """
    found: list[tuple[int, str, Any, Any]] = []
    left, right = pairing.columns
    look_alike = left.dtypes is right.dtypes and left.shapes is right.shapes  # lists of one known geometry
    if not look_alike and ((dtypes and left.dtypes != right.dtypes) or left.shapes != right.shapes):
        rows = zip(pairing.ordinary, left.dtypes, right.dtypes, left.shapes, right.shapes, strict=True)
        for index, dtype_a, dtype_b, shape_a, shape_b in rows:
            if dtypes and dtype_a != dtype_b:
                found.append((index, "dtype", dtype_a, dtype_b))
            if shape_a != shape_b:
                found.append((index, "shape", tuple(shape_a), tuple(shape_b)))
    if plain:
        atoms = ((index, type(pairing.left[index]), type(pairing.right[index])) for index in pairing.atoms)
        found += [(index, "type", a.__qualname__, b.__qualname__) for index, a, b in atoms if a is not b]
    for index in pairing.others:
        pair = pairing.left[index], pairing.right[index]
        try:
            found += [(index, *row) for row in _leaf_difference(*pair, plain=plain, dtypes=dtypes)]
        except unsignalled(Exception) as error:
            raise located_error(pairing.verb, "take apart", error, pairing.spec.paths, pairing.left, index) from error
    if not found:
        return pairing.differences
    pairing.leave_out({index for index, *_ in found})
    named = pairing.spec.paths()
    found.sort(key=itemgetter(0))
    return [*pairing.differences, *(Difference(named[index], kind, a, b) for index, kind, a, b in found)]


def _leaf_difference(a: Any, b: Any, *, plain: bool, dtypes: bool) -> Iterator[tuple[str, Any, Any]]:
    if is_value(a) and is_value(b):
        if plain and type(a) is not type(b):
            yield ("type", type(a).__qualname__, type(b).__qualname__)
        return
    try:
        a, b = materialized(a), materialized(b)
        found = [row for row in fact_differences(_facts_here(a), _facts_here(b)) if dtypes or row[0] != "dtype"]
        found = found or [row for row in inner_differences(a, b) if dtypes or row[0] != "dtype"]
    except unsignalled(Exception) as error:
        if not plain:
            raise
        # similarity is total: what cannot be taken apart is like nothing
        reason = str(error).replace("the leaf at %PATH%", "it")
        yield ("leaf type", f"{type(a).__qualname__} ({reason})", type(b).__qualname__)
        return
    yield from found


# Lists: an interrupt inside a generator that is let go of before its end would be lost.


def facts_inside(leaf: Any) -> list[Mapping[str, Any] | None]:
    """Return the facts of what a leaf is made of, all the way down; ``None`` for tensors that are but a view."""
    found: list[Mapping[str, Any] | None] = []
    leaf_type = leaf_type_of(type(leaf))
    if leaf_type is None or leaf_type.native or leaf_type.deferred or not leaf_type.has_elements:
        return found
    if leaf_type.local_tensor is not None and is_cuttable(getattr(leaf, leaf_type.local_tensor)):  # as nearly always
        return found
    for part in leaf_type.contents(leaf)[0]:
        for held in map(materialized, part if isinstance(part, (list, tuple)) else [part]):
            is_all = held is leaf or is_cuttable(held)
            found += [None] if is_all else [_facts_here(held), *facts_inside(held)]
    return found


def inner_differences(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """Return where ``facts_inside`` of two leaves differ. That one has more of them, is seen by the parts."""
    plain = {"leaf type": "Tensor"}
    pairs = zip(facts_inside(a), facts_inside(b), strict=False)
    both = [pair for pair in pairs if pair != (None, None)]
    return [row for left, right in both for row in fact_differences(left or plain, right or plain)]


def is_made_of_views(recipe: Recipe) -> bool:
    """Whether all that a leaf is made of is a view and nothing else, so that ``facts_inside`` have nothing to say."""
    inner = recipe.inner if isinstance(recipe, PackedRecipe) else ()
    return all(
        isinstance(each, int)
        or (isinstance(each, PackedRecipe) and each.leaf_type.native and each.leaf_type.elements_only(each.context))
        for each in inner
    )


def _facts_here(leaf: Any) -> Mapping[str, Any]:
    """Return the facts of a leaf, and which elements of the whole its parts are, where its class says so."""
    leaf_type = leaf_type_of(type(leaf))
    if leaf_type is None or not (leaf_type.registered and leaf_type.distributed):
        return facts(leaf)
    rows = leaf_type.distributed_parts(leaf, leaf_type.contents(leaf)[0])
    return {**facts(leaf), "layout": tuple([row and (row.shape, *row.offsets) for row in rows])}


def fact_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(kind, left, right)`` for every fact that differs; only the leaf type if that does."""
    if left["leaf type"] != right["leaf type"]:
        yield ("leaf type", left["leaf type"], right["leaf type"])
        return
    for name in {**left, **right}:
        a, b = left.get(name, "absent"), right.get(name, "absent")
        if not safely_equal(a, b) or (name == "memory" and a == "freed"):  # nothing can be copied from or to that
            x, y = (tuple(fact) if isinstance(fact, torch.Size) else fact for fact in (a, b))
            yield name, x, y


def paired_parts(left: Unpacked, right: Unpacked) -> Iterator[tuple[int, int | None, int | None]]:
    """Yield ``(leaf, part, part)``: which plain tensors face each other; ``None`` where there is none."""
    for leaf in range(len(left.leaves)):
        for part_a, part_b in _paired(left.recipe(leaf), right.recipe(leaf)):
            yield leaf, part_a, part_b


def _paired(a: Recipe | list[Recipe], b: Recipe | list[Recipe]) -> Iterator[tuple[int | None, int | None]]:
    if isinstance(a, int) and isinstance(b, int):
        yield a, b
        return
    if isinstance(a, AtomRecipe) or isinstance(b, AtomRecipe):
        return
    inner_a, inner_b = _parts_of(a), _parts_of(b)
    if len(inner_a) != len(inner_b):
        yield None, None
        return
    for x, y in zip(inner_a, inner_b, strict=True):
        yield from _paired(x, y)


def _parts_of(recipe: Recipe | list[Recipe]) -> Sequence[Any]:
    """Return the recipes of what holds a leaf's elements: without the attributes and the identity of a tensor."""
    if isinstance(recipe, list):
        return recipe
    return recipe.inner if isinstance(recipe, PackedRecipe) else (recipe,)
