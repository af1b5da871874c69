"""Renaming: leaves brought to other paths, and the containers above them with them."""

from __future__ import annotations

from difflib import SequenceMatcher
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from statetree.errors import TreeMismatch
from statetree.key_paths import Attr, Path, key_identity, render_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from statetree.tree.spec import TreeSpec


class _Place:
    """A new container of places and ``ref``s of items, made like a node of the old one (-1: a plain dict)."""

    __slots__ = ("children", "keys", "origin")

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.children: dict[Any, _Place | int] = {}  # by what tells keys apart, also 0 and False
        self.keys: dict[Any, Any] = {}

    def child(self, key: Any, otherwise: _Place | int) -> _Place | int:
        """Return what is under a key; if nothing is, put something there."""
        identity = key_identity(key)
        self.keys.setdefault(identity, key)
        return self.children.setdefault(identity, otherwise)


class Located(NamedTuple):
    """Something of a tree that can be renamed."""

    ref: int  # the index of a leaf, or `~index` of the node of an empty container
    keys: tuple[Any, ...]
    nodes: tuple[int, ...]  # the nodes of the containers from the root down to the one that it lies in

    @property
    def text(self) -> str:
        """The path, rendered plainly."""
        return ".".join(map(render_key, self.keys))


def located(spec: TreeSpec) -> Iterator[Located]:
    """Yield every leaf and every empty container, in order."""
    links = spec.links()
    pending: list[Located] = [Located(spec.root(), (), ())]
    while pending:
        found = pending.pop()
        ref, keys, nodes = found
        if ref >= 0 or not links[~ref]:
            yield found
            continue
        rows = zip(reversed(spec.nodes[~ref][1]), reversed(links[~ref]), strict=True)
        pending += [Located(child, (*keys, key), (*nodes, ~ref)) for key, child in rows]


class _Item(NamedTuple):
    """What is put into a new tree: its ``ref``, its name there, and what a message says of it."""

    ref: int
    name: str
    origin: str


class TreeBuilder:
    """Puts a tree together from names. Its root is made like a node of ``spec``; -1 stands for a plain dict."""

    def __init__(self, verb: str, spec: TreeSpec, leaves: Sequence[Any], root: int = -1) -> None:
        self._verb, self._spec, self._leaves = verb, spec, leaves
        self._root = _Place(root)
        self._items: dict[int, _Item] = {}

    def put(self, ref: int, steps: Sequence[tuple[Any, int]], name: str, origin: str) -> None:
        """Put something under keys, each with the old node that the container there is made like (-1 for none)."""
        item = self._items[ref] = _Item(ref, name, origin)
        place = self._root
        for key, node in steps[:-1]:
            child = place.child(key, _Place(node))
            if not isinstance(child, _Place):
                self._refuse_through(item, self._items[child])
            if child.origin < 0:
                child.origin = node
            place = child
        found = place.child(steps[-1][0], ref)
        while isinstance(found, _Place):
            found = next(iter(found.children.values()))
        if found != ref:
            self._refuse_through(self._items[found], item)

    def _refuse_through(self, item: _Item, leaf: _Item) -> NoReturn:
        raise TreeMismatch(
            f"{self._verb}: a path would go through a leaf: expected a container at {leaf.name!r}, got "
            f"the leaf {_told(leaf)}, above {_told(item)}. Change a rule."
        )

    def tree(self) -> Any:
        """Return the tree."""
        made: dict[int, Any] = {}
        pending: list[tuple[_Place, Path, bool]] = [(self._root, Path(), False)]
        while pending:
            place, path, is_ready = pending.pop()
            inner = [(place.keys[at], child) for at, child in place.children.items() if isinstance(child, _Place)]
            if not is_ready:
                pending.append((place, path, True))
                pending += [(child, path.child(key), False) for key, child in inner]
                continue
            values: dict[Any, Any] = {}
            for at, child in place.children.items():
                if isinstance(child, _Place):
                    values[at] = made[id(child)]
                elif child >= 0:
                    values[at] = self._leaves[child]
                else:  # an empty container
                    kind, keys, aux, *_ = self._spec.nodes[~child]
                    values[at] = kind.unflatten(aux, keys, [])
            made[id(place)] = _container(self._verb, self._spec, place, values, path)
        return made[id(self._root)]


def _told(item: _Item) -> str:
    return f"{item.origin or '<root>'}" + ("" if item.name == item.origin else f" (to {item.name})")


def renamed(verb: str, spec: TreeSpec, leaves: Sequence[Any], names: Mapping[int, str]) -> Any:
    """Return a tree in which leaves have other paths.

    Containers keep their classes and attributes where their leaves go. A new name is cut into keys as the old one was:
    what lies in a mapping with dots in its keys gets one key, and what lies in nested mappings gets nested ones. Names
    are given by ``ref`` of ``located``; what is not named stays where it is.
    """
    if not spec.nodes:
        return leaves[0]
    flat = _flatness(spec)
    typed = [{render_key(key): key for key in node[1]} for node in spec.nodes]
    known = [(keys, {int} == {*map(type, keys.values())}) for keys in typed]
    builder = TreeBuilder(verb, spec, leaves, ~spec.root())
    at: dict[str, Located] = {}
    for item in located(spec):
        name = names.get(item.ref, item.text)
        other = at.setdefault(name, item)
        # Without a new name there may be two: of a key with a dot, or of 0 and "0".
        if other is not item and not names.keys().isdisjoint((item.ref, other.ref)):
            raise TreeMismatch(
                f"{verb}: two leaves would get one path: expected one for each, got {name!r} for {other.text} and "
                f"{item.text}. Change a rule, or leave one out with select."
            )
        if not item.keys:  # the root itself is empty
            continue
        steps = [*zip(item.keys, (*item.nodes[1:], -1), strict=True)]
        if name != item.text:
            steps = _steps(item, name, flat, known)
        builder.put(item.ref, steps, name, item.text)
    return builder.tree()


