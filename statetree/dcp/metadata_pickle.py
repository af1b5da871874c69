"""What torch pickles as a checkpoint's metadata, read without torch's classes: from a file that nobody vouches for.

Unpickling can run any code, or crash. Here the unpickler in C reads (ten thousand tensors are a million and a half
instructions), but each name stands for a class of this file that does nothing, for a dtype, or for a builtin that makes
plain values. So what comes out is plain data, and is checked here.
"""

from __future__ import annotations

import io
import pickle
import re
import reprlib
from operator import add
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch

from statetree.chunks.boxes import Box
from statetree.dcp.file_manifest import ID_PREFIX, Index, Stored
from statetree.errors import unsignalled
from statetree.files.pickled_tensors import size_of
from statetree.files.unpickling import BadPickle, damage_of
from statetree.files.untrusted import on_deep_stack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statetree.dcp.file_manifest import ManifestFile

_MODULE: Final = "torch.distributed.checkpoint.metadata"
#: No offset or length is larger.
LARGEST: Final = 2**62

T = TypeVar("T")


class StoredEntry(NamedTuple):
    """A tensor of a checkpoint: its dtype and shape, and the boxes that it is stored in. A plain value has no dtype."""

    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    boxes: tuple[Box, ...] = ()


class Described(NamedTuple):
    """What a checkpoint holds, and where."""

    entries: dict[str, StoredEntry]
    pieces: dict[Index, Stored]
    paths: dict[str, tuple[str | int, ...]]  # how DCP nests entries
    save: str | None  # which left a manifest, if one did
    files: Mapping[str, ManifestFile] | None = None  # what that lists


