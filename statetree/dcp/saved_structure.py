"""The structure of a saved tree as text, so that it can be loaded without a template.

The text is JSON: the containers, children before parents, and the entries. It comes from a file, so that reading it
trusts nothing in it: classes and keys are texts, which are looked up here, and never imported.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.dcp.state_entries import PARTS_ENTRY, TENSOR_ENTRY, VALUE_ENTRY
from statetree.errors import CheckpointError, unsignalled
from statetree.files.key_texts import UnknownKey, is_readable, key_of, key_text, shown_key
from statetree.files.pickled_values import CLASSES
from statetree.key_paths import Path
from statetree.leaves.divided import DividedLeaf
from statetree.tree.instances import Attributes, InstanceContainer
from statetree.tree.registry import container_of, declared_containers
from statetree.tree.traversal import freeze

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from statetree.tree.containers import Container
    from statetree.tree.spec import TreeSpec

VERSION: Final = 1
#: The containers that are always made again without a template.
BUILTIN: Final[dict[str, type]] = {
    **{cls.__name__: cls for cls in (dict, list, tuple, OrderedDict)},
    **{f"collections.{cls.__name__}": cls for cls in (Counter, defaultdict, deque)},
}
_NAMES: Final = {cls: name for name, cls in BUILTIN.items()}
#: How the names of leaves begin that are made of several tensors.
_LEAF: Final = "leaf "


class SavedEntry(NamedTuple):
    """An entry of a checkpoint: its sort, the keys of its data (several for the parts of a tensor), and facts.

    ``context`` is the key of what a value of a registered leaf type has beside its parts, if there is anything.
    """

    sort: str
    keys: tuple[str, ...]
    facts: str = ""
    context: str = ""


class SavedContainer(NamedTuple):
    """A container as a checkpoint describes it."""

    name: str  # of its class
    family: str  # which containers it matches
    keys: Sequence[str]  # by ``key_text``
    links: Sequence[int]  # to its children: indices of entries, or ``~index`` of containers
    data: Any  # what it has beside them, as JSON data; ``False`` if that is no plain data

    @property
    def is_leaf(self) -> bool:
        """Whether it is a leaf that is made of several tensors."""
        return self.name.startswith(_LEAF)

    def full_text(self, containers: Sequence[SavedContainer]) -> str:
        """Return what such a leaf is beside its parts, as ``DividedLeaf`` has it. ``containers`` are all of them."""
        found = [containers[~ref] for ref in self.links if ref < 0]
        inside = [part.full_text(containers) for part in found if part.is_leaf]
        text = self.name.removeprefix(_LEAF)
        return f"{text} {inside}" if inside else text


class Structure(NamedTuple):
    """The containers of a checkpoint, children before parents, and its entries, one for each leaf."""

    containers: Sequence[SavedContainer]
    entries: Sequence[SavedEntry]
    #: What leaves of several tensors are beside these, by the texts of the keys above, that ranks other than the first
    #: hold and it does not.
    others: Mapping[tuple[str, ...], str] = {}

    @classmethod
    def of(cls, spec: TreeSpec, entries: Sequence[SavedEntry] = ()) -> Structure:
        """Describe the structure of a tree."""
        found = []
        for (kind, keys, aux, *_), links in zip(spec.nodes, spec.links(), strict=True):
            name = f"{_LEAF}{aux[0]}" if kind.cls is DividedLeaf else _NAMES.get(kind.cls) or _full_name(kind.cls)
            family = kind.family if isinstance(kind.family, str) else _full_name(kind.family)
            family = name if kind.cls is DividedLeaf else family
            found.append(SavedContainer(name, family, [*map(key_text, keys)], [*links], _written_aux(kind, aux)))
        return cls(found, entries)

    def to_text(self) -> str:
        """Return it as text."""
        table = [list(entry) if entry.context else list(entry[:3]) for entry in self.entries]
        nodes = [list(container) for container in self.containers]
        others = {"others": [*self.others.items()]} if self.others else {}
        return json.dumps({"version": VERSION, "nodes": nodes, "entries": table, **others}, separators=(",", ":"))

    def unknown(self) -> Iterator[tuple[Path, SavedContainer, str]]:
        """Yield the containers that are not made without a template, parents first: each with its path, and why."""
        known = rebuilt_classes()
        for keys, container in self._walk():
            how = _made_of(container, known)
            if isinstance(how, str):
                yield Path([shown_key(key) for key in keys]), container, how

    def divided(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield what leaves are that are made of several tensors, beside these: by the texts of the keys above."""
        yield from self.others.items()
        yield from ((keys, found.full_text(self.containers)) for keys, found in self._walk() if found.is_leaf)

    def _walk(self) -> Iterator[tuple[tuple[str, ...], SavedContainer]]:
        """Yield the containers, parents first, with the texts of the keys above each."""
        pending: list[tuple[tuple[str, ...], int]] = [((), len(self.containers) - 1)] if self.containers else []
        while pending:
            keys, index = pending.pop()
            container = self.containers[index]
            yield keys, container
            below = [(key, ~ref) for key, ref in zip(container.keys, container.links, strict=True) if ref < 0]
            pending += [((*keys, key), child) for key, child in reversed(below)]

    def rebuild(self, values: Sequence[Any]) -> tuple[Any, set[int]]:
        """Return a tree with a value for each entry, and its containers, by ids, in which ``unknown`` ones stand.

        These are mappings by texts.
        """
        known = rebuilt_classes()
        made: list[Any] = []
        holding: set[int] = set()
        for container in self.containers:
            children = [values[ref] if ref >= 0 else made[~ref] for ref in container.links]
            how = _made_of(container, known)
            if isinstance(how, str) or (holding and not holding.isdisjoint([~ref for ref in container.links])):
                holding.add(len(made))
            if isinstance(how, str):
                made.append(dict(zip(_as_texts(container.keys), children, strict=True)))
                continue
            kind, keys, aux = how
            try:
                made.append(kind.unflatten(aux, keys, children))
            except Exception as error:  # a function of the user's
                error.add_note(f"statetree: while putting together a {container.name} with the keys {keys[:8]}")
                raise
        return made[-1] if made else values[0], {id(made[index]) for index in holding}


