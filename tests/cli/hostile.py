"""Files made by hand, with one fault each."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import torch


class ZipWriter:
    """Writes an archive, its members' bytes aligned as torch aligns them, to an empty file (a context manager)."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._archive = ZipFile(file, "w")

    def __enter__(self) -> ZipWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def add(self, name: str, nbytes: int, pieces: list[bytes]) -> None:
        """Write a member, a piece at a time."""
        info = ZipInfo(name)
        info.file_size = nbytes
        is_large = nbytes >= (1 << 30)
        begin = self._file.tell() + 30 + len(name.encode()) + 20 * is_large + 4
        padding = -begin % 64
        info.extra = struct.pack("<2H", 0x4246, padding) + b"Z" * padding
        with self._archive.open(info, "w", force_zip64=is_large) as member:
            for piece in pieces:
                member.write(piece)
        assert info.file_size == nbytes, (name, info.file_size, nbytes)


def archive(path: Path, data_pkl: bytes, storages: dict[str, bytes] | None = None, **more: bytes) -> Path:
    """A sound zip archive of torch with a given pickle."""
    with path.open("wb") as file, ZipWriter(file) as writer:
        members = {"data.pkl": data_pkl, "byteorder": b"little", "version": b"3\n", **more}
        members |= {f"data/{key}": data for key, data in (storages or {}).items()}
        for name, data in members.items():
            writer.add(f"archive/{name}", len(data), [data])
    return path


def pickled(path: Path) -> bytes:
    """The pickle in an archive."""
    with ZipFile(path) as file:
        name = next(name for name in file.namelist() if name.endswith("data.pkl"))
        return file.read(name)


class Raw:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


class Storage:
    """Pickles as the persistent id of a storage."""

    def __init__(self, key: Any, numel: Any, cls: Any = torch.FloatStorage) -> None:
        self.pid = ("storage", cls, key, "cpu", numel)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Storage) else None


def pickle_of(tree: Any) -> bytes:
    """Pickle a tree as torch does, with ``Storage`` and ``Raw`` in it."""
    file = io.BytesIO()
    _Pickler(file, 2).dump(tree)
    return file.getvalue()


def tensor(key: Any = "0", numel: Any = 4, offset: Any = 0, size: Any = (4,), stride: Any = (1,)) -> Raw:
    """A tensor on a storage, as torch pickles it."""
    return Raw(torch._utils._rebuild_tensor_v2, Storage(key, numel), offset, size, stride, False, {})


def bomb(path: Path, unpacked: int = 2 << 30) -> Path:
    """A torch archive with a compressed storage: two gigabytes of zeros in two megabytes."""
    block = bytes(1 << 20)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    one = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = one * (unpacked >> 20) + packer.flush()
    with ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle_of({"w": tensor(numel=unpacked // 4, size=(unpacked // 4,))}))
        file.writestr("archive/version", b"3\n")
        info = ZipInfo("archive/data/0")
        info.compress_type = ZIP_DEFLATED
        start = file.fp.tell()
        info.header_offset = start
        info.file_size, info.compress_size = unpacked, len(packed)
        for _ in range(unpacked >> 20):
            info.CRC = zlib.crc32(block, info.CRC if hasattr(info, "CRC") else 0)
        file.fp.write(info.FileHeader(zip64=False) + packed)
        file.start_dir = file.fp.tell()
        file.filelist.append(info)
        file.NameToInfo[info.filename] = info
        file._didModify = True
    return path


def safetensors(path: Path, header: Any, data: bytes = b"", size: int | None = None) -> Path:
    """A safetensors file with a given header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    return path
