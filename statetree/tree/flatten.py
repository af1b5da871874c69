"""The tree engine: a state taken apart into leaves and a ``TreeSpec``, and put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from statetree.tree.atoms import add_atom_type, is_atom_type
from statetree.errors import CyclicTree, Difference, TreeMismatch, TreeTooDeep
from statetree.tree.instances import NotPlain
from statetree.tree.registry import KINDS, LEAF_CLASSES, container_of
from statetree.tree.matching import matched
from statetree.notes import note_leaf
from statetree.paths import Attr, Path, render_key
from statetree.tree.spec import Node, TreeSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from statetree.tree.containers import Container

#: How deep containers may be nested.
MAX_DEPTH: Final = 10_000

_UNSEEN: Final = cast("Container", object())


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Take a tree apart into its leaves and the structure that they came from.

    Leaves come in the order of the containers (the insertion order of mappings). ``None`` is a leaf. Mappings,
    lists, tuples, deques and their subclasses, namedtuples, torch's return types, dataclasses, attrs classes and
    registered classes are containers; everything else is a leaf.

    Args:
        tree: Any value.

    Returns:
        The leaves, and a ``TreeSpec`` with which ``unflatten`` makes the same tree again: types, key types and their
        order, default factories, ``maxlen``, instance attributes and empty containers included.

    Aliasing:
        The leaves are the tree's own.

    Raises:
        CyclicTree: If a container holds itself.
        TreeTooDeep: If containers are nested more than 10,000 deep.

    Example:
        >>> import statetree as st
        >>> leaves, spec = st.flatten({"b": [1, 2], "a": None})
        >>> leaves
        [1, 2, None]
        >>> st.unflatten(spec, leaves)
        {'b': [1, 2], 'a': None}
    """
    return _flatten(tree)


def flatten_for(verb: str, tree: Any) -> tuple[list[Any], TreeSpec]:
    """Do as ``flatten``, on behalf of another verb, which errors name."""
    return _flatten(tree, verb=verb)


class Again(NamedTuple):
    """Stands, as a leaf, for a container that was met before: the index of its node."""

    node: int


add_atom_type(Again)


def flatten_for_copy(
    tree: Any, holds_tensor: Callable[[Any], bool], *, verb: str = "flatten", shared: bool = False
) -> tuple[list[Any], TreeSpec]:
    """Do as ``flatten``, for copying a tree without leaving any of its tensors behind.

    Mappings with tensors in their keys become opaque leaves, in which keys are copied as well.

    Args:
        tree: Any tree.
        holds_tensor: Says whether a key is or holds a tensor.
        verb: On whose behalf, for messages.
        shared: Whether a container that appears again is to become a leaf, ``Again``, which ``unflatten_copy``
            resolves, and a tree with a cycle to become one opaque leaf.
    """
    if not shared:
        return _flatten(tree, verb=verb, holds_tensor=holds_tensor)
    try:
        return _flatten(tree, verb=verb, holds_tensor=holds_tensor, met={})
    except CyclicTree:
        return [tree], TreeSpec((), 1)


def flatten_plain(tree: Any, depth: int) -> tuple[list[Any], TreeSpec]:
    """Do as ``flatten``, but raise ``NotPlain`` as soon as a leaf turns up that is no atom.

    Args:
        tree: An attribute of a container.
        depth: In how many attributes it lies.
    """
    return _flatten(tree, plain=depth)


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


def _flatten(
    tree: Any,
    *,
    verb: str = "flatten",
    plain: int = 0,
    met: dict[int, _Met] | None = None,
    holds_tensor: Callable[[Any], bool] | None = None,
) -> tuple[list[Any], TreeSpec]:
    leaves: list[Any] = []
    nodes: list[Node] = []
    emitted = 0  # how many leaves there were when the last node was finished
    kind_of = KINDS.get
    frame = _Frame(None, _UNSEEN, (), (tree,), None)
    frames: list[_Frame] = []
    active: set[int] = set()
    while True:
        for index, child in frame.children:
            cls = type(child)
            kind = kind_of(cls, _UNSEEN)
            if kind is _UNSEEN:
                kind = container_of(cls)
            if kind is None:
                if plain and not is_atom_type(cls):
                    raise NotPlain
                leaves.append(child)
                continue
            if met is not None and id(child) in met:
                leaves.append(Again(met[id(child)].node))
                continue
            try:
                children, keys, aux = kind.flatten(child, plain=plain)
            except NotPlain:
                raise
            except Exception as error:
                note_leaf(error, _path_of([*frames, frame], index), child)
                raise
            if holds_tensor is not None and kind.keyed and _any_key(holds_tensor, keys):
                leaves.append(child)
                continue
            frame.kids.append(index)
            if not plain and LEAF_CLASSES.issuperset(map(type, children)):
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
                return leaves, TreeSpec(tuple(nodes), len(leaves))
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


