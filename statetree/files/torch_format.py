"""What ``torch.save`` writes: a pickle, and storages that are mapped into memory, in an archive (since torch 1.6)."""

from __future__ import annotations

import io
import re
import sys
import warnings
from functools import partial
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from statetree.chunks.boxes import whole_box
from statetree.errors import CheckpointError, CyclicTree, TreeTooDeep, UnsupportedLeaf, suppress, unsignalled, warn
from statetree.files.checkpoint import CheckpointFormat, OpenedCheckpoint, whole_tensors
from statetree.files.crc32 import crc32
from statetree.files.filling import check_dims, check_elements
from statetree.files.hugging_face import INDEX, SAFETENSORS_NAMES, TORCH_NAMES, file_in, read_index
from statetree.files.pickled_tensors import MAX_DIMS, find, storages
from statetree.files.ranges import FileRange, OpenFiles
from statetree.files.shared_bytes import is_loose
from statetree.files.stored import StoredPiece, StoredTensor
from statetree.files.torch_members import LEGACY, REWRITE, read_legacy, read_members
from statetree.files.unpickling import BadPickle, StoredObject, all_within, read_pickle
from statetree.files.untrusted import refuse
from statetree.leaves.parts import unpack
from statetree.leaves.types.special import QUANTIZED, is_strided
from statetree.spans.layout import holds_memory
from statetree.torch_internals import check_sparse_indices, storage_key
from statetree.transforms.offload import offload
from statetree.tree.flatten import flatten
from statetree.tree.mapping import map_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from statetree.files.checkpoint import SaveOptions
    from statetree.tree.spec import TreeSpec

_MAX_PICKLE_BYTES: Final = 1 << 30
#: Where members begin that processors can read any numbers from. (Those that torch writes begin at multiples of 64.)
_ALIGNMENT: Final = 16
#: What is made of elements as the pickle is read, but for strided tensors, whose elements can be read later.
_MADE_OF_ELEMENTS: Final = (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage, torch.Generator)
#: The part of what ``torch.load`` says that is not advice for its callers.
_REASON: Final = re.compile(
    r"(?:WeightsUnpickler error: |(?=Unsupported (?:global|class|operand)|Trying to load))(.*?)(?:\. | Check the doc|$)"
)


