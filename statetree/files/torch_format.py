"""What ``torch.save`` writes: opened by ``torch.load``, mapped into memory, once it was looked at."""

from __future__ import annotations

import io
import re
import sys
import warnings
from functools import partial
from pickle import PicklingError, UnpicklingError
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from statetree.chunks.boxes import Box
from statetree.errors import CheckpointError
from statetree.files.checkpoint import CheckpointFormat, OpenedCheckpoint
from statetree.files.ranges import OpenFiles
from statetree.files.safe_pickle import BadPickle
from statetree.files.stored import StoredObject, StoredPiece, StoredTensor, span_bytes, whole_tensors
from statetree.files.torch_pickles import PickledTree, StridedOutline, read_pickle
from statetree.files.untrusted import printable, refuse
from statetree.files.zip_archive import REWRITE, is_zip, read_members
from statetree.torch_internals import check_sparse_indices
from statetree.transforms.offload import offload
from statetree.tree.flatten import flatten
from statetree.tree.mapping import map_leaves

if TYPE_CHECKING:
    from pathlib import Path

    from statetree.files.checkpoint import SaveOptions
    from statetree.files.ranges import FileRange

_MAX_PICKLE_BYTES: Final = 1 << 30
#: What files of torch before 1.6 begin with.
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
#: What torch raises for files that it cannot load.
_REFUSALS: Final = (
    *(UnpicklingError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, EOFError, AssertionError),
    *(NotImplementedError, MemoryError, OverflowError),
)


class TorchArchive:
    """A zip archive of ``torch.save``: a file, or what DCP keeps of an entry in one.

    Attributes:
        members: Its members by name.
        pickled: What its pickle says.
    """

    def __init__(self, place: FileRange) -> None:
        self.place = place
        self.members = read_members(place)
        pickles = [name for name in self.members if name.endswith("/data.pkl") and name.count("/") == 1]
        if any(name.endswith("/constants.pkl") for name in self.members):
            remedy = "Load it with torch.jit.load, and save its state_dict() with torch.save."
            self.refuse("it is a file of TorchScript, which holds code", remedy)
        if len(pickles) != 1:
            self.refuse("it holds no data.pkl, or several: it is no file of torch.save")
        self.prefix = pickles[0].removesuffix("data.pkl")
        outside = next((name for name in self.members if not name.startswith(self.prefix)), None)
        if outside is not None:
            self.refuse(f"the member {outside!r} does not lie in {self.prefix}")
        if f"{self.prefix}byteorder" in self.members:
            order = self._content("byteorder", 16)
            if order != sys.byteorder.encode():
                self.refuse(f"its byte order is {order!r}: expected {sys.byteorder}", REWRITE)
        try:
            self.pickled: PickledTree = read_pickle(self._content("data.pkl"), self.prefix, self.members)
        except BadPickle as bad:
            self.refuse(f"the pickle in {pickles[0]}: {bad}")

    def refuse(self, what: str, *remedy: str) -> NoReturn:
        """Raise ``CheckpointError``."""
        refuse(self.place.label, what, *remedy)

    def _content(self, name: str, limit: int = _MAX_PICKLE_BYTES) -> bytes:
        member = self.members[f"{self.prefix}{name}"]
        if member.nbytes > limit:
            self.refuse(f"the member {member.name!r} has {member.nbytes} bytes: expected at most {limit}")
        return self.place.read(member.start, member.nbytes, f"the member {member.name!r}")

    def storage(self, key: str) -> FileRange:
        """Return where the bytes of a storage lie."""
        member = self.members[f"{self.prefix}data/{key}"]
        return self.place.part(member.start, member.nbytes, member.name)

    def load(self, *, skip_foreign: bool = False) -> Any:
        """Return the tree, with ``StoredTensor`` for its tensors where the archive is a whole file.

        Args:
            skip_foreign: Whether objects of classes that ``weights_only`` does not admit become ``StoredObject``;
                otherwise they are refused.

        Raises:
            CheckpointError: If torch does not load it.
        """
        foreign = self.pickled.foreign
        damaged = [name for name in foreign if name.startswith("torch._utils.") and name[13:] not in vars(torch._utils)]  # noqa: SLF001
        if damaged:
            self.refuse(f"it refers to {printable(damaged[0])}, which torch does not have")
        if foreign and not skip_foreign:
            what = f"it holds objects that torch.load(weights_only=True) refuses ({', '.join(foreign[:5])})"
            self.refuse(what, "If you trust it, load it with torch.load(weights_only=False), and save what you need.")
        stubs: list[Any] = [(type("StoredObject", (StoredObject,), {"name": name}), name) for name in foreign]
        loader = _Mapped(self) if self.place.start == 0 and self.place.length == self.whole_bytes() else None
        source: Any = loader.name if loader else io.BytesIO(self.place.read(0, self.place.length, "its bytes"))
        kept = torch.serialization.get_safe_globals()
        admitted = {getattr(item, "__name__", "") for item in kept if not isinstance(item, tuple)}
        clash = [name for name in foreign if name.rpartition(".")[2] in admitted]
        if clash:
            self.refuse(f"it holds {clash[0]}, of which no part is loaded", "Gather it before it is saved.")
        try:
            with warnings.catch_warnings(), torch.serialization.safe_globals(stubs):
                warnings.simplefilter("ignore")
                tree = torch.load(
                    source, weights_only=True, mmap=loader is not None, map_location=loader.place if loader else "cpu"
                )
        except _REFUSALS as error:
            self.refuse(f"torch cannot load it: {type(error).__name__}: {_reason(error)}")
        return tree if loader is None else loader.stored(tree)

    def whole_bytes(self) -> int:
        """Return how many bytes the file has that the archive lies in."""
        return self.place.files.identity(self.place.path).nbytes

    def verify(self) -> int:
        """Compare the members with their checksums. Returns how many there are.

        Raises:
            CheckpointError: If one does not agree.
        """
        for member in self.members.values():
            member.verify(self.place)
        return len(self.members)

    def strided(self) -> StridedOutline | None:
        """Return the strided tensor that the archive holds, if it is one."""
        tree = self.pickled.tree
        return tree if isinstance(tree, StridedOutline) else None


