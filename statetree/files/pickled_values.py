"""The values that records of a pickle stand for: containers are made here, all else by rules that check arguments."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.files.safe_pickle import BadPickle, Named, PersistentId, Record, StoredObject, check_depth

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

_ATOMS: Final = frozenset([str, int, float, bool, type(None), bytes])
_KEYS: Final = _ATOMS | {complex, tuple, torch.Size, torch.dtype, torch.device, StoredObject}
_MAPPINGS: Final = (OrderedDict, Counter, defaultdict)


class Rules:
    """What the names in pickles stand for. As it is, it knows none.

    Attributes:
        foreign: Names that stand for nothing here: objects of them are not made.
    """

    foreign: Collection[str] = ()

    def named(self, name: str) -> Any:
        """Return what stands for a function or class that is not called."""
        return Named(name)

    def called(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return the result of a call."""
        raise BadPickle(f"it makes a {name} in an unknown way{args and ''}")

    def stored(self, pid: Any) -> Any:
        """Return a storage by its persistent id."""
        raise BadPickle(f"it refers to what is outside of it (a {type(pid).__name__})")

    def set_state(self, target: Any, state: Any) -> bool:  # noqa: ARG002
        """Set the state of the result of a call; return whether that is known."""
        return False


def made(root: Any, rules: Rules) -> Any:
    """Return the value that stands for what ``read_records`` returned.

    Raises:
        BadPickle: If it is nested too deeply, or if something in it cannot be made.
    """
    found: dict[int, Any] = {}

    def of(value: Any) -> Any:
        cls = type(value)
        if cls in _ATOMS:
            return value
        if cls is type:
            return StoredObject(value.name) if value.name in rules.foreign else rules.named(value.name)
        return found.get(id(value), value)

    try:
        for value in check_depth(root, rules.foreign):
            found[id(value)] = _made(value, of, rules)
        return of(root)
    except BadPickle:
        raise
    except Exception as error:  # noqa: BLE001 - what is made is given arguments of any kind
        raise BadPickle(f"it is damaged ({type(error).__name__}: {str(error)[:100]})") from None


def _made(value: Any, of: Callable[[Any], Any], rules: Rules) -> Any:
    cls = type(value)
    if cls is dict:
        keys = list(map(of, value))
        check_keys(keys)
        return dict(zip(keys, map(of, value.values()), strict=True))
    if cls in (list, tuple, set, frozenset):
        parts = list(map(of, value))
        if cls in (set, frozenset):
            check_keys(parts)
        return cls(parts)
    if cls is PersistentId:
        return rules.stored(of(value.args)[0])
    if not isinstance(value, Record):
        return value
    if value.name in rules.foreign:
        return StoredObject(value.name)
    args, state, items = of(value.args), of(value.state), of(value.items)
    make = _BUILTIN.get(value.name)
    target = rules.called(value.name, args) if make is None else make(*args)
    if isinstance(target, StoredObject):
        return target
    if items is not None:
        _put(target, items)
    if value.state is not None and not _set_state(target, state) and not rules.set_state(target, state):
        raise BadPickle(f"it sets the state of a {type(target).__name__}")
    return target


def _put(target: Any, items: list[Any]) -> None:
    if type(target) is deque:
        target.extend(items)
        return
    if type(target) not in _MAPPINGS or not all(type(item) is tuple and len(item) == 2 for item in items):
        raise BadPickle(f"it sets items of a {type(target).__name__}")
    check_keys([key for key, _ in items])
    for key, value in items:
        target[key] = value


def _set_state(target: Any, state: Any) -> bool:
    if type(target) is not OrderedDict or type(state) is not dict:
        return False
    set_state_attributes(target, state)
    return True


def set_state_attributes(target: Any, state: Any) -> None:
    """Set the attributes of an object, none of which means anything to Python.

    Raises:
        BadPickle: If one may.
    """
    are_names = type(state) is dict and set(map(type, state)) <= {str}
    cls = type(target)
    if not are_names or not all(
        name.isidentifier() and not name.startswith("__") and not callable(getattr(cls, name, None)) for name in state
    ):
        raise BadPickle("it sets attributes that are no plain ones")
    target.__dict__.update(state)


def check_keys(keys: Iterable[Any]) -> None:
    """Raise ``BadPickle`` unless keys are plain values, or tuples."""
    for key in keys:
        if type(key) not in _KEYS:
            raise BadPickle(f"it has a {type(key).__name__} as a key")


def _encoded(text: Any = b"", codec: Any = "latin1") -> bytes:
    if codec not in ("latin1", "latin-1") or not isinstance(text, (str, bytes)):
        raise BadPickle("it makes bytes in an unknown way")
    return text.encode("latin1") if isinstance(text, str) else text


def _of_items(cls: Any) -> Callable[..., Any]:
    def make(items: Any = ()) -> Any:
        if type(items) not in (list, tuple, dict, set):
            raise BadPickle(f"it makes a {cls.__name__} of a {type(items).__name__}")
        check_keys(items if cls is set or type(items) is dict else [key for key, _ in items])
        made = cls()
        if cls is set:
            made.update(items)
        for key, value in () if cls is set else items.items() if type(items) is dict else items:
            made[key] = value  # a Counter's update would add up
        return made

    return make


def _complex(*parts: Any) -> complex:
    if not 1 <= len(parts) <= 2 or not all(type(part) in (int, float) for part in parts):
        raise BadPickle("it makes a complex number of something else")
    return complex(*parts)


#: Functions and classes that are called here, and not by rules.
_BUILTIN: Final[dict[str, Callable[..., Any]]] = {
    "collections.OrderedDict": _of_items(OrderedDict),
    "collections.Counter": _of_items(Counter),
    "builtins.set": _of_items(set),
    "builtins.bytearray": lambda *args: bytearray(_encoded(*args)),
    "builtins.complex": _complex,
    "_codecs.encode": _encoded,
}
MADE_HERE: Final = frozenset(_BUILTIN)
