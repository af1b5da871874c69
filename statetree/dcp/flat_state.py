"""A state as the flat dict that DCP keeps: the entries of a tree, and the structure above them.

The keys are those of ``to_flat``, except that a list without mappings and tensors in it, and a tuple of plain values,
are one entry (the 625 integers of Python's random state, say).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.files.checkpoint import is_entry
from statetree.key_paths import Path, render_key
from statetree.leaves.builtin import settled
from statetree.leaves.lowering import Lowered, is_made_of_tensors, lower
from statetree.leaves.types.converted import joined
from statetree.tree.flatten import flatten_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.tree.spec import TreeSpec

#: The key of the entry that holds the structure. No other entry gets it.
STRUCTURE_KEY: Final = "<statetree structure>"
_NUMBERED: Final = frozenset({"list", "tuple", "deque"})


class StateEntry(NamedTuple):
    """A leaf, or a list or tuple of plain values.

    Attributes:
        path: Where it lies.
        key: The key of its entry in the checkpoint.
        value: The leaf.
        dcp_path: Where tools put it that nest DCP's flat dicts again: its path as DCP would have it, or its key where
            they could not follow that.
    """

    path: Path
    key: str
    value: Any
    dcp_path: tuple[str | int, ...]

    def dcp_path_of(self, key: str) -> tuple[str | int, ...]:
        """Return the path for one of the keys under which this is saved: its own, or that of one of its parts."""
        return self.dcp_path if key == self.key else (key,)


class FlatState(NamedTuple):
    """The structure of a tree, down to its entries, and the entries: one for each leaf of the structure.

    ``lowered`` puts the tree together again: leaves that are made of several tensors have an entry for each of them.
    """

    spec: TreeSpec
    entries: Sequence[StateEntry]
    lowered: Lowered

    def rebuilt(self, verb: str, values: Sequence[Any]) -> Any:
        """Return the tree again, with others in the places of its entries."""
        return self.lowered.outline.lift(verb, values, self.lowered.recipes)


def flat_state(tree: Any, *, verb: str) -> FlatState:
    """Return the entries of a tree.

    Args:
        tree: Any tree.
        verb: On whose behalf, for messages.

    Raises:
        CyclicTree, TreeTooDeep: As ``flatten``.
    """
    outer, outer_spec = flatten_for(verb, tree, is_leaf=is_entry)
    outer = [joined(settled(leaf)) for leaf in outer]
    lowered = lower(verb, outer, outer_spec, partial(flatten_for, verb, is_leaf=is_entry), wanted=is_made_of_tensors)
    leaves, spec = lowered.leaves, lowered.spec
    keys = spec.flat_keys()
    if STRUCTURE_KEY in keys:
        keys = [free_key(key, set(keys)) if key == STRUCTURE_KEY else key for key in keys]
    paths = _dcp_paths(spec)
    taken = set(paths)
    for index, (key, path) in enumerate(zip(keys, paths, strict=True)):
        # Tools follow paths that make the keys, and have no leaf above.
        if key != ".".join(map(str, path)) or any(path[:count] in taken for count in range(1, len(path))):
            paths[index] = (key,)
    return FlatState(spec, list(map(StateEntry, spec.paths(), keys, leaves, paths)), lowered)


def _dcp_paths(spec: TreeSpec) -> list[tuple[str | int, ...]]:
    """Return the path of every entry as DCP has it: texts for the keys of mappings, numbers for those of lists."""
    found: list[tuple[str | int, ...]] = [("",)] * spec.num_leaves
    start: tuple[str | int, ...] = ()
    pending = [(spec.root(), start)] if spec.nodes else []
    while pending:
        ref, above = pending.pop()
        kind, keys = spec.nodes[~ref][:2]
        is_numbered = kind.family in _NUMBERED
        for key, child in zip(keys, spec.links()[~ref], strict=True):
            path = (*above, key if is_numbered and type(key) is int else render_key(key))
            if child >= 0:
                found[child] = path
            else:
                pending.append((child, path))
    return found


def free_key(wanted: str, taken: set[str]) -> str:
    """Return a key like the one wanted that is not taken, and take it."""
    number = 2
    key = wanted
    while key in taken or key == STRUCTURE_KEY:
        key = f"{wanted}~{number}"
        number += 1
    taken.add(key)
    return key