class _Object:
    """What stands for an object of a class of torch's: its state, as the pickle has it."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        # Without this method, a pickle could set attributes of the class, and each object would have a copy of its
        # state, which may be that of many.
        self.state = state


class _Size(_Object):
    """Gives numbers as they are: ``tuple`` would copy a list or a text, which may be many times the same one."""

    __slots__ = ()

    def __new__(cls, numbers: Any = ()) -> Any:
        return numbers


class _Ignored(_Object):
    """Layouts, memory formats, where the checkpoint was."""

    __slots__ = ()

    def __new__(cls, *_: Any) -> _Ignored:
        return super().__new__(cls)


def _stand_in(name: str) -> type[_Object]:
    return type(name, (_Object,), {"__slots__": ()})


_Bytes: Final = _stand_in("BytesStorageMetadata")
_Chunk: Final = _stand_in("ChunkStorageMetadata")
_Metadata: Final = _stand_in("Metadata")
_Index: Final = _stand_in("MetadataIndex")
_SaveMeta: Final = _stand_in("StorageMeta")
_Tensor: Final = _stand_in("TensorStorageMetadata")
_Piece: Final = _stand_in("_StorageInfo")
_Properties: Final = _stand_in("TensorProperties")
DTYPES: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
#: What torch 2.11 to 2.15 pickle as metadata.
_KNOWN: Final[dict[str, Any]] = {
    **DTYPES,
    "torch.Size": _Size,
    "torch.serialization._get_layout": _Ignored,
    f"{_MODULE}._MEM_FORMAT_ENCODING": _Ignored,
    **{
        f"{_MODULE}.{cls.__name__}": cls for cls in (_Bytes, _Chunk, _Metadata, _Index, _Properties, _SaveMeta, _Tensor)
    },
    "torch.distributed.checkpoint.filesystem._StorageInfo": _Piece,
    **{
        f"{module}.{name}": _Ignored
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


#: Instructions of pickles that take about as much memory as they are long. Those that are left out can take any amount
#: (places for what is referred to later, say): one flipped bit could end the process.
_HARMLESS: Final = re.compile(
    rb"(?:[(012Nabdelstu)}\]R\x81\x85-\x89\x8f-\x91\x93\x94]++|[Khq\x80].|M..|[Jj].{4}|[G\x95].{8}|[SV][^\n]*\n|[ILFg][^\n]{0,99}\n"
    rb"|c[^\n]*\n[^\n]*\n|p\d{1,6}\n|[UC\x8a\x8c](?:%b))*+"
    % b"|".join([re.escape(bytes([length])) + b".{%d}" % length for length in range(256)]),
    re.DOTALL,
)
#: Texts and bytes of any length, and what is referred to later: each has a number of four bytes.
_NUMBERED: Final = (pickle.BINUNICODE, pickle.BINBYTES, pickle.BINSTRING, pickle.LONG_BINPUT)


def _check_instructions(data: bytes) -> None:
    """Raise ``BadPickle`` if a pickle has an instruction that may take much more memory than it is long."""
    end = 0
    while (end := _HARMLESS.match(data, end).end()) < len(data):  # type: ignore[union-attr]  # it matches nothing, too
        code, number = data[end : end + 1], int.from_bytes(data[end + 1 : end + 5], "little")
        if code == pickle.STOP:  # what comes after it is not read
            return
        if code not in _NUMBERED or number > len(data):
            raise BadPickle(f"it has the instruction {code!r} at byte {end}, which metadata do not need")
        end += 5 if code == pickle.LONG_BINPUT else 5 + number


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in _KNOWN:
            raise BadPickle(f"it refers to {full}, which metadata does not consist of")
        return _KNOWN[full]


def read_metadata(data: bytes) -> Described:
    """Return what pickled metadata say. Raises ``BadPickle`` if they are something else."""
    _check_instructions(data)
    # All is one frame: at the end of a frame of its own, the unpickler would leave out the beginning of an instruction
    # that goes on behind it, and take what follows for instructions that nobody has looked at.
    file = io.BytesIO(b"".join([pickle.PROTO, b"\x04", pickle.FRAME, len(data).to_bytes(8, "little"), data]))
    # Tuples that are keys are hashed by C code which calls itself for each that lies in another one.
    levels = sum(map(data.count, (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)))
    try:
        found = on_deep_stack(levels, _MetadataUnpickler(file, encoding="utf-8").load)
        return _described(found)
    except (BadPickle, MemoryError):
        raise
    except unsignalled(Exception) as error:  # functions are given anything
        raise damage_of(error) from None


def _of(cls: type[T], value: Any) -> T:
    """Return a value that must be of a class."""
    if type(value) is not cls:
        raise BadPickle(f"expected a {cls.__name__}, got a {type(value).__name__}")
    return value


def _attributes(cls: type[_Object], value: Any) -> dict[str, Any]:
    """Return the attributes of an object that must be of a class."""
    return _of(dict, _of(cls, value).state)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise BadPickle(f"expected an offset or a length, got {reprlib.repr(value)}")
    return value


def box_of(start: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    """Return the box of a piece. Raises ``BadPickle`` if there is none."""
    if len(start) != len(sizes):
        raise BadPickle(f"a piece lies at {start} with the size {sizes}")
    return Box(start, (*map(add, start, sizes),))


def _described(found: Any) -> Described:
    state = _attributes(_Metadata, found)
    given, meta = state.get("planner_data"), state.get("storage_meta")
    name = _attributes(_SaveMeta, meta).get("save_id") if type(meta) is _SaveMeta else None
    save = name.removeprefix(ID_PREFIX) if isinstance(name, str) and name.startswith(ID_PREFIX) else None
    paths = {
        key: path
        for key, path in (given.items() if type(given) is dict else ())
        if type(key) is str and type(path) is tuple and path and all(type(step) in (str, int) for step in path)
    }
    entries = {_of(str, key): _entry(entry) for key, entry in _of(dict, state["state_dict_metadata"]).items()}
    pieces = {_index(index): _stored(piece) for index, piece in _of(dict, state["storage_data"]).items()}
    return Described(entries, pieces, paths, save)


def _entry(value: Any) -> StoredEntry:
    if type(value) is _Bytes:
        return StoredEntry()
    state = _attributes(_Tensor, value)
    dtype = _of(torch.dtype, _of(tuple, _of(_Properties, state["properties"]).state)[0])
    chunks = [_attributes(_Chunk, chunk) for chunk in _of(list, state["chunks"])]
    boxes = [box_of(size_of(chunk["offsets"]), size_of(chunk["sizes"])) for chunk in chunks]
    return StoredEntry(dtype, size_of(state["size"]), tuple(boxes))


def _index(value: Any) -> Index:
    state = _attributes(_Index, value)
    offset = state.get("offset")
    return Index(_of(str, state["fqn"]), None if offset is None else size_of(offset))


def _stored(value: Any) -> Stored:
    state = _attributes(_Piece, value)
    if state.get("transform_descriptors"):
        remedy = "Load it with torch.distributed.checkpoint, and save it again"
        raise BadPickle(f"it is transformed (compressed, say): expected plain files. {remedy}")
    return Stored(_of(str, state["relative_path"]), _number(state["offset"]), _number(state["length"]))
