"""Renaming: leaves brought to other paths, and the containers above them with them."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from statetree.errors import TreeMismatch
from statetree.key_paths import Attr, Path, key_identity, render_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from statetree.tree.rename_rules import Match
    from statetree.tree.spec import TreeSpec

#: A leaf, by its index, or an empty container, by that of its node.
_Item = int


class _Place:
    """A container of the new tree.

    Attributes:
        origin: The node of the old tree that it is made like; -1 for a plain dict.
        children: By their keys: a place, or an item.
    """

    __slots__ = ("children", "keys", "origin")

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.children: dict[
            Any, _Place | _Item
        ] = {}  # by what tells keys apart, also 0 and False, or "a" and Attr("a")
        self.keys: dict[Any, Any] = {}

    def child(self, key: Any, otherwise: _Place | _Item) -> _Place | _Item:
        """Return what is under a key; if nothing is, put something there."""
        identity = key_identity(key)
        self.keys.setdefault(identity, key)
        return self.children.setdefault(identity, otherwise)


class Located(NamedTuple):
    """Something of a tree that can be renamed.

    Attributes:
        ref: The index of a leaf, or ``~index`` of the node of an empty container.
        keys: Its path.
        nodes: The nodes of the containers from the root down to the one that it lies in.
    """

    ref: int
    keys: tuple[Any, ...]
    nodes: tuple[int, ...]

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


def renamed(verb: str, spec: TreeSpec, leaves: Sequence[Any], names: Mapping[int, Match]) -> Any:
    """Return a tree in which leaves have other paths.

    Containers keep their classes and attributes where their leaves go. A new name is cut into keys as the old one was:
    what lies in a mapping with dots in its keys gets one key, and what lies in nested mappings gets nested ones.

    Args:
        verb: On whose behalf, for messages.
        spec: The structure.
        leaves: The leaves.
        names: The new paths, by ``ref`` of ``located``. What is not named stays where it is.

    Raises:
        TreeMismatch: If two leaves would get paths that read the same, a path would go through a leaf, or a container
            cannot have the keys.
    """
    if not spec.nodes:
        return leaves[0]
    flat = _flatness(spec)
    root = _Place(~spec.root())
    came_from: dict[int, Located] = {}
    at: dict[str, Located] = {}
    for item in located(spec):
        came_from[item.ref] = item
        match = names.get(item.ref)
        other = at.setdefault(item.text if match is None else match.name, item)
        # Without a new name there may be two: of a key with a dot, or of 0 and "0".
        if other is not item and not names.keys().isdisjoint((item.ref, other.ref)):
            _refuse_twice(verb, item, other, names)
        if not item.keys:  # the root itself is empty
            continue
        steps = [*zip(item.keys, (*item.nodes[1:], -1), strict=True)]
        if match is not None and match.name != item.text:
            steps = _steps(spec, item, match, flat)
        place = root
        for key, node in steps[:-1]:
            child = place.child(key, _Place(node))
            if not isinstance(child, _Place):
                _refuse_through(verb, item, came_from[child], names)
            if child.origin < 0:
                child.origin = node
            place = child
        found = place.child(steps[-1][0], item.ref)
        while isinstance(found, _Place):
            found = next(iter(found.children.values()))
        if found != item.ref:
            _refuse_through(verb, came_from[found], item, names)
    return _built(verb, spec, leaves, root)


def _flatness(spec: TreeSpec) -> list[bool]:
    """Return for every container whether dots in a new name of what lies in it belong to one key."""
    dotted = [any("." in render_key(key) for key in node[1]) for node in spec.nodes]
    nested = [any(ref < 0 for ref in refs) for refs in spec.links()]
    # A container that says nothing by its own keys goes with the tree. A key that is no text cannot be part of another.
    usual = any(dotted) or (len(spec.nodes) == 1 and all(isinstance(key, (str, Attr)) for key in spec.nodes[0][1]))
    return [own or (usual and not deep) for own, deep in zip(dotted, nested, strict=True)]


def _steps(spec: TreeSpec, item: Located, match: Match, flat: Sequence[bool]) -> list[tuple[Any, int]]:
    """Return the keys of a new path, each with the old node that the container there is made like (-1 for none)."""
    old, new = item.text.split("."), match.name.split(".")
    cuts = _cuts(item, old, new)
    carried = _carried(item, match)
    steps: list[tuple[Any, int]] = []
    for index in range(len(item.keys)):
        start, stop = cuts[index], cuts[index + 1]
        if start == stop:  # the key is gone, and the container below it with it
            continue
        node = item.nodes[index]
        after = item.nodes[index + 1] if index + 1 < len(item.nodes) else -1
        places = [(start, stop)] if flat[node] else [(at, at + 1) for at in range(start, stop)]
        texts = [".".join(new[begin:end]) for begin, end in places]
        typed = {render_key(key): key for key in spec.nodes[node][1]}
        numbered = bool(typed) and all(type(key) is int for key in typed.values())
        # The first key lies in the old container, the others in new ones.
        first = typed.get(texts[0], int(texts[0]) if numbered and _is_index(texts[0]) else texts[0])
        keys = [carried.get(place, text) for place, text in zip(places, [first, *texts[1:]], strict=True)]
        steps += [(key, -1) for key in keys[:-1]]
        steps.append((keys[-1], after))
    return steps


def _carried(item: Located, match: Match) -> dict[tuple[int, int], Any]:
    """Return the keys that were captured whole, by the components of the new path that they are."""
    key_at: dict[int, Any] = {}
    at = 0
    for key in item.keys:
        count = render_key(key).count(".") + 1
        if count == 1 and type(key) is not Attr:
            key_at[at] = key
        at += count
    return {(new, new + 1): key_at[old] for new, old in match.carried.items() if old in key_at}


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and str(int(text)) == text


def _cuts(item: Located, old: Sequence[str], new: Sequence[str]) -> list[int]:
    """Return where the new components are cut into those of each old key: ``len(item.keys) + 1`` positions."""
    position_of = [0] * (len(old) + 1)
    for _, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for at in range(a, b + 1):  # where components were replaced, the last ones stand for the last ones
            position_of[at] = max(c, d - (b - at)) if at > a else c
    position_of[0], position_of[len(old)] = 0, len(new)
    cuts, at = [0], 0
    for key in item.keys:
        at += render_key(key).count(".") + 1
        cuts.append(position_of[at])
    return cuts


def _built(verb: str, spec: TreeSpec, leaves: Sequence[Any], root: _Place) -> Any:
    made: dict[int, Any] = {}
    pending: list[tuple[_Place, Path, bool]] = [(root, Path(), False)]
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
            else:
                values[at] = leaves[child] if child >= 0 else _empty(spec, ~child)
        made[id(place)] = _container(verb, spec, place, values, path)
    return made[id(root)]


def _empty(spec: TreeSpec, node: int) -> Any:
    kind, keys, aux, *_ = spec.nodes[node]
    return kind.unflatten(aux, keys, [])


def _container(verb: str, spec: TreeSpec, place: _Place, values: Mapping[Any, Any], path: Path) -> Any:
    """Return a container of children, which are given by the identities of their keys."""
    keys = list(place.keys.values())
    items = [key for key in keys if type(key) is not Attr]
    # 0 and False, say, of which one would be lost; or 0 and "0", which paths do not tell apart.
    alike = len(set(map(render_key, items))) < len(items) and not values.keys() <= _own_identities(spec, place)
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
    msg = (
        f"{verb}: a {kind.cls.__qualname__} cannot have these keys at {str(path) or '<root>'}: expected {expected}, "
        f"got {got}. Rename all of what is in it, or none."
    )
    raise TreeMismatch(msg)


def _own_identities(spec: TreeSpec, place: _Place) -> set[Any]:
    return set(map(key_identity, spec.nodes[place.origin][1])) if place.origin >= 0 else set()


def _name(item: Located, names: Mapping[int, Match]) -> str:
    return names[item.ref].name if item.ref in names else item.text


def _told(item: Located, names: Mapping[int, Match]) -> str:
    return f"{item.text or '<root>'}" + ("" if item.ref not in names else f" (to {names[item.ref].name})")


def _refuse_twice(verb: str, item: Located, other: Located, names: Mapping[int, Match]) -> NoReturn:
    msg = (
        f"{verb}: two leaves would get one path: expected one for each, got {_name(item, names)!r} for "
        f"{other.text} and {item.text}. Change a rule, or leave one out with select."
    )
    raise TreeMismatch(msg)


def _refuse_through(verb: str, item: Located, leaf: Located, names: Mapping[int, Match]) -> NoReturn:
    msg = (
        f"{verb}: a path would go through a leaf: expected a container at {_name(leaf, names)!r}, got "
        f"the leaf {_told(leaf, names)}, above {_told(item, names)}. Change a rule."
    )
    raise TreeMismatch(msg)
