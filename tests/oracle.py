"""A strict judge of whether two trees are the same.

It imports nothing of statetree, so that it can judge it: every rule about containers, tensors and ties is written
down here a second time. ``tests/unit/test_oracle.py`` plants faults and checks that each is noticed.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import struct
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

SHOWN = 20
#: Tensors on one storage that lie further apart than this may come out closer together (DESIGN 3.10).
FAR_BYTES = 1 << 20

BY_VALUE = (bool, int, str, bytes, bytearray, range, type(None), type(...), type(NotImplemented), torch.Size, slice)
BY_IDENTITY = (
    type,
    enum.Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.CodeType,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.qscheme,
)
HEAP_TYPE = 1 << 9  # set for classes made by a class statement, whose slots are Python's
#: Attributes that DTensors and jagged tensors keep for themselves; they are compared by what they mean.
OWN_ATTRIBUTES = frozenset({"_spec", "_ragged_idx", "_size", "_strides", "_metadata_cache"})


def assert_same(
    left: Any,
    right: Any,
    *,
    ties: bool = True,
    device: bool = True,
    containers: bool = False,
    storages: bool = True,
) -> None:
    """Raise ``AssertionError`` that names every place where two trees differ.

    Args:
        left: Any value.
        right: What should be the same.
        ties: Whether the same tensors must share storages, with the same overlap, and be the same objects.
        device: Whether tensors must be on the same device.
        containers: Whether containers and opaque objects must be the same object in the same places (as a deep copy
            keeps them).
        storages: With ``ties``, whether tensors that do not overlap must share a storage object as well.
    """
    found = differences(left, right, ties=ties, device=device, containers=containers, storages=storages)
    if found:
        more = [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        raise AssertionError("\n  ".join([f"the trees differ in {len(found)} places:", *found[:SHOWN], *more]))


def differences(
    left: Any,
    right: Any,
    *,
    ties: bool = True,
    device: bool = True,
    containers: bool = False,
    storages: bool = True,
) -> list[str]:
    """Return what ``assert_same`` would report, one line a place."""
    judge = _Judge(device=device)
    judge.run(left, right)
    if ties:
        judge.check_ties(storages=storages)
        judge.check_identities(judge.tensors, "tensor object")
    if containers:
        judge.check_identities(judge.objects, "object")
    return judge.found


def assert_independent(left: Any, right: Any, *, containers: bool = True) -> None:
    """Raise ``AssertionError`` if two trees share memory, or (with ``containers``) one that can be changed."""
    one, other = _Judge(device=False), _Judge(device=False)
    one.run(left, left)
    other.run(right, right)
    found = [f"{b.path} lies on the storage of {a.path}" for a, b in _pairs_on_one_storage(one.views, other.views)]
    found += [
        f"{b.path} lies in the memory of {a.path}"
        for a in one.views
        for b in other.views
        if a.left.overlaps_in_memory(b.left)
    ]
    found += [
        f"{path} shares the memory of the array at {name}"
        for path, array in other.arrays
        for name, mine in one.arrays
        if np.shares_memory(mine, array)
    ]
    mine = {met.left: met.path for met in one.objects}
    found += [
        f"{met.path} is the container at {mine[met.left]}"
        for met in other.objects
        if containers
        if met.left in mine and isinstance(other.alive[met.left], (dict, list, deque, set))
    ]
    if found:
        raise AssertionError("the trees are not independent: " + "; ".join(found[:SHOWN]))


def _pairs_on_one_storage(one: list[_View], other: list[_View]) -> Iterator[tuple[_View, _View]]:
    mine = {view.left.storage: view for view in one}
    return ((mine[view.left.storage], view) for view in other if view.left.storage in mine)


class _Region(NamedTuple):
    storage: int
    address: int  # of the storage; 0 without memory
    start: int
    length: int

    def in_memory(self) -> _Region:
        """Return the same bytes with their address, for storages that are pieces of others."""
        return self if not self.address else _Region(0, 0, self.address + self.start, self.length)

    def overlaps_in_memory(self, other: _Region) -> bool:
        if not (self.address and other.address):
            return False
        mine, its = self.address + self.start, other.address + other.start
        return mine < its + other.length and its < mine + self.length


class _View(NamedTuple):
    """A plain tensor, or a storage, met on both sides."""

    path: str
    left: _Region
    right: _Region

    def in_memory(self) -> _View:
        return _View(self.path, self.left.in_memory(), self.right.in_memory())


class _Met(NamedTuple):
    path: str
    left: int
    right: int


class _Judge:
    def __init__(self, *, device: bool) -> None:
        self.device = device
        self.found: list[str] = []
        self.views: list[_View] = []
        self.tensors: list[_Met] = []
        self.objects: list[_Met] = []
        self.arrays: list[tuple[str, np.ndarray]] = []
        self.alive: dict[int, Any] = {}  # no id is handed out twice
        self._inside: list[tuple[str, Any, Any]] = []  # what the value under judgement holds
        self._seen: set[tuple[int, int]] = set()

    def run(self, left: Any, right: Any) -> None:
        pending = [("", left, right)]
        while pending:
            path, a, b = pending.pop()
            try:
                self._judge(path, a, b)
            except Exception as error:
                error.add_note(f"oracle: at {path or '<root>'}")
                raise
            # What one value brings up is judged before its next sibling, so that the report reads top down.
            pending += reversed(self._inside)
            self._inside.clear()

    def _differ(self, path: str, what: str, a: Any = None, b: Any = None) -> None:
        sides = "" if a is None and b is None else f": {_brief(a)} against {_brief(b)}"
        self.found.append(f"{what} at {path or '<root>'}{sides}")

    def _expect(self, path: str, what: str, a: Any, b: Any) -> bool:
        same = type(a) is type(b) and a == b
        if not same:
            self._differ(path, what, a, b)
        return same

    def _later(self, path: str, a: Any, b: Any) -> None:
        self._inside.append((path, a, b))

    # Values of any kind

    def _judge(self, path: str, a: Any, b: Any) -> None:
        cls = type(a)
        if cls is not type(b):
            self._differ(path, "type differs", cls, type(b))
            return
        if cls in BY_VALUE:
            if a != b:
                self._differ(path, "value differs", a, b)
            return
        if isinstance(a, np.dtype):
            self._expect(path, "dtype differs", a, b)
            return
        if cls is float or cls is complex:
            if _number_bits(a) != _number_bits(b):
                self._differ(path, "value differs", a, b)
            return
        if isinstance(a, BY_IDENTITY):
            if a is not b:
                self._differ(path, "object differs", a, b)
            return
        if (id(a), id(b)) in self._seen:
            self._meet(path, a, b)
            return
        self._seen.add((id(a), id(b)))
        self.alive.update({id(a): a, id(b): b})
        self._meet(path, a, b)
        if isinstance(a, torch.Tensor):
            self._judge_tensor(path, a, b)
        elif isinstance(a, (torch.UntypedStorage, torch.storage.TypedStorage)):
            self._judge_storage(path, a, b)
        elif isinstance(a, np.ndarray):
            self._judge_array(path, a, b)
        elif isinstance(a, dict):
            self._judge_dict(path, a, b)
        elif isinstance(a, (list, tuple, deque)):
            self._judge_sequence(path, a, b)
        elif isinstance(a, (set, frozenset)):
            self._judge_set(path, a, b)
        elif isinstance(a, weakref.ref):
            if a() is not b():
                self._differ(path, "referent differs", a(), b())
        elif dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__"):
            self._judge_attributes(path, a, b)
        else:
            self._judge_object(path, a, b)

    def _meet(self, path: str, a: Any, b: Any) -> None:
        if isinstance(a, torch.Tensor):
            self.tensors.append(_Met(path, id(a), id(b)))
        elif type(a) is not tuple:  # equal tuples may be one object by interning
            self.objects.append(_Met(path, id(a), id(b)))

    # Containers

    def _judge_dict(self, path: str, a: Any, b: Any) -> None:
        base = OrderedDict if isinstance(a, OrderedDict) else dict
        keys, others = list(base.__iter__(a)), list(base.__iter__(b))
        if len(keys) != len(others):
            self._differ(path, "number of keys differs", keys, others)
        for index, (key, other) in enumerate(zip(keys, others, strict=False)):
            self._later(f"{path}<key {index}>", key, other)
        for key, other in zip(keys, others, strict=False):
            self._later(f"{path}[{_brief(key)}]", dict.__getitem__(a, key), dict.__getitem__(b, other))
        if isinstance(a, defaultdict):
            factory = defaultdict.default_factory.__get__
            self._later(f"{path}.default_factory", factory(a), factory(b))
        self._judge_attributes(path, a, b)

    def _judge_sequence(self, path: str, a: Any, b: Any) -> None:
        base = next(base for base in (list, tuple, deque) if isinstance(a, base))
        items, others = list(base.__iter__(a)), list(base.__iter__(b))
        if len(items) != len(others):
            self._differ(path, "length differs", len(items), len(others))
        if base is deque:
            self._expect(path, "maxlen differs", deque.maxlen.__get__(a), deque.maxlen.__get__(b))
        for index, (item, other) in enumerate(zip(items, others, strict=False)):
            self._later(f"{path}[{index}]", item, other)
        if base is tuple and hasattr(type(a), "n_sequence_fields"):  # may have fields beyond the sequence
            self._later(f"{path}.__reduce__()", a.__reduce__()[1], b.__reduce__()[1])
        self._judge_attributes(path, a, b)

    def _judge_set(self, path: str, a: Any, b: Any) -> None:
        left, right = list(a), list(b)
        if len(left) != len(right):
            self._differ(path, "number of elements differs", len(left), len(right))
            return
        for index, element in enumerate(left):
            fits = [
                position
                for position, other in enumerate(right)
                if other is element or not differences(element, other, ties=False, device=self.device)
            ]
            if not fits:
                self._differ(path, "element differs", element, right)
                return
            self._later(f"{path}{{{index}}}", element, right.pop(fits[0]))
        self._judge_attributes(path, a, b)

    def _judge_attributes(self, path: str, a: Any, b: Any, *, skip: frozenset[str] = frozenset()) -> None:
        mine, others = _attributes(a, skip), _attributes(b, skip)
        if list(mine) != list(others):
            self._differ(path, "attributes differ", list(mine), list(others))
        for name in mine.keys() & others.keys():
            self._later(f"{path}.{name}", mine[name], others[name])

    def _judge_object(self, path: str, a: Any, b: Any) -> None:
        one, other = _reduced(a), _reduced(b)
        if one is None or other is None:
            if a is not b:
                self._differ(path, "object cannot be compared and differs", a, b)
        elif isinstance(one, str) or isinstance(other, str):
            if a is not b:
                self._differ(path, "object differs", a, b)
        else:
            self._later(f"{path}.__reduce__", one, other)

    # Tensors

    def _judge_storage(self, path: str, a: Any, b: Any) -> None:
        if isinstance(a, torch.storage.TypedStorage):
            self._expect(path, "dtype differs", a.dtype, b.dtype)
            a, b = a._untyped_storage, b._untyped_storage
        if self._expect(path, "bytes differ in number", a.nbytes(), b.nbytes()):
            bits = [_storage_bits(storage) for storage in (a, b)]
            self._judge_bits(path, *bits)
            self.views.append(_View(path, *(_Region(s._cdata, s.data_ptr(), 0, s.nbytes()) for s in (a, b))))

    def _judge_array(self, path: str, a: Any, b: Any) -> None:
        self.arrays.append((path, a))
        if self._expect(path, "dtype differs", a.dtype, b.dtype) and self._expect(
            path, "shape differs", a.shape, b.shape
        ):
            if a.dtype.hasobject:
                self._later(f"{path}.tolist()", a.tolist(), b.tolist())
            elif a.tobytes() != b.tobytes():
                self._differ(path, "elements differ", a, b)

    def _judge_tensor(self, path: str, a: Any, b: Any) -> None:
        kind = f"{type(a).__module__}.{type(a).__qualname__}"
        if kind.endswith(".ShardedTensor"):  # refuses to be asked for most attributes
            self._judge_sharded(path, a, b)
            return
        names = ["dtype", "layout", "requires_grad", "is_nested", "is_quantized", "is_meta"]
        if self.device:
            names.append("device")
        agree = [self._expect(path, f"{name} differs", getattr(a, name), getattr(b, name)) for name in names]
        if not all(agree):
            return
        if isinstance(a, torch.nn.parameter.UninitializedTensorMixin):
            self._judge_attributes(path, a, b)
        elif kind.startswith("torch._subclasses.fake_tensor"):
            self._judge_fake(path, a, b)
        elif hasattr(type(a), "__tensor_flatten__") and hasattr(type(a), "__tensor_unflatten__"):
            self._judge_wrapper(path, a, b)
        else:
            with torch.no_grad():
                self._judge_elements(path, a, b)
            self._judge_attributes(path, a, b)

    def _judge_fake(self, path: str, a: Any, b: Any) -> None:
        for name in ("shape", "fake_device"):
            self._expect(path, f"{name} differs", getattr(a, name), getattr(b, name))
        self._expect(path, "strides differ", a.stride(), b.stride())
        if a.fake_mode is not b.fake_mode:
            self._differ(path, "fake mode differs")

    def _judge_sharded(self, path: str, a: Any, b: Any) -> None:
        self._expect(path, "metadata differs", a.metadata(), b.metadata())
        self._expect(path, "sharding spec differs", a.sharding_spec(), b.sharding_spec())
        if a._process_group is not b._process_group:
            self._differ(path, "process group differs")
        self._later(f"{path}.local_shards()", a.local_shards(), b.local_shards())
        self._judge_attributes(path, a, b, skip=frozenset(name for name in vars(a) if name.startswith("_")))

    def _judge_wrapper(self, path: str, a: Any, b: Any) -> None:
        (names, context), (others, other_context) = a.__tensor_flatten__(), b.__tensor_flatten__()
        ragged = a.layout is torch.jagged
        # The ragged size of a jagged tensor is a symbol, which equals nothing but itself.
        shapes = [[size if type(size) is int else "ragged" for size in tensor.shape] for tensor in (a, b)]
        self._expect(path, "shape differs", *shapes)
        if not ragged:
            self._expect(path, "strides differ", a.stride(), b.stride())
        if hasattr(a, "placements") and hasattr(a, "device_mesh"):
            self._expect(path, "placements differ", a.placements, b.placements)
            if a.device_mesh != b.device_mesh:
                self._differ(path, "mesh differs", a.device_mesh, b.device_mesh)
        else:
            self._later(f"{path}.__tensor_flatten__()", context, other_context)
        if self._expect(path, "inner tensors differ", list(names), list(others)):
            for name in names:
                if name != "device_mesh":
                    self._later(f"{path}.{name}", getattr(a, name), getattr(b, name))
        caches = {name for tensor in (a, b) for name in vars(tensor) if name.startswith("_sym_")}
        self._judge_attributes(path, a, b, skip=OWN_ATTRIBUTES | caches | set(names))

    def _judge_elements(self, path: str, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.is_nested:
            a, b = a.detach(), b.detach()
            for part in ("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets", "values"):
                self._judge_elements(f"{path}.{part}()", getattr(a, part)(), getattr(b, part)())
            return
        if not self._expect(path, "shape differs", a.shape, b.shape):
            return
        if a.layout is torch.strided:
            self._judge_strided(path, a, b)
        elif a.layout is torch.sparse_coo:
            self._expect(path, "coalesced differs", a.is_coalesced(), b.is_coalesced())
            a, b = a.detach(), b.detach()
            self._judge_strided(f"{path}.indices()", a._indices(), b._indices())
            self._judge_strided(f"{path}.values()", a._values(), b._values())
        elif a.layout in (torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc):
            rows = a.layout in (torch.sparse_csr, torch.sparse_bsr)
            a, b = a.detach(), b.detach()
            for part in ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices"):
                self._judge_strided(f"{path}.{part}()", getattr(a, part)(), getattr(b, part)())
            self._judge_strided(f"{path}.values()", a.values(), b.values())
        else:
            self._judge_strided(path, a.to_dense(), b.to_dense())

    def _judge_strided(self, path: str, a: torch.Tensor, b: torch.Tensor) -> None:
        facts = [
            self._expect(path, "dtype differs", a.dtype, b.dtype),
            self._expect(path, "shape differs", a.shape, b.shape),
            self._expect(path, "strides differ", a.stride(), b.stride()),
            self._expect(path, "conj bit differs", a.is_conj(), b.is_conj()),
            self._expect(path, "neg bit differs", a.is_neg(), b.is_neg()),
            self._expect(path, "requires_grad differs", a.requires_grad, b.requires_grad),
        ]
        if a.is_quantized:
            self._judge_scales(path, a, b)
        if not all(facts):
            return
        if not a.is_meta:
            self._judge_bits(path, _bits(a), _bits(b))
        self.views.append(_View(path, _region(a), _region(b)))

    def _judge_scales(self, path: str, a: torch.Tensor, b: torch.Tensor) -> None:
        if not self._expect(path, "quantization scheme differs", a.qscheme(), b.qscheme()):
            return
        if a.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            self._expect(path, "scale differs", a.q_scale(), b.q_scale())
            self._expect(path, "zero point differs", a.q_zero_point(), b.q_zero_point())
            return
        self._expect(path, "axis differs", a.q_per_channel_axis(), b.q_per_channel_axis())
        self._judge_strided(f"{path}.scales", a.q_per_channel_scales(), b.q_per_channel_scales())
        self._judge_strided(f"{path}.zero_points", a.q_per_channel_zero_points(), b.q_per_channel_zero_points())

    def _judge_bits(self, path: str, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
        if a is None or b is None:
            if a is not b:
                self._differ(path, "one storage is freed")
        elif not torch.equal(a.cpu(), b.cpu()):
            first = (a.cpu() != b.cpu()).nonzero()[0].tolist()
            self._differ(path, f"elements differ, first in byte {first}")

    # What lies between the leaves

    def check_ties(self, *, storages: bool) -> None:
        """Compare which tensors share storages, and how those that do lie to each other."""
        views = self.views if storages else [view.in_memory() for view in self.views]
        taken = sorted(
            (view for view in views if view.left.length),
            key=lambda view: (view.left.storage, view.left.start, view.left.length),
        )
        clusters: dict[tuple[int, int], list[_View]] = {}
        first: _View | None = None
        end = 0
        for view in taken:
            reach = end + FAR_BYTES if storages else end
            if first is None or view.left.storage != first.left.storage or view.left.start >= reach:
                first, end = view, 0
            clusters.setdefault((first.left.storage, first.left.start), []).append(view)
            end = max(end, view.left.start + view.left.length)
        for first, *others in clusters.values():
            for view in others:
                apart, now = view.left.start - first.left.start, view.right.start - first.right.start
                if view.right.storage != first.right.storage:
                    self.found.append(f"storage of {first.path} and {view.path} is one on the left, two on the right")
                elif now != apart:
                    self.found.append(f"overlap differs: {view.path} lay {apart} bytes from {first.path}, now {now}")
        if storages:
            self._check_storages(clusters)
        overlaps = [set(_overlapping(taken, side)) for side in ("left", "right")]
        for one, other in sorted(overlaps[0] ^ overlaps[1]):
            self.found.append(f"overlap differs: {one} and {other} overlap on one side only")

    def _check_storages(self, clusters: dict[tuple[int, int], list[_View]]) -> None:
        met = [_Met(view.path, view.left.storage, view.right.storage) for view in self.views]
        self._map(met, "storage", "right", "left")
        parts = Counter(storage for storage, _ in clusters)
        # Where a storage was cut at its gaps, nobody can say on which part a tensor without elements belongs.
        whole = [place for place in met if parts[place.left] <= 1]
        self._map(whole, "storage", "left", "right")

    def check_identities(self, met: list[_Met], what: str) -> None:
        """Compare which places hold one and the same object."""
        self._map(met, what, "left", "right")
        self._map(met, what, "right", "left")

    def _map(self, met: list[_Met], what: str, one: str, other: str) -> None:
        partner: dict[int, _Met] = {}
        for place in met:
            known = partner.setdefault(getattr(place, one), place)
            if getattr(known, other) != getattr(place, other):
                self.found.append(f"{what} of {known.path} and {place.path} is one on the {one}, two on the {other}")


def _overlapping(views: list[_View], side: str) -> Iterator[tuple[str, str]]:
    """Return the pairs of views whose ranges of bytes overlap, each pair once."""
    placed = sorted((getattr(view, side), view.path) for view in views)
    active: list[tuple[_Region, str]] = []
    for region, path in placed:
        active = [
            (other, name)
            for other, name in active
            if other.storage == region.storage and other.start + other.length > region.start
        ]
        yield from ((min(name, path), max(name, path)) for _, name in active)
        active.append((region, path))


def _region(tensor: torch.Tensor) -> _Region:
    size = tensor.element_size()
    length = 0
    if tensor.numel():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        length = (last + 1) * size
    storage = tensor.untyped_storage()
    return _Region(storage._cdata, storage.data_ptr(), tensor.storage_offset() * size, length)


def _bits(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of the elements as they lie in memory, or ``None`` if the memory is gone."""
    size = tensor.element_size()
    storage = tensor.untyped_storage()
    region = _region(tensor)
    if not region.length:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    if region.start + region.length > storage.nbytes():
        return None
    shape = (*tensor.shape, size)
    strides = (*(step * size for step in tensor.stride()), 1)
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, tensor.storage_offset() * size, shape, strides)


