"""The structure of a saved tree as text, so that it can be loaded without a template.

The text is JSON: the containers, children before parents, and the entries. It comes from a file, so that reading it
trusts nothing in it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.dcp.keys import UnknownKey, key_of, key_text, shown_key
from statetree.dcp.tensors import PARTS_ENTRY, TENSOR_ENTRY, VALUE_ENTRY
from statetree.errors import CheckpointError
from statetree.paths import Path
from statetree.tree.instances import Attributes
from statetree.tree.registry import container_of
from statetree.tree.traversal import freeze

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.dcp.outline import Node

VERSION: Final = 1
#: The containers that are made again without a template.
BUILTIN: Final[dict[str, type]] = {"dict": dict, "list": list, "tuple": tuple, "OrderedDict": OrderedDict}
_NAMES: Final = {cls: name for name, cls in BUILTIN.items()}


class SavedEntry(NamedTuple):
    """An entry of a checkpoint: its sort, the keys of its data (several for the parts of a tensor), and facts."""

    sort: str
    keys: tuple[str, ...]
    facts: str = ""


class SavedNode(NamedTuple):
    """A container of a checkpoint. ``attributes`` are as ``_written_attributes`` gives them."""

    name: str
    family: str
    keys: tuple[str, ...]
    children: tuple[int, ...]
    attributes: Any

    def num_items(self) -> int:
        """Return how many of the keys are the container's own."""
        return sum(not text.startswith("@") for text in self.keys)


