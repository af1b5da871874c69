"""Composition: ``chain`` makes one transform of several, ``stream`` hands out results while they are made.

A *leafwise* transform treats leaves independently of each other, up to ties. Runs of leafwise transforms in a chain
are applied bucket by bucket, so that what lies between two steps is a bucket and not a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from statetree.errors import StateTreeError, TreeMismatch
from statetree.leaves import holds_tensor, unpack
from statetree.ties import tied_leaves
from statetree.torch_internals import quietly
from statetree.tree import flatten_for_copy, unflatten

if TYPE_CHECKING:
    from statetree.paths import Path
    from statetree.treespec import TreeSpec

#: How many bytes of leaves a bucket takes, unless one leaf or one group of tied leaves is larger.
BUCKET_BYTES: Final = 64 << 20

Step = Callable[[Any], Any]
F = TypeVar("F", bound=Callable[..., Any])
L = TypeVar("L")

_LEAFWISE: Final[set[Callable[..., Any]]] = set()


def leafwise(transform: F) -> F:
    """Declare that a transform treats leaves independently of each other, up to ties (a decorator)."""
    _LEAFWISE.add(transform)
    return transform


def is_leafwise(step: Step) -> bool:
    """Whether a step is a leafwise transform, a partial of one, or a chain of such steps."""
    while isinstance(step, partial):
        step = step.func
    if isinstance(step, Chain):
        return all(map(is_leafwise, step.steps))
    try:
        return step in _LEAFWISE
    except TypeError:  # a callable that cannot be hashed
        return False


@dataclass(frozen=True)
class Chain:
    """Transforms applied one after the other. Made by ``chain``."""

    steps: tuple[Step, ...]

    def __call__(self, tree: Any) -> Any:
        """Apply the steps in turn."""
        for streams, run in groupby(self.steps, is_leafwise):
            steps = list(run)
            if streams and len(steps) > 1:
                tree = _apply_by_bucket(tree, steps)
            else:
                for step in steps:
                    tree = step(tree)
        return tree


def chain(*steps: Step) -> Chain:
    """Compose transforms: ``chain(f, g)(tree)`` is ``g(f(tree))``.

    Consecutive leafwise transforms (``offload``, ``allocate_like`` and partials of them) are applied bucket by
    bucket, so that only one bucket of intermediate results exists at a time. Other steps, any function from tree to
    tree, get the whole tree.

    Args:
        steps: Transforms, partials of them, or any functions of one tree. None at all is the identity.

    Returns:
        A transform.

    Raises:
        TypeError: If a step cannot be called.

    Example:
        >>> import statetree as st, torch
        >>> from functools import partial
        >>> double = partial(st.map_leaves, lambda leaf: leaf * 2)
        >>> st.chain(st.offload, double)({"w": torch.ones(2)})
        {'w': tensor([2., 2.])}
    """
    for position, step in enumerate(steps):
        if not callable(cast("Any", step)):
            msg = f"chain: step {position} cannot be called: expected a transform or a partial of one, got {step!r}."
            raise TypeError(msg)
    flat: list[Step] = []
    for step in steps:
        flat.extend(step.steps if isinstance(step, Chain) else (step,))
    return Chain(tuple(flat))


def stream(tree: Any, step: Step) -> Iterator[tuple[Path, Any]]:
    """Apply a transform bucket by bucket, and yield each leaf of its result as soon as it is there.

    Args:
        tree: Any tree.
        step: A transform that treats leaves independently, such as ``offload`` or a chain of such. It is called with
            flat dicts of leaves (tied leaves in one dict) and must return dicts with the same keys.

    Yields:
        ``(path, leaf)``, in the order of the paths. Results that were yielded are not kept; at most a bucket of
        64 MiB is in flight, or one group of tied leaves if that is larger.

    Raises:
        TreeMismatch: If the step returns other keys than it was given.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> for path, leaf in st.stream({"b": torch.zeros(1), "a": {"w": torch.ones(2)}}, st.offload):
        ...     print(path, leaf)
        a.w tensor([1., 1.])
        b tensor([0.])
    """
    leaves, spec = flatten_for_copy(tree, holds_tensor)
    yield from _stream(leaves, spec, step, spec.paths())


def _apply_by_bucket(tree: Any, steps: Sequence[Step]) -> Any:
    leaves, spec = flatten_for_copy(tree, holds_tensor)
    results: list[Any] = [None] * len(leaves)

    def in_turn(bucket: Any) -> Any:
        for step in steps:
            bucket = step(bucket)
        return bucket

    for index, leaf in _stream(leaves, spec, in_turn, range(len(leaves))):
        results[index] = leaf
    return unflatten(spec, results)


def _stream(leaves: list[Any], spec: TreeSpec, step: Step, labels: Sequence[L]) -> Iterator[tuple[L, Any]]:
    """Yield ``(label, result)`` of every leaf, in the order of the paths."""
    paths, keys = spec.paths(), spec.flat_keys()
    order = sorted(range(len(leaves)), key=lambda index: paths[index].sort_key())
    size, companions = _sizes_and_ties(leaves, spec)
    ready: dict[int, Any] = {}  # results whose turn has not come: companions of leaves before them
    for position, index in enumerate(order):
        if index not in ready:
            bucket = _fill_bucket(order[position:], size, companions, ready)
            given = {keys[member]: leaves[member] for member in sorted(bucket)}
            result = _call(step, given, {keys[member]: paths[member] for member in bucket})
            ready.update((member, result[keys[member]]) for member in bucket)
            del given, result  # or the bucket would outlive the consumer's interest in it
        yield labels[index], ready.pop(index)


def _fill_bucket(
    rest: Sequence[int], size: Sequence[int], companions: Sequence[Sequence[int]], ready: dict[int, Any]
) -> list[int]:
    bucket: dict[int, None] = {}
    filled = 0
    for index in rest:
        if index in ready or index in bucket:
            continue
        group = companions[index]
        needed = sum(size[member] for member in group)
        if bucket and filled + needed > BUCKET_BYTES:
            break
        bucket.update(dict.fromkeys(group))
        filled += needed
    return list(bucket)


def _call(step: Step, bucket: dict[str, Any], paths: dict[str, Path]) -> Any:
    try:
        result = step(bucket)
    except StateTreeError as error:
        path = getattr(error, "path", None)
        if isinstance(path, tuple) and len(path) == 1 and path[0] in paths:
            error.path = paths[path[0]]  # type: ignore[attr-defined]  # in the tree, and not in the bucket
        raise
    if not isinstance(result, dict) or result.keys() != bucket.keys():
        got = list(result)[:3] if isinstance(result, dict) else type(result).__qualname__
        msg = (
            f"stream: the step changed the structure of a bucket: expected a dict of {len(bucket)} leaves from "
            f"{next(iter(bucket))!r} on, got {got}. Stream transforms that keep the structure."
        )
        raise TreeMismatch(msg)
    return result


@quietly
def _sizes_and_ties(leaves: list[Any], spec: TreeSpec) -> tuple[list[int], list[Sequence[int]]]:
    """Return the bytes of every leaf, and for every leaf those that it is tied to, itself included."""
    unpacked = unpack("stream", leaves, spec.paths)
    nbytes = unpacked.columns.nbytes
    return [sum(nbytes[part] for part in unpacked.parts_of(leaf)) for leaf in range(len(leaves))], tied_leaves(unpacked)
