"""The structure of a saved tree as text, so that it can be loaded without a template.

The text is JSON: the containers, children before parents, and the entries. It comes from a file, so that reading it
trusts nothing in it: classes and keys stay texts in the ``TreeSpec`` that it becomes.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.dcp.tensors import PARTS_ENTRY, TENSOR_ENTRY, VALUE_ENTRY
from statetree.errors import CheckpointError
from statetree.files.key_texts import UnknownKey, key_of, key_text, shown_key
from statetree.files.pickled_values import CLASSES
from statetree.key_paths import Path
from statetree.leaves.divided import DividedLeaf
from statetree.tree.containers import Container
from statetree.tree.instances import Attributes, InstanceContainer
from statetree.tree.registry import container_of, declared_containers
from statetree.tree.spec import TreeSpec
from statetree.tree.traversal import Node, freeze

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

VERSION: Final = 1
#: The containers that are always made again without a template.
BUILTIN: Final[dict[str, type]] = {
    "dict": dict,
    "list": list,
    "tuple": tuple,
    "OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "collections.defaultdict": defaultdict,
    "collections.deque": deque,
}
#: How the names of leaves begin that are made of several tensors.
_LEAF: Final = "leaf "
_NAMES: Final = {cls: name for name, cls in BUILTIN.items()}


class SavedEntry(NamedTuple):
    """An entry of a checkpoint: its sort, the keys of its data (several for the parts of a tensor), and facts.

    ``context`` is the key of what a value of a registered leaf type has beside its parts, if there is anything.
    """

    sort: str
    keys: tuple[str, ...]
    facts: str = ""
    context: str = ""


class SavedContainer(Container):
    """A container as a checkpoint describes it, by the name of its class.

    In a node, its keys are texts (``key_text``), and its auxiliary data is what ``_written_attributes`` returns.
    """

    __slots__ = ("name",)

    def __init__(self, name: str, family: str) -> None:
        super().__init__(object, family, keyed=family not in {"list", "tuple", "deque"})
        self.name = name

    def num_items(self, keys: tuple[Any, ...]) -> int:
        """Return how many of the keys are the container's own."""
        return sum(not text.startswith("@") for text in keys)


class Structure(NamedTuple):
    """The containers of a checkpoint, each a ``SavedContainer``, and its entries, one for each leaf."""

    spec: TreeSpec
    entries: tuple[SavedEntry, ...]

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Return a tree with a value for each entry. None of ``why_not_rebuilt`` may apply."""
        known = rebuilt_classes()
        return TreeSpec((*[_node(node, known) for node in self.spec.nodes],), self.spec.num_leaves).unflatten(values)


def saved_form(spec: TreeSpec) -> TreeSpec:
    """Return a structure as a checkpoint describes it."""
    nodes: list[Node] = []
    for kind, keys, aux, kids, take in spec.nodes:
        cls = kind.cls
        family = kind.family if isinstance(kind.family, str) else _full_name(kind.family)
        attributes = _written_aux(kind, aux)
        name = f"{_LEAF}{aux[0]}" if cls is DividedLeaf else _NAMES.get(cls) or _full_name(cls)
        container = SavedContainer(name, name if cls is DividedLeaf else family)
        nodes.append((container, (*map(key_text, keys),), attributes, kids, take))
    return TreeSpec(tuple(nodes), spec.num_leaves)


def _full_name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def places(spec: TreeSpec) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the keys that lead to each container and leaf, and what is there: see ``TreeSpec.links``."""
    pending: list[tuple[tuple[Any, ...], int]] = [((), spec.root())]
    while pending:
        keys, ref = pending.pop()
        yield keys, ref
        if ref < 0:
            below = zip(spec.nodes[~ref][1], spec.links()[~ref], strict=True)
            pending += reversed([((*keys, key), child) for key, child in below])


def is_leaf(node: Node) -> bool:
    """Whether a container of a checkpoint is a leaf that is made of several tensors."""
    container = node[0]
    return isinstance(container, SavedContainer) and container.name.startswith(_LEAF)