class TorchArchive:
    """A file of ``torch.save``, or what DCP keeps of an entry in one.

    Its ``members`` are those of the archive by name; of a file of torch before 1.6, the storages by key.
    """

    def __init__(self, file: FileRange) -> None:
        self.file = file
        self.foreign: list[str] = []  # classes and functions that its pickle names and that are not known, once read
        self._storages: dict[tuple[str, str], torch.UntypedStorage] = {}
        self._places: dict[int, FileRange] = {}
        self._stored: dict[int, StoredTensor] = {}
        self._prefix = ""
        self._legacy_pickle: bytes | None = None
        if file.length >= len(LEGACY[0]) and file.read(0, len(LEGACY[0]), "its beginning") in LEGACY:
            self._legacy_pickle, self.members = read_legacy(file)
        else:
            self.members = read_members(file)
            self._check_members()

    def _check_members(self) -> None:
        pickles = [name for name in self.members if name.endswith("/data.pkl") and name.count("/") == 1]
        if any(name.endswith("/constants.pkl") for name in self.members):
            remedy = "Load it with torch.jit.load, and save its state_dict() with torch.save."
            self.refuse("it is a file of TorchScript, which holds code", remedy)
        if any(name.endswith(".npy") for name in self.members):
            self.refuse("it is a NumPy archive (.npz)", "Register a format (docs/howto/file_format.md has this one).")
        if len(pickles) != 1:
            self.refuse("it holds no data.pkl, or several: it is no file of torch.save")
        self._prefix = pickles[0].removesuffix("data.pkl")
        outside = next((name for name in self.members if not name.startswith(self._prefix)), None)
        if outside is not None:
            self.refuse(f"the member {outside!r} does not lie in {self._prefix}")
        if f"{self._prefix}byteorder" in self.members:
            order = self._content("byteorder", 16)
            if order != sys.byteorder.encode():
                self.refuse(f"its byte order is {order!r}: expected {sys.byteorder}", REWRITE)

    def refuse(self, what: str, *remedy: str) -> NoReturn:
        """Raise ``CheckpointError``."""
        refuse(self.file.label, what, *remedy)

    def _content(self, name: str, limit: int = _MAX_PICKLE_BYTES) -> bytes:
        member = self.members[f"{self._prefix}{name}"]
        if member.nbytes > limit:
            self.refuse(f"the member {member.name!r} has {member.nbytes} bytes: expected at most {limit}")
        data = self.file.read(member.start, member.nbytes, f"the member {member.name!r}")
        if self.file.files.verify and member.crc is not None and crc32(data) != member.crc:
            self.refuse(f"the member {member.name!r} has the checksum {crc32(data):08x}: expected {member.crc:08x}")
        return data

    def read(self, device: str = "cpu") -> Any:
        """Return the tree, its tensors on ``meta``, or (on the CPU) in memory that is mapped from the file."""
        data = self._content("data.pkl") if self._legacy_pickle is None else self._legacy_pickle
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that typed storages, quantized and nested tensors are old or new
                tree, self.foreign = read_pickle(data, find, storages(partial(self._memory, device)))
        except BadPickle as bad:
            self.refuse(f"the pickle in {self._prefix}data.pkl: {bad}")
        return tree

    def _memory(self, device: str, key: str, count: int, itemsize: int) -> torch.UntypedStorage:
        """Return the memory of a storage. Raises ``BadPickle`` if the archive has none of this key and size."""
        member = self.members.get(f"{self._prefix}data/{key}" if self._legacy_pickle is None else key)
        if member is None:
            raise BadPickle(f"it has a tensor on the storage {key[:40]!r}, which the archive does not hold")
        nbytes = count * itemsize
        if nbytes != member.nbytes:
            raise BadPickle(f"it says that the storage {member.name!r} has {nbytes} bytes: it has {member.nbytes}")
        if (device, key) not in self._storages:
            place = self.file.part(member.start, member.nbytes, member.name)
            is_checked = self.file.files.verify and member.crc is not None
            checked = place.checked(f"the member {member.name!r}", member.crc or 0) if is_checked else place
            # What is fetched is compared as it comes; what is mapped, when it is read.
            source = checked if self.file.files.is_remote else place
            storage = source.mapped() if device == "cpu" else torch.UntypedStorage(nbytes, device=device)
            self._storages[device, key] = storage = storage if member.start % _ALIGNMENT == 0 else storage.clone()
            self._places[storage_key(storage)] = checked
        return self._storages[device, key]

    def piece(self, tensor: Any) -> StoredPiece | None:
        """Return where the elements of a strided tensor lie; ``None`` if it is none, but something else in the tree."""
        is_view = type(tensor) in (torch.Tensor, torch.nn.Parameter) and is_strided(tensor)
        file = self._places.get(storage_key(tensor.untyped_storage())) if is_view else None
        if file is None:
            return None
        offset, bits = int(tensor.storage_offset()), (tensor.is_conj(), tensor.is_neg())
        return StoredPiece(whole_box(tensor.shape), file, tensor.stride(), offset, bits)

    def needs_elements(self, tree: Any) -> bool:
        """Whether a tree that was read on ``meta`` holds what cannot be read later, unlike a strided leaf."""
        later = {id(leaf): leaf for leaf in flatten(tree)[0] if self.piece(leaf) is not None}
        held = all_within([tree, *map(vars, later.values())])
        return any(isinstance(each, _MADE_OF_ELEMENTS) and id(each) not in later for each in held)

    def verify_values(self, tree: Any) -> None:
        """Compare the memory of what lies in plain values with its checksums, as nobody does later."""
        if not self.file.files.verify or not self._places:
            return
        for leaf in flatten(tree)[0]:
            for held in () if isinstance(leaf, torch.Tensor) else all_within(leaf):
                for part in _parts_of(held) if isinstance(held, _MADE_OF_ELEMENTS) else ():
                    if (place := self._places.get(storage_key(part.untyped_storage()))) is not None:
                        place.verify()

    def stored(self, leaf: Any) -> Any:
        """Return what stands for a leaf of the tree, one object for each."""
        if isinstance(leaf, (torch.UntypedStorage, torch.storage.TypedStorage)):
            storage: Any = leaf
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that typed storages are old
                return storage.clone()  # the file may change
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self._stored:
            piece = self.piece(leaf)
            # Not a method: the archive, its map and its file would lie in a cycle.
            check = partial(_check, self.file, self._places, leaf if piece is None else None)
            self._stored[id(leaf)] = StoredTensor(leaf, check, None if piece is None else lambda _: [piece])
        return self._stored[id(leaf)]

    def verify(self) -> int:
        """Compare the members with their checksums, and return how many there are."""
        members = [member for member in self.members.values() if member.crc is not None]
        for member in members:
            member.verify(self.file)
        return len(members)


