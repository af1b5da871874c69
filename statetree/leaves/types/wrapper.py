"""Traceable wrapper subclasses: tensors made of inner tensors by ``__tensor_flatten__`` and ``__tensor_unflatten__``.

The protocol is the one that ``torch.compile`` relies on (``torch.utils._python_dispatch``), so every subclass that
compiles is covered: torchao's quantized tensors, jagged nested tensors, users' own.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.errors import UnsupportedLeaf
from statetree.leaves.engine_type import EngineLeafType
from statetree.leaves.types.tensor import attributes_of, set_attributes
from statetree.spans.bits import safely_equal
from statetree.tree.atoms import same_value
from statetree.tree.flatten import flatten, unflatten
from statetree.tree.traversal import Frozen, freeze

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class WrapperType(EngineLeafType):
    """Any class with ``__tensor_flatten__`` and ``__tensor_unflatten__``."""

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        with _caches_dropped(value):
            return self._unpack(value)

    def _unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        names, metadata = value.__tensor_flatten__()
        inner = {name: getattr(value, name) for name in names}
        tensors = {name: held for name, held in inner.items() if isinstance(held, torch.Tensor)}
        kept = {name: held for name, held in inner.items() if name not in tensors}  # a DTensor's mesh, say
        context = _Context(
            type(value),
            tuple(tensors),
            kept,
            metadata,
            freeze(metadata),
            value.shape,
            value.stride(),
            value.requires_grad,
        )
        carried = {name: held for name, held in attributes_of(value).items() if name not in inner}
        if value.layout is torch.jagged:
            carried = {name: held for name, held in carried.items() if not name.startswith("_sym_")}  # cached sizes
        if carried:
            # What the class sets by itself comes back by itself; the rest was set by somebody else.
            own = attributes_of(context.rebuild(list(tensors.values())))
            carried = {name: held for name, held in carried.items() if name not in own or _is_changed(held, own[name])}
        leaves, spec = flatten(carried)
        held, context = context.without_tensors()
        return [*tensors.values(), *held, *leaves], (context, spec)

    def pack(self, context: Any, parts: Sequence[Any]) -> torch.Tensor:
        tensor, carried = context
        count = len(tensor.names) + len(tensor.places)
        fresh: torch.Tensor = tensor.rebuild(parts[:count])
        set_attributes(fresh, unflatten(carried, parts[count:]))
        return fresh

    def essential(self, context: Any, inner: Sequence[Any]) -> Sequence[Any]:
        """Return what holds the elements, without the attributes."""
        return inner[: len(context[0].names)]

    def part_names(self, context: Any, count: int) -> Sequence[str]:
        """Return the names of the inner tensors, and numbers for what else there is."""
        names = context[0].names
        return [*names, *[str(number) for number in range(len(names), count)]]

    def reshaped(self, context: Any, shape: Sequence[int], stride: Sequence[int]) -> Any:
        """Return the context of a tensor of another shape, which its metadata may name."""
        tensor, carried = context
        return tensor.reshaped(tuple(shape), tuple(stride)), carried

    def describe(self, value: Any) -> Mapping[str, Any]:
        with _caches_dropped(value):
            _, context = value.__tensor_flatten__()
            facts = {"class": type(value), "dtype": value.dtype, "shape": _shape_of(value), "metadata": context}
            if value.layout is torch.jagged:
                facts["metadata"] = context["ragged_idx"]
                facts["offsets"] = value.offsets().tolist()
            return facts


def _is_changed(held: Any, own: Any) -> bool:
    """Whether an attribute that the class sets by itself was set to something else since.

    Objects that are neither plain data nor hold tensors in the open are the class's own affair.
    """
    if freeze(held) is not None:
        return not same_value(held, own)
    return any(isinstance(leaf, torch.Tensor) for leaf in flatten(held)[0]) and not safely_equal(held, own)


class _Context(NamedTuple):
    cls: Any
    names: tuple[str, ...]  # of the inner tensors
    kept: dict[str, Any]  # inner values that are no tensors
    metadata: Any
    frozen: Frozen | None  # the metadata, if it is plain data, so that every copy gets its own
    shape: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool
    places: tuple[int, ...] = ()  # of tensors among the leaves of the metadata

    def without_tensors(self) -> tuple[list[torch.Tensor], _Context]:
        """Return the tensors in the metadata, and a context that waits for others in their places."""
        if self.frozen is not None:
            return [], self
        leaves, spec = flatten(self.metadata)
        places = tuple([index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)])
        if not places:
            return [], self
        tensors = [leaves[index] for index in places]
        leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tensors, self._replace(metadata=(leaves, spec), places=places)

    def reshaped(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> _Context:
        """Return a context in which whatever is the shape, also in the metadata, is another one."""
        before = tuple(self.shape)

        def renamed(value: Any) -> Any:
            if isinstance(value, (list, tuple)) and tuple(value) == before and all(type(size) is int for size in value):
                return torch.Size(shape) if isinstance(value, torch.Size) else type(value)(shape)
            if type(value) in (list, tuple):
                return type(value)(map(renamed, value))
            return {key: renamed(item) for key, item in value.items()} if type(value) is dict else value

        metadata = renamed(self.metadata if self.frozen is None else self.frozen.thaw())
        frozen = None if self.frozen is None else freeze(metadata)
        return self._replace(metadata=metadata, frozen=frozen, shape=torch.Size(shape), stride=stride)

    def rebuild(self, inner: Sequence[Any]) -> torch.Tensor:
        named = {**self.kept, **dict(zip(self.names, inner, strict=False))}
        metadata = self.metadata if self.frozen is None else self.frozen.thaw()
        if self.places:
            leaves, spec = list(metadata[0]), metadata[1]
            for index, tensor in zip(self.places, inner[len(self.names) :], strict=True):
                leaves[index] = tensor
            metadata = unflatten(spec, leaves)
        fresh: torch.Tensor = self.cls.__tensor_unflatten__(named, metadata, self.shape, self.stride)
        if fresh.requires_grad != self.requires_grad:
            fresh = fresh.detach().requires_grad_(self.requires_grad)
        return fresh


@contextmanager
def _caches_dropped(value: Any) -> Iterator[None]:
    """Take away what looking at a tensor leaves in its attributes: torch caches the sizes of jagged ones there."""
    before = set(vars(value))
    try:
        yield
    finally:
        for name in set(vars(value)) - before:
            del value.__dict__[name]


def _shape_of(value: torch.Tensor) -> tuple[Any, ...]:
    """Return a shape that can be compared: the ragged size of a jagged tensor is a symbol, equal to nothing else."""
    return tuple([size if type(size) is int else "ragged" for size in value.shape])


class UntraceableType(EngineLeafType):
    """Wrapper subclasses that do not say what they are made of."""

    def unpack(self, value: Any) -> tuple[Sequence[Any], Any]:
        cls = type(value).__qualname__
        msg = (
            f"the leaf at %PATH% ({cls}) cannot be taken apart: expected __tensor_flatten__ and __tensor_unflatten__ "
            f"beside __torch_dispatch__, got neither. Define them, or use register_leaf_type({cls}, ...)."
        )
        raise UnsupportedLeaf(msg)

    def describe(self, value: Any) -> Mapping[str, Any]:
        self.unpack(value)
        return {}


WRAPPER = WrapperType()
UNTRACEABLE = UntraceableType()
