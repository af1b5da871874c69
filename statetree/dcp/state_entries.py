"""The entries of a state, under the keys that DCP gives them, and what a checkpoint holds of each.

The keys are those of ``to_flat``, except that a list without mappings and tensors in it, and a tuple of plain values,
are one entry (the 625 integers of Python's random state, say).
"""

from __future__ import annotations

from functools import partial
from operator import eq
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.dcp.groups import ranks_of
from statetree.errors import UnsupportedLeaf
from statetree.files.checkpoint import is_entry
from statetree.files.filling import check_elements, held_chunks, refuse_leaf
from statetree.files.key_texts import without_addresses
from statetree.key_paths import Path, render_key
from statetree.leaves.builtin import facts, is_distributed, is_plain, is_stored, leaf_type_of, materialized
from statetree.leaves.lowering import is_made_of_tensors, lower
from statetree.leaves.pairing import facts_inside
from statetree.leaves.parts import Unpacked, unpack
from statetree.leaves.replicas import replicated
from statetree.leaves.types.converted import joined
from statetree.leaves.types.special import QUANTIZED
from statetree.leaves.types.tensor import TENSOR
from statetree.spans.layout import extents
from statetree.spans.memory import memory_of
from statetree.torch_internals import WITHOUT_KERNELS, as_copied, quietly
from statetree.tree.flatten import flatten_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statetree.chunks.local import LocalChunks
    from statetree.exchange.group import Group
    from statetree.tree.spec import TreeSpec

#: The key of the entry that holds the structure. No other entry gets it.
STRUCTURE_KEY: Final = "<statetree structure>"
TENSOR_ENTRY: Final = "tensor"
PARTS_ENTRY: Final = "parts"
VALUE_ENTRY: Final = "value"
_NUMBERED: Final = frozenset({"list", "tuple", "deque"})


class StateEntry(NamedTuple):
    """A leaf, or a list or tuple of plain values, with its key in the checkpoint.

    Tools that nest DCP's flat dicts again put it at ``dcp_path``: its path as DCP would have it, or its key where they
    could not follow that.
    """

    path: Path
    key: str
    value: Any
    dcp_path: tuple[str | int, ...]


def entries_of(tree: Any, *, verb: str) -> tuple[TreeSpec, list[StateEntry], Mapping[Path, str]]:
    """Return the structure of a tree down to its entries, and these. Leaves of several tensors have one for each.

    What these leaves are beside their tensors comes last.
    """
    outer, outer_spec = flatten_for(verb, tree, is_leaf=is_entry)
    flatten = partial(flatten_for, verb, is_leaf=is_entry)
    outer = [leaf if _is_made_later(leaf) else joined(materialized(leaf)) for leaf in outer]
    lowered = lower(verb, outer, outer_spec, flatten, wanted=is_made_of_tensors)
    keys, paths = lowered.spec.flat_keys(), _dcp_paths(lowered.spec)
    if STRUCTURE_KEY in keys:
        keys = [free_key(key, set(keys)) if key == STRUCTURE_KEY else key for key in keys]
    taken = set(paths)
    for index, (key, path) in enumerate(zip(keys, paths, strict=True)):
        # Tools follow paths that make the keys, and have no leaf above.
        if key != ".".join(map(str, path)) or any(path[:count] in taken for count in range(1, len(path))):
            paths[index] = (key,)
    return lowered.spec, list(map(StateEntry, lowered.spec.paths(), keys, lowered.leaves, paths)), lowered.texts


def _is_made_later(leaf: Any) -> bool:
    """Whether a leaf is made of stored tensors (combined, or converted) where it is written, a bucket at a time."""
    return is_stored(leaf) and leaf.is_made and leaf.dtype not in QUANTIZED and leaf.dtype not in WITHOUT_KERNELS


def _dcp_paths(spec: TreeSpec) -> list[tuple[str | int, ...]]:
    """Return the path of every entry as DCP has it: texts for the keys of mappings, numbers for those of lists."""
    found: list[tuple[str | int, ...]] = [("",)] * spec.num_leaves
    start: tuple[str | int, ...] = ()
    pending = [(spec.root(), start)] if spec.nodes else []
    while pending:
        ref, above = pending.pop()
        kind, keys = spec.nodes[~ref][:2]
        is_numbered = kind.family in _NUMBERED
        for key, child in zip(keys, spec.links()[~ref], strict=True):
            path = (*above, key if is_numbered and type(key) is int else render_key(key))
            if child >= 0:
                found[child] = path
            else:
                pending.append((child, path))
    return found


def free_key(wanted: str, taken: set[str]) -> str:
    """Return a key like the one wanted that is not taken, and take it."""
    number, key = 2, wanted
    while key in taken or key == STRUCTURE_KEY:
        key, number = f"{wanted}~{number}", number + 1
    taken.add(key)
    return key


