"""Objects with ``state_dict`` and ``load_state_dict`` in a state: their states are saved, and given back to them."""

from __future__ import annotations

from functools import partial
from itertools import compress
from operator import is_not
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from statetree.errors import TreeMismatch, UnsupportedLeaf
from statetree.files.formats import opened
from statetree.files.key_texts import key_text
from statetree.files.stored import StoredTensor
from statetree.key_paths import Path, key_identity
from statetree.torch_internals import are_flattened
from statetree.tree.flatten import flatten_for, unflatten
from statetree.tree.selection import selected

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Collection, Mapping, Sequence

    from statetree.files.checkpoint import OpenedCheckpoint
    from statetree.tree.selection import Where
    from statetree.tree.spec import TreeSpec


def _is_stateful(value: Any) -> bool:
    """Whether a value, which is no class, has both methods: DCP's protocol ``Stateful``."""
    return hasattr(type(value), "load_state_dict") and hasattr(type(value), "state_dict")


class StatefulTree:
    """A tree, taken apart down to its stateful objects. ``state`` is the tree with their states in their places.

    To be filled, schedulers' states have memory of their own: a scheduler holds the optimizer's learning rate several
    times, and what was saved in these places may differ.
    """

    def __init__(self, verb: str, tree: Any, *, to_fill: bool = False) -> None:
        self._verb = verb
        self._leaves, self._spec = flatten_for(verb, tree, is_leaf=_is_stateful)
        self._mask = list(map(_is_stateful, self._leaves))
        self._paths = list(compress(self._spec.paths(), self._mask)) if any(self._mask) else []
        for value, path in self._objects():
            _refuse_flattened(verb, value, path)
        self._states = [self._ask("state_dict", value, path) for value, path in self._objects()]
        if to_fill:
            pairs = zip(self._objects(), self._states, strict=True)
            self._states = [_apart(own) if isinstance(value, LRScheduler) else own for (value, _), own in pairs]
        self.state = self._with(self._states) if self._states else tree

    def _objects(self) -> list[tuple[Any, Path]]:
        return list(zip(compress(self._leaves, self._mask), self._paths, strict=True))

    def _ask(self, method: str, value: Any, path: Path, *given: Any) -> Any:
        try:
            return getattr(value, method)(*given)
        except Exception as error:
            error.add_note(f"statetree: {self._verb}: in {method} of the object at {path or '<root>'}")
            raise

    def _with(self, values: Sequence[Any]) -> Any:
        """Return the tree with values in the places of the objects."""
        rest, pairs = iter(values), zip(self._leaves, self._mask, strict=True)
        return unflatten(self._spec, [next(rest) if mask else leaf for leaf, mask in pairs])

    def template(self, directory: pathlib.Path, where: Where | None = None, *, strict: bool = True) -> Any:
        """Return the template for a checkpoint: where an object's state lacks paths, memory for them, if chosen.

        What an optimizer's state has beside is left out, if all that was saved of it is chosen, and it is ``strict``.

        Raises:
            TreeMismatch: If ``where`` chooses some of what an object lacks: an optimizer with half of its moments, or a
                list without its middle, is nobody's state.
        """
        if not self._states:
            return self.state
        stored = opened(directory, skip_foreign=True)
        divided = _divided(stored)
        pairs = zip(self._objects(), self._states, strict=True)
        fitted = [_fitted(value, state, path, stored.tree, divided, strict=strict) for (value, path), state in pairs]
        tree = self._with([each.state for each in fitted])
        if where is None:
            return tree
        leaves, spec = flatten_for("restore", tree)
        chosen = set(compress(spec.paths(), selected(where, spec, leaves, verb="restore")))
        known = []
        for (made, marked, gives_up), state, path in zip(fitted, self._states, self._paths, strict=True):
            marks, inner = flatten_for("restore", marked)
            are_chosen = [Path((*path, *below)) in chosen for below in inner.paths()]
            found = set(compress(are_chosen, [mark is _LACKING for mark in marks]))
            if len(found) > 1:
                raise TreeMismatch(
                    f"restore: where chooses some of what the object at {path or '<root>'} lacks: expected all of it "
                    "or none. Choose all, or give the object a state first."
                )
            known.append(made if (all(are_chosen) if gives_up else True in found) else state)
        return self._with(known)

    def loaded(self, tree: Any) -> Any:
        """Give the objects their states out of a loaded tree, and return it with the objects in their places."""
        if not self._states:
            return tree
        for value, path in self._objects():
            self._ask("load_state_dict", value, path, path(tree))
        return _replaced(tree, {(*map(key_identity, path),): value for value, path in self._objects()})


