"""The tree engine: a state as a pytree, taken apart into leaves and a ``TreeSpec`` and put together again, exactly.

It stands beside optree, shares its registry of classes, and keeps what optree drops: the order and attributes of
containers. From the top to the bottom:

- ``mapping``: functions mapped over leaves, and trees as flat dicts.
- ``flatten``: the two directions, and their variants for copying.
- ``selection``: which leaves are meant: globs over paths, and predicates.
- ``pruning``, ``renaming``: a tree without some of its leaves; with leaves at other paths.
- ``name_patterns``: patterns of names with captures, matched and filled in.
- ``matching``: which leaves of two trees correspond, mappings matched by their keys.
- ``union``: a structure that has every key of several.
- ``spec``: ``TreeSpec``, the structure without the leaves; to optree and back.
- ``html_fragments``: structures and tables as HTML, for notebooks and pages.
- ``traversal``: the loop that takes a tree apart, and the one that rebuilds it.
- ``registry``: which classes are containers (the only module that registers with optree).
- ``instances``: containers with instance attributes: dataclasses, attrs classes, subclasses of builtin containers.
- ``stand_ins``: leaves that stand for tensors elsewhere, and what a user's function gets for them.
- ``containers``, ``atoms``: what a container is to the traversal; plain values that no transform looks into.
"""

from statetree.tree.flatten import flatten, paths, unflatten
from statetree.tree.mapping import from_flat, map_leaves, map_with_path, to_flat
from statetree.tree.registry import register_container
from statetree.tree.spec import TreeSpec, Visit

__all__ = [
    "TreeSpec",
    "Visit",
    "flatten",
    "from_flat",
    "map_leaves",
    "map_with_path",
    "paths",
    "register_container",
    "to_flat",
    "unflatten",
]
