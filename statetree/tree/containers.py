"""Containers: how one level of a tree is taken apart and put together, per class (``registry`` knows which).

optree's own traversal is not used. Measured with optree 0.20 it takes 250 ns a leaf where asking for the types of a
whole container at once takes 30, and its compiled rules for builtin classes cannot be changed: it drops
``OrderedDict._metadata``, calls the constructors of namedtuple subclasses, and treats subclasses of ``dict`` and
``list`` as leaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from importlib import import_module
from typing import Any

from statetree.key_paths import Attr

Flattened = tuple[Sequence[Any], tuple[Any, ...], Any]

#: Returns an object whose ``thaw()`` makes fresh copies of an attribute, or ``None`` if the attribute is to be a child.
#: The traversal hands it in: attributes are trees themselves.
Freeze = Callable[[Any], Any]


class Container(ABC):
    """One container class: its children, the keys that lead to them, and what else rebuilding it takes.

    ``family`` says which containers match each other where structure is compared: any two mappings do, as do a list
    and a subclass of ``list``, but a list and a tuple do not.
    """

    __slots__ = ("cls", "family", "keyed")
    #: Whether the auxiliary data is part of the structure that two trees are compared by.
    compares_aux = False

    def __init__(self, cls: type, family: Hashable, *, keyed: bool) -> None:
        self.cls = cls
        self.family = family
        self.keyed = keyed  # children are matched by key, not by position

    def __reduce__(self) -> Any:
        # Structures are pickled by classes alone: how one is taken apart, the process says that loads them.
        return import_module("statetree.tree.registry").known_container, (self.cls,)

    @abstractmethod
    def flatten(self, container: Any, freeze: Freeze) -> Flattened:
        """Return children, their keys, and the auxiliary data, which ``freeze`` makes of attributes."""

    @abstractmethod
    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        """Return a fresh container."""

    def num_items(self, keys: tuple[Any, ...]) -> int:
        """Return how many of the keys are the container's own, and not those of attributes."""
        return sum(type(key) is not Attr for key in keys)

    def can_lack(self) -> bool:
        """Whether a container without some of its children is one of the same kind."""
        return self.family in {"mapping", "list", "tuple", "deque"}

    def without_attributes(self, aux: Any, gone: Collection[str]) -> Any:
        """Return the auxiliary data of a container that lacks some of the attributes which are its children."""
        assert not gone
        return aux
