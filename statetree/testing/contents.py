"""What a tree holds in every place, and what is true of it: what all assertions look at.

Containers and leaves are taken apart as the engines do it, by the registry of containers and by leaf types.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.errors import StateTreeError
from statetree.leaves.builtin import holds_tensor, leaf_type_of
from statetree.tree.registry import container_of
from statetree.tree.traversal import freeze

if TYPE_CHECKING:
    from collections.abc import Callable

#: The aspects of a tree. Every difference belongs to one.
STRUCTURE, GEOMETRY, VALUES, TIES = "structure", "geometry", "values", "ties"
#: The fact that says what no other one does.
CONTENTS = "contents"
#: The same of an object of which no more is known.
OBJECT = "object"
#: What is taken apart into tensors that are made anew each time.
TENSORS = (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage)


def _sizes(sizes: Any) -> tuple[Any, ...]:
    return tuple([size if type(size) is int else "symbol" for size in sizes])  # a symbol equals itself alone


_FACTS: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda tensor: tensor.dtype,
    "layout": lambda tensor: tensor.layout,
    "shape": lambda tensor: _sizes(tensor.shape),
    "strides": lambda tensor: _sizes(tensor.stride()),
    "requires_grad": lambda tensor: tensor.requires_grad,
    "conjugate bit": lambda tensor: tensor.is_conj(),
    "negative bit": lambda tensor: tensor.is_neg(),
    "is_meta": lambda tensor: tensor.is_meta,
    "fake mode": lambda tensor: tensor.fake_mode,
}


class TreePlace(NamedTuple):
    """What a tree holds in one place."""

    value: Any
    above: str  # the path of what holds it
    facts: dict[str, tuple[str, Any]]  # what is true of it, by name, with the aspect that this belongs to
    elements: torch.Tensor | None  # of a tensor that is nothing but a view of its storage: a plain one on this memory


def entries(tree: Any, *, gradients: bool = False) -> dict[str, TreePlace]:
    """Return what a tree holds, at any depth, by paths: containers, leaves, and the tensors that these consist of."""
    found: dict[str, TreePlace] = {}
    pending: list[tuple[str, str, Any, tuple[int, ...]]] = [("", "", tree, ())]
    while pending:
        path, above, value, holders = pending.pop()
        parts, facts, plain = _taken_apart(value)
        found[path] = TreePlace(value, above, facts, plain)
        if id(value) in holders:  # a cycle
            continue
        if gradients and isinstance(value, torch.Tensor) and gradient(value) is not None:
            parts[".grad"] = gradient(value)
        pending += [(path + step, path, part, (*holders, id(value))) for step, part in reversed(parts.items())]
    return found


def shown(path: str) -> str:
    """Return a path of ``entries`` as messages have it."""
    return path.removeprefix(".") or "<root>"


def gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor, without torch's warning where there can be none."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _taken_apart(value: Any) -> tuple[dict[str, Any], dict[str, tuple[str, Any]], torch.Tensor | None]:
    """Return what a value holds by the steps that lead there, the facts, and its elements."""
    parts: dict[str, Any] = {}
    container = container_of(type(value))
    if container is not None:
        children, keys, rest = container.flatten(value, freeze)
        odd = {index: key for index, key in enumerate(keys) if holds_tensor(key)}
        for index, (key, child) in enumerate(zip(keys, children, strict=True)):
            step = f".<key {index}>" if index in odd else f".{key if isinstance(key, str) else repr(key)}"
            while step in parts:
                step += "'"
            parts[step] = child
        parts |= {f"<key {index}>": key for index, key in odd.items()}
        known = [type(key) if index in odd else key for index, key in enumerate(keys)]
        return parts, {"keys": (STRUCTURE, known), CONTENTS: (STRUCTURE, rest)}, None
    if isinstance(value, torch.Generator):  # of which leaf types give a tensor that is made anew each time
        return parts, {OBJECT: (VALUES, value.get_state().tolist())}, None
    leaf_type = leaf_type_of(type(value))
    if leaf_type is None:
        return parts, {"value": (VALUES, value)}, None
    try:
        inner, rest, attributes = leaf_type.contents(value)
    except StateTreeError:  # it cannot be taken apart: it equals itself alone
        return parts, {"identity": (VALUES, id(value))}, None
    parts = {f"<part {at}>": part for at, part in enumerate(inner) if part is not value}
    if attributes:
        parts["<attributes>"] = attributes
    if not isinstance(value, torch.Tensor):
        if type(value) in (set, frozenset) and not parts:  # pickled in an order that a copy need not have
            rest = sorted(map(pickle.dumps, value))
        return parts, {OBJECT: (VALUES, rest)}, None
    if value.layout is torch.jagged:  # whose shape is a symbol, which equals itself alone
        rest = leaf_type.describe(value), rest[-1]
    elif rest is value:  # a fake tensor is all that it is made of
        rest = None
    facts = {name: (GEOMETRY, _answer(question, value)) for name, question in _FACTS.items()}
    plain = None
    if any(part is value for part in inner):
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            plain = value.detach()
    return parts, {**facts, CONTENTS: (GEOMETRY, rest)}, plain


def _answer(question: Callable[[Any], Any], tensor: torch.Tensor) -> Any:
    try:
        return question(tensor)
    except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError):
        return None  # it does not say
