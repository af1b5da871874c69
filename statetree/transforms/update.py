"""``update``: a tree with other leaves at some paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from statetree.errors import Difference, StateTreeError, TreeMismatch, note_leaf, suppress
from statetree.key_paths import Path
from statetree.leaves.builtin import is_stored
from statetree.leaves.copying import copied_leaves
from statetree.leaves.parts import unpack
from statetree.leaves.ties import sharing, view_key
from statetree.torch_internals import quietly
from statetree.transforms.similarity import similarity
from statetree.tree.atoms import HOLE
from statetree.tree.flatten import flatten_for, unflatten
from statetree.tree.selection import selected
from statetree.tree.stand_ins import reader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.tree.selection import Where
    from statetree.tree.spec import TreeSpec

T = TypeVar("T")


def update(tree: T, where: Where, value_or_fn: Any, *, missing_ok: bool = False) -> T:
    """Return a tree in which the leaves that match are replaced.

    Args:
        tree: Any tree. It does not change.
        where: Which leaves, as for ``select``. A ``HOLE`` stays one.
        value_or_fn: The new leaf, or a function from the old leaf to the new one. It is called once for tensors
            of one class that are the same view on one memory (as the tied entries of a ``state_dict()`` are): its
            result takes the place of all of them; where it returns what it was given, perhaps written to, each stays.
            A stored tensor is read before, and with it those that share elements with it, chosen or not (behind a URL,
            only equal views that are chosen are tied).
        missing_ok: Whether a glob or path may match nothing.

    Returns:
        A tree with fresh containers.

    Aliasing:
        The other leaves are the tree's own (but for stored tensors that share elements with one that is read), and the
        new ones are put in as they are.

    Raises:
        TreeMismatch: If a glob or path matches nothing, or tensors share elements otherwise (another view, or a
            ``Parameter`` and its ``.data``), and a function does anything with them but return them: it is called with
            copies, since it could write these elements twice, and what it made of them could not be tied again.
        CyclicTree: If a container holds itself.
        Exception: What the function raises, with a note of the leaf's path.

    Example:
        >>> import statetree as st
        >>> st.update({"lr": 0.1, "groups": [{"lr": 0.2}]}, ["lr", "groups.*.lr"], lambda lr: lr / 2)
        {'lr': 0.05, 'groups': [{'lr': 0.1}]}
    """
    leaves, spec = flatten_for("update", tree)
    mask = selected(where, spec, leaves, verb="update", missing_ok=missing_ok)
    chosen = [index for index, leaf in enumerate(leaves) if mask[index] and leaf is not HOLE]
    result = list(leaves)
    if not callable(value_or_fn):
        for index in chosen:
            result[index] = value_or_fn
        return cast("T", unflatten(spec, result))
    tied = _tied_in_files(leaves, chosen)
    given = [leaves[index] for index in tied]
    copies = quietly(copied_leaves)("update", given, lambda: [spec.paths()[index] for index in tied])
    for index, leaf in zip(tied, copies, strict=True):
        result[index] = leaves[index] = leaf  # read together, so that they share elements
    keys = [_key(leaves[index]) for index in chosen]
    entangled = _entangled(spec, leaves, chosen, keys)
    read = reader(leaves[index] for index in chosen)
    made: dict[Any, tuple[Any, Any]] = {}  # what the function was given first, and what it returned
    for index, key in zip(chosen, keys, strict=True):
        leaf = leaves[index]
        if index in entangled:
            _check_unchanged(value_or_fn, spec, index, leaf, entangled[index])
            continue
        if key is None or key not in made:
            try:
                given = read(leaf)
                made[key] = given, value_or_fn(given)
            except Exception as error:
                note_leaf(error, spec.paths()[index], leaf)
                raise
        given, returned = made[key]
        result[index] = leaf if returned is given and isinstance(leaf, torch.Tensor) else returned
    return cast("T", unflatten(spec, result))


def _key(leaf: Any) -> Any:
    """Return what is equal for tensors that a function is called for once, and ``None`` for other leaves."""
    if isinstance(leaf, torch.Tensor):
        return type(leaf), view_key(leaf)
    return (type(leaf.outline), leaf.location()) if is_stored(leaf) else None


def _check_unchanged(fn: Any, spec: TreeSpec, index: int, leaf: Any, found: Difference) -> None:
    """Call a function with a copy of a leaf, and raise ``TreeMismatch`` unless it returns that as it was."""
    paths = spec.paths
    [given] = quietly(copied_leaves)("update", [leaf], lambda: [paths()[index]])
    try:
        returned = fn(given)
    except Exception as error:
        note_leaf(error, paths()[index], leaf)
        raise
    if returned is not given or not similarity(given, leaf):
        raise TreeMismatch.between("update", [found], "It was given a copy: nothing was written. Choose one (where).")


@quietly
def _entangled(
    spec: TreeSpec, leaves: Sequence[Any], chosen: Sequence[int], keys: Sequence[Any]
) -> dict[int, Difference]:
    """Return the leaves that share elements with others, but not as the same view, each with one of these."""
    paths = spec.paths()
    found: dict[int, Difference] = {}
    for one, other in _sharing([leaves[index] for index in chosen]):
        if keys[one] != keys[other]:
            index, shared = chosen[one], f"elements that it shares with {paths[chosen[other]]}"
            found.setdefault(index, Difference(paths[index], "memory", shared, "elements of its own, or the same view"))
    told = {key: found[index] for index, key in zip(chosen, keys, strict=True) if index in found}
    alike = {index: told[key] for index, key in zip(chosen, keys, strict=True) if key in told}  # the same views
    return {**alike, **found}


def _sharing(leaves: Sequence[Any]) -> list[tuple[int, int]]:
    """Return, both ways round, which tensors among leaves share elements, by their positions."""
    rows: list[tuple[int, torch.Tensor]] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            with suppress(StateTreeError):  # of what cannot be taken apart nothing is known but the object
                parts = unpack("update", [leaf], lambda: [Path()]).parts
                rows += [(place, part) for part in parts if not part.is_meta and part.data_ptr()]
    return sharing(rows)


@quietly
def _tied_in_files(leaves: Sequence[Any], chosen: Sequence[int]) -> list[int]:
    """Return the stored tensors that share elements with others of which one is chosen, directly or through others."""
    found = {index for index in chosen if is_stored(leaves[index])}
    pairs = _sharing([leaf.outline if is_stored(leaf) else None for leaf in leaves]) if found else []
    partners: dict[int, list[int]] = {}
    for one, other in pairs:
        partners.setdefault(one, []).append(other)
    pending = [index for index in partners if index in found]
    tied = set(pending)
    while pending:
        more = [other for other in partners[pending.pop()] if other not in tied]
        tied.update(more)
        pending += more
    return sorted(tied)