def _full_name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


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


def _made_of(saved: SavedContainer, known: Mapping[str, type]) -> tuple[Container, tuple[Any, ...], Any] | str:
    """Return how a container is made: kind, keys, auxiliary data. Or, in words, what it is, if it takes a template."""
    name = saved.name
    if name not in known:
        return f"a {name}"
    if saved.data is False:
        return f"a {name} with attributes that are no plain data"
    try:
        keys = (*map(key_of, saved.keys),)
    except UnknownKey as key:
        return f"a {name} with the key {key}, which like= alone can give"
    try:
        kind: Any = container_of(known[name])
        if name in BUILTIN:
            return kind, keys, _read_aux(name, saved.data)
        if kind is not None and kind.compares_aux:  # registered: what its function returned
            (aux,) = saved.data
            return kind, keys, _read_value(aux)
        return kind, keys, (None, _read_instance(kind, keys, saved.data))
    except unsignalled(TypeError, ValueError, KeyError) as error:
        return f"a {name} that is not the class of that name here ({error})"


def _read_instance(kind: Container | None, keys: tuple[Any, ...], data: Any) -> Attributes | None:
    """Return the attributes of a dataclass, a namedtuple, or a subclass of a builtin container.

    They must be some that the class can have: it may have changed since, and the text may say anything.
    """
    if not isinstance(kind, InstanceContainer):
        raise TypeError("no container with attributes")
    found = _read_attributes(data)
    attributes = found or Attributes((), (), are_items=False)
    children = [name for name, frozen in zip(attributes.names, attributes.frozen, strict=True) if frozen is None]
    count = len(keys) - len(children)
    is_dataclass = bool(kind.fields) or kind.base is object
    if (
        list(map(str, keys[max(count, 0) :])) != children
        or count != (0 if is_dataclass else kind.num_items(keys))
        or keys[:count] != (kind.names or keys[:count])
        or not (kind.cls.__dictoffset__ or {*attributes.names} <= {*kind.slots})
    ):
        raise ValueError("it has other fields")
    if unsaved := {*kind.fields}.difference(children):
        raise ValueError(f"its field {min(unsaved)} was not saved")
    return found


def _as_texts(keys: Sequence[str]) -> list[str]:
    """Return distinct texts for the keys of a container of an unknown class, as ``Entries.find`` looks for them."""
    taken: dict[Any, None] = {}
    for text in keys:
        key = text[1:] if text[0] == "@" else shown_key(text)
        while key in taken:
            key = f"{key}~"
        taken[key] = None
    return [*taken]


