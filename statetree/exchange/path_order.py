"""The order of a tree's leaves by their paths, which is the same on every rank, and what its containers are."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from statetree.exchange.consensus import CONTAINER, Entry
from statetree.key_paths import Path, exactly, unique_keys

if TYPE_CHECKING:
    from statetree.tree.containers import Container
    from statetree.tree.spec import TreeSpec


class PathOrder(NamedTuple):
    """What depends on a tree's structure alone: the leaves by their paths, their keys in that order, and containers."""

    order: list[int]
    keys: list[str]
    structure: list[Entry]


@lru_cache(maxsize=32)
def order_of(spec: TreeSpec) -> PathOrder:
    """Return what depends on a tree's structure alone."""
    paths, keys = spec.paths(), spec.flat_keys()
    order = sorted(range(spec.num_leaves), key=lambda index: paths[index].sort_key())
    containers: list[tuple[tuple[Any, ...], str]] = []
    links = spec.links()
    pending: list[tuple[int, tuple[Any, ...]]] = [(spec.root(), ())] if spec.nodes else []
    while pending:
        ref, path = pending.pop()
        kind, names = spec.nodes[~ref][:2]
        containers.append((path, _container_text(kind, names)))
        pending += [(child, (*path, name)) for name, child in zip(names, links[~ref], strict=True) if child < 0]
    containers.sort(key=lambda container: Path(container[0]).sort_key())
    named = unique_keys([str(Path(path)) or "<root>" for path, _ in containers], [path for path, _ in containers])
    structure = [Entry(f"{name}{CONTAINER}", text) for name, (_, text) in zip(named, containers, strict=True)]
    return PathOrder(order, [keys[index] for index in order], structure)


def _container_text(kind: Container, names: tuple[Any, ...]) -> str:
    family = kind.family if isinstance(kind.family, str) else getattr(kind.family, "__qualname__", str(kind.family))
    if not kind.keyed or all(type(name) is str for name in names):
        return f"a {family} of {len(names)}"
    return f"a {family} with the keys {', '.join(sorted(map(exactly, names)))}"
