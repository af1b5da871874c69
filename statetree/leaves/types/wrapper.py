"""Traceable wrapper subclasses: tensors made of inner tensors by ``__tensor_flatten__`` and ``__tensor_unflatten__``.

The protocol is the one that ``torch.compile`` relies on (``torch.utils._python_dispatch``), so every subclass that
compiles is covered: torchao's quantized tensors, jagged nested tensors, users' own.
"""

from __future__ import annotations

from contextlib import contextmanager
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.chunks.cuts import Cut, cut_alike
from statetree.errors import UnsupportedLeaf, suppress
from statetree.leaves.engine_type import EngineLeafType
from statetree.leaves.types.tensor import attributes_of, set_attributes
from statetree.spans.bits import safely_equal
from statetree.tree.atoms import same_value
from statetree.tree.flatten import flatten, unflatten
from statetree.tree.traversal import Frozen, freeze

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from statetree.leaves.engine_type import LeafContents


class WrapperType(EngineLeafType):
    """Any class with ``__tensor_flatten__`` and ``__tensor_unflatten__``."""

    def contents(self, value: Any) -> LeafContents:
        with _caches_dropped(value):
            names, metadata = value.__tensor_flatten__()
            inner = {name: getattr(value, name) for name in names}
            geometry = value.shape, value.stride(), value.requires_grad
        tensors = {name: held for name, held in inner.items() if isinstance(held, torch.Tensor)}
        kept = {name: held for name, held in inner.items() if name not in tensors}  # a DTensor's mesh, say
        context = _Context(type(value), tuple(tensors), kept, metadata, freeze(metadata), *geometry)
        parts = list(tensors.values())
        carried = {name: held for name, held in attributes_of(value).items() if name not in inner}
        if value.layout is torch.jagged:
            carried = {name: held for name, held in carried.items() if not name.startswith("_sym_")}  # cached sizes
        if carried:
            # What the class sets by itself comes back by itself; the rest was set by somebody else.
            own = attributes_of(context.rebuild(parts, ()))
            carried = {name: held for name, held in carried.items() if name not in own or _is_changed(held, own[name])}
        held, context = context.without_tensors()
        return parts, context, (held, carried) if held or carried else None

    def assemble(self, context: _Context, parts: Sequence[Any], attributes: Any) -> torch.Tensor:
        held, carried = attributes or ((), {})
        fresh = context.reshaped_as_given(parts, held)
        set_attributes(fresh, carried)
        return fresh

    def part_names(self, context: _Context, count: int) -> Sequence[str]:
        """Return the names of the inner tensors."""
        return context.names

    def reshaped(self, context: _Context, shape: Sequence[int], stride: Sequence[int]) -> _Context:
        """Return the context of a tensor of another shape, which its metadata may name."""
        return context.reshaped(tuple(shape), tuple(stride))

    def describe(self, value: Any) -> Mapping[str, Any]:
        with _caches_dropped(value):
            _, context = value.__tensor_flatten__()
            # The ragged size of a jagged tensor is a symbol, which equals nothing else.
            shape = tuple([size if type(size) is int else "ragged" for size in value.shape])
            facts = {"class": type(value), "dtype": value.dtype, "shape": shape, "metadata": context}
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
    #: The context in which whatever equals the shape is taken for it, if it is not clear that all of it is.
    doubtful: _Context | None = None

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
        every = self._renamed(shape, stride, is_sure=True)
        # One row has the shape of a block of one row (scales by rows). The block stays as it is where rows are added.
        if all(old != 1 or old == new for old, new in zip(self.shape, shape, strict=False)):
            return every
        sure = self._renamed(shape, stride, is_sure=False)
        return sure if same_value(sure.metadata, every.metadata) else sure._replace(doubtful=every)

    def _renamed(self, shape: tuple[int, ...], stride: tuple[int, ...], *, is_sure: bool) -> _Context:
        before = tuple(self.shape)

        def renamed(value: Any, name: Any = "") -> Any:
            if isinstance(value, (list, tuple)) and tuple(value) == before and all(type(size) is int for size in value):
                if isinstance(value, torch.Size):
                    return torch.Size(shape)
                is_named_so = isinstance(name, str) and name.endswith("shape") and "block" not in name
                return type(value)(shape) if is_sure or is_named_so else value
            if type(value) in (list, tuple):
                return type(value)(map(renamed, value))
            return {key: renamed(item, key) for key, item in value.items()} if type(value) is dict else value

        metadata = renamed(self.metadata if self.frozen is None else self.frozen.thaw())
        frozen = None if self.frozen is None else freeze(metadata)
        return self._replace(metadata=metadata, frozen=frozen, shape=torch.Size(shape), stride=stride)

    def reshaped_as_given(self, inner: Sequence[Any], held: Sequence[Any]) -> torch.Tensor:
        """Return a tensor of inner tensors, whose shape shows whether what was doubtful is the shape."""
        if self.doubtful is None:
            return self.rebuild(inner, held)
        with suppress(Exception):  # a class may check its metadata
            fresh = self.rebuild(inner, held)
            if fresh.shape == self.shape:
                return fresh
        return self.doubtful.rebuild(inner, held)

    def rebuild(self, inner: Sequence[Any], held: Sequence[Any]) -> torch.Tensor:
        """Return a tensor of inner tensors, and of those in the metadata (``held``)."""
        named = {**self.kept, **dict(zip(self.names, inner, strict=True))}
        metadata = self.metadata if self.frozen is None else self.frozen.thaw()
        if self.places:
            leaves, spec = list(metadata[0]), metadata[1]
            for index, tensor in zip(self.places, held, strict=True):
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


class UntraceableType(EngineLeafType):
    """Wrapper subclasses that do not say what they are made of."""

    def contents(self, value: Any) -> LeafContents:
        cls = type(value).__qualname__
        raise UnsupportedLeaf(
            f"the leaf at %PATH% ({cls}) cannot be taken apart: expected __tensor_flatten__ and __tensor_unflatten__ "
            f"beside __torch_dispatch__, got neither. Define them, or use register_leaf_type({cls}, ...)."
        )

    def describe(self, value: Any) -> Mapping[str, Any]:
        self.contents(value)
        return {}


class LowBitType(WrapperType):
    """``OptimState8bit``, ``OptimState4bit`` and ``OptimStateFp8`` of torchao 0.18: codes, scales, a table of values.

    Codes (of 4 bits, two in a byte) and scales (one for each block) lie in the row-major order of the elements. So a
    shard of rows has a stretch of each, if it is made of whole blocks.
    """

    def cuts(self, value: Any, inner: Sequence[torch.Tensor]) -> Sequence[tuple[Cut | None, ...]]:
        """Return how codes and scales are cut; the table is whole."""
        rows = value.shape[0]

        def flat(tensor: torch.Tensor) -> tuple[Cut | None, ...]:
            if tensor.shape == value.shape:
                return cut_alike(value.shape, tensor.shape)
            common = gcd(tensor.numel(), rows) or 1
            return (Cut(0, tensor.numel() // common, rows // common, is_flat=True),)

        codes, scale, *table = inner
        return [flat(codes), flat(scale), *[(None,) * tensor.dim() for tensor in table]]


WRAPPER = WrapperType()
UNTRACEABLE = UntraceableType()
LOW_BIT = LowBitType()
