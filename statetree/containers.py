"""Containers: how one level of a tree is taken apart and put together, per class.

Which classes are containers is looked up here, and only here: ours, those that a user registered (kept in optree's
registry, so that trees registered with optree work too), and those recognised when first met: subclasses of ``dict``,
``list``, ``tuple`` and ``deque``, namedtuples, torch's return types, dataclasses and attrs classes.

optree's own traversal is not used. Measured with optree 0.20 it takes 250 ns a leaf where asking for the types of a
whole container at once takes 30, and its compiled rules for builtin classes cannot be changed: it drops
``OrderedDict._metadata``, calls the constructors of namedtuple subclasses, and treats subclasses of ``dict`` and
``list`` as leaves.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, cast

import optree
import torch

from statetree.atoms import is_atom_type
from statetree.errors import CyclicTree, TreeTooDeep
from statetree.paths import Attr

#: The optree namespace that ``register_container`` writes to. Types in optree's global namespace are seen as well.
NAMESPACE = "statetree"

Flattened = tuple[Sequence[Any], tuple[Any, ...], Any]


#: How deep attributes of attributes may be nested and still be part of the structure. Deeper ones become leaves.
MAX_ATTRIBUTE_DEPTH: Final = 8


class NotPlain(Exception):
    """Raised while freezing an attribute, as soon as something turns up that is no atom."""


class Container:
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

    def flatten(self, container: Any, *, plain: int = 0) -> Flattened:
        """Return children, their keys, and the auxiliary data.

        With ``plain`` only atoms are of interest: ``NotPlain`` may be raised if the container holds anything else. It
        counts how many attributes the traversal is in.
        """
        raise NotImplementedError

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        """Return a fresh container."""
        raise NotImplementedError

    def num_items(self, keys: tuple[Any, ...]) -> int:
        """Return how many of the keys are the container's own, and not those of attributes."""
        return sum(type(key) is not Attr for key in keys)

    def __reduce__(self) -> tuple[Callable[[type], Container | None], tuple[type]]:
        return (container_of, (self.cls,))

    def __repr__(self) -> str:
        return f"<container {self.cls.__qualname__}>"


class _Dict(Container):
    __slots__ = ()

    def flatten(self, container: Any, *, plain: int = 0) -> Flattened:
        return list(container.values()), tuple(container), None

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        return dict(zip(keys, children, strict=True))


class _DefaultDict(_Dict):
    __slots__ = ()

    def flatten(self, container: Any, *, plain: int = 0) -> Flattened:
        return list(container.values()), tuple(container), container.default_factory

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        return defaultdict(aux, zip(keys, children, strict=True))


class _List(Container):
    __slots__ = ()

    def flatten(self, container: Any, *, plain: int = 0) -> Flattened:
        return container, tuple(range(len(container))), None

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        return list(children)


class _Tuple(_List):
    __slots__ = ()

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        return tuple(children)


class _Deque(_List):
    __slots__ = ()

    def flatten(self, container: Any, *, plain: int = 0) -> Flattened:
        return list(container), tuple(range(len(container))), container.maxlen

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        return deque(children, aux)


class _StructSequence(Container):
    """torch's return types: tuples with named fields whose constructor takes one sequence."""

    __slots__ = ("fields",)

    def __init__(self, cls: type) -> None:
        super().__init__(cls, cls, keyed=False)
        self.fields = tuple(optree.structseq_fields(cls))

    def flatten(self, container: Any, *, plain: int = 0) -> Flattened:
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

    def flatten(self, container: Any, *, plain: int = 0) -> Flattened:
        result = self.entry.flatten_func(container)
        children = list(result[0])
        metadata = result[1]
        entries = result[2] if len(result) > 2 and result[2] is not None else range(len(children))
        keys = tuple(entries)
        if len(keys) != len(children):
            msg = (
                f"flatten: the flatten function of {self.cls.__qualname__} returned {len(children)} children "
                f"and {len(keys)} entries. Return one entry a child."
            )
            raise ValueError(msg)
        return children, keys, metadata

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        return self.entry.unflatten_func(aux, tuple(children))