def read_structure(text: Any) -> Structure:
    """Return the structure that a text describes; raise ``CheckpointError`` if it is none, or of a later version."""
    try:
        table = json.loads(text)
        if table["version"] != VERSION:
            raise CheckpointError(
                f"load: the checkpoint's structure is of version {table['version']}: expected {VERSION}. Load it with "
                "the version of statetree that saved it, or with torch.distributed.checkpoint."
            )
        found = Structure(
            [_read_container(*row) for row in table["nodes"]],
            [_read_entry(*row) for row in table["entries"]],
            {_texts(keys): str(text) for keys, text in table.get("others", ())},
        )
        _check_tree(found)
    except unsignalled(TypeError, ValueError, KeyError, IndexError, RecursionError, AttributeError) as error:
        msg = f"load: the checkpoint's structure is damaged: {type(error).__name__}: {error}. Load another checkpoint."
        raise CheckpointError(msg) from error
    return found


def _check_tree(structure: Structure) -> None:
    """Raise ``ValueError`` unless every entry and every container but the last has one place, above what is in it."""
    refs = [ref for container in structure.containers for ref in container.links]
    wanted = [*range(len(structure.entries)), *[~index for index in range(len(structure.containers) - 1)]]
    is_ordered = all(ref > ~index for index, found in enumerate(structure.containers) for ref in found.links)
    if sorted(refs) != sorted(wanted if structure.containers else []) or not is_ordered:
        raise ValueError("expected a tree, and one entry for each of its leaves")
    if not structure.containers and len(structure.entries) != 1:
        raise ValueError("expected one entry")


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not {*map(type, values)} <= {str}:
        raise TypeError("expected a list of texts")
    return tuple(values)


def _read_container(name: Any, family: Any, keys: Any, links: Any, data: Any) -> SavedContainer:
    _texts([name, family])
    list(map(is_readable, _texts(keys)))  # which raises if one is no key at all
    if not all(type(ref) is int for ref in links) or len(links) != len(keys):
        raise TypeError("expected one child a key")
    if name in BUILTIN and data is not False:
        _read_aux(name, data)
    return SavedContainer(name, family, keys, links, data)


def _read_entry(sort: Any, keys: Any, facts: Any, context: Any = "") -> SavedEntry:
    _texts([facts, context])
    if sort not in {TENSOR_ENTRY, PARTS_ENTRY, VALUE_ENTRY} or (sort != PARTS_ENTRY and len(keys) != 1):
        raise ValueError("expected the sort of an entry, and its keys")
    return SavedEntry(sort, _texts(keys), facts, context)


def _written_aux(kind: Container, aux: Any) -> Any:
    """Return what a container has beside its children, as JSON data; ``False`` if that is no plain data."""
    if kind.cls is deque:
        return [aux[0]]
    if kind.cls is defaultdict:
        factory, attributes = aux
        name = _full_name(factory) if isinstance(factory, type) else None
        is_known = attributes is None and (factory is None or CLASSES.get(name or "") is factory)
        return [name] if is_known else False
    try:
        if kind.compares_aux:  # registered: what its function returned
            return [_written_value(aux)]
        extra, attributes = aux or (None, None)
        if extra is not None or (attributes is not None and attributes.are_items):
            return False
        if attributes is None:
            return None
        pairs = zip(attributes.names, attributes.frozen, strict=True)
        return [[name, None if frozen is None else _written_value(frozen.thaw())] for name, frozen in pairs]
    except unsignalled(TypeError):
        return False


def _read_aux(name: str, data: Any) -> Any:
    if name in ("dict", "list", "tuple"):
        return None
    if name in ("OrderedDict", "collections.Counter"):
        return None, _read_attributes(data)
    (value,) = data
    if name == "collections.defaultdict":
        return None if value is None else CLASSES[value], None
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError("expected the length of a deque")
    return value, None


def _read_attributes(rows: Any) -> Attributes | None:
    if rows is None:
        return None
    names = _texts([name for name, _ in rows])
    frozen = tuple([None if value is None else freeze(_read_value(value)) for _, value in rows])
    return Attributes(names, frozen, are_items=False)


def _written_value(value: Any) -> Any:
    """Return plain data, and nothing else, as JSON data. Every value but a text is a list that begins with its sort."""
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