def rebuilt_classes() -> dict[str, type]:
    """Return the containers that are made without a template, by name: builtin ones, and those that the user named.

    A checkpoint names classes as well, but they are only looked up here: nothing is imported because a file says so.
    """
    from statetree.transforms.deltas.change import TensorChange, ValueChange  # here: few checkpoints have any
    from statetree.transforms.deltas.delta import Delta

    found = {_full_name(cls): cls for cls in (Delta, TensorChange, ValueChange, *declared_containers())}
    for listed in torch.serialization.get_safe_globals():
        cls, name = listed if isinstance(listed, tuple) else (listed, "")
        if isinstance(cls, type):
            found[name or _full_name(cls)] = cls
    return found | BUILTIN


def why_not_rebuilt(node: Node, known: Mapping[str, type]) -> str:
    """Say why a container of a checkpoint cannot be made without a template; empty if it can.

    Args:
        node: The container.
        known: The classes of containers that can be, by name: ``rebuilt_classes()``.
    """
    container, keys, attributes = node[:3]
    assert isinstance(container, SavedContainer)
    if container.name not in known:
        return f"a {container.name}"
    if attributes is None and container.name in ("collections.deque", "collections.defaultdict"):
        return f"a {container.name} saved by an earlier version, which left out its arguments"
    if attributes is False:
        return f"a {container.name} with attributes that are no plain data"
    try:
        for text in keys:
            key_of(text)
    except UnknownKey as unknown:
        return f"a {container.name} with the key {unknown}"
    try:
        _node(node, known)
    except (TypeError, ValueError, KeyError) as error:
        return f"a {container.name} that is not the class of that name here ({error})"
    return ""


def _node(node: Node, known: Mapping[str, type]) -> Node:
    container, texts, data, kids, take = node
    assert isinstance(container, SavedContainer)
    kind, keys = container_of(known[container.name]), (*map(key_of, texts),)
    if container.name in BUILTIN:
        assert kind is not None
        return kind, keys, _read_aux(container.name, data), kids, take
    if kind is None:
        raise TypeError("no container")
    if kind.compares_aux:  # registered: what its function returned
        (aux,) = data
        return kind, keys, _read_value(aux), kids, take
    return kind, keys, (None, _read_instance(kind, keys, data)), kids, take


def _read_instance(kind: Container, keys: tuple[Any, ...], data: Any) -> Attributes | None:
    """Return the attributes of a dataclass, a namedtuple, or a subclass of a builtin container.

    Raises:
        ValueError: If they are none that the class can have: it may have changed since, and the text may say anything.
    """
    if not isinstance(kind, InstanceContainer):
        raise TypeError("no container with attributes")
    if data is None and kind.fields:  # an earlier version left them out
        data = [[name, None] for name in keys]
    attributes = _read_attributes(data) or Attributes((), (), are_items=False)
    children = [name for name, frozen in zip(attributes.names, attributes.frozen, strict=True) if frozen is None]
    count = len(keys) - len(children)
    is_dataclass = bool(kind.fields) or kind.base is object
    if (
        list(map(str, keys[max(count, 0) :])) != children
        or count != (0 if is_dataclass else kind.num_items(keys))
        or not {*kind.fields} <= {*children}
        or keys[:count] != getattr(kind, "names", keys[:count])
        or not (kind.cls.__dictoffset__ or {*attributes.names} <= {*kind.slots})
    ):
        raise ValueError("it has other fields")
    return attributes if data is not None else None


def structure_text(spec: TreeSpec, entries: Sequence[SavedEntry]) -> str:
    """Return a structure as text."""
    rows = []
    for (container, keys, attributes, *_), links in zip(saved_form(spec).nodes, spec.links(), strict=True):
        assert isinstance(container, SavedContainer)
        rows.append([container.name, container.family, keys, list(links), attributes])
    table = [list(entry) if entry.context else list(entry[:3]) for entry in entries]
    return json.dumps({"version": VERSION, "nodes": rows, "entries": table}, separators=(",", ":"))