def _flatness(spec: TreeSpec) -> list[bool]:
    """Return for every container whether dots in a new name of what lies in it belong to one key."""
    dotted = [any("." in render_key(key) for key in node[1]) for node in spec.nodes]
    nested = [any(ref < 0 for ref in refs) for refs in spec.links()]
    # A container that says nothing by its own keys goes with the tree. A key that is no text cannot be part of another.
    usual = any(dotted) or (len(spec.nodes) == 1 and all(isinstance(key, (str, Attr)) for key in spec.nodes[0][1]))
    return [own or (usual and not deep) for own, deep in zip(dotted, nested, strict=True)]


def _steps(
    item: Located, name: str, flat: Sequence[bool], known: Sequence[tuple[Mapping[str, Any], bool]]
) -> list[tuple[Any, int]]:
    """Return the keys of a new path, each with the old node that the container there is made like (-1 for none).

    For each node ``known`` has its keys by how they read, and whether these are numbers.
    """
    texts = name.split(".")
    bounds = _bounds(item.text.split("."), texts)
    own: dict[str, list[Any]] = {}  # the keys of the old path, which stay the same where they read the same
    for key in item.keys:
        if type(key) is not Attr:
            own.setdefault(render_key(key), []).append(key)
    start = stop = end = 0
    steps: list[tuple[Any, int]] = []
    for index, key in enumerate(item.keys):
        start, stop = stop, bounds[end := end + render_key(key).count(".") + 1]
        if start == stop:  # the key is gone, and the container below it with it
            continue
        node = item.nodes[index]
        after = item.nodes[index + 1] if index + 1 < len(item.nodes) else -1
        places = [(start, stop)] if flat[node] else [(at, at + 1) for at in range(start, stop)]
        typed, numbered = known[node]
        keys: list[Any] = []
        for text in [".".join(texts[first:last]) for first, last in places]:
            if own.get(text):
                keys.append(own[text].pop(0))
            elif keys:  # which lies in a new container
                keys.append(text)
            else:
                is_index = numbered and text.isascii() and text.isdigit() and str(int(text)) == text
                keys.append(typed.get(text, int(text) if is_index else text))
        steps += [(key, -1) for key in keys[:-1]]
        steps.append((keys[-1], after))
    return steps


def _bounds(old: Sequence[str], new: Sequence[str]) -> list[int]:
    """Return, for each component of an old path and its end, where the new path is cut there.

    Components that are alike belong together. Between them the last ones stand for the last ones.
    """
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    pairs = [(block.a + step, block.b + step) for block in blocks for step in range(max(block.size, 1))]
    found = [0] * (len(old) + 1)
    for (a, c), (b, d) in pairwise([(-1, -1), *pairs]):
        for at in range(max(1, a + 1), b + 1):
            found[at] = d if at == b else c + 1 if at == a + 1 else max(c + 1, d - (b - at))
    return found


def _container(verb: str, spec: TreeSpec, place: _Place, values: Mapping[Any, Any], path: Path) -> Any:
    """Return a container of children, which are given by the identities of their keys."""
    keys = list(place.keys.values())
    items = [key for key in keys if type(key) is not Attr]
    # 0 and False, say, of which one would be lost; or 0 and "0", which paths do not tell apart.
    before = spec.nodes[place.origin][1] if place.origin >= 0 else ()
    alike = len(set(map(render_key, items))) < len(items) and not values.keys() <= set(map(key_identity, before))
    if len(set(items)) < len(items) or alike:
        shown = ", ".join(map(repr, items[:8]))
        msg = f"{verb}: two keys at {str(path) or '<root>'} are equal or read alike: expected others, got {shown}."
        raise TreeMismatch(msg)
    if place.origin < 0:
        return dict(zip(keys, values.values(), strict=True))
    kind, own, aux, *_ = spec.nodes[place.origin]
    attributes = [key for key in own if type(key) is Attr]
    if kind.family == "mapping":
        wanted = [*(key for key in keys if type(key) is not Attr), *attributes]
    elif kind.can_lack():
        wanted = [*range(len(keys) - len(attributes)), *attributes]
    else:
        wanted = list(own)
    identities = list(map(key_identity, wanted))
    if set(identities) == values.keys():
        return kind.unflatten(aux, tuple(wanted), [values[at] for at in identities])
    got = ", ".join(map(render_key, keys[:8]))
    expected = ", ".join(map(render_key, own[:8]))
    raise TreeMismatch(
        f"{verb}: a {kind.cls.__qualname__} cannot have these keys at {str(path) or '<root>'}: expected {expected}, "
        f"got {got}. Rename all of what is in it, or none."
    )