def _check(file: FileRange, places: Mapping[int, FileRange], composite: torch.Tensor | None) -> None:
    """Look at a file again, and compare what a tensor is made of that is no strided one with its checksums."""
    file.files.check(file.path)
    if composite is None:
        return
    for part in _parts_of(composite):
        place = places.get(storage_key(part.untyped_storage()))
        if place is not None:
            place.verify()
    try:
        check_sparse_indices(composite)
    except unsignalled(RuntimeError) as error:
        refuse(file.label, f"the indices of a sparse tensor are wrong: {str(error).splitlines()[0]}")


def _parts_of(tensor: Any) -> Sequence[torch.Tensor]:
    """Return the plain tensors that a tensor or a storage is made of; none of a dtype that no verb takes apart."""
    if type(tensor) is torch.Tensor and not tensor.__dict__ and is_strided(tensor):  # the usual case
        return [tensor]
    with suppress(UnsupportedLeaf):
        return unpack("save", [tensor], list).parts
    return ()


class TorchFormat(CheckpointFormat):
    """Files of ``torch.save``: zip archives, and what torch before 1.6 wrote."""

    title = "torch file"
    suffixes = (".pt", ".pth", ".ckpt", ".bin")

    def recognises(self, path: Path, beginning: bytes) -> bool:
        """Whether a file is a zip archive, what older versions of torch wrote, or the index of several."""
        if path.is_dir():
            return file_in(path, TORCH_NAMES) is not None and file_in(path, SAFETENSORS_NAMES) is None
        is_index = path.name.lower().endswith(f".bin{INDEX}") and beginning.lstrip()[:1] == b"{"
        return is_index or beginning[:4] in (b"PK\x03\x04", b"PK\x05\x06") or beginning.startswith(LEGACY)

    def open(self, path: Path, files: OpenFiles, *, skip_foreign: bool) -> OpenedCheckpoint:
        """Open a file, or the index of several."""
        file = files.open((file_in(path, TORCH_NAMES) or path) if path.is_dir() else path)
        archives: list[TorchArchive] = []

        def read(shard: FileRange) -> Any:
            archives.append(TorchArchive(shard))
            tree = archives[-1].read("meta" if files.is_remote else "cpu")
            if files.is_remote and archives[-1].needs_elements(tree):
                tree = archives[-1].read()
            archives[-1].verify_values(tree)
            return map_leaves(archives[-1].stored, tree)

        def read_mapping(shard: FileRange) -> dict[str, Any]:
            tree = read(shard)
            return dict(tree) if isinstance(tree, dict) else archives[-1].refuse("it holds no mapping")

        try:
            tree = read_index(file, read_mapping) if file.path.name.lower().endswith(INDEX) else read(file)
            leaves = flatten(tree)[0]
        except (CyclicTree, TreeTooDeep) as error:
            what = "is nested too deeply" if isinstance(error, TreeTooDeep) else "has a container that holds itself"
            refuse(path, f"the pickle in data.pkl {what}, at {error.path or '<root>'}")
        foreign = [name for archive in archives for name in archive.foreign]
        foreign += [leaf.name for leaf in leaves if isinstance(leaf, StoredObject)]
        foreign = list(dict.fromkeys(foreign))
        if foreign and not skip_foreign:
            what = f"it holds objects of classes that are not loaded ({', '.join(foreign[:5])})"
            remedy = "If you trust it, load it with torch.load(weights_only=False), and save what you need."
            refuse(path, what, remedy)
        return OpenedCheckpoint(
            tree, self.title, files, foreign, verify=lambda: sum(archive.verify() for archive in archives)
        )

    def write(self, tree: Any, folder: Path, name: str, options: SaveOptions) -> list[str]:  # noqa: ARG002
        """Write a file, of each storage what lies between the first and the last element that the tree has."""
        tree = whole_tensors(tree)
        leaves, spec = flatten(tree)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                _check_readable(leaf, spec, index)
        try:
            save_as(offload(tree) if is_loose(leaves) else tree, folder / name)
        except (CheckpointError, OSError):
            raise
        except unsignalled(Exception) as error:  # whatever the values' own methods raise
            what = f"torch cannot save the {_culprit(tree)}: {type(error).__name__}: {str(error)[:200]}"
            raise CheckpointError(f"save: {what}. Leave it out (select).") from error
        try:  # by the names in the pickle: tensors are neither made nor mapped
            refused = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(folder / name)[:5])
        except UnpicklingError as error:
            refused = gist(error)
        if refused:
            what = f"the {_culprit(tree, refused)} holds what torch.load(weights_only=True) refuses: {refused}"
            remedy = "Leave it out (select), or save a directory (a name without suffix)."
            raise CheckpointError(f"save: {what}. {remedy}")
        foreign = _foreign(folder / name) if _may_be_foreign(leaves) else []
        if foreign:
            what = f"load makes no objects of what the torch file holds ({', '.join(foreign[:5])})"
            warn(f"save: {what}. Read it with torch.load, or save a directory (a name without suffix).")
        return [name]


