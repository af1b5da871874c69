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
    inner = [(path, spec.nodes[~ref]) for ref, path, _ in spec.places(leaves=False) if ref < 0]
    containers = [(path, _container_text(kind, names)) for path, (kind, names, *_) in inner]
    containers.sort(key=lambda container: Path(container[0]).sort_key())
    named = unique_keys([str(Path(path)) or "<root>" for path, _ in containers], [path for path, _ in containers])
    structure = [Entry(f"{name}{CONTAINER}", text) for name, (_, text) in zip(named, containers, strict=True)]
    return PathOrder(order, [keys[index] for index in order], structure)


def _container_text(kind: Container, names: tuple[Any, ...]) -> str:
    family = kind.family if isinstance(kind.family, str) else getattr(kind.family, "__qualname__", str(kind.family))
    if not kind.keyed or all(type(name) is str for name in names):
        return f"a {family} of {len(names)}"
    return f"a {family} with the keys {', '.join(sorted(map(exactly, names)))}"