def unflatten(spec: TreeSpec, leaves: Iterable[Any]) -> Any:
    """Put a tree together from a structure and leaves.

    Every container is fresh; no constructor of a dataclass, attrs class or container subclass runs.

    Args:
        spec: The structure, from ``flatten`` or ``to_flat``.
        leaves: As many leaves as ``spec.num_leaves``, in the order in which ``flatten`` gave them.

    Returns:
        A tree with the structure of ``spec`` and the given leaves.

    Aliasing:
        The leaves are put in as they are.

    Raises:
        TreeMismatch: If the number of leaves is not that of the structure.
    """
    if isinstance(leaves, TreeSpec):
        msg = "unflatten: the arguments are swapped: expected (spec, leaves), got (leaves, spec)."
        raise TypeError(msg)
    if not isinstance(cast("Any", spec), TreeSpec):
        msg = f"unflatten: expected the TreeSpec that flatten returned, got {type(spec).__qualname__}."
        raise TypeError(msg)
    values = list(leaves)
    if len(values) != spec.num_leaves:
        msg = (
            f"unflatten: the number of leaves does not fit the structure: expected {spec.num_leaves}, "
            f"got {len(values)}. Pass one leaf for each of spec.paths()."
        )
        raise TreeMismatch(msg)
    return _rebuild(spec, values, [])


def unflatten_copy(spec: TreeSpec, leaves: list[Any]) -> Any:
    """Do as ``unflatten``, with what ``flatten_for_copy`` gave: containers that were one become one again."""
    return _rebuild(spec, leaves, [index for index, leaf in enumerate(leaves) if type(leaf) is Again])


def _rebuild(spec: TreeSpec, values: list[Any], again: list[int]) -> Any:
    stack: list[Any] = []
    made: list[Any] = []  # the container of every node so far, where some appear again
    waiting = iter(again)
    pending = next(waiting, -1)
    position = 0
    for kind, keys, aux, kids, take in spec.nodes:
        while position <= pending < position + take:
            values[pending] = made[values[pending].node]
            pending = next(waiting, -1)
        arity = len(keys)
        if kids:
            stack += values[position : position + take]
            children = stack[-arity:]
            del stack[-arity:]
        else:  # all children are leaves: they are the last of those taken
            split = position + take - arity
            stack += values[position:split]
            children = values[split : split + arity]
        position += take
        try:
            container = kind.unflatten(aux, keys, children)
        except Exception as error:
            error.add_note(f"statetree: while putting together a {kind.cls.__qualname__} with the keys {keys[:8]}")
            raise
        stack.append(container)
        if again:
            made.append(container)
    return stack[0] if stack else values[0]


def paths(tree: Any) -> list[Path]:
    """Return the path of every leaf, in the order of ``flatten``.

    Example:
        >>> import statetree as st
        >>> [str(path) for path in st.paths({"layers": [{"w": 1}, {"w": 2}]})]
        ['layers.0.w', 'layers.1.w']
    """
    return flatten_for("paths", tree)[1].paths()


def aligned(verb: str, spec: TreeSpec, leaves: list[Any], other: Any) -> list[Any]:
    """Return the leaves of ``other`` in the order of ``spec``'s, mappings matched by their keys.

    Raises:
        TreeMismatch: If the structures do not match; it holds every difference.
    """
    other_leaves, other_spec = flatten_for(verb, other)
    order, differences = matched(other_spec, other_leaves, spec, leaves)
    if differences:
        raise TreeMismatch.between(verb, differences, "Pass trees of one structure.")
    if order is None:
        return other_leaves
    result = list(leaves)
    for index, leaf in zip(order, other_leaves, strict=True):
        result[index] = leaf
    return result