def read_structure(text: Any) -> Structure:
    """Return the structure that a text describes.

    Raises:
        CheckpointError: If it is none that ``structure_text`` returns, or one of a later version.
    """
    try:
        table = json.loads(text)
        if table["version"] != VERSION:
            msg = (
                f"load: the checkpoint's structure is of version {table['version']}: expected {VERSION}. Load it with "
                "the version of statetree that saved it, or with torch.distributed.checkpoint."
            )
            raise CheckpointError(msg)
        entries = tuple([_read_entry(*row) for row in table["entries"]])
        spec = _read_spec([_checked_row(*row) for row in table["nodes"]], len(entries))
    except (TypeError, ValueError, KeyError, IndexError, RecursionError, AttributeError) as error:
        msg = f"load: the checkpoint's structure is damaged: {type(error).__name__}: {error}. Load another checkpoint."
        raise CheckpointError(msg) from error
    return Structure(spec, entries)


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("expected a list of texts")
    return tuple(values)


class _Row(NamedTuple):
    container: SavedContainer
    keys: tuple[str, ...]
    links: Sequence[int]
    attributes: Any


def _checked_row(name: Any, family: Any, keys: Any, links: Any, attributes: Any) -> _Row:
    _texts([name, family])
    for text in _texts(keys):
        try:
            key_of(text)
        except UnknownKey:
            continue
    if not all(type(ref) is int for ref in links) or len(links) != len(keys):
        raise TypeError("expected one child a key")
    if name in BUILTIN and attributes is not False:
        _read_aux(name, attributes)
    return _Row(SavedContainer(name, family), tuple(keys), links, attributes)


def _read_entry(sort: Any, keys: Any, facts: Any, context: Any = "") -> SavedEntry:
    _texts([facts, context])
    if sort not in {TENSOR_ENTRY, PARTS_ENTRY, VALUE_ENTRY} or (sort != PARTS_ENTRY and len(keys) != 1):
        raise ValueError("expected the sort of an entry, and its keys")
    return SavedEntry(sort, _texts(keys), facts, context)


def _read_spec(rows: Sequence[_Row], num_entries: int) -> TreeSpec:
    """Return the structure that rows describe: entries in order, and each row after those of its children."""
    nodes: list[Node] = []
    position = emitted = 0
    pending = [(~(len(rows) - 1), False)] if rows else []
    while pending:
        ref, is_done = pending.pop()
        if ref >= 0:
            if ref != position:
                raise ValueError("expected a tree")
            position += 1
        elif is_done:
            row = rows[~ref]
            inner = tuple([index for index, child in enumerate(row.links) if child < 0])
            nodes.append((row.container, row.keys, row.attributes, inner, position - emitted))
            emitted = position
            if ~ref != len(nodes) - 1:
                raise ValueError("expected a tree")
        else:
            if any(~child >= ~ref for child in rows[~ref].links):
                raise ValueError("expected a tree")
            pending.append((ref, True))
            pending += reversed([(child, False) for child in rows[~ref].links])
    if len(nodes) != len(rows) or position != (num_entries if rows else 0) or (not rows and num_entries != 1):
        raise ValueError("expected a tree, and one entry for each of its leaves")
    return TreeSpec(tuple(nodes), num_entries)


def _written_aux(kind: Container, aux: Any) -> Any:
    """Return what a container has beside its children, as JSON data; ``False`` if that is no plain data."""
    cls = kind.cls
    if cls is deque:
        return [aux[0]]
    if cls is defaultdict:
        factory, attributes = aux
        name = None if factory is None else _full_name(factory) if isinstance(factory, type) else ""
        is_known = attributes is None and (factory is None or CLASSES.get(name or "") is factory)
        return [name] if is_known else False
    if kind.compares_aux:  # registered: what its function returned
        try:
            return [_written_value(aux)]
        except TypeError:
            return False
    if aux is None:
        return None
    extra, attributes = aux
    return _written_attributes(attributes) if extra is None else False


def _read_aux(name: str, data: Any) -> Any:
    if data is None or name in ("dict", "list", "tuple"):
        return (None, None) if name in ("OrderedDict", "collections.Counter") else None
    if name in ("OrderedDict", "collections.Counter"):
        return None, _read_attributes(data)
    (value,) = data
    if name == "collections.deque":
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError("expected the length of a deque")
        return value, None
    return None if value is None else CLASSES[value], None


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
    frozen = tuple([None if value is None else freeze(_read_value(value)) for _, value in rows])
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
    return Path([*map(shown_key, texts)])
