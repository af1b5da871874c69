"""Which classes are containers, and of what kind: looked up here, and only here. One registry, open to users.

Containers are the builtin ones, those that a user registered (kept in optree's registry, so that trees registered with
optree work too), and those recognised when first met: subclasses of ``dict``, ``list``, ``tuple`` and ``deque``,
namedtuples, torch's return types, dataclasses and attrs classes.
"""

from __future__ import annotations

import gc
import inspect
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, Final, cast

import optree
import torch

from statetree.errors import unsignalled
from statetree.tree.atoms import is_atom_type
from statetree.tree.containers import Container
from statetree.tree.instances import InstanceContainer, instance_container

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from statetree.tree.containers import Flattened, Freeze


class _Dict(Container):
    __slots__ = ()

    def flatten(self, container: Any, freeze: Freeze) -> Flattened:
        return list(container.values()), tuple(container), None

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        # As many children as keys: every caller counts them. To ask zip for it doubles the time of a small dict.
        return dict(zip(keys, children))  # noqa: B905


#: The keys of short lists and tuples, which most are.
_INDICES: Final = tuple([tuple(range(count)) for count in range(64)])


def _indices(count: int) -> tuple[int, ...]:
    return _INDICES[count] if count < len(_INDICES) else tuple(range(count))


class _List(Container):
    __slots__ = ()

    def flatten(self, container: Any, freeze: Freeze) -> Flattened:
        return container, _indices(len(container)), None

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        return list(children)


class _Tuple(_List):
    __slots__ = ()

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        return tuple(children)


class _StructSequence(Container):
    """torch's return types: tuples with named fields whose constructor takes one sequence."""

    __slots__ = ("fields",)

    def __init__(self, cls: type) -> None:
        super().__init__(cls, cls, keyed=False)
        self.fields = tuple(optree.structseq_fields(cls))

    def flatten(self, container: Any, freeze: Freeze) -> Flattened:
        return tuple(container), self.fields, None

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        return self.cls(tuple(children))


class _Registered(Container):
    """A class that a user registered, here or with optree."""

    __slots__ = ("entry",)
    compares_aux = True

    def __init__(self, cls: type, entry: Any) -> None:
        super().__init__(cls, cls, keyed=False)
        self.entry = entry

    def flatten(self, container: Any, freeze: Freeze) -> Flattened:
        result = self.entry.flatten_func(container)
        children = list(result[0])
        metadata = result[1]
        entries = result[2] if len(result) > 2 and result[2] is not None else range(len(children))
        keys = tuple(entries)
        if len(keys) != len(children):
            raise ValueError(
                f"flatten: the flatten function of {self.cls.__qualname__} returned {len(children)} children "
                f"and {len(keys)} entries. Return one entry a child."
            )
        return children, keys, metadata

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        return self.entry.unflatten_func(aux, tuple(children))


#: The optree namespace that ``register_container`` writes to. Types in optree's global namespace are seen as well.
NAMESPACE = "statetree"


_BUILTIN: dict[type, Container | None] = {
    dict: _Dict(dict, "mapping", keyed=True),
    defaultdict: instance_container(defaultdict),
    OrderedDict: instance_container(OrderedDict),
    Counter: instance_container(Counter),
    list: _List(list, "list", keyed=False),
    tuple: _Tuple(tuple, "tuple", keyed=False),
    deque: instance_container(deque),
}


#: Every class met so far: its container, or ``None`` where its instances are leaves.
CONTAINERS: dict[type, Container | None] = dict(_BUILTIN)


#: The classes of ``CONTAINERS`` whose instances are leaves, for asking about many at once.
LEAF_CLASSES: set[type] = set()

#: The classes that users registered. All others were recognised, and can be so again.
_DECLARED: set[type] = set()
#: Those of them whose subclasses are leaves, too.
_LEAF_BASES: set[type] = set()


# A program may make classes as it runs, and the registry must not keep them for ever. It cannot refer to them weakly: a
# container refers to its class. But classes are freed by the garbage collector alone, so that it is enough to let go of
# them before a full collection. Nobody can tell a container that is made again from one that no structure refers to.
#
# What the collector calls costs something: if a signal comes while it collects, the signal's handler runs in there, and
# Python drops what it raises (a Ctrl-C). So nothing is called as long as all classes are those of modules that stay.
_MET: Final[dict[tuple[str, str], int]] = {}
_HOMES: Final[dict[str, int]] = {}
#: The flag of classes that are made as a program runs, by a ``class`` statement too. The others are never freed.
_HEAP: Final = 1 << 9