def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return a tree of the same structure with ``fn(leaf, *rest_leaves)`` in place of every leaf.

    Args:
        fn: Called once a leaf, in the order of ``flatten``. What it returns is put in as one leaf.
        tree: Gives the structure.
        rest: Trees of the same structure. Mappings are matched by their keys, whatever their order.

    Returns:
        A tree with fresh containers.

    Raises:
        TreeMismatch: If the structures do not match, before ``fn`` is called.
        Exception: What ``fn`` raises comes out as it is, with a note of the leaf's path, dtype, shape and device.

    Example:
        An exponential moving average of parameters:

        >>> import statetree as st, torch
        >>> ema, new = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
        >>> st.map_leaves(lambda e, n: e.lerp(n, 0.1), ema, new)
        {'w': tensor([0.1000, 0.1000])}
    """
    leaves, spec = flatten_for("map_leaves", tree)
    columns = [aligned("map_leaves", spec, leaves, other) for other in rest]
    return unflatten(spec, _mapped(fn, leaves, columns, spec))


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Do as ``map_leaves``, with ``fn(path, leaf, *rest_leaves)``.

    Example:
        >>> import statetree as st
        >>> st.map_with_path(lambda path, leaf: f"{path}={leaf}", {"a": [1, 2]})
        {'a': ['a.0=1', 'a.1=2']}
    """
    leaves, spec = flatten_for("map_with_path", tree)
    columns = [aligned("map_with_path", spec, leaves, other) for other in rest]
    return unflatten(spec, _mapped(fn, spec.paths(), [leaves, *columns], spec))


def _mapped(fn: Callable[..., Any], first: Sequence[Any], columns: Sequence[list[Any]], spec: TreeSpec) -> list[Any]:
    results: list[Any] = []
    append = results.append
    try:
        for row in zip(first, *columns, strict=True):
            append(fn(*row))
    except Exception as error:
        index = len(results)
        leaf = first[index] if not columns or not isinstance(first[index], Path) else columns[0][index]
        note_leaf(error, spec.paths()[index], leaf)
        raise
    return results


def to_flat(tree: Any) -> tuple[dict[str, Any], TreeSpec]:
    """Turn a tree into one flat dict, with a key for every leaf.

    A key reads like ``model.layers.0.weight``. The keys of ordinary state dicts are those of
    ``torch.distributed.checkpoint``; below lists without tensors, where DCP stops, ours go on. Where two leaves
    would get the same key (``{0: …, "0": …}``), both are written out exactly (``[0]``, ``['0']``).

    Returns:
        The dict, in the order of ``flatten``, and the structure for ``from_flat``.

    Aliasing:
        The leaves are the tree's own.

    Raises:
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st
        >>> flat, spec = st.to_flat({"model": {"w": 1}, "steps": [2, 3]})
        >>> flat
        {'model.w': 1, 'steps.0': 2, 'steps.1': 3}
        >>> st.from_flat(flat, spec)
        {'model': {'w': 1}, 'steps': [2, 3]}
    """
    leaves, spec = flatten_for("to_flat", tree)
    return dict(zip(spec.flat_keys(), leaves, strict=True)), spec


def from_flat(flat: Mapping[str, Any], spec: TreeSpec) -> Any:
    """Put a tree together from a flat dict, whatever its order.

    Args:
        flat: Exactly the keys that ``to_flat`` gave.
        spec: The structure that ``to_flat`` gave.

    Aliasing:
        The leaves are put in as they are.

    Raises:
        TreeMismatch: If keys are missing or unexpected; it names all of them.
    """
    keys = spec.flat_keys()
    expected = set(keys)
    if expected != flat.keys():
        differences = [Difference(Path((key,)), "missing", "absent", "a leaf") for key in keys if key not in flat]
        differences += [Difference(Path((key,)), "missing", "a leaf", "absent") for key in flat if key not in expected]
        raise TreeMismatch.between("from_flat", differences, "Pass exactly the keys that to_flat gave.")
    return unflatten(spec, [flat[key] for key in keys])
