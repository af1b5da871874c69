"""The tree engine: a state taken apart into leaves and a ``TreeSpec``, and put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from statetree.errors import CyclicTree, TreeMismatch, warn
from statetree.key_paths import Path, same_key
from statetree.tree.registry import container_of
from statetree.tree.spec import TreeSpec
from statetree.tree.traversal import Repeated, freeze, rebuild, traverse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from statetree.tree.traversal import IsLeaf, Node


def flatten(tree: Any, *, is_leaf: IsLeaf = None) -> tuple[list[Any], TreeSpec]:
    """Take a tree apart into its leaves and the structure that they came from.

    Leaves come in the order of the containers (the insertion order of mappings). ``None`` is a leaf. Mappings,
    lists, tuples, deques and their subclasses, namedtuples, torch's return types, dataclasses, attrs classes and
    registered classes are containers; everything else is a leaf.

    Args:
        tree: Any value.
        is_leaf: Asked about every container, before its children are visited: if it says yes, the container is a leaf.

    Returns:
        The leaves, and a ``TreeSpec`` with which ``unflatten`` makes the same tree again: types, key types and their
        order, default factories, ``maxlen``, instance attributes and empty containers included.

    Aliasing:
        The leaves are the tree's own.

    Raises:
        CyclicTree: If a container holds itself.
        TreeTooDeep: If containers are nested more than 10,000 deep.

    Example:
        >>> import statetree as st
        >>> leaves, spec = st.flatten({"b": [1, 2], "a": None})
        >>> leaves
        [1, 2, None]
        >>> st.unflatten(spec, leaves)
        {'b': [1, 2], 'a': None}
    """
    return _specified(traverse(tree, is_leaf=is_leaf))


def _specified(found: tuple[list[Any], list[Node]]) -> tuple[list[Any], TreeSpec]:
    return found[0], TreeSpec(tuple(found[1]), len(found[0]))


def flatten_for(verb: str, tree: Any, *, is_leaf: IsLeaf = None) -> tuple[list[Any], TreeSpec]:
    """Do as ``flatten``, on behalf of another verb, which errors name."""
    return _specified(traverse(tree, verb=verb, is_leaf=is_leaf))


def flatten_for_copy(
    tree: Any, holds_tensor: Callable[[Any], bool], *, verb: str = "flatten", shared: bool = False
) -> tuple[list[Any], TreeSpec]:
    """Do as ``flatten``, for copying a tree without leaving any of its tensors behind.

    Mappings with tensors in their keys become opaque leaves, in which keys are copied as well. If it is ``shared``, a
    container that appears again becomes a leaf, which ``unflatten_copy`` resolves, and a tree with a cycle one leaf.
    """
    if isinstance(tree, (torch.nn.Module, torch.optim.Optimizer)):  # inside a container it is meant
        name = type(tree).__qualname__
        warn(
            f"{verb}: the tree is a whole object, a {name}, which is handled as one opaque leaf: expected a state. "
            "Pass its state_dict()."
        )
    if not shared:
        return _specified(traverse(tree, verb=verb, holds_tensor=holds_tensor))
    try:
        return _specified(traverse(tree, verb=verb, holds_tensor=holds_tensor, met={}))
    except CyclicTree:
        return [tree], TreeSpec((), 1)


def unflatten(spec: TreeSpec, leaves: Iterable[Any]) -> Any:
    """Put a tree together from a structure and leaves.

    Every container is fresh; no constructor of a dataclass, attrs class or container subclass runs.

    Args:
        spec: The structure, from ``flatten`` or ``to_flat``.
        leaves: As many leaves as ``spec.num_leaves``, in the order in which ``flatten`` gave them.

    Returns:
        A tree with the structure of ``spec`` and the given leaves.

    Aliasing:
        The leaves are put in as they are.

    Raises:
        TreeMismatch: If the number of leaves is not that of the structure.
    """
    if not isinstance(cast("Any", spec), TreeSpec):
        raise TypeError(f"unflatten: expected the TreeSpec that flatten returned, got {type(spec).__qualname__}.")
    return spec.unflatten(leaves)


def unflatten_copy(spec: TreeSpec, leaves: list[Any]) -> Any:
    """Do as ``unflatten``, with what ``flatten_for_copy`` gave: containers that were one become one again."""
    repeated: dict[int, int] = {}
    if Repeated in set(map(type, leaves)):  # to look at each costs more
        repeated = {index: leaf.node for index, leaf in enumerate(leaves) if type(leaf) is Repeated}
    return rebuild(spec.nodes, leaves, repeated)


def unshared(spec: TreeSpec, leaves: Sequence[Any], most: int) -> tuple[TreeSpec, Sequence[int]] | None:
    """Return the structure that ``flatten`` gives, from that of ``flatten_for_copy``, and which leaf lies where.

    ``None`` if that has more than so many leaves: containers that are shared again and again lie in very many places.
    """
    if Repeated not in set(map(type, leaves)):
        return spec, range(len(leaves))
    links = spec.links()
    child_of = {index: ~leaf.node for index, leaf in enumerate(leaves) if type(leaf) is Repeated}
    nodes: list[Node] = []
    places: list[int] = []
    taken = 0  # how many leaves there were when the last node was finished
    pending = [(spec.root(), False)]
    while pending:
        ref, is_finished = pending.pop()
        if len(places) > most:
            return None
        if ref >= 0:
            places.append(ref)
            continue
        children = [child_of.get(child, child) for child in links[~ref]]
        if not is_finished:
            pending.append((ref, True))
            pending += [(child, False) for child in reversed(children)]
            continue
        kind, keys, aux, *_ = spec.nodes[~ref]
        kids = tuple([index for index, child in enumerate(children) if child < 0])
        nodes.append((kind, keys, aux, kids, len(places) - taken))
        taken = len(places)
    return TreeSpec(tuple(nodes), len(places)), places


def paths(tree: Any, *, is_leaf: IsLeaf = None) -> list[Path]:
    """Return the path of every leaf, in the order of ``flatten``, which ``is_leaf`` is for.

    Example:
        >>> import statetree as st
        >>> [str(path) for path in st.paths({"layers": [{"w": 1}, {"w": 2}]})]
        ['layers.0.w', 'layers.1.w']
    """
    return flatten_for("paths", tree, is_leaf=is_leaf)[1].paths()


def follow(path: Path, tree: Any) -> Any:
    """Do as ``path(tree)``."""
    value = tree
    for depth, key in enumerate(path):
        container = container_of(type(value))
        children, keys, _ = container.flatten(value, freeze) if container is not None else ((), (), None)
        index = next((index for index, other in enumerate(keys) if same_key(key, other)), -1)
        if index < 0:
            above = Path(path[:depth])
            what = f"{type(value).__qualname__} with the keys {keys[:8]}" if keys else type(value).__qualname__
            msg = f"path: there is nothing at {path}: expected the key {key!r} at {above or '<root>'}, got {what}."
            raise TreeMismatch(msg)
        value = children[index]
    return value