def _storage_bits(storage: torch.UntypedStorage) -> torch.Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))


def _number_bits(value: complex) -> bytes:
    return struct.pack("<dd", value.real, value.imag)


def _attributes(value: Any, skip: frozenset[str]) -> dict[str, Any]:
    """Return the instance attributes: those of ``__dict__`` in their order, then those in slots by name."""
    result = {name: kept for name, kept in (getattr(value, "__dict__", None) or {}).items() if name not in skip}
    slots: dict[str, Any] = {}
    for base in type(value).__mro__:
        if base.__flags__ & HEAP_TYPE:
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType) and name not in skip:
                    try:
                        slots.setdefault(f"{name} of {base.__qualname__}", member.__get__(value))
                    except AttributeError:
                        continue
    return {**result, **dict(sorted(slots.items()))}


def _reduced(value: Any) -> Any:
    """Return what pickle would make of an object, with its iterators spelled out; ``None`` if it cannot."""
    try:
        reducer = copyreg.dispatch_table.get(type(value))
        result = value.__reduce_ex__(4) if reducer is None else reducer(value)
    except Exception:
        return None
    if isinstance(result, str):
        return result
    padded = [*result, *[None] * (6 - len(result))]
    for position in (3, 4):
        if padded[position] is not None:
            padded[position] = list(padded[position])
    return padded


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) < 80 else f"{text[:77]}..."