def _check_readable(leaf: torch.Tensor, spec: TreeSpec, index: int) -> None:
    """Raise ``UnsupportedLeaf`` if a leaf is what torch writes, and nobody can read."""
    if leaf.dtype in QUANTIZED:  # of which some pack several numbers into a byte
        unpack("save", [leaf], lambda: [spec.paths()[index]])
    parts = _parts_of(leaf)
    if parts and leaf.dim() > MAX_DIMS:
        check_dims("save", leaf, spec.paths()[index])
    for part in parts:
        if not holds_memory(part):
            check_elements("save", part, spec.paths()[index])


def _may_be_foreign(leaves: Sequence[Any]) -> bool:
    """Whether torch.load may make what nothing here does: users have it admit classes, and torch jagged tensors."""
    if any(isinstance(leaf, torch.Tensor) and leaf.layout is torch.jagged for leaf in leaves):
        return True
    classes = [listed[0] if isinstance(listed, tuple) else listed for listed in torch.serialization.get_safe_globals()]
    return any(str(getattr(listed, "__module__", "torch")).split(".")[0] != "torch" for listed in classes)


def _foreign(path: Path) -> list[str]:
    """Return the names of classes in a file of which nothing here makes objects."""
    archive = TorchArchive(OpenFiles(verify=False).open(path))
    with suppress(CheckpointError):  # of leaves that are made of elements, which are not read
        leaves = flatten(archive.read("meta"))[0]
        return [*archive.foreign, *(leaf.name for leaf in leaves if isinstance(leaf, StoredObject))]
    return archive.foreign


def _culprit(tree: Any, refused: str = "") -> str:
    """Return which value of a tree that was refused is refused by itself, for a message; ``refused`` names classes."""
    leaves, spec = flatten(tree)

    def refused_leaf(*, is_tensor: bool) -> str:
        for path, leaf in zip(spec.paths(), leaves, strict=True):
            if isinstance(leaf, torch.Tensor) is is_tensor and not is_loaded(leaf):
                return f"leaf at {path or '<root>'} ({type(leaf).__qualname__})"
        return ""

    def refused_container() -> str:
        for visit in spec.walk():
            cls = visit.cls
            # Not a builtin one: a defaultdict names what it makes.
            if cls and cls.__module__ != "builtins" and f"{cls.__module__}.{cls.__qualname__}" in refused.split(", "):
                return f"{cls.__qualname__} at {visit.path or '<root>'}"
        return ""

    # A leaf first: what it holds can be of a class that a container has, too. Trying tensors takes long.
    return refused_leaf(is_tensor=False) or refused_container() or refused_leaf(is_tensor=True) or "tree"


class _Stream:
    """A file to write to, until it is closed."""

    def __init__(self, file: Any) -> None:
        self.write = file.write

    def flush(self) -> None:
        """There is nothing to flush: whoever opened the file does that."""

    def close(self) -> None:
        # A writer of torch that broke off writes once more when it is freed. If that raises, the process ends.
        self.write = len


def save_as(value: Any, path: Path) -> None:
    """Write a value as ``torch.save`` does to a file that is not there yet, and raise what writing raises."""
    handled = sys.exception()
    with path.open("xb") as file:
        stream: Any = _Stream(file)
        try:
            torch.save(value, stream)
        except unsignalled(RuntimeError) as error:
            hidden = error.__context__  # torch's writer closes the archive, and raises that it is not whole
            if hidden is None or hidden is handled:
                raise
            raise hidden from None
        finally:
            stream.close()


def is_loaded(value: Any) -> bool:
    """Whether ``torch.load(weights_only=True)`` takes a plain value."""
    if type(value) in (int, float, str, bool, type(None), bytes) and (type(value) is not int or abs(value) < 1 << 1024):
        return True
    file = io.BytesIO()
    try:
        torch.save(value, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except unsignalled(Exception):  # whatever it is, loading would raise it
        return False
    return True


def gist(error: Exception) -> str:
    """Return what an error of ``torch.load`` says that is of use to others than its callers."""
    text = " ".join(str(error)[:10_000].split())
    found = _REASON.search(text)
    return (found[1] if found else text)[:200]
