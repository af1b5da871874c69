"""Functions mapped over the leaves of trees, and trees as flat dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from statetree.errors import Difference, TreeMismatch, check_function, note_leaf
from statetree.key_paths import Path
from statetree.tree.flatten import flatten_for, unflatten
from statetree.tree.matching import matched
from statetree.tree.spec import TreeSpec
from statetree.tree.stand_ins import STAND_INS, reader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from statetree.tree.traversal import IsLeaf

T = TypeVar("T")


def aligned(verb: str, spec: TreeSpec, leaves: list[Any], other: Any, *, is_leaf: IsLeaf = None) -> list[Any]:
    """Return the leaves of ``other`` in ``spec``'s order, mappings matched by their keys; or ``TreeMismatch``."""
    other_leaves, other_spec = flatten_for(verb, other, is_leaf=is_leaf)
    order, differences = matched(other_spec, other_leaves, spec, leaves)
    if differences:
        raise TreeMismatch.between(verb, differences, "Pass trees of one structure.")
    if order is None:
        return other_leaves
    result = list(leaves)
    for index, leaf in zip(order, other_leaves, strict=True):
        result[index] = leaf
    return result


# A tree whose leaves become tensors is of the class that it was: what else a function returns may make another one.
@overload
def map_leaves(fn: Callable[..., torch.Tensor], tree: T, *rest: Any, is_leaf: IsLeaf = None) -> T: ...
@overload
def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any: ...
def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """Return a tree of the same structure with ``fn(leaf, *rest_leaves)`` in place of every leaf.

    Args:
        fn: Called once a leaf, in the order of ``flatten``. What it returns is put in as one leaf. Of a stored tensor
            (of ``statetree.files``) it gets the tensor, which is read right before; those that are the same view on
            the same bytes are one tensor. In what ``is_leaf`` says is a leaf they are read, too.
        tree: Gives the structure.
        rest: Trees of the same structure. Mappings are matched by their keys, whatever their order.
        is_leaf: As for ``flatten``.

    Returns:
        A tree with fresh containers.

    Raises:
        TreeMismatch: If the structures do not match, before ``fn`` is called.
        Exception: What ``fn`` raises, with a note of the leaf's path, dtype, shape and device.

    Example:
        An exponential moving average of parameters:

        >>> import statetree as st, torch
        >>> ema, new = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
        >>> st.map_leaves(lambda e, n: e.lerp(n, 0.1), ema, new)
        {'w': tensor([0.1000, 0.1000])}
    """
    return _mapped("map_leaves", fn, tree, rest, is_leaf=is_leaf)


@overload
def map_with_path(fn: Callable[..., torch.Tensor], tree: T, *rest: Any) -> T: ...
@overload
def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any: ...
def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Do as ``map_leaves``, with ``fn(path, leaf, *rest_leaves)``.

    Example:
        >>> import statetree as st
        >>> st.map_with_path(lambda path, leaf: f"{path}={leaf}", {"a": [1, 2]})
        {'a': ['a.0=1', 'a.1=2']}
    """
    return _mapped("map_with_path", fn, tree, rest, by_path=True)


def _mapped(
    verb: str, fn: Callable[..., Any], tree: Any, rest: Sequence[Any], *, is_leaf: IsLeaf = None, by_path: bool = False
) -> Any:
    check_function(verb, "fn", fn)
    leaves, spec = flatten_for(verb, tree, is_leaf=is_leaf)
    sides = [leaves, *[aligned(verb, spec, leaves, other, is_leaf=is_leaf) for other in rest]]
    results: list[Any] = []
    append = results.append
    # What ``is_leaf`` says is a leaf may be a container, with stored tensors in it.
    inner = flatten_for("map_leaves", sides)[0] if STAND_INS else []
    stored = [leaf for leaf in inner if type(leaf) in STAND_INS]
    read = reader(stored)
    above = [spec.paths()] if by_path else []
    try:
        for row in zip(*above, *sides, strict=True):
            append(fn(*[_read(leaf, read) for leaf in row]) if stored else fn(*row))
    except Exception as error:
        note_leaf(error, spec.paths()[len(results)], leaves[len(results)])
        raise
    return unflatten(spec, results)


def _read(leaf: Any, read: Callable[[Any], Any]) -> Any:
    leaves, spec = flatten_for("map_leaves", leaf)
    return leaf if STAND_INS.isdisjoint(map(type, leaves)) else unflatten(spec, list(map(read, leaves)))


def to_flat(tree: Any, *, is_leaf: IsLeaf = None) -> tuple[dict[str, Any], TreeSpec]:
    """Turn a tree into one flat dict, with a key for every leaf.

    A key reads like ``model.layers.0.weight``. The keys of ordinary state dicts are those of
    ``torch.distributed.checkpoint``; lists without tensors, which DCP does not flatten, are flattened as well. Where
    two leaves would get the same key (``{0: …, "0": …}``), both are written out exactly (``[0]``, ``['0']``).

    Args:
        tree: Any tree.
        is_leaf: As for ``flatten``.

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
    leaves, spec = flatten_for("to_flat", tree, is_leaf=is_leaf)
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
    if not isinstance(cast("Any", spec), TreeSpec):
        raise TypeError(f"from_flat: expected the TreeSpec that to_flat returned, got {type(spec).__qualname__}.")
    keys = spec.flat_keys()
    if not hasattr(flat, "keys"):
        raise TypeError(f"from_flat: expected the flat dict that to_flat returned, got {type(flat).__qualname__}.")
    if list(flat) == keys:  # in the order in which to_flat gave them
        return unflatten(spec, flat.values())
    expected = set(keys)
    if expected != flat.keys():
        differences = [Difference(Path((key,)), "missing", "absent", "a leaf") for key in keys if key not in flat]
        differences += [Difference(Path((key,)), "missing", "a leaf", "absent") for key in flat if key not in expected]
        raise TreeMismatch.between("from_flat", differences, "Pass exactly the keys that to_flat gave.")
    return unflatten(spec, [flat[key] for key in keys])