class Attributes(NamedTuple):
    """The instance attributes of a container: those without a tensor inside are kept here, the others are children.

    ``frozen`` holds, for each name, the attribute as ``freeze`` gives it, or ``None`` where it is a child.
    ``are_items`` is whether the container is its own ``__dict__``: a dict whose items can be written as attributes.
    """

    names: tuple[str, ...]
    frozen: tuple[Any, ...]
    are_items: bool


_default_factory: Any = vars(defaultdict)["default_factory"]
_maxlen: Any = vars(deque)["maxlen"]


class _Instance(Container):
    """A class with instance attributes: dataclasses, attrs classes, and subclasses of the builtin containers.

    The builtin part, if there is one, is read and written through the builtin class itself, so that no overridden
    method and no constructor of the subclass runs.
    """

    __slots__ = ("base", "fields", "slots")

    def __init__(self, cls: type, family: Hashable, *, base: Any, fields: Iterable[str] = ()) -> None:
        keyed = base is object or issubclass(base, dict)
        super().__init__(cls, family, keyed=keyed)
        self.base = base
        self.fields = tuple(fields)
        self.slots = slots_of(cls)

    def attributes(self, container: Any) -> tuple[dict[str, Any], bool]:
        """Return the attributes that are not items, and whether others are."""
        try:
            found = object.__getattribute__(container, "__dict__")
        except AttributeError:
            found = {}
        are_items = found is container
        state = {} if are_items else dict(found)
        for name, slot in self.slots.items():
            try:
                state[name] = slot.__get__(container)
            except AttributeError:  # the slot was never set
                continue
        return state, are_items

    def flatten(self, container: Any, *, plain: int = 0) -> Flattened:
        base = self.base
        children: list[Any]
        keys: tuple[Any, ...]
        extra: Any = None
        if base is object:
            children, keys = [], ()
        elif issubclass(base, dict):
            children, keys = list(base.values(container)), tuple(base.__iter__(container))
            if base is defaultdict:
                extra = _default_factory.__get__(container)
        else:
            children = list(base.__iter__(container))
            keys = tuple(range(len(children)))
            if base is deque:
                extra = _maxlen.__get__(container)
        state, are_items = self.attributes(container)
        if not state and not are_items:
            return children, keys, (extra, None)
        frozen: list[Any] = []
        for name, value in state.items():
            is_field = name in self.fields
            kept = None if is_field else freeze(value, plain + 1)
            frozen.append(kept)
            if kept is None:
                if plain and not is_field:
                    raise NotPlain
                children.append(value)
                keys = (*keys, name if is_field else Attr(name))
        return children, keys, (extra, Attributes(tuple(state), tuple(frozen), are_items))

    def unflatten(self, aux: Any, keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
        extra, attributes = aux
        count = len(children)
        if attributes is not None:
            count -= sum(kept is None for kept in attributes.frozen)
        fresh = self._builtin_part(extra, keys[:count], children[:count])
        if attributes is not None:
            self._set_attributes(fresh, attributes, children[count:])
        return fresh

    def _builtin_part(self, extra: Any, keys: tuple[Any, ...], items: Sequence[Any]) -> Any:
        base, cls = self.base, self.cls
        if base is tuple:
            return tuple.__new__(cls, items)
        fresh = base.__new__(cls)
        if issubclass(base, dict):
            if base is defaultdict:
                _default_factory.__set__(fresh, extra)
            store = base.__setitem__
            for key, item in zip(keys, items, strict=True):
                store(fresh, key, item)
        elif base is list:
            list.extend(fresh, items)
        elif base is deque:
            deque.__init__(fresh, items, extra)
        return fresh

    def _set_attributes(self, fresh: Any, attributes: Attributes, values: Sequence[Any]) -> None:
        remaining = iter(values)
        if attributes.are_items:
            object.__setattr__(fresh, "__dict__", fresh)
        for name, kept in zip(attributes.names, attributes.frozen, strict=True):
            value = next(remaining) if kept is None else thaw(kept)
            slot = self.slots.get(name)
            if slot is not None:
                slot.__set__(fresh, value)
            else:
                fresh.__dict__[name] = value


def _is_heap_type(cls: type) -> bool:
    """Whether a class was made by a class statement, and not in C."""
    return bool(cls.__flags__ & 1 << 9)  # Py_TPFLAGS_HEAPTYPE


def slots_of(cls: type) -> dict[str, Any]:
    """Return the descriptors of the ``__slots__`` of a class and its bases, without those of classes written in C.

    Where a class repeats a slot of its base, the base's is called ``Base.name``.
    """
    slots: dict[str, Any] = {}
    for base in cls.__mro__:
        if _is_heap_type(base):
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    slots[f"{base.__qualname__}.{name}" if name in slots else name] = member
    return slots


def freeze(value: Any, depth: int = 1) -> Any:
    """Return what ``thaw`` makes fresh copies of a value from, or ``None`` if it holds anything but atoms.

    Args:
        value: An attribute of a container, or metadata of a leaf.
        depth: In how many attributes it lies.
    """
    from statetree import tree  # attributes are trees themselves

    try:
        return (_copy_plain(value, depth),)
    except NotPlain:
        pass
    if depth > MAX_ATTRIBUTE_DEPTH:
        return None
    try:
        leaves, spec = tree.flatten_plain(value, depth)
    except (NotPlain, CyclicTree, TreeTooDeep):
        # What goes round in circles does so again when it is walked as a child, where the error can name the path.
        return None
    return (tuple(leaves), spec)


def thaw(frozen: Any) -> Any:
    """Return a fresh value from what ``freeze`` gave."""
    from statetree import tree  # as above

    return _copy_plain(frozen[0], 0) if len(frozen) == 1 else tree.unflatten(frozen[1], frozen[0])


def _copy_plain(value: Any, depth: int) -> Any:
    """Copy builtin containers of atoms, the quick way for the usual metadata (``_metadata`` of a state dict)."""
    cls = type(value)
    if is_atom_type(cls):
        return value
    if depth > 2 * MAX_ATTRIBUTE_DEPTH:
        raise NotPlain
    if cls is dict or (cls is OrderedDict and not vars(value)):
        items = list(value.values())
        classes = set(map(type, items))
        if all(map(is_atom_type, classes)):
            return cls(value)
        if classes == {dict} and all(map(is_atom_type, set(map(type, chain.from_iterable(map(dict.values, items)))))):
            return cls(zip(value, map(dict.copy, items), strict=True))  # such as the metadata of modules
        return cls(zip(value, [_copy_plain(item, depth + 1) for item in items], strict=True))
    if cls is list or cls is tuple:
        return cls([_copy_plain(item, depth + 1) for item in value])
    raise NotPlain


_BUILTIN: dict[type, Container | None] = {
    dict: _Dict(dict, "mapping", keyed=True),
    defaultdict: _DefaultDict(defaultdict, "mapping", keyed=True),
    OrderedDict: _Instance(OrderedDict, "mapping", base=OrderedDict),
    Counter: _Instance(Counter, "mapping", base=dict),
    list: _List(list, "list", keyed=False),
    tuple: _Tuple(tuple, "tuple", keyed=False),
    deque: _Deque(deque, "deque", keyed=False),
}

#: Every class met so far: its container, or ``None`` where its instances are leaves.
KINDS: dict[type, Container | None] = dict(_BUILTIN)
#: The classes of ``KINDS`` whose instances are leaves, for asking about many at once.
LEAF_CLASSES: set[type] = set()


def container_of(cls: type) -> Container | None:
    """Return how instances of a class are taken apart, or ``None`` where they are leaves."""
    try:
        return KINDS[cls]
    except KeyError:
        kind = _recognise(cls)
        if kind is not None:
            return KINDS.setdefault(cls, kind)  # another thread may have been quicker
        if is_atom_type(cls) or issubclass(cls, torch.Tensor):
            LEAF_CLASSES.add(cls)
            KINDS[cls] = None
        return None  # an unknown class may yet be registered with optree, so that it is asked about every time


def declare_leaf_class(cls: type) -> None:
    """Make instances of exactly this class leaves, whatever they derive from.

    Raises:
        ValueError: If it is a builtin container.
    """
    if cls in _BUILTIN:
        msg = f"register_leaf_type: {cls.__qualname__} is a builtin container: expected a class of your own."
        raise ValueError(msg)
    LEAF_CLASSES.add(cls)
    KINDS[cls] = None


def register_container(
    cls: type,
    flatten: Callable[[Any], tuple[Iterable[Any], Any] | tuple[Iterable[Any], Any, Iterable[Any] | None]],
    unflatten: Callable[[Any, tuple[Any, ...]], Any],
) -> None:
    """Make instances of exactly this class containers.

    The functions have the form that ``optree.register_pytree_node`` takes, and are kept in optree's registry under
    the namespace ``"statetree"``; classes registered with optree's global namespace need no second registration.

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
        msg = f"register_container: expected a class, got {cls!r}."
        raise TypeError(msg)
    if cls in _BUILTIN or is_atom_type(cls) or issubclass(cls, torch.Tensor):
        what = "a builtin container" if cls in _BUILTIN else "a leaf"
        msg = f"register_container: {cls.__qualname__} is {what}: expected a class of your own. Derive one from it."
        raise ValueError(msg)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # optree has rules of its own for namedtuples: override them
        optree.register_pytree_node(cast("Any", cls), flatten, cast("Any", unflatten), namespace=NAMESPACE)
    LEAF_CLASSES.discard(cls)
    KINDS[cls] = _Registered(cls, _registered_entry(cls))


def _registered_entry(cls: type) -> Any:
    entry = optree.register_pytree_node.get(cls, namespace=NAMESPACE)
    return entry if entry is not None and entry.type is cls else None


def _recognise(cls: type) -> Container | None:
    """Decide what a class is that is met for the first time."""
    if is_atom_type(cls) or issubclass(cls, (torch.Tensor, torch.nn.Module)):
        return None
    entry = _registered_entry(cls)
    if entry is not None:
        return _Registered(cls, entry)
    if optree.is_structseq_class(cls):
        # Others, such as time.struct_time, have fields that the sequence does not show, or cannot be made at all.
        complete = cls.n_fields == cls.n_sequence_fields and "__new__" in vars(cls)  # type: ignore[attr-defined]
        return _StructSequence(cls) if complete else None
    if optree.is_namedtuple_class(cls):
        return _NamedTuple(cls)
    return _recognise_instance(cls)


class _NamedTuple(_Instance):
    __slots__ = ("names",)

    def __init__(self, cls: type) -> None:
        super().__init__(cls, cls, base=tuple)
        self.names = tuple(cls._fields)  # type: ignore[attr-defined]

    def flatten(self, container: Any, *, plain: int = 0) -> Flattened:
        children, keys, aux = super().flatten(container, plain=plain)
        return children, self.names + keys[len(self.names) :], aux


def _recognise_instance(cls: type) -> Container | None:
    families: tuple[tuple[type, Hashable], ...] = (
        (OrderedDict, "mapping"),
        (defaultdict, "mapping"),
        (dict, "mapping"),
        (list, "list"),
        (tuple, "tuple"),
        (deque, "deque"),
    )
    for base, family in families:
        if issubclass(cls, base):
            return _Instance(cls, family, base=base) if _is_python_above(cls, base) else None
    fields: tuple[str, ...] | None = None
    if dataclasses.is_dataclass(cls):
        fields = tuple(field.name for field in dataclasses.fields(cls))
    elif hasattr(cls, "__attrs_attrs__"):
        fields = tuple(attribute.name for attribute in cls.__attrs_attrs__)
    if fields is None or not _is_python_above(cls, object):
        return None
    return _Instance(cls, cls, base=object, fields=fields)


def _is_python_above(cls: type, base: type) -> bool:
    """Whether nothing between a class and its base is written in C, so that the base can make its instances.

    Exceptions and ``time.struct_time`` keep state of their own, for example.
    """
    return all(_is_heap_type(ancestor) for ancestor in cls.__mro__ if ancestor not in base.__mro__)
