"""Containers with instance attributes: dataclasses, attrs classes, and subclasses of the builtin containers."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, defaultdict, deque
from itertools import compress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.key_paths import Attr
from statetree.tree.atoms import is_constant_type
from statetree.tree.containers import Container

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Sequence

    from statetree.tree.containers import Flattened, Freeze


class Attributes(NamedTuple):
    """The instance attributes of a container: those without a tensor inside are kept here, the others are children.

    ``frozen`` holds, for each name, the attribute as ``freeze`` gives it, or ``None`` where it is a child.
    ``are_items`` is whether the container is its own ``__dict__``: a dict whose items can be written as attributes.
    """

    names: tuple[str, ...]
    frozen: tuple[Any, ...]
    are_items: bool


_FACTORY: Final = "default_factory"
_default_factory: Any = vars(defaultdict)[_FACTORY]
_maxlen: Any = vars(deque)["maxlen"]


class InstanceContainer(Container):
    """A class with instance attributes: dataclasses, attrs classes, and subclasses of the builtin containers.

    The builtin part, if there is one, is read and written through the builtin class itself, so that no overridden
    method and no constructor of the subclass runs.
    """

    __slots__ = ("base", "fields", "names", "slots")

    def __init__(
        self, cls: type, family: Hashable, *, base: Any, fields: Iterable[str] = (), names: tuple[str, ...] = ()
    ) -> None:
        keyed = base is object or issubclass(base, dict)
        super().__init__(cls, family, keyed=keyed)
        self.base = base
        self.fields = tuple(fields)
        self.names = names  # of the items of a namedtuple
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
        if self.slots and self.fields:  # slots are listed by name
            state = {name: state[name] for name in (*filter(state.__contains__, self.fields), *state)}
        return state, are_items

    def flatten(self, container: Any, freeze: Freeze) -> Flattened:
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
            keys = (*self.names, *range(len(self.names), len(children)))
            if base is deque:
                extra = _maxlen.__get__(container)
        state, are_items = self.attributes(container)
        if extra is not None and base is defaultdict and not is_constant_type(type(extra)):
            state[_FACTORY], extra = extra, None
        if not state and not are_items:
            return children, keys, (extra, None)
        frozen: list[Any] = []
        for name, value in state.items():
            is_field = name in self.fields
            kept = None if is_field else freeze(value)
            frozen.append(kept)
            if kept is None:
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

    def without_attributes(self, aux: Any, gone: Collection[str]) -> Any:
        if not gone:
            return aux
        extra, attributes = aux
        stays = [name not in gone for name in attributes.names]
        names, frozen = (*compress(attributes.names, stays),), (*compress(attributes.frozen, stays),)
        return extra, attributes._replace(names=names, frozen=frozen)

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
            value = next(remaining) if kept is None else kept.thaw()
            slot = _default_factory if name == _FACTORY and self.base is defaultdict else self.slots.get(name)
            if slot is not None:
                slot.__set__(fresh, value)
            else:
                fresh.__dict__[name] = value


def _is_python_class(cls: type) -> bool:
    """Whether a class was made by a class statement, and not in C.

    C's classes lie on the heap, too, since Python 3.12 (``defaultdict``): those cannot be changed.
    """
    return cls.__flags__ & (1 << 8 | 1 << 9) == 1 << 9  # Py_TPFLAGS_IMMUTABLETYPE, Py_TPFLAGS_HEAPTYPE


def slots_of(cls: type) -> dict[str, Any]:
    """Return the descriptors of the ``__slots__`` of a class and its bases, without those of classes written in C.

    Where a class repeats a slot of its base, the base's is called ``Base.name``.
    """
    slots: dict[str, Any] = {}
    for base in cls.__mro__:
        if _is_python_class(base):
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    slots[f"{base.__qualname__}.{name}" if name in slots else name] = member
    return slots


def _is_python_above(cls: type, base: type) -> bool:
    """Whether nothing between a class and its base is written in C, so that the base can make its instances.

    Exceptions and ``time.struct_time`` keep state of their own, for example.
    """
    return all(_is_python_class(ancestor) for ancestor in cls.__mro__ if ancestor not in base.__mro__)


def instance_container(cls: type) -> Container | None:
    """Return how instances of a class are taken apart that is none of the builtin ones, or ``None`` for leaves."""
    for base in (OrderedDict, defaultdict, dict, list, tuple, deque):
        if issubclass(cls, base):
            family = "mapping" if issubclass(base, dict) else base.__name__
            return InstanceContainer(cls, family, base=base) if _is_python_above(cls, base) else None
    is_attrs = hasattr(cls, "__attrs_attrs__")
    if not (is_attrs or dataclasses.is_dataclass(cls)) or not _is_python_above(cls, object):
        return None
    fields: Any = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else getattr(cls, "__attrs_attrs__", ())
    return InstanceContainer(cls, cls, base=object, fields=[field.name for field in fields])