class Structure(NamedTuple):
    """The containers and entries of a checkpoint."""

    nodes: tuple[SavedNode, ...]
    entries: tuple[SavedEntry, ...]

    def root(self) -> int:
        """Return what the whole tree is: the index of an entry, or ``~index`` of a node."""
        return ~(len(self.nodes) - 1) if self.nodes else 0

    def walk(self) -> list[tuple[tuple[str, ...], int]]:
        """Return the path (as texts) of every node and entry."""
        found: list[tuple[tuple[str, ...], int]] = []
        pending: list[tuple[tuple[str, ...], int]] = [((), self.root())]
        while pending:
            path, ref = pending.pop()
            found.append((path, ref))
            if ref < 0:
                node = self.nodes[~ref]
                pending += [((*path, key), child) for key, child in zip(node.keys, node.children, strict=True)]
        return found

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Return a tree of builtin containers with a value for each entry."""
        if not self.nodes:
            return values[0]
        made: list[Any] = []
        for node in self.nodes:
            kind = container_of(BUILTIN[node.name])
            assert kind is not None
            children = [values[ref] if ref >= 0 else made[~ref] for ref in node.children]
            aux = (None, _read_attributes(node.attributes)) if node.name == "OrderedDict" else None
            made.append(kind.unflatten(aux, tuple(map(key_of, node.keys)), children))
        return made[-1]


def why_not_rebuilt(node: SavedNode) -> str:
    """Say why a container cannot be made without a template; empty if it can."""
    if node.name not in BUILTIN:
        return f"a {node.name}"
    if node.attributes is False:
        return f"a {node.name} with attributes that are no plain data"
    try:
        for text in node.keys:
            key_of(text)
    except UnknownKey as unknown:
        return f"a {node.name} with the key {unknown}"
    return ""


def family_text(family: Any) -> str:
    """Return the family of a container (see ``Container``) as text."""
    return family if isinstance(family, str) else f"{family.__module__}.{family.__qualname__}"


def written(nodes: Sequence[Node], entries: Sequence[SavedEntry]) -> str:
    """Return a structure as text."""
    rows = []
    for node in nodes:
        cls = node.kind.cls
        rows.append(
            [
                _NAMES.get(cls) or f"{cls.__module__}.{cls.__qualname__}",
                family_text(node.kind.family),
                list(map(key_text, node.keys)),
                node.children,
                _written_attributes(node.aux[1]) if cls is OrderedDict else None,
            ]
        )
    table = [[entry.sort, entry.keys, entry.facts] for entry in entries]
    return json.dumps({"version": VERSION, "nodes": rows, "entries": table}, separators=(",", ":"))


def read(text: Any) -> Structure:
    """Return the structure that a text describes.

    Raises:
        CheckpointError: If it is none that ``written`` returns, or one of a later version.
    """
    try:
        table = json.loads(text)
        if table["version"] != VERSION:
            msg = (
                f"load: the checkpoint's structure is of version {table['version']}: expected {VERSION}. Load it with "
                "the version of statetree that saved it, or with torch.distributed.checkpoint."
            )
            raise CheckpointError(msg)
        nodes = tuple(_read_node(*row) for row in table["nodes"])
        entries = tuple(_read_entry(*row) for row in table["entries"])
        _check_links(nodes, len(entries))
    except (TypeError, ValueError, KeyError, RecursionError, AttributeError) as error:
        msg = f"load: the checkpoint's structure is damaged: {type(error).__name__}: {error}. Load another checkpoint."
        raise CheckpointError(msg) from error
    return Structure(nodes, entries)


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("expected a list of texts")
    return tuple(values)


def _read_node(name: Any, family: Any, keys: Any, children: Any, attributes: Any) -> SavedNode:
    _texts([name, family])
    for text in _texts(keys):
        try:
            key_of(text)
        except UnknownKey:
            continue
    if not all(type(ref) is int for ref in children) or len(children) != len(keys):
        raise TypeError("expected one child a key")
    if name == "OrderedDict" and attributes is not False:
        _read_attributes(attributes)
    return SavedNode(name, family, tuple(keys), tuple(children), attributes)


def _read_entry(sort: Any, keys: Any, facts: Any) -> SavedEntry:
    _texts([facts])
    if sort not in {TENSOR_ENTRY, PARTS_ENTRY, VALUE_ENTRY} or (sort != PARTS_ENTRY and len(keys) != 1):
        raise ValueError("expected the sort of an entry, and its keys")
    return SavedEntry(sort, _texts(keys), facts)


def _check_links(nodes: Sequence[SavedNode], num_entries: int) -> None:
    """Raise unless every entry and every node but the last is the child of one later node."""
    if not nodes:
        if num_entries != 1:
            raise ValueError("expected one entry")
        return
    missing = set(range(num_entries)) | {~index for index in range(len(nodes) - 1)}
    for index, node in enumerate(nodes):
        for ref in node.children:
            if ref not in missing or ~ref >= index:
                raise ValueError("expected a tree")
            missing.remove(ref)
    if missing:
        raise ValueError("expected a tree")


def _written_attributes(attributes: Attributes | None) -> Any:
    """Return attributes as JSON data: pairs of name and value (``None`` for a child); ``False`` if they are none."""
    if attributes is None:
        return None
    if attributes.are_items:
        return False
    try:
        return [
            [name, None if frozen is None else _written_value(frozen.thaw())]
            for name, frozen in zip(attributes.names, attributes.frozen, strict=True)
        ]
    except TypeError:
        return False


def _read_attributes(rows: Any) -> Attributes | None:
    if rows is None:
        return None
    names = _texts([name for name, _ in rows])
    frozen = tuple(None if value is None else freeze(_read_value(value)) for _, value in rows)
    return Attributes(names, frozen, are_items=False)


def _written_value(value: Any) -> Any:
    """Return plain data as JSON data. Every value but a text is a list that begins with its sort."""
    cls = type(value)
    if cls is str:
        return value
    if cls in (list, tuple):
        return [cls.__name__, *map(_written_value, value)]
    if cls in (dict, OrderedDict) and not getattr(value, "__dict__", None):
        return [cls.__name__, *([_written_value(key), _written_value(item)] for key, item in value.items())]
    if cls in (int, bool, float, complex, bytes, type(None)):
        return ["key", key_text(value)]
    raise TypeError


def _read_value(data: Any) -> Any:
    if isinstance(data, str):
        return data
    sort, *rest = data
    if sort == "key":
        return key_of(*_texts(rest))
    if sort in ("list", "tuple"):
        return BUILTIN[sort](map(_read_value, rest))
    if sort in ("dict", "OrderedDict"):
        return BUILTIN[sort]((_read_value(key), _read_value(item)) for key, item in rest)
    raise ValueError(sort)


def path_of(texts: Sequence[str]) -> Path:
    """Return a path, for messages."""
    return Path(map(shown_key, texts))