def _untyped(storage: Any) -> torch.UntypedStorage:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's typed storages are old
        found: torch.UntypedStorage = storage.untyped()
    return found


def _reason(error: BaseException) -> str:
    """Return what torch says is wrong, without the paragraphs of advice around it."""
    text = str(error).strip()
    found = re.search(r"(Trying to|Unsupported|Can only|WeightsUnpickler error:)[^\n]*", text)
    return printable((found[0] if found else text)[:200])


class _Mapped:
    """The storages that torch maps, in the order in which it does: where each lies in the file."""

    def __init__(self, archive: TorchArchive) -> None:
        self._archive = archive
        self._keys = iter(archive.pickled.keys)
        self._places: dict[int, FileRange] = {}
        self.files = archive.place.files
        self.path = archive.place.path
        self.name = self.files.by_descriptor(self.path)

    def place(self, storage: Any, _location: str) -> Any:
        """Note where a storage lies. Torch calls it for each that it loads."""
        untyped = _untyped(storage)
        if untyped.nbytes():
            found = self._archive.storage(next(self._keys))
            assert found.length == untyped.nbytes(), (found.label, untyped.nbytes())
            self._places[untyped.data_ptr()] = found
        return storage

    def stored(self, tree: Any) -> Any:
        """Return a tree with ``StoredTensor`` in the place of its tensors, each tensor object once."""
        made: dict[int, Any] = {}

        def store(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in made:
                made[id(leaf)] = (self._stored(leaf), leaf)
            return made[id(leaf)][0]

        return map_leaves(store, tree)

    def _stored(self, tensor: torch.Tensor) -> StoredTensor:
        is_strided = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not is_strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            return StoredTensor(tensor, partial(self._check_whole, tensor), None)
        found = self._places.get(tensor.untyped_storage().data_ptr())
        whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
        bits = (tensor.is_conj(), tensor.is_neg())
        pieces = [StoredPiece(whole, found, tensor.stride(), int(tensor.storage_offset()), bits)] if found else []
        return StoredTensor(tensor, self._check, lambda: pieces)

    def _check(self) -> None:
        self.files.check(self.path)

    def _check_whole(self, tensor: torch.Tensor) -> None:
        self._check()
        try:
            check_sparse_indices(tensor)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self._archive.refuse(
                f"the indices of a sparse tensor of the shape {list(tensor.shape)} are wrong: {reason}"
            )


class TorchFormat(CheckpointFormat):
    """Zip files of ``torch.save``."""

    title = "torch file"
    suffixes = (".pt", ".pth", ".ckpt", ".bin")

    def recognises(self, path: Path, beginning: bytes) -> bool:  # noqa: ARG002 - as the base class has it
        """Whether a file is a zip archive, or what older versions of torch wrote."""
        return beginning[:4] in (b"PK\x03\x04", b"PK\x05\x06") or beginning.startswith(_LEGACY)

    def open(self, path: Path, files: OpenFiles, *, skip_foreign: bool) -> OpenedCheckpoint:
        """Open a file."""
        place = files.open(path)
        if not is_zip(place):
            remedy = "If you trust it, load it with torch.load, and save it again with torch.save."
            refuse(path, "torch before 1.6 wrote it: expected a zip archive of torch.save", remedy)
        archive = TorchArchive(place)
        tree = archive.load(skip_foreign=skip_foreign)
        return OpenedCheckpoint(tree, self.title, files, archive.pickled.foreign, verify=archive.verify)

    def write(self, tree: Any, folder: Path, name: str, options: SaveOptions) -> list[str]:  # noqa: ARG002
        """Write a file, of each storage what lies between the first and the last element that the tree has."""
        tree = whole_tensors(tree, keeps_strides=True)
        try:
            torch.save(offload(tree) if _is_loose(tree) else tree, folder / name)
        except (*_REFUSALS, PicklingError, RecursionError) as error:
            msg = (
                f"save: torch cannot save the tree: {type(error).__name__}: {str(error)[:200]}. Leave it out (select)."
            )
            raise CheckpointError(msg) from error
        foreign = TorchArchive(OpenFiles().open(folder / name)).pickled.foreign
        if foreign:
            msg = (
                f"save: the tree holds what torch.load(weights_only=True) refuses: {', '.join(foreign[:5])}. Leave it "
                "out (select), or convert it to plain values."
            )
            raise CheckpointError(msg)
        return [name]


def _is_loose(tree: Any) -> bool:
    """Whether storages are much larger than what the tree's tensors view of them."""
    held: dict[int, tuple[int, int, int]] = {}
    for tensor in flatten(tree)[0]:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
            if tensor.is_nested or tensor.is_quantized or tensor.is_meta or not tensor.numel():
                continue
            storage = tensor.untyped_storage()
            begin = tensor.storage_offset() * tensor.dtype.itemsize
            low, high, _ = held.get(storage.data_ptr(), (begin, begin, 0))
            stop = begin + span_bytes(tensor)
            held[storage.data_ptr()] = (min(low, begin), max(high, stop), storage.nbytes())
    return any(size - (high - low) > max(4096, size // 4) for low, high, size in held.values())