def _replaced(tree: Any, objects: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return a tree with objects in their places, whose keys are identities. Containers above them are made anew."""
    opened: dict[tuple[Any, ...], tuple[list[Any], TreeSpec, dict[Any, int]]] = {}
    for path in objects:
        node = tree
        for count, key in enumerate(path):
            if path[:count] not in opened:
                leaves, spec = flatten_for("restore", node, is_leaf=partial(is_not, node))
                places = {key_identity(child[0]): place for place, child in enumerate(spec.paths())}
                opened[path[:count]] = leaves, spec, places
            leaves, _, places = opened[path[:count]]
            node = leaves[places[key]]
    made = dict(objects)
    for above in sorted(opened, key=len, reverse=True):
        leaves, spec, places = opened[above]
        for key, place in places.items():
            leaves[place] = made.get((*above, key), leaves[place])
        made[above] = unflatten(spec, leaves)
    return made[()]


def _refuse_flattened(verb: str, value: Any, path: Path) -> None:
    """Raise ``UnsupportedLeaf`` for an optimizer of FSDP1's: its tensors do not say that each rank has a part."""
    if isinstance(value, torch.optim.Optimizer) and are_flattened(parameters_of(value)):
        msg = (
            f"{verb}: FullyShardedDataParallel has flattened the parameters of the optimizer at {path or '<root>'}: "
            "expected one whose tensors say which rank holds what. Pass what get_optimizer_state_dict(model, "
            "optimizer) of torch.distributed.checkpoint.state_dict returns."
        )
        raise UnsupportedLeaf(msg, path)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in the order of their numbers in its state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _divided(stored: OpenedCheckpoint) -> set[int]:
    """Return the mappings, by their ids, that stand in a checkpoint's tree for leaves made of several tensors."""
    visits = flatten_for("restore", stored.tree)[1].walk() if stored.divided else ()
    inner = [visit.path for visit in visits if visit.cls is not None]
    return {id(path(stored.tree)) for path in inner if (*map(key_text, path),) in stored.divided}


def _apart(state: Any) -> Any:
    """Return a state whose tensors have memory of their own, each another one."""
    leaves, spec = flatten_for("restore", state)
    return unflatten(spec, [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


#: Where an optimizer's state has what it keeps of its parameters, by their numbers.
_MOMENTS: Final = ("state",)
#: Stands for a leaf that an object's state lacks.
_LACKING: Final = object()


class _Fitted(NamedTuple):
    """A template for what is stored of an object."""

    state: Any  # with the leaves of its own state where they fit
    marked: Any  # the same, with ``_LACKING`` in the places of what its own state lacks
    gives_up: bool = False  # whether its own state has more, which ``load_state_dict`` takes away


def _fitted(value: Any, state: Any, path: Path, tree: Any, divided: Collection[int], *, strict: bool) -> _Fitted:
    """Return a template for what is stored of an object.

    An optimizer that has not stepped yet has no state, one that has gone on may have more; a loader's differs from one
    moment to the next. Where another own path has no counterpart, it may be an entry of this rank alone, or an error:
    the load knows.
    """
    try:
        saved, outline = flatten_for("restore", path(tree), is_leaf=lambda node: id(node) in divided)
    except TreeMismatch:
        return _Fitted(state, state)
    leaves, spec = flatten_for("restore", state)
    own = dict(zip(map(tuple, spec.paths()), leaves, strict=True))
    paths = list(map(tuple, outline.paths()))
    known, whole = {path[:count] for path in paths for count in range(len(path) + 1)}, set(paths)
    others = {
        path for path in own if path not in known and not any(path[:count] in whole for count in range(len(path)))
    }
    parameters = dict(enumerate(parameters_of(value))) if isinstance(value, torch.optim.Optimizer) else {}
    pairs = list(zip(paths, saved, strict=True))
    gone: set[Any] = set()
    kept_of = {path[1] for path in paths if path[:1] == _MOMENTS and len(path) > 1}
    if strict and kept_of <= parameters.keys() and _MOMENTS in _containers(outline):
        gone = {path for path in others if path[:1] == _MOMENTS and _is_later(path, known, parameters)}
    if isinstance(value, torch.optim.LBFGS):  # it keeps a number where it has a tensor later
        gone |= {path for path, leaf in pairs if path[:1] == _MOMENTS and path in own and _is_other(own[path], leaf)}
    others -= gone
    is_all_there = not gone and own.keys() >= whole and _containers(spec) >= _containers(outline)
    if is_all_there or others:
        return _Fitted(state, state)
    own = {path: leaf for path, leaf in own.items() if path not in gone}
    made = [own[path] if path in own else _room(leaf, path, parameters) for path, leaf in pairs]
    marked = [own.get(path, _LACKING) for path in paths]
    return _Fitted(unflatten(outline, made), unflatten(outline, marked), bool(gone))


def _is_later(path: tuple[Any, ...], known: Collection[Any], parameters: Mapping[int, Any]) -> bool:
    """Whether an optimizer has come to keep something since: of a parameter of which nothing is saved, or in a list.

    Saved without a field that it keeps of others, its state is another optimizer's.
    """
    if len(path) < 2 or path[1] not in parameters:
        return False
    return path[:2] not in known or (len(path) > 3 and path[:3] in known)


def _is_other(own: Any, saved: Any) -> bool:
    """Whether one is a tensor and the other a plain value."""
    return isinstance(own, torch.Tensor) != isinstance(saved, StoredTensor)


def _containers(spec: TreeSpec) -> set[tuple[Any, ...]]:
    return {tuple(visit.path) for visit in spec.walk() if visit.cls is not None}


def _room(leaf: Any, path: tuple[Any, ...], parameters: dict[int, torch.Tensor]) -> Any:
    """Return memory for a tensor. What is read of a plain value takes its place.

    What an optimizer keeps of a distributed parameter, in its shape, is laid out as the parameter is: no operation
    takes a DTensor and a plain tensor.
    """
    if not isinstance(leaf, StoredTensor):
        return None
    if not leaf.is_strided:
        return leaf.tensor().clone()
    parameter = parameters.get(path[1]) if len(path) == 3 and path[:1] == _MOMENTS else None
    if isinstance(parameter, DTensor) and parameter.shape == leaf.shape:
        return torch.empty_like(parameter.detach(), dtype=leaf.dtype)
    return torch.empty(leaf.shape, dtype=leaf.dtype)
