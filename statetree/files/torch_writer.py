"""Writes what ``torch.load`` reads, without having the tensors in memory."""

from __future__ import annotations

import io
import pickle
import sys
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.errors import CheckpointError
from statetree.files.checkpoint import is_value, why_not_plain
from statetree.files.ranges import memory_of
from statetree.files.safe_pickle import Named
from statetree.files.stored import BUCKET_BYTES, Composite, Storage, StoredStorage, StoredTensor
from statetree.files.torch_names import rebuild_function, storage_class
from statetree.files.zip_archive import ZipWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from statetree.files.checkpoint import Progress

_PREFIX: Final = "archive/"
#: Offsets of what is left of a storage are multiples of the size of every element.
_GRAIN: Final = 16


class WrittenStorage(NamedTuple):
    """What is written of a storage: its bytes from ``start`` to ``stop``, and zeros up to ``nbytes``."""

    storage: Storage
    start: int
    stop: int
    nbytes: int
    key: str
    is_untyped: bool


class TorchFile:
    """A tree that is to be written. Of each storage, what lies between the first and last element in use is kept.

    Attributes:
        kept: The storages.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        seen = _StorageFinder()
        _dump(seen, tree)
        self.kept: dict[int, WrittenStorage] = {}
        for number, (key, (storage, start, stop, dtypes)) in enumerate(seen.storages.items()):
            size = max(dtype.itemsize if dtype else 1 for dtype in dtypes)
            nbytes = -(-(stop - start) // size) * size
            self.kept[key] = WrittenStorage(storage, start, stop, nbytes, str(number), len(dtypes) > 1)

    @property
    def nbytes(self) -> int:
        """How many bytes the storages take."""
        return sum(kept.nbytes for kept in self.kept.values())

    def write(self, file: IO[bytes], progress: Progress) -> None:
        """Write the file."""
        target = io.BytesIO()
        _dump(_TreePickler(target, self.kept), self._tree)
        order = sys.byteorder.encode()
        with ZipWriter(file) as archive:
            archive.add(f"{_PREFIX}data.pkl", target.tell(), [target.getbuffer()])
            archive.add(f"{_PREFIX}byteorder", len(order), [order])
            for kept in self.kept.values():
                archive.add(f"{_PREFIX}data/{kept.key}", kept.nbytes, _pieces(kept, progress))
            archive.add(f"{_PREFIX}version", 2, [b"3\n"])


def _pieces(kept: WrittenStorage, progress: Progress) -> Iterator[bytes | memoryview]:
    for start in range(kept.start, kept.stop, BUCKET_BYTES):
        stop = min(start + BUCKET_BYTES, kept.stop)
        found = kept.storage.read(start, stop)
        yield memory_of(found)
        progress(stop - start)
    yield bytes(kept.nbytes - (kept.stop - kept.start))


def _dump(pickler: pickle.Pickler, tree: Any) -> None:
    try:
        pickler.dump(tree)
    except RecursionError:
        msg = (
            "convert: the tree is nested too deep for pickle: expected a few hundred levels. Choose parts with --match."
        )
        raise CheckpointError(msg) from None


class _Null:
    def write(self, data: bytes) -> int:
        return len(data)


class _StorageFinder(pickle.Pickler):
    """Notes which bytes of which storages are in use, and as which dtypes (``None``: untyped)."""

    def __init__(self) -> None:
        super().__init__(_Null(), protocol=2)
        self.storages: dict[int, tuple[Storage, int, int, set[torch.dtype | None]]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is StoredStorage:
            self._note(obj.storage, 0, obj.storage.nbytes, obj.dtype)
            return 0
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, StoredTensor):
            start = obj.offset * obj.dtype.itemsize if obj.numel else 0
            self._note(obj.storage, start // _GRAIN * _GRAIN, start + obj.span, obj.dtype)
            return (torch.Size, ())
        return _reduced(obj)

    def _note(self, storage: Storage, start: int, stop: int, dtype: torch.dtype | None) -> None:
        if start >= stop:
            start = stop = 0
        _, low, high, dtypes = self.storages.get(id(storage), (storage, start, stop, set()))
        if low == high:
            low, high = start, stop
        elif start < stop:
            low, high = min(low, start), max(high, stop)
        self.storages[id(storage)] = (storage, low, high, dtypes | {dtype})


class _TreePickler(pickle.Pickler):
    def __init__(self, file: IO[bytes], kept: dict[int, WrittenStorage]) -> None:
        super().__init__(file, protocol=2)
        self._kept = kept
        self._references: dict[tuple[int, torch.dtype | None], StoredStorage] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not StoredStorage:
            return None
        kept = self._kept[id(obj.storage)]
        itemsize = obj.dtype.itemsize if obj.dtype else 1
        return ("storage", storage_class(obj.dtype), kept.key, "cpu", kept.nbytes // itemsize)

    def reducer_override(self, obj: Any) -> Any:
        return self._tensor(obj) if isinstance(obj, StoredTensor) else _reduced(obj)

    def _tensor(self, leaf: StoredTensor) -> Any:
        kept = self._kept[id(leaf.storage)]
        offset = leaf.offset - kept.start // leaf.dtype.itemsize if leaf.numel else 0
        is_untyped = kept.is_untyped or storage_class(leaf.dtype) is None
        # Of several references to a storage, torch goes by the first one's dtype.
        reference = self._reference(leaf.storage, None if is_untyped else leaf.dtype)
        bits = {name: True for name, is_set in (("conj", leaf.is_conj), ("neg", leaf.is_neg)) if is_set}
        requires_grad = leaf.requires_grad and not leaf.is_parameter
        args: tuple[Any, ...] = (reference, offset, leaf.shape, leaf.stride, requires_grad, {})
        args += (leaf.dtype,) if is_untyped else ()
        args += (bits,) if bits else ()
        name = f"torch._utils._rebuild_tensor_v{3 if is_untyped else 2}"
        if not leaf.is_parameter:
            return rebuild_function(name), args
        plain = _WrittenCall(rebuild_function(name), args)
        return rebuild_function("torch._utils._rebuild_parameter"), (plain, leaf.requires_grad, {})

    def _reference(self, storage: Storage, dtype: torch.dtype | None) -> StoredStorage:
        key = (id(storage), dtype)
        if key not in self._references:
            self._references[key] = StoredStorage(storage, dtype)
        return self._references[key]


class _WrittenCall:
    """A call that is written as it is."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


def _reduced(obj: Any) -> Any:
    """Return how an object other than a strided tensor is pickled."""
    if isinstance(obj, Composite):
        assert obj.call is not None, obj.kind  # convert looks before
        name, args = obj.call
        return rebuild_function(name), tuple(
            rebuild_function(arg.name) if isinstance(arg, Named) else arg for arg in args
        )
    if is_value(obj) and not isinstance(obj, (_WrittenCall, type)) and type(obj).__module__.startswith("statetree"):
        msg = f"convert: {why_not_plain(obj) or type(obj).__name__} cannot be written. Leave it out (--match)."
        raise CheckpointError(msg)
    return NotImplemented


def loaded(leaf: Any) -> Any:
    """Return the real tensor that stands behind a leaf, as ``torch.load(weights_only=True)`` makes it."""
    file = io.BytesIO()
    TorchFile(leaf).write(file, lambda _: None)
    file.seek(0)
    return torch.load(file, weights_only=True)
