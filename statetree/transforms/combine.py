"""``combine``: a tree whose elements are made of those of several."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch

from statetree.declare import leafwise
from statetree.errors import Difference, TreeMismatch, check_function, note_leaf, unsignalled
from statetree.leaves.builtin import facts, is_stored, is_value, materialized
from statetree.leaves.location import located_error
from statetree.leaves.pairing import fact_differences, inner_differences, paired_parts
from statetree.leaves.parts import unpack
from statetree.leaves.recasting import recast
from statetree.leaves.ties import sharing, view_key
from statetree.leaves.types.tensor import identified, kind_of
from statetree.spans.bits import as_plain
from statetree.spans.columns import Columns
from statetree.spans.layout import check_memory, extents, lay_out
from statetree.spans.overlaps import lie_alike, once, shared_elements
from statetree.torch_internals import (
    copy_each,
    is_sole_view,
    quietly,
    set_bits,
    storage_key,
    torch_function_enabled,
    version_of,
)
from statetree.tree.flatten import flatten_for, unflatten
from statetree.tree.matching import matched_where
from statetree.tree.selection import selected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from statetree.key_paths import Path
    from statetree.tree.selection import Where

T = TypeVar("T")


class _Counterparts(NamedTuple):
    """A leaf of the first tree, and those of the others in its place."""

    path: Path
    leaves: Sequence[Any]


@leafwise
@quietly
def combine(fn: Callable[..., torch.Tensor], tree: T, *others: Any, where: Where | None = None) -> T:
    """Make a tree of several, element by element: averages, moving averages, interpolations.

    Structure, layout, geometry, ties, classes and ``requires_grad`` are the first tree's, the dtype is that of what the
    function returns. Leaves without floating-point or complex elements are the first tree's as they are, and so are
    opaque objects, with tensors inside that are tied to combined ones. Of distributed leaves, ranks combine what they
    hold: nothing communicates. Of stored leaves, a leaf is made that reads and combines elements when it is read, a
    bucket at a time: so checkpoints may be larger than memory. (Each of these has memory of its own, also where two lay
    in one storage without sharing an element.)

    Args:
        fn: Is called with the tensors of one part of each tree, once for those that are tied. It works elementwise, and
            not in place (that is noticed, but for writes through ``.data`` and NumPy, and into inference tensors). What
            it returns may be one and the same tensor each time (``out=``).
        tree: Any tree.
        others: Trees of the same structure and layout.
        where: Which leaves are combined, as for ``select``; all others are the first tree's.

    Returns:
        A fresh tree.

    Aliasing:
        Leaves that are not combined are the first tree's own.

    Raises:
        TreeMismatch: If trees differ in structure, shapes or layouts, placements are ``Partial``, tensors of the first
            are tied and not those of the others, or the function returns another shape or writes into its arguments.
        UnsupportedLeaf: If a leaf is made of several tensors (sparse, quantized).
        Exception: What the function raises, with a note of the leaf's path.

    Example:
        >>> import statetree as st, torch
        >>> average, model = {"w": torch.zeros(2), "step": 3}, {"w": torch.ones(2), "step": 4}
        >>> st.combine(lambda old, new: old.lerp(new, 0.1), average, model)
        {'w': tensor([0.1000, 0.1000]), 'step': 3}
    """
    check_function("combine", "fn", fn)
    leaves, spec = flatten_for("combine", tree)
    paths = spec.paths()
    wrong: list[Difference] = []
    mask = [_is_floating(leaf) for leaf in leaves]
    if where is not None:
        mask = selected(where, spec, leaves, verb="combine")
        plain = [path for path, leaf, flag in zip(paths, leaves, mask, strict=True) if flag and is_value(leaf)]
        wrong += [Difference(path, "leaf type", "a plain value", "a tensor") for path in plain]
    meant = None if where is None else [path for path, flag in zip(paths, mask, strict=True) if flag]
    columns = [leaves]
    for other in others:
        theirs, other_spec = flatten_for("combine", other)
        found = matched_where("combine", (spec, leaves), (other_spec, theirs), where=meant)
        wrong += [difference._replace(left=difference.right, right=difference.left) for difference in found.differences]
        columns.append([theirs[partner] if partner >= 0 else None for partner in found.order])
    chosen = [index for index, flag in enumerate(mask) if flag]
    rows = [_Counterparts(paths[index], [column[index] for column in columns]) for index in chosen]
    wrong += [] if wrong else [difference for row in rows for difference in _differences(row)]
    if wrong:
        raise TreeMismatch.between("combine", wrong, "Combine trees that are alike.")
    _keep_ties(_cut_ties(leaves, mask, paths))
    result = list(leaves)
    later, now = _later(fn, dict(zip(chosen, rows, strict=True)))
    for index, leaf in later.items():
        result[index] = leaf
    if now:
        rest = [
            leaf for leaf, flag in zip(leaves, mask, strict=True) if not (flag or is_value(leaf) or is_stored(leaf))
        ]
        for index, leaf in zip(now, _combined(fn, list(now.values()), rest), strict=True):
            result[index] = leaf
    return cast("T", unflatten(spec, result))


def _is_floating(leaf: Any) -> bool:
    dtype = None if is_value(leaf) else getattr(leaf, "dtype", None)
    return isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)


def _differences(row: _Counterparts) -> list[Difference]:
    """Return where the leaves of a row are not alike."""
    found = []
    base: Any = None
    first: Mapping[str, Any] = {}
    for leaf in row.leaves:
        try:
            held = leaf if is_stored(leaf) else materialized(leaf)
            base = held if base is None else base
            known, inside = facts(held).items(), inner_differences(base, held)
        except unsignalled(Exception) as error:
            raise located_error("combine", "take apart", error, lambda: [row.path], [leaf], 0) from error
        own = {name: fact for name, fact in known if name not in ("dtype", "memory")}
        found += [
            Difference(row.path, "placements", p, "no Partial") for p in own.get("placements", ()) if p.is_partial()
        ]
        first = first or own
        rows = [*fact_differences(first, own), *inside]
        found += [Difference(row.path, kind, got, expected) for kind, expected, got in rows if kind != "dtype"]
    return found


def _call(fn: Callable[..., torch.Tensor], path: Path, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what a function makes of tensors, in memory of its own: it may return the same tensor each time."""
    before = list(map(_version, tensors))
    try:
        with torch_function_enabled():
            made: object = fn(*tensors)
    except Exception as error:
        note_leaf(error, path, tensors[0])
        raise
    found = []
    if before != list(map(_version, tensors)):
        found.append(Difference(path, "argument", "written by the function", "as it was"))
    result: torch.Tensor | None = None
    if not isinstance(made, torch.Tensor) or made.layout != torch.strided or made.is_nested or made.is_quantized:
        got = made.layout if type(made) is torch.Tensor and not made.is_nested else type(made).__qualname__
        found.append(Difference(path, "result", got, "a strided tensor"))
    elif made.shape != tensors[0].shape:
        found.append(Difference(path, "shape", tuple(made.shape), tuple(tensors[0].shape)))
    else:
        try:
            result = as_plain(made)
        except unsignalled(RuntimeError, TypeError):  # of a class that cannot do without
            found.append(Difference(path, "result", type(made).__qualname__, "a strided tensor"))
    if found or result is None:
        raise TreeMismatch.between("combine", found, "Pass a function that works elementwise, and not in place.")
    made = None
    if is_sole_view(result):
        return result
    copy = torch.empty_like(result)
    copy_each([copy], [result])
    return copy


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else int(version_of(tensor))


