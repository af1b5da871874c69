"""Traversal: a tree taken apart into its leaves and *nodes*, which say how its containers are made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, cast

from statetree.errors import CyclicTree, TreeTooDeep, UnsupportedLeaf, note_leaf
from statetree.key_paths import Attr, Path, render_key
from statetree.tree.atoms import add_atom_type, is_atom_type, is_constant_type
from statetree.tree.containers import Container
from statetree.tree.instances import MAX_ATTRIBUTE_DEPTH, NotPlain, copy_plain
from statetree.tree.registry import CONTAINERS, LEAF_CLASSES, container_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: How deep containers may be nested.
MAX_DEPTH: Final = 10_000

_UNSEEN: Final = cast("Container", object())

#: One container, in the order in which containers are finished: how it is rebuilt, its keys, its auxiliary data, which
#: children are containers, and how many leaves come between the previous node and the end of this one.
Node = tuple[Container, tuple[Any, ...], Any, tuple[int, ...], int]

#: Says of a value whether it is to be a leaf although it is a container; what is none is a leaf anyway.
IsLeaf = Callable[[Any], bool] | None


class Repeated(NamedTuple):
    """Stands, as a leaf, for a container that was met before: the index of its node."""

    node: int


add_atom_type(Repeated)


class Frozen(NamedTuple):
    """An attribute of a container, or metadata of a leaf, without anything but atoms inside.

    Attributes:
        leaves: The leaves; without nodes, the value itself.
        nodes: The containers; none for what ``copy_plain`` copies, which is quicker.
    """

    leaves: tuple[Any, ...]
    nodes: tuple[Node, ...]

    def thaw(self) -> Any:
        """Return a fresh value."""
        return rebuild(self.nodes, list(self.leaves), {}) if self.nodes else copy_plain(self.leaves[0])

    def __reduce__(self) -> Any:
        return _loaded_frozen, (self.leaves, by_class(self.nodes))


def freeze(value: Any, depth: int = 1) -> Frozen | None:
    """Return what fresh copies of a value can be made from, or ``None`` if it holds anything but atoms.

    Args:
        value: An attribute of a container, or metadata of a leaf.
        depth: In how many attributes it lies.
    """
    try:
        return Frozen((copy_plain(value),), ())
    except NotPlain:
        pass
    if depth > MAX_ATTRIBUTE_DEPTH:
        return None
    try:
        leaves, nodes = traverse(value, plain=depth)
    except (NotPlain, CyclicTree, TreeTooDeep):
        # What goes round in circles does so again when it is walked as a child, where the error can name the path.
        return None
    return Frozen(tuple(leaves), tuple(nodes))


def by_class(nodes: Iterable[Node]) -> list[tuple[Any, ...]]:
    """Return nodes as they are pickled: how a class is taken apart is for the process to say that loads them."""
    return [(node[0].cls, *node[1:]) for node in nodes]


def loaded(nodes: Iterable[tuple[Any, ...]]) -> tuple[Node, ...]:
    """Return what ``by_class`` was given.

    Raises:
        ValueError: If a class is no container in this process.
    """
    found: list[Any] = []
    for cls, *rest in nodes:
        container = container_of(cls)
        if container is None:
            msg = (
                f"cannot load a structure: expected {cls.__qualname__} to be a container. Register it as it was saved."
            )
            raise ValueError(msg)
        found.append((container, *rest))
    return tuple(found)


def _loaded_frozen(leaves: tuple[Any, ...], nodes: list[tuple[Any, ...]]) -> Frozen:
    return Frozen(leaves, loaded(nodes))


def _any_key(holds_tensor: Callable[[Any], bool], keys: tuple[Any, ...]) -> bool:
    return not _SIMPLE_KEYS.issuperset(map(type, keys)) and any(map(holds_tensor, keys))


def _only_atoms(leaves: Iterable[Any]) -> bool:
    return all(map(is_atom_type, set(map(type, leaves))))


class _Met(NamedTuple):
    """A container that was met, and its node. Holding it keeps its id from being handed out again."""

    container: Any
    node: int


class _Frame:
    """A container whose children are being visited. Only those that hold further containers get one."""

    __slots__ = ("aux", "children", "container", "keys", "kids", "kind")

    def __init__(self, container: Any, kind: Container, keys: tuple[Any, ...], children: Any, aux: Any) -> None:
        self.container = container
        self.kind = kind
        self.keys = keys
        self.children = enumerate(children)
        self.aux = aux
        self.kids: list[int] = []


#: Keys of these types hold no tensors.
_SIMPLE_KEYS: Final = frozenset({str, int, bool, float, bytes, type(None), Attr})


def traverse(
    tree: Any,
    *,
    verb: str = "flatten",
    plain: int = 0,
    met: dict[int, _Met] | None = None,
    is_leaf: IsLeaf = None,
    holds_tensor: Callable[[Any], bool] | None = None,
) -> tuple[list[Any], list[Node]]:
    """Take a tree apart into its leaves and its containers.

    Args:
        tree: Any value.
        verb: On whose behalf, for messages.
        plain: If it is not 0, ``NotPlain`` is raised as soon as a leaf turns up that is no atom; it says in how many
            attributes the tree lies.
        met: Where containers that were met are noted, by their ids; one that appears again then becomes a leaf,
            ``Repeated``.
        is_leaf: As for ``flatten``.
        holds_tensor: Says whether a key is or holds a tensor: mappings with such keys become leaves.

    Raises:
        CyclicTree: If a container holds itself.
        TreeTooDeep: If containers are nested too deep.
    """
    leaves: list[Any] = []
    nodes: list[Node] = []
    emitted = 0  # how many leaves there were when the last node was finished
    kind_of, are_leaf_classes = CONTAINERS.get, LEAF_CLASSES.issuperset
    frame = _Frame(None, _UNSEEN, (), (tree,), None)
    frames: list[_Frame] = []
    active: set[int] = set()
    while True:
        for index, child in frame.children:
            cls = type(child)
            try:
                kind = kind_of(cls, _UNSEEN)
                if kind is _UNSEEN:
                    kind = container_of(cls)
            except Exception as error:
                if _can_be_hashed(cls):  # then a signal's handler raised it
                    raise
                _raise_unknowable(verb, error, child, [*frames, frame], index)
            if kind is not None and is_leaf is not None:
                try:
                    kind = None if is_leaf(child) else kind
                except Exception as error:
                    note_leaf(error, _path_of([*frames, frame], index), child)
                    raise
            if kind is None:
                if plain and not is_constant_type(cls):
                    raise NotPlain
                leaves.append(child)
                continue
            if met is not None and id(child) in met:
                leaves.append(Repeated(met[id(child)].node))
                continue
            try:
                children, keys, aux = kind.flatten(child, freeze, plain)
            except NotPlain:
                raise
            except Exception as error:
                note_leaf(error, _path_of([*frames, frame], index), child)
                raise
            if holds_tensor is not None and kind.keyed and _any_key(holds_tensor, keys):
                leaves.append(child)
                continue
            frame.kids.append(index)
            # The parents of leaves are most of the containers of a state: they need no frame. All that their children
            # are is found in one look at a set of classes, which costs less than a look-up for each child.
            try:
                only_leaves = not plain and are_leaf_classes(map(type, children))
            except Exception:  # noqa: BLE001 - a metaclass whose instances cannot be hashed: found again, and named
                only_leaves = False
            if only_leaves:
                leaves += children
                nodes.append((kind, keys, aux, (), len(leaves) - emitted))
                emitted = len(leaves)
                # Tuples of atoms are values: nobody can tell a copy from the original.
                if met is not None and not (cls is tuple and _only_atoms(children)):
                    met[id(child)] = _Met(child, len(nodes) - 1)
                continue
            if id(child) in active:
                _raise_cycle(verb, child, [*frames, frame], index)
            if len(frames) >= MAX_DEPTH:
                _raise_too_deep(verb, [*frames, frame], index)
            active.add(id(child))
            frames.append(frame)
            frame = _Frame(child, kind, keys, children, aux)
            break
        else:
            if not frames:
                return leaves, nodes
            nodes.append((frame.kind, frame.keys, frame.aux, tuple(frame.kids), len(leaves) - emitted))
            emitted = len(leaves)
            active.discard(id(frame.container))
            if met is not None:
                met[id(frame.container)] = _Met(frame.container, len(nodes) - 1)
            frame = frames.pop()


def _path_of(frames: Sequence[_Frame], index: int) -> Path:
    """Return the path of child ``index`` of the last frame (the first frame is the root's, without keys)."""
    inner = [frame.keys[frame.kids[-1]] for frame in frames[1:-1]]
    return Path((*inner, frames[-1].keys[index])) if len(frames) > 1 else Path()


def _can_be_hashed(cls: type) -> bool:
    try:
        hash(cls)
    except Exception:  # noqa: BLE001 - of a hostile metaclass
        return False
    return True


def _raise_unknowable(verb: str, error: Exception, child: Any, frames: Sequence[_Frame], index: int) -> NoReturn:
    path = _path_of(frames, index)
    msg = (
        f"{verb}: the class of the value at {path or '<root>'} ({type(child).__qualname__}) cannot be looked up: "
        f"expected one that can be hashed, got {type(error).__name__}: {error}. Mend its metaclass."
    )
    raise UnsupportedLeaf(msg, path) from error


def _raise_cycle(verb: str, child: Any, frames: Sequence[_Frame], index: int) -> None:
    path = _path_of(frames, index)
    first = next(i for i, frame in enumerate(frames) if frame.container is child)
    start = Path(path[: first - 1])
    msg = (
        f"{verb}: the container at {path} is the one at {start or '<root>'} that it lies in "
        f"({type(child).__qualname__}): expected a tree, got a cycle. Remove the reference, or use a Stager, "
        "which copies cycles."
    )
    raise CyclicTree(msg, path)


def _raise_too_deep(verb: str, frames: Sequence[_Frame], index: int) -> None:
    path = _path_of(frames, index)
    top = ".".join(map(render_key, path[:8]))
    msg = f"{verb}: containers are nested deeper than {MAX_DEPTH} at {top}.…: expected at most {MAX_DEPTH} levels."
    raise TreeTooDeep(msg, path)


def rebuild(nodes: Iterable[Node], values: list[Any], repeated: Mapping[int, int]) -> Any:
    """Put a tree together.

    Args:
        nodes: Its containers.
        values: Its leaves. They are changed where there are repeated containers.
        repeated: The leaves, by their indices, in whose places a container comes again: the index of its node.
    """
    stack: list[Any] = []
    made: list[Any] = []  # the container of every node so far, where some appear again
    waiting = iter(repeated)
    pending = next(waiting, -1)
    position = 0
    for kind, keys, aux, kids, take in nodes:
        while position <= pending < position + take:
            values[pending] = made[repeated[pending]]
            pending = next(waiting, -1)
        arity = len(keys)
        if kids:
            stack += values[position : position + take]
            children = stack[-arity:]
            del stack[-arity:]
        else:  # all children are leaves: they are the last of those taken
            split = position + take - arity
            if split > position:
                stack += values[position:split]
            children = values[split : split + arity]
        position += take
        try:
            container = kind.unflatten(aux, keys, children)
        except Exception as error:
            error.add_note(f"statetree: while putting together a {kind.cls.__qualname__} with the keys {keys[:8]}")
            raise
        stack.append(container)
        if repeated:
            made.append(container)
    return stack[0] if stack else values[0]
