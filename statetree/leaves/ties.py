"""Ties: which leaves of a tree must be treated together, since they share memory or are the same object."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from statetree.errors import StateTreeError
from statetree.key_paths import Path
from statetree.leaves.builtin import leaf_type_of
from statetree.leaves.parts import unpack
from statetree.spans.columns import Columns
from statetree.spans.layout import extents, is_dense
from statetree.spans.overlaps import lie_alike, shared_elements
from statetree.torch_internals import quietly, storage_key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    import torch

    from statetree.leaves.parts import Unpacked


T = TypeVar("T")


@quietly
def view_key(tensor: torch.Tensor) -> Hashable:
    """Return what is equal for tensors that are the same view on the same memory, as long as they are alive.

    Two entries of a ``state_dict()`` that are tied are two objects, so their identity does not tell.
    """
    try:
        parts = unpack("update", [tensor], lambda: [Path()]).parts
    except StateTreeError:  # it cannot be taken apart: nothing is known but the object
        return id(tensor)
    if not parts:
        return id(tensor)
    views: list[Any] = []
    for part in parts:
        # What is on meta, freed or empty lies nowhere: its storage tells.
        place = part.data_ptr() or (storage_key(part.untyped_storage()), part.storage_offset())
        views.append((place, part.device, part.dtype, part.shape, part.stride(), part.is_conj(), part.is_neg()))
    # A local tensor is no DTensor, and may belong to several of other shapes; nested tensors have none.
    return (leaf_type_of(type(tensor)), None if tensor.is_nested else tuple(tensor.shape), *views)


def tied_leaves(unpacked: Unpacked) -> list[Sequence[int]]:
    """Return for every leaf the indices of those that it is tied to, directly or through others, itself included."""
    leaves, keys = unpacked.leaves, unpacked.columns.storage_keys
    parent = list(range(len(leaves)))
    first_on: dict[int, int] = {}
    for leaf, value in enumerate(leaves):
        _join(parent, leaf, first_on.setdefault(id(value), leaf))
    first_on.clear()
    for leaf in range(len(leaves)):
        for part in unpacked.parts_of(leaf):
            _join(parent, leaf, first_on.setdefault(keys[part], leaf))
    groups: dict[int, list[int]] = {}
    for leaf in range(len(leaves)):
        groups.setdefault(_find(parent, leaf), []).append(leaf)
    return [groups[_find(parent, leaf)] for leaf in range(len(leaves))]


def _find(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]
        index = parent[index]
    return index


def _join(parent: list[int], a: int, b: int) -> None:
    parent[_find(parent, a)] = _find(parent, b)


class ObjectTies(NamedTuple):
    """How the tensors inside opaque objects (parts) are tied to tensors that are copied from sources to targets.

    An object that is copied may hold a view on a tensor that is written into a destination. In the result that has to
    be a view on the destination: a copy would be a second memory.
    """

    views: dict[int, torch.Tensor]  # by the indices of parts, the same views on the targets
    written: list[int]  # those that reach beyond the target, into a part of the object that the destination has there
    #: Pairs of a part and a source that lie over each other, of which the target has no such view: it has another dtype
    #: or other strides, or the part reaches beyond the source.
    lost: list[tuple[int, int]]


def object_ties(
    parts: Columns, sources: Columns, targets: Columns, counterparts: Callable[[], Mapping[int, torch.Tensor]]
) -> ObjectTies:
    """Find the parts of objects that lie in memory which is copied from sources to targets.

    ``counterparts`` returns what the destination has in the places of parts, by their indices. ``lost`` counts the
    parts that are written after the sources.
    """
    found, counterparts = ObjectTies({}, [], []), cache(counterparts)
    of, into, begins = [*sources.tensors], [*targets.tensors], [*sources.pointers]
    part_reach, reach = extents(parts), [*extents(sources)]
    on_storage: defaultdict[int, list[int]] = defaultdict(list)
    for index, key in enumerate(sources.storage_keys):
        on_storage[key].append(index)
    over: dict[int, list[int]] = {part: [] for part, pointer in enumerate(parts.pointers) if pointer}
    looked_at = dict.fromkeys(over, 0)

    def is_tied(part: int) -> bool:
        """Compare a part with what is written and was not there before."""
        tensor, known, there = parts.tensors[part], len(over[part]), on_storage[parts.storage_keys[part]]
        for source in there[looked_at[part] :]:
            begin, end = parts.pointers[part] - begins[source], begins[source] + reach[source] - parts.pointers[part]
            if end <= 0 or begin + part_reach[part] <= 0:
                continue
            is_inside = begin >= 0 and part_reach[part] <= end
            view = _view_on(tensor, of[source], into[source]) if is_inside else None
            if view is not None:
                found.views[part] = view
                return True
            if shared_elements(Columns((tensor, of[source]))):  # and not in the gaps of each other
                over[part].append(source)
        looked_at[part] = len(there)
        partner = counterparts().get(part) if len(over[part]) > known else None
        pairs = [(of[at], into[at]) for at in over[part]]
        if partner is None or not all(a.dtype == b.dtype for a, b in [(tensor, partner), *pairs]):
            return False
        if not all(lie_alike((tensor, partner), pair) for pair in pairs):
            return False
        found.views[part] = partner.detach()
        found.written.append(part)
        there.append(len(of))
        of.append(tensor)
        into.append(found.views[part])
        begins.append(parts.pointers[part])
        reach.append(part_reach[part])
        return True

    count = -1
    while count < len(found.written):  # other parts may lie on what is written, and on nothing else
        count = len(found.written)
        for part in [part for part in over if is_tied(part)]:
            del over[part]
    found.lost.extend((part, source) for part, lost in over.items() for source in lost)
    return found


def sharing(rows: Iterable[tuple[T, torch.Tensor]]) -> list[tuple[T, T]]:
    """Return, both ways round, which leaves have elements in common, of tensors with the leaf of each."""
    real = [(leaf, tensor) for leaf, tensor in rows if tensor.numel() and not tensor.is_meta]
    pairs = shared_elements(Columns([tensor for _, tensor in real]))
    return list(dict.fromkeys((real[a][0], real[b][0]) for pair in pairs for a, b in permutations(pair)))


def _view_on(part: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """Return the view on a target that a part is on its source; ``None`` if there is none."""
    plain = target.detach()
    alike = source.dtype == target.dtype == part.dtype
    bits = [(each.is_conj(), each.is_neg()) for each in (part, source, plain)]
    if not alike or bits[0] != bits[1] or bits[1] != bits[2]:
        return None
    if part.data_ptr() == source.data_ptr() and part.shape == source.shape and part.stride() == source.stride():
        return plain
    if source.stride() != plain.stride() or not is_dense(source.is_contiguous(), source.shape, source.stride()):
        return None  # in a gap of the source there may be anything in the target
    offset = part.storage_offset() - source.storage_offset()
    return plain.as_strided(part.shape, part.stride(), plain.storage_offset() + offset)