def forget_later(cls: type, forget: Callable[[str, Mapping[str, int]], None]) -> None:
    """Have a function called by the garbage collector from now on, if a class was met that may be freed one day."""
    if cls.__flags__ & _HEAP and forget not in gc.callbacks and not _stays(cls):
        gc.callbacks.append(forget)


def _stays(cls: type) -> bool:
    """Whether a module has the class under its name, no earlier one had that, and the modules of all classes are there.

    A cell of a notebook that runs twice makes a class twice; a module of plugins may be thrown away.
    """
    try:
        found: Any = sys.modules[cls.__module__]
        _HOMES.setdefault(cls.__module__, id(found))
        for name in cls.__qualname__.split("."):
            found = vars(found)[name]
        known = _MET.setdefault((cls.__module__, cls.__qualname__), id(cls))
    except unsignalled(KeyError, AttributeError, TypeError, ImportError):  # of classes that are like no others
        return False
    return found is cls and known == id(cls) and all(id(sys.modules.get(name)) == of for name, of in _HOMES.items())


def _forget_unused(phase: str, about: Mapping[str, int]) -> None:
    if phase != "start" or about["generation"] < 2:
        return
    for cls in set(CONTAINERS) - _BUILTIN.keys() - _DECLARED:
        if CONTAINERS[cls] is None or sys.getrefcount(CONTAINERS[cls]) <= 2:  # the registry's, and this question's
            LEAF_CLASSES.discard(cls)
            CONTAINERS.pop(cls, None)


def container_of(cls: type) -> Container | None:
    """Return how instances of a class are taken apart, or ``None`` where they are leaves."""
    try:
        return CONTAINERS[cls]
    except KeyError:
        forget_later(cls, _forget_unused)
        is_leaf = is_atom_type(cls) or issubclass(cls, (torch.Tensor, torch.nn.Module))
        if is_leaf or not _LEAF_BASES.isdisjoint(cls.__mro__):
            LEAF_CLASSES.add(cls)
            CONTAINERS[cls] = None
            return None
        kind = _recognised(cls)
        # Another thread may have been quicker. An unknown class may yet be registered with optree: it is asked again.
        return None if kind is None else CONTAINERS.setdefault(cls, kind)


def known_container(cls: type) -> Container:
    """Do as ``container_of`` for a structure that is loaded; raise ``ValueError`` where instances are leaves."""
    container = container_of(cls)
    if container is None:
        raise ValueError(
            f"cannot load a structure: expected {cls.__qualname__} to be a container. Register it as it was saved."
        )
    return container


def declare_leaf_class(cls: type, *, subclasses: bool = False) -> None:
    """Make instances of a class leaves, and those of subclasses that are not declared themselves, if asked to."""
    if cls in _BUILTIN:
        msg = f"register_leaf_type: {cls.__qualname__} is a builtin container: expected a class of your own."
        raise ValueError(msg)
    _take_back(cls)
    _DECLARED.add(cls)
    LEAF_CLASSES.add(cls)
    CONTAINERS[cls] = None
    if subclasses:
        _LEAF_BASES.add(cls)
        for known in [known for known in CONTAINERS if issubclass(known, cls) and known not in _DECLARED]:
            del CONTAINERS[known]