def _cut_ties(leaves: Sequence[Any], mask: Sequence[bool], paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the stored leaves that are combined and lie, in the file, where others do that are not."""
    stored = [index for index, leaf in enumerate(leaves) if is_stored(leaf) and leaf.is_strided and leaf.numel]
    if all(mask[index] for index in stored):
        return
    places = {index: leaves[index].location() for index in stored}
    others = {place for index, place in places.items() if not mask[index]}
    mapped = [(index, as_plain(leaves[index].outline)) for index in stored if not leaves[index].outline.is_meta]
    cut = {one for one, other in sharing(mapped) if not mask[other]}
    for index in stored:
        if mask[index] and (places[index] in others or index in cut):
            yield paths[index], "what shares its memory"


def _keep_ties(cut: Iterable[tuple[Path, str]]) -> None:
    """Raise ``TreeMismatch`` if there are leaves whose ties would be cut."""
    found = [Difference(path, "ties", "values of its own", what) for path, what in dict.fromkeys(cut)]
    if found:
        remedy = "Combine trees that are tied alike, by views of the same strides, and all tied leaves or none."
        raise TreeMismatch.between("combine", found, remedy)


def _later(
    fn: Callable[..., torch.Tensor], rows: dict[int, _Counterparts]
) -> tuple[dict[int, Any], dict[int, _Counterparts]]:
    """Return leaves that are made of stored ones when they are read, and the rows of the others."""
    stored = {index: row for index, row in rows.items() if all(map(is_stored, row.leaves))}
    places = {index: tuple([leaf.location() for leaf in row.leaves]) for index, row in stored.items()}
    outlines = {places[index][0]: row.leaves[0].outline for index, row in stored.items()}
    mapped = [as_plain(outline) for outline in outlines.values() if not outline.is_meta]
    kinds = {(places[index], kind_of(row.leaves[0].outline)) for index, row in stored.items()}
    if shared_elements(Columns(mapped)) or len(kinds) > len(outlines):
        return {}, rows  # tied, but not the same: that is seen, and kept, where they are combined now
    made: dict[Any, Any] = {}
    for index, row in stored.items():
        if places[index] not in made:
            made[places[index]] = row.leaves[0].derived(row.leaves, *_recipe(fn, row))
    found = {index: made[place] for index, place in places.items()}
    return found, {index: row for index, row in rows.items() if index not in found}


def _recipe(fn: Callable[..., torch.Tensor], row: _Counterparts) -> tuple[torch.Tensor, Callable[..., None]]:
    """Return what a leaf is like that is made of stored ones, and what fills a box of it."""
    outline = row.leaves[0].outline
    shape = [1] * outline.dim()  # a tensor without dims may become another dtype
    dtype = _call(fn, row.path, [torch.ones(shape, dtype=leaf.dtype) for leaf in row.leaves]).dtype
    bare = torch.empty_strided(outline.shape, outline.stride(), dtype=dtype, device="meta")

    def fill(start: Sequence[int], target: torch.Tensor) -> None:
        box = [slice(begin, begin + size) for begin, size in zip(start, target.shape, strict=True)]
        copy_each([target], [_call(fn, row.path, [leaf.read(box) for leaf in row.leaves])])

    return identified(bare, outline), fill


def _combined(fn: Callable[..., torch.Tensor], rows: Sequence[_Counterparts], rest: Sequence[Any]) -> list[Any]:
    """Return leaves in memory combined; ``rest`` are those of the first tree that stay as they are."""
    paths = [row.path for row in rows]
    columns = [[materialized(leaf) for leaf in column] for column in zip(*[row.leaves for row in rows], strict=True)]
    first, *others = [unpack("combine", column, lambda: paths) for column in columns]
    check_memory("combine", first.columns, lambda part: paths[first.owners[part]])
    partners = [{(leaf, a): b for leaf, a, b in paired_parts(first, other) if b is not None} for other in others]
    parts = [recast("combine", first.recipe(leaf), torch.float32, path)[1] for leaf, path in enumerate(paths)]
    # Each view is combined once, however many tensors are the same one.
    number_of: dict[Any, int] = {}
    used: list[list[torch.Tensor]] = []
    owners: list[Path] = []
    places: dict[int, int] = {}
    wrong: list[tuple[Path, str]] = []
    for leaf, (path, own) in enumerate(zip(paths, parts, strict=True)):
        for part in own:
            facing = [other.parts[partner[leaf, part]] for other, partner in zip(others, partners, strict=True)]
            tensors = list(map(as_plain, [first.parts[part], *facing]))
            place = places[part] = number_of.setdefault(view_key(tensors[0]), len(used))
            if place == len(used):
                used.append(tensors)
                owners.append(path)
            elif tensors[0].numel() and list(map(view_key, tensors)) != list(map(view_key, used[place])):
                wrong.append((path, f"what is tied to {owners[place]}"))
    rows_of = [(number, tensor) for number, tensors in enumerate(used) for tensor in tensors[1:]]
    check_memory("combine", Columns([tensor for _, tensor in rows_of]), lambda place: owners[rows_of[place][0]])
    held = [as_plain(part) for part in unpack("combine", list(rest), list).parts]
    firsts = [(number, tensors[0]) for number, tensors in enumerate(used)]
    for a, b in sharing([*firsts, *[(-1, part) for part in held]]):
        if a < b:
            continue  # it comes the other way round, too
        if a >= 0 and not (b >= 0 and _are_tied_alike(used[a], used[b])):
            wrong.append((owners[a], "what shares its memory"))
    _keep_ties(wrong)
    fresh = _as_they_lie(used, [_call(fn, path, tensors) for path, tensors in zip(owners, used, strict=True)], owners)
    recipes = dict(first.recipes)
    made = list(first.parts)
    for leaf, own in enumerate(parts):
        for part in own:
            made[part] = fresh[places[part]]
        recipe = recast("combine", first.recipe(leaf), made[own[0]].dtype, paths[leaf])[0] if own else 0
        if not isinstance(recipe, int):
            recipes[leaf] = recipe
    return replace(first, recipes=recipes).pack(made)


def _are_tied_alike(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether two tensors of one storage are tied as those of the other trees in their places are."""
    (a, *others), (b, *theirs) = one, other
    if a.dtype != b.dtype or storage_key(a.untyped_storage()) != storage_key(b.untyped_storage()):
        return False
    return all(lie_alike((a, x), (b, y)) for x, y in zip(others, theirs, strict=True))


def _as_they_lie(
    used: Sequence[Sequence[torch.Tensor]], results: Sequence[torch.Tensor], owners: Sequence[Path]
) -> list[torch.Tensor]:
    """Return results with the strides and the overlap of the first tensors that they were made of.

    Raises:
        TreeMismatch: If a tensor and its conjugate (or negative) lie in one memory, and their results do not.
    """
    fresh = list(results)
    for dtype in {tensors[0].dtype for tensors in used}:
        members = [index for index, tensors in enumerate(used) if tensors[0].dtype == dtype]
        columns = Columns([used[index][0] for index in members])
        layout = lay_out(columns, extents(columns))
        buffers: dict[int, torch.Tensor] = {}
        users: defaultdict[int, list[int]] = defaultdict(list)
        for place, number in enumerate(layout.span_of):
            users[number].append(place)
        for own in users.values():
            first = members[own[0]]
            other = next((at for at in own if results[members[at]].dtype != results[first].dtype), None)
            if other is not None:
                what = f"{results[first].dtype}, as {owners[first]} becomes, which shares its memory"
                found = [Difference(owners[members[other]], "dtype", results[members[other]].dtype, what)]
                raise TreeMismatch.between("combine", found, "Pass a function that makes one dtype of both.")
        mirrored = [
            number for number, own in users.items() if len({(columns.conj[at], columns.neg[at]) for at in own}) > 1
        ]
        for place, index in enumerate(members):
            view, result, number = used[index][0], results[index], layout.span_of[place]
            is_alone = len(users[number]) == 1
            if is_alone and result.stride() == view.stride() and layout.dense[number]:
                continue
            span = layout.spans[number]
            count = (span.stop - span.start) // dtype.itemsize
            buffer = buffers.setdefault(number, torch.empty(count, dtype=result.dtype, device=result.device))
            fresh[index] = buffer.as_strided(view.shape, view.stride(), layout.offsets[place])
            if number in mirrored:
                set_bits(fresh[index], conj=columns.conj[place] and result.is_complex(), neg=columns.neg[place])
            pair = once(fresh[index], result)
            if pair is None:  # which as_strided alone can make
                found = [Difference(owners[index], "overlap", "a tensor that overlaps itself", "values of its own")]
                raise TreeMismatch.between("combine", found, "Copy it before.")
            copy_each(*[[tensor] for tensor in pair])
        lost = [
            at for number in mirrored for at in users[number] if not _alike(fresh[members[at]], results[members[at]])
        ]
        if lost:
            what = "what holds its conjugate or negative in the same memory"
            found = [Difference(owners[members[at]], "ties", "values of its own", what) for at in lost]
            raise TreeMismatch.between("combine", found, "Copy one of them before.")
    return fresh


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same values, zeros of any sign and NaNs of any payload."""
    return bool(((a == b) | ((a != a) & (b != b))).all())
