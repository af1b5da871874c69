"""Composition: ``chain`` makes one transform of several, ``stream`` hands out results while they are made.

A *leafwise* transform treats leaves independently of each other, up to ties. Runs of leafwise transforms in a chain
are applied bucket by bucket, so that what lies between two steps is a bucket and not a model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain as chain_of_lists
from itertools import groupby
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from statetree.declare import is_collective, is_leafwise
from statetree.errors import RankMismatch, StateTreeError, TreeMismatch, check_function, place_in_tree, suppress
from statetree.exchange.buckets import BUCKET_BYTES
from statetree.exchange.call import Call
from statetree.exchange.consensus import Entry, Fingerprint, tell_failure
from statetree.exchange.group import group_of
from statetree.exchange.prepared import Preparation, Prepared, preparing
from statetree.leaves.builtin import global_bytes, holds_tensor, is_distributed
from statetree.leaves.parts import unpack
from statetree.leaves.ties import tied_leaves
from statetree.torch_internals import quietly
from statetree.tree.flatten import flatten_for_copy, unflatten
from statetree.tree.stand_ins import STAND_INS, reader

if TYPE_CHECKING:
    from statetree.exchange.group import Group
    from statetree.key_paths import Path
    from statetree.tree.spec import TreeSpec

Step = Callable[[Any], Any]
L = TypeVar("L")
P = ParamSpec("P")
T = TypeVar("T")


def _group_of(verb: str, steps: Iterable[Step]) -> Group | None:
    """Return the group that steps communicate in; ``None`` if none of them does.

    Raises:
        ValueError: If they name several: a rank that fails in one would have to be heard in all others.
    """
    groups: dict[Any, Group] = {}
    for step in filter(is_collective, steps):
        options = getattr(step, "keywords", {})
        group = group_of(verb, options.get("group"), options.get("timeout"))
        groups.setdefault(group.process_group, group)
    if len(groups) > 1:
        raise ValueError(
            f"{verb}: the steps communicate in different process groups: expected one, got {len(groups)}. Make a chain "
            "for each group, and call one after the other."
        )
    return next(iter(groups.values()), None)


def _streams(step: Step) -> bool:
    """Whether a step is a leafwise transform, a partial of one, or a chain of such steps."""
    step = getattr(step, "func", step) if isinstance(step, partial) else step  # partials of partials are flat
    return all(map(_streams, step.steps)) if isinstance(step, Chain) else is_leafwise(step)


def _applied(step: Step, tree: Any) -> Any:
    """Return what a step makes of a tree. A step that is not ours gets tensors: what is stored is read before."""
    named = step.func if isinstance(step, partial) else step
    is_ours = (getattr(named, "__module__", None) or "").partition(".")[0] == __name__.partition(".")[0]
    if STAND_INS and not is_ours:
        leaves, spec = flatten_for_copy(tree, holds_tensor, verb="chain")
        if not STAND_INS.isdisjoint(map(type, leaves)):
            tree = unflatten(spec, list(map(reader(leaves), leaves)))
    return step(tree)


def _tell(group: Group | None, error: BaseException) -> None:
    """Let the other ranks know of a failure here. Where they do not answer, the failure still is what counts."""
    if group is not None:
        with suppress(RankMismatch):
            tell_failure(group, error)


@dataclass(frozen=True)
class Chain:
    """Transforms applied one after the other. Made by ``chain``."""

    steps: tuple[Step, ...]

    def __call__(self, tree: Any) -> Any:
        """Apply the steps in turn."""
        group = _group_of("chain", self.steps)
        runs: list[list[Step]] = []
        for streams, found in groupby(self.steps, _streams):
            run = list(found)
            runs += [run] if streams else [[step] for step in run]
        for number, steps in enumerate(runs):
            try:
                tree = _apply_by_bucket(tree, steps) if len(steps) > 1 else _applied(steps[0], tree)
            except BaseException as error:
                is_awaited = any(map(is_collective, chain_of_lists.from_iterable(runs[number + 1 :])))
                if is_awaited and not any(map(is_collective, steps)):  # those of this run have heard of it
                    _tell(group, error)
                raise
        return tree


def chain(*steps: Step) -> Chain:
    """Compose transforms: ``chain(f, g)(tree)`` is ``g(f(tree))``.

    Consecutive leafwise transforms (``offload``, ``allocate_like``, ``gather`` and partials of them) are applied
    bucket by bucket, so that only one bucket of intermediate results exists at a time. Other steps, any function from
    tree to tree, get the whole tree. A step of your own gets tensors: stored tensors (of ``statetree.files``) are read
    before, of a ``leafwise`` step those of a bucket, of another one all.

    Args:
        steps: Transforms, partials of them, or any functions of one tree. None at all is the identity.

    Returns:
        A transform.

    Collective:
        Applied to a tree, if one of the steps is, over the one group that these name. If a rank fails in a step that
        does not communicate, and a later step does, all ranks raise there. After the last step that communicates
        nobody hears of it: the rank that fails raises alone.

    Raises:
        TypeError: If a step cannot be called.
        ValueError: When it is applied: if the steps name different process groups.

    Example:
        >>> import statetree as st, torch
        >>> from functools import partial
        >>> double = partial(st.map_leaves, lambda leaf: leaf * 2)
        >>> st.chain(st.offload, double)({"w": torch.ones(2)})
        {'w': tensor([2., 2.])}
    """
    for position, step in enumerate(steps):
        check_function("chain", f"step {position}", step, "a transform or a partial of one")
    return Chain(tuple([one for step in steps for one in (step.steps if isinstance(step, Chain) else (step,))]))


def stream(tree: Any, step: Step) -> Iterator[tuple[Path, Any]]:
    """Apply a transform bucket by bucket, and yield each leaf of its result as soon as it is there.

    Args:
        tree: Any tree.
        step: A transform that treats leaves independently, such as ``offload`` or a chain of such. It is called with
            flat dicts of leaves (tied leaves in one dict) and must return dicts with the same keys.

    Yields:
        ``(path, leaf)``, in the order of the paths. Results that were yielded are not kept; at most a bucket of
        64 MiB is in flight, or one group of tied leaves if that is larger.

    Collective:
        If the step is. Then every rank of the group takes all results, and has the same buckets: they hold whole
        tensors, however these are distributed. If a rank stops early, the others raise once its iterator is closed: at
        the end of a ``for`` loop, or when it is deleted.

    Raises:
        TreeMismatch: If the step returns other keys than it was given.
        RankMismatch: If the step is a collective and the ranks have different trees, or one of them failed or stopped
            before the end.
        CyclicTree: If a container holds itself.

    Example:
        >>> import statetree as st, torch
        >>> for path, leaf in st.stream({"b": torch.zeros(1), "a": {"w": torch.ones(2)}}, st.offload):
        ...     print(path, leaf)
        a.w tensor([1., 1.])
        b tensor([0.])
    """
    leaves, spec = flatten_for_copy(tree, holds_tensor, verb="stream")
    yield from _stream(leaves, spec, chain(step).steps, spec.paths())


def prepare(verb: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> Prepared[T]:
    """Plan a transfer and agree on it once, to move elements many times.

    ``sync = prepare(reshard, tree, like, in_place=True)`` checks, plans, agrees and allocates for these tensors, and
    moves nothing yet. Each ``sync()`` moves their elements, at a small part of the cost of ``reshard``: one small
    message confirms that the tensors of all ranks are still at the same addresses.

    Only elements move again. Structure, plain values and opaque objects stay what they were when the transfer was
    prepared (``gather`` passes leaves that are not distributed through: those are the source's own). Replicas over
    meshes that differ from rank to rank are also compared only once.

    Args:
        verb: ``gather``, ``distribute``, ``broadcast`` or ``reshard``, or a transform of your own that moves elements
            with one of them, or one ``exchange``.
        args: What it is called with.
        options: Its options.

    Returns:
        A function without arguments. It returns the same tree each time, with new elements. It holds its tensors until
        it is closed, with ``close()`` or at the end of a ``with`` block.

    Aliasing:
        As for the verb.

    Collective:
        If the verb is, so are both ``prepare`` and each call of what it returns.

    Raises:
        TypeError: If the verb moves no elements, or in several steps.
        UnsupportedLeaf: If a leaf is a copy that a ``Conversion`` made of plain tensors: it does not follow them.
        Exception: What the verb raises. On every rank, as there.
        RankMismatch: When elements are to move: if on some rank a tensor that was passed was resized, freed, or given
            other memory since. On every rank, before anything moves. (A model whose parameters are replaced does not
            touch the tensors of an earlier ``state_dict()``: these are sent again, and nothing is noticed.)

    Example:
        >>> import statetree as st, torch
        >>> weights, engine = {"w": torch.zeros(2)}, {"w": torch.empty(2)}
        >>> with st.prepare(st.reshard, weights, engine, in_place=True) as sync:
        ...     for step in range(2):
        ...         weights["w"] += 1
        ...         sync()
        {'w': tensor([1., 1.])}
        {'w': tensor([2., 2.])}
    """
    check_function("prepare", "the verb", verb)
    name = getattr(getattr(verb, "func", verb), "__name__", repr(verb))
    with preparing(Preparation()) as preparation:
        tree = verb(*args, **options)
    return preparation.finish(name, tree)


def _apply_by_bucket(tree: Any, steps: Sequence[Step]) -> Any:
    leaves, spec = flatten_for_copy(tree, holds_tensor, verb="chain")
    results: list[Any] = [None] * len(leaves)
    for index, leaf in _stream(leaves, spec, steps, range(len(leaves))):
        results[index] = leaf
    return unflatten(spec, results)


def _stream(leaves: list[Any], spec: TreeSpec, steps: Sequence[Step], labels: Sequence[L]) -> Iterator[tuple[L, Any]]:
    """Yield ``(label, result)`` of every leaf, in the order of the paths.

    If steps are collectives, the ranks agree on the buckets, and hear of it if one of them fails or stops early.
    """
    paths, keys = spec.paths(), spec.flat_keys()
    order = sorted(range(len(leaves)), key=lambda index: paths[index].sort_key())
    group = _group_of("stream", steps)
    if group is None:
        buckets = _buckets(leaves, spec, order)
    else:
        with Call("stream", group) as call:
            buckets = _buckets(leaves, spec, order)
            pairs = [(index, number) for number, bucket in enumerate(buckets) for index in bucket]
            entries = sorted([Entry(keys[index], f"in bucket {number}") for index, number in pairs])
            call.agree(Fingerprint("stream", entries))  # sorted, as ties decide on the order within a bucket
        del pairs, entries
    done: dict[int, Any] = {}  # results whose turn has not come: companions of leaves before them
    waiting = buckets[::-1]
    for index in order:
        while index not in done:
            bucket = waiting.pop()
            given = {keys[member]: leaves[member] for member in sorted(bucket)}
            result = _apply(steps, given, {keys[member]: paths[member] for member in bucket}, group)
            done.update((member, result[keys[member]]) for member in bucket)
            del given, result  # or the bucket would outlive the consumer's interest in it
        try:
            yield labels[index], done.pop(index)
        except GeneratorExit:
            # At the end of the process, or of the group, whoever waits here waits for a process that ends.
            if group is not None and not sys.is_finalizing() and group.is_alive:
                with suppress(StateTreeError):
                    if waiting:
                        _tell(group, StateTreeError("stream: this rank stopped before the end."))
                    else:
                        _finish(group)
            raise
    _finish(group)


def _finish(group: Group | None) -> None:
    if group is not None:
        with Call("stream", group) as call:
            call.ready()


@quietly
def _buckets(leaves: list[Any], spec: TreeSpec, order: Sequence[int]) -> list[list[int]]:
    """Cut the leaves into buckets, in the order of the paths; tied ones lie in one bucket."""
    unpacked = unpack("stream", leaves, spec.paths)
    nbytes, companions = unpacked.columns.nbytes, tied_leaves(unpacked)
    size = [
        global_bytes(leaf) if is_distributed(leaf) else sum(nbytes[part] for part in unpacked.parts_of(index))
        for index, leaf in enumerate(leaves)
    ]
    buckets: list[list[int]] = []
    room = 0
    taken: set[int] = set()
    for index in order:
        if index in taken:
            continue
        group = companions[index]
        needed = sum(size[member] for member in group)
        if not buckets or needed > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1] += group
        taken.update(group)
        room -= needed
    return buckets


def _apply(steps: Sequence[Step], bucket: Any, paths: dict[str, Path], group: Group | None) -> dict[str, Any]:
    result = bucket
    for step in steps:
        try:
            result = _applied(step, result)
        except BaseException as error:
            if not is_collective(step):  # which tells it by itself
                _tell(group, error)
            if isinstance(error, StateTreeError):
                place_in_tree(error, paths)
            raise
    if isinstance(result, dict) and result.keys() == paths.keys():
        return result
    got = list(result)[:3] if isinstance(result, dict) else type(result).__qualname__
    mismatch = TreeMismatch(
        f"stream: the step changed the structure of a bucket: expected a dict of {len(paths)} leaves from "
        f"{next(iter(paths))!r} on, got {got}. Stream transforms that keep the structure."
    )
    _tell(group, mismatch)
    raise mismatch
