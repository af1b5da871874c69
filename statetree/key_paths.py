"""Key paths: where a leaf lies in a tree, typed, with one way of rendering them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from importlib import import_module
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

#: What has an address in its representation, which differs from process to process, and a full name.
_NAMED: Final = (FunctionType, BuiltinFunctionType, MethodType)
#: Such an address.
ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


class Attr(str):
    """The name of an instance attribute of a container, told apart from an equal mapping key."""

    __slots__ = ()


#: Keys of these types render alike exactly where they are equal, but for their types.
_TEXTUAL: Final = frozenset({str, int, bool, float, complex, bytes, type(None), Attr})


class Path(tuple[Any, ...]):
    """The keys from a tree's root to a leaf: mapping keys, sequence indices, field names.

    Two paths are equal only if their keys agree in type as well: ``Path((0,))``, ``Path(("0",))`` and
    ``Path((False,))`` all differ. ``str(path)`` reads like ``model.layers.0.weight``, and a path of names and numbers
    is equal to the string that it reads like. It is equal to no plain tuple. ``path(tree)`` is what lies there.

    Example:
        >>> import statetree as st
        >>> tree = {"model": {"layers": [{"weight": 1.0}]}}
        >>> (path,) = st.paths(tree)
        >>> path == "model.layers.0.weight"
        True
        >>> path.parent(tree)
        {'weight': 1.0}
        >>> st.Path((0,)) == st.Path((False,))
        False
    """

    __slots__ = ()

    # What is equal must hash alike, and a path is equal to its text: so it is hashed by that. Keys of a user's class
    # may be equal and read differently (as by their addresses); a path with such keys is equal to no string, and is
    # hashed by the keys. The price is that one string is equal to two paths that differ, those of 0 and "0"; sets and
    # dicts of paths alone do not notice.
    def __eq__(self, other: object) -> bool:
        if isinstance(other, Path):
            return len(self) == len(other) and all(map(same_key, self, other))
        return isinstance(other, str) and self._is_textual() and str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(str(self) if self._is_textual() else (*map(key_identity, self),))

    def __call__(self, tree: Any) -> Any:
        """Return what lies at this path of a tree: a leaf or a container.

        Raises:
            TreeMismatch: If nothing does.
        """
        # Containers are the tree engine's, which stands on this module: it is loaded when a path is followed.
        return import_module("statetree.tree.flatten").follow(self, tree)

    @property
    def parent(self) -> Path:
        """The path one key further up; the root's is the root."""
        return Path(self[:-1])

    def _is_textual(self) -> bool:
        return _TEXTUAL.issuperset(map(type, self))

    def __str__(self) -> str:
        return ".".join(map(render_key, self))

    def __repr__(self) -> str:
        return f"Path({tuple(self)!r})"

    def __getnewargs__(self) -> tuple[tuple[Any, ...]]:
        return (tuple(self),)

    def child(self, key: Any) -> Path:
        """Return the path one key further down."""
        return Path((*self, key))

    def sort_key(self) -> tuple[Any, ...]:
        """Return a key for sorting paths in one total order that does not depend on the order of any dict."""
        return (*map(_key_order, self),)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor. Where torch is not loaded, as in a command that reads headers only, nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def key_identity(key: Any) -> Hashable:
    """Return what a key is matched by: its value *and* type, all the way down."""
    cls = type(key)
    if cls is str:
        return key  # type: ignore[no-any-return]  # the common case: stands for itself
    if cls is int:
        return (int, key)
    if isinstance(key, float):
        return (cls, key.hex())  # tells 0.0 from -0.0, and lets one NaN match another
    if isinstance(key, tuple):
        return (cls, (*map(key_identity, key),))
    if isinstance(key, frozenset):
        return (cls, frozenset(map(key_identity, key)))
    if is_tensor(key):
        return (cls, id(key))  # as hash() has it; == would compare the elements
    try:
        hash(key)
    except Exception:  # noqa: BLE001 - keys that a registered flatten function made up, or hostile ones
        return (cls, exactly(key))
    return (cls, _Guarded(key))


class _Guarded:
    """A key of a user's class, whose ``__eq__`` may do anything but is taken for a no unless it says yes."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Guarded):
            return NotImplemented
        try:
            return self.key is other.key or bool(self.key == other.key)
        except Exception:  # noqa: BLE001 - hostile or not made for comparing
            return False


def same_key(a: Any, b: Any) -> bool:
    """Whether two keys agree in value and type (``1``, ``1.0`` and ``True`` do not; NaN agrees with NaN)."""
    return a is b or bool(key_identity(a) == key_identity(b))


def printable(text: str) -> str:
    """Return a text in which control characters, which a terminal would obey, are written as escapes.

    So are characters that change the direction of writing, invisible ones, line breaks and lone surrogates.
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def render_key(key: Any) -> str:
    """Render one key of a path as plain text."""
    if type(key) is str:
        return key
    if type(key) in (frozenset, tuple) or isinstance(key, _NAMED):
        return exactly(key)
    try:
        return str(key)
    except Exception:  # noqa: BLE001 - a hostile __str__ must not hide the error that names the key
        return object.__repr__(key)


def exactly(key: Any) -> str:
    """Render one key so that its type shows, the same in every process: functions by their full names."""
    cls = type(key)
    if cls is frozenset:
        return f"frozenset({{{', '.join(sorted(map(exactly, key)))}}})"
    if cls is tuple:
        return f"({', '.join(map(exactly, key))}{',' if len(key) == 1 else ''})"
    try:
        if isinstance(key, _NAMED):
            return ".".join(filter(None, (key.__module__, key.__qualname__)))
        return repr(key)
    except Exception:  # noqa: BLE001 - a hostile __repr__
        return object.__repr__(key)


def _key_order(key: Any) -> tuple[int, Any, Any]:
    cls = type(key)
    if cls is int:
        return (0, key, "")
    if cls is str:
        return (1, key, "")
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls is tuple:
        return (2, name, (*map(_key_order, key),))
    if cls is frozenset:
        return (2, name, tuple(sorted(map(_key_order, key))))
    return (2, name, exactly(key))


def unique_keys(plain: list[str], paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """Return one distinct string a path: the plain rendering wherever it is distinct already.

    Others are rendered with the ``repr`` of each key in brackets, and numbered in case that even this is taken.
    """
    counts = Counter(plain)
    taken = set(counts)
    numbers: Counter[str] = Counter()
    result = []
    for key, path in zip(plain, paths, strict=True):
        unique = key
        if counts[key] > 1:
            exact = unique = "".join(f".{part!s}" if type(part) is Attr else f"[{exactly(part)}]" for part in path)
            while unique in taken:
                numbers[exact] += 1
                unique = f"{exact}~{numbers[exact] + 1}"
            taken.add(unique)
        result.append(unique)
    return result


def literal(text: str) -> str:
    """Return a glob that matches a text and nothing else: wildcards, braces and a first ``!`` are quoted."""
    return re.sub(r"(^!|[\\*{}])", r"\\\1", text)
