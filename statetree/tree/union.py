"""The union of structures: one that has every key of several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from statetree.errors import Difference
from statetree.key_paths import Path, key_identity
from statetree.tree.flatten import flatten_for_copy
from statetree.tree.spec import TreeSpec, container_text, same_aux

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.tree.containers import Container


class United(NamedTuple):
    """The union of structures.

    Attributes:
        spec: The union. Mappings have the keys of all, in the order of the paths if these differ.
        leaves: For each leaf, by the number of each structure that has it, its index there.
        differences: Where containers differ in more than keys. Then the others mean nothing.
    """

    spec: TreeSpec
    leaves: list[Mapping[int, int]]
    differences: list[Difference]


class _Leaf:
    """Stands for a leaf: its index in each structure that has it."""

    def __init__(self, found: Mapping[int, int]) -> None:
        self.found = found


class _Open(NamedTuple):
    """A container whose children are put together before it."""

    kind: Container
    keys: tuple[Any, ...]
    aux: Any


def united(specs: Sequence[TreeSpec]) -> United:
    """Return the union of structures."""
    differences: list[Difference] = []
    made: list[Any] = []
    pending: list[tuple[tuple[Any, ...], dict[int, int]] | _Open] = [
        ((), {number: spec.root() for number, spec in enumerate(specs)})
    ]
    while pending:
        step = pending.pop()
        if isinstance(step, _Open):
            count = len(step.keys)
            children = made[len(made) - count :]
            del made[len(made) - count :]
            made.append(step.kind.unflatten(step.aux, step.keys, children))
            continue
        path, refs = step
        if all(ref >= 0 for ref in refs.values()):
            made.append(_Leaf(refs))
            continue
        reason = _unlike(specs, refs)
        if reason is not None:
            differences.append(Difference(Path(path), *reason))
            made.append(None)
            continue
        children_of: dict[Any, tuple[Any, dict[int, int]]] = {}
        for number, ref in refs.items():
            for key, child in zip(specs[number].nodes[~ref][1], specs[number].links()[~ref], strict=True):
                children_of.setdefault(key_identity(key), (key, {}))[1][number] = child
        merged = list(children_of.values())
        if any(len(found) < len(refs) for _, found in merged):
            merged.sort(key=lambda child: Path((child[0],)).sort_key())
        number, ref = next(iter(refs.items()))
        kind, _, aux, *_ = specs[number].nodes[~ref]
        pending.append(_Open(kind, tuple([key for key, _ in merged]), aux))
        pending += [((*path, key), found) for key, found in reversed(merged)]
    if differences:
        return United(specs[0], [], differences)
    leaves, spec = flatten_for_copy(made[0], _never)
    return United(spec, [leaf.found for leaf in leaves], [])


def _never(_: Any) -> bool:
    return False


def _unlike(specs: Sequence[TreeSpec], refs: Mapping[int, int]) -> tuple[str, str, str] | None:
    """Say how the things in one place differ in more than the keys of mappings; ``None`` if they do not."""
    (first, ref), *rest = refs.items()
    for number, other in rest:
        texts = _described(specs[first], ref), _described(specs[number], other)
        if ref >= 0 or other >= 0:
            if (ref >= 0) != (other >= 0):
                return ("structure", *texts)
            continue
        a, b = specs[first].nodes[~ref], specs[number].nodes[~other]
        if a[0].family != b[0].family:
            return ("structure", *texts)
        if a[0].compares_aux and not same_aux(a, b):
            return ("metadata", *texts)
        if not a[0].keyed and list(map(key_identity, a[1])) != list(map(key_identity, b[1])):
            return ("length", *texts)
    return None


def _described(spec: TreeSpec, ref: int) -> str:
    return "a leaf" if ref >= 0 else container_text(spec, ref)