def register_container(
    cls: type,
    flatten: Callable[[Any], tuple[Iterable[Any], Any] | tuple[Iterable[Any], Any, Iterable[Any] | None]],
    unflatten: Callable[[Any, tuple[Any, ...]], Any],
) -> None:
    """Make instances of exactly this class containers.

    The functions have the form that ``optree.register_pytree_node`` takes, and are kept in optree's registry under the
    namespace ``"statetree"``; classes that are registered in optree's global namespace need not be registered again.

    Args:
        cls: The class. Its subclasses are not affected.
        flatten: Returns ``(children, metadata)`` or ``(children, metadata, keys)`` of an instance. The keys are what
            paths show; without them children are numbered. Metadata is shared between copies and must not be changed.
        unflatten: Takes ``(metadata, children)`` and returns a fresh instance.

    Raises:
        ValueError: If the class is a builtin container, or registered already.

    Example:
        >>> import statetree as st
        >>> class Pair:
        ...     def __init__(self, left, right):
        ...         self.left, self.right = left, right
        >>> st.register_container(
        ...     Pair,
        ...     lambda p: ((p.left, p.right), None, ("left", "right")),
        ...     lambda _, children: Pair(*children),
        ... )
        >>> [str(path) for path in st.paths({"p": Pair(1, 2)})]
        ['p.left', 'p.right']
    """
    if not inspect.isclass(cls):
        raise TypeError(f"register_container: expected a class, got {cls!r}.")
    if cls in _BUILTIN or is_atom_type(cls) or issubclass(cls, torch.Tensor):
        what = "a builtin container" if cls in _BUILTIN else "a leaf"
        msg = f"register_container: {cls.__qualname__} is {what}: expected a class of your own. Derive one from it."
        raise ValueError(msg)
    _take_back(cls)
    _register_with_optree(cls, flatten, unflatten)
    _DECLARED.add(cls)
    LEAF_CLASSES.discard(cls)
    CONTAINERS[cls] = _Registered(cls, _registered_entry(cls))


def declared_containers() -> list[type]:
    """Return the classes that users registered as containers here."""
    return [cls for cls in _DECLARED if CONTAINERS[cls] is not None]


def _registered_entry(cls: type) -> Any:
    entry = optree.register_pytree_node.get(cls, namespace=NAMESPACE)
    return entry if entry is not None and entry.type is cls else None


def optree_structure(tree: Any) -> optree.PyTreeSpec:
    """Return the structure of a tree as optree sees it, mappings in the order of insertion and ``None`` as a leaf."""
    with optree.dict_insertion_ordered(True, namespace=NAMESPACE):  # noqa: FBT003 - it has no name
        return optree.tree_structure(tree, none_is_leaf=True, namespace=NAMESPACE)


#: Containers that optree has rules of its own for, which keep what we keep. (A ``Counter`` is a leaf to it.)
_KNOWN_TO_OPTREE: Final = frozenset({dict, defaultdict, OrderedDict, list, tuple, deque})

#: The classes that ``introduce`` registered. A user who registers one of them overrides that.
_INTRODUCED: set[type] = set()


def introduce(container: Container, freeze: Freeze) -> None:
    """Register a class with optree that was recognised here, and that optree does not know."""
    cls = container.cls
    if cls in _KNOWN_TO_OPTREE or _registered_entry(cls) is not None or optree.is_structseq_class(cls):
        return
    if optree.is_namedtuple_class(cls) and cls.__bases__ == (tuple,):
        return  # optree calls the constructors of classes that derive from it, and drops their attributes

    def flatten(value: Any) -> tuple[Any, Any, Any]:
        children, keys, aux = container.flatten(value, freeze)
        return children, (keys, aux), keys

    def unflatten(metadata: Any, children: Any) -> Any:
        return container.unflatten(metadata[1], metadata[0], children)

    _register_with_optree(cls, flatten, unflatten)
    _INTRODUCED.add(cls)


def _register_with_optree(cls: type, flatten: Any, unflatten: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # optree has rules of its own for namedtuples: override them
        optree.register_pytree_node(cast("Any", cls), flatten, unflatten, namespace=NAMESPACE)


def _take_back(cls: type) -> None:
    """Undo ``introduce``."""
    if cls in _INTRODUCED:
        _INTRODUCED.discard(cls)
        optree.unregister_pytree_node(cls, namespace=NAMESPACE)


def _recognised(cls: type) -> Container | None:
    entry = _registered_entry(cls)
    if entry is not None:
        return _Registered(cls, entry)
    if optree.is_structseq_class(cls):
        # Others, such as time.struct_time, have fields that the sequence does not show, or cannot be made at all.
        complete = cls.n_fields == cls.n_sequence_fields and "__new__" in vars(cls)  # type: ignore[attr-defined]
        return _StructSequence(cls) if complete else None
    if optree.is_namedtuple_class(cls):
        return InstanceContainer(cls, cls, base=tuple, names=tuple(cls._fields))  # type: ignore[attr-defined]
    return instance_container(cls)