class Content(NamedTuple):
    """What there is to save of a leaf, or to fill."""

    sort: str
    tensors: Sequence[Any]  # the tensor itself (``LocalChunks`` of a distributed one, a stored one), or its parts
    facts: str = ""  # what must agree, besides, for the parts to be of use
    unpacked: Unpacked | None = None  # how a leaf is packed again of its parts

    @property
    def contexts(self) -> list[Any]:
        """What a value of a registered leaf type has beside its parts."""
        return [] if self.unpacked is None else [recipe.context for recipe in self.unpacked.registered(0)]

    def packed(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the leaf again, of other tensors in the place of ``tensors``."""
        assert self.unpacked is not None
        parts = list(self.unpacked.parts)
        for index, tensor in zip(dict.fromkeys(self.unpacked.parts_of(0)), tensors, strict=True):
            parts[index] = tensor.view(parts[index].dtype)
        return self.unpacked.pack(parts)[0]


PLAIN: Final = Content(VALUE_ENTRY, ())


def content_of(verb: str, leaf: Any, path: Path, ranks: Group | None = None) -> Content:
    """Say what there is to save, or to fill, of a leaf. Tensors come without gradient and class, on its memory."""
    if is_plain(leaf) or is_array_of_numbers(leaf):
        return PLAIN
    if _is_made_later(leaf):
        return Content(TENSOR_ENTRY, (leaf,))
    leaf = materialized(leaf)
    leaf_type = leaf_type_of(type(leaf))
    assert leaf_type is not None
    if leaf_type.opaque:
        _check_whole(verb, leaf, path)
        return PLAIN
    if is_distributed(leaf):
        if leaf_type is TENSOR and (ranks is None or ranks.size == 1):  # who saves alone would keep this part alone
            refuse_leaf(verb, path, "a tensor of which each rank holds a part", "Gather it")
        return Content(TENSOR_ENTRY, (_held(verb, leaf, path, ranks or ranks_of(verb, None)),))
    # DCP asks torch for the sizes of elements, which it does not know of dtypes without kernels.
    is_entry_of_dcp = leaf_type is TENSOR and leaf.layout is torch.strided and not leaf.is_nested
    if is_entry_of_dcp and leaf.dtype not in QUANTIZED and leaf.dtype not in WITHOUT_KERNELS:
        tensor = _bare(leaf)
        check_elements(verb, tensor, path)
        return Content(TENSOR_ENTRY, (tensor,))
    if not leaf_type.has_elements:
        refuse_leaf(verb, path, f"a {type(leaf).__qualname__}, which has no elements", "Materialize it")
    unpacked = unpack(verb, [leaf], lambda: [path])
    if unpacked.holds_distributed():
        refuse_leaf(verb, path, f"a {type(leaf).__qualname__} around a distributed tensor", "Gather it")
    parts = [_bare(unpacked.parts[index]) for index in dict.fromkeys(unpacked.parts_of(0))]
    for part in parts:
        check_elements(verb, part, path)
    parts = [as_copied(part) if part.dtype in WITHOUT_KERNELS else part for part in parts]
    known: list[Any] = [dict(facts(leaf)), *(inside and dict(inside) for inside in facts_inside(leaf))]
    return Content(PARTS_ENTRY, parts, without_addresses(known if any(known[1:]) else known[0]), unpacked)


def is_array_of_numbers(value: Any) -> bool:
    """Whether a value is an array of NumPy without objects: it may be large, and need not be pickled to look inside."""
    cls = type(value)
    return cls.__module__ == "numpy" and cls.__qualname__ == "ndarray" and value.dtype.kind in "biufc"


@quietly
def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor)


def _check_whole(verb: str, leaf: Any, path: Path) -> None:
    """Raise if a leaf that is to be pickled is or holds a distributed tensor: the first rank's part would be kept."""
    if is_distributed(leaf):
        refuse_leaf(verb, path, f"a {type(leaf).__qualname__}, of which each rank holds a part", "Gather it")
    try:
        unpacked = unpack(verb, [leaf], lambda: [path], memory=False)
    except UnsupportedLeaf:  # then it cannot be pickled either, and need not be where it is only replaced
        return
    if unpacked.holds_distributed():
        held = f"a {type(leaf).__qualname__} with a distributed tensor inside"
        refuse_leaf(verb, path, held, "Gather it, or register the class as a container (register_container)")


def _held(verb: str, leaf: Any, path: Path, ranks: Group) -> LocalChunks:
    """Return the chunks that this rank holds of a distributed leaf."""
    cls = type(leaf).__qualname__
    held = held_chunks(verb, leaf, path, ranks)
    assert held is not None
    if held.partials is not None:
        refuse_leaf(verb, path, f"a {cls} with the placements {leaf.placements}", "Redistribute or reduce it")
    if held.dtype in WITHOUT_KERNELS:  # DCP asks torch for the sizes of elements
        refuse_leaf(verb, path, f"a {cls} of {held.dtype}", "View it as numbers (uint8)")
    for piece in held.memory:
        if leaf_type_of(type(piece)) is not TENSOR or piece.layout is not torch.strided:
            refuse_leaf(verb, path, f"a {cls} of a {type(piece).__qualname__}", "Gather it, or save its inner tensors")
        check_elements(verb, piece, path)
    if held.layout is not None and not held.layout.is_complete:
        part = f"one of which the ranks of the group hold only a part ({held.text})"
        refuse_leaf(verb, path, part, "Pass the process_group of all ranks that hold it, or gather it")
    return held


def compact(value: Any) -> Any:
    """Return a plain value to be pickled, or a copy if it holds small parts of large storages: pickle writes all."""
    if is_plain(value) or is_array_of_numbers(value) or type(value) in (list, tuple, dict):  # only plain values in it
        return value
    try:
        columns = unpack("save", [value], lambda: [Path()]).columns
        devices = set(columns.devices) - {torch.device("meta")}
        if len(devices) != 1 or all(map(eq, extents(columns), columns.storage_bytes)):
            return value
        return replicated("save", value, memory_of(devices.pop()), copy=True)
    except UnsupportedLeaf:  # pickle may know better
        return value
