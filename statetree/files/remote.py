"""Checkpoints behind URLs, by fsspec: paths like those of ``pathlib``, and files of which ranges are fetched.

What fsspec knows as a file system (``s3://``, ``hf://``, ``memory://``, ``https://``) is as good as a disk: a rank
fetches the ranges that it needs. ``fsspec`` (the extra ``remote``) is loaded when the first URL comes. Where URLs are
not taken, they are refused: a ``Path`` of one would be a local folder ``s3:``.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import sys
import zlib
from collections import deque
from datetime import datetime
from importlib import import_module
from itertools import chain
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakValueDictionary

from statetree.errors import CheckpointError, chain_of, check_later, suppress, unsignalled
from statetree.files.ranges import FileIdentity, OpenFiles
from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    import torch

    from statetree.files.ranges import FileRange

#: Ranges are fetched in parts of so many bytes, several at a time.
_PART_BYTES: Final = 8 << 20
_AT_ONCE: Final = 8
#: What changes with a file's content, as file systems name it.
_MARKS: Final = ("ETag", "etag", "LastModified", "mtime", "created", "checksum", "sha256", "blob_id", "size")
# A ``Path`` of a URL has lost one of its slashes. A letter alone before the colon is a drive.
_URL: Final = re.compile(r"[A-Za-z][\w+.:-]+:/")
#: The protocols of files on this machine, as fsspec names them.
_NEAR: Final = frozenset({"file", "local"})
#: How often a request is made that fails, unless with an answer.
_ATTEMPTS: Final = 3
#: The way out where the last one fails.
REACH: Final = "Check the URL, and what it takes to read it."
_ANSWERS: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


def is_url(path: Any) -> bool:
    """Whether a path looks like a URL."""
    name = os.fspath(path)
    return isinstance(name, str) and _URL.match(name.lstrip()) is not None


def located(path: Any) -> Path:
    """Return the place that a path or a URL names. ``file://`` names a path of this machine."""
    if isinstance(path, RemotePath):
        return cast("Path", path)
    text = os.fsdecode(path)
    if not is_url(text):
        return Path(text)
    protocol, slashes, rest = re.split(r":(/+)", text.lstrip(), maxsplit=1)
    if protocol in _NEAR:
        return Path(rest if slashes == "//" else f"/{rest}")
    return RemotePath.of(f"{protocol}:{'//' if slashes == '/' else slashes}{rest}")


def is_outage(error: BaseException, before: BaseException | None) -> bool:
    """Whether something could not be read since a request for it failed, to which no answer came: it may be whole.

    What was being handled ``before``, somebody else's error, says nothing of it. An answer may be an error of the
    server's in other words (huggingface_hub), or a connection that broke off (fsspec's http).
    """
    answered = False
    for each in chain_of(error, before):
        answered = answered or isinstance(each, _ANSWERS)
        if isinstance(each, (ConnectionError, TimeoutError) if answered else OSError) or _is_of_http(each):
            return True
    return False


def _is_of_http(error: BaseException) -> bool:
    """Whether it is an error of aiohttp to which no answer came, or one that asking again may change.

    Its classes are no ``OSError``, and fsspec makes a ``FileNotFoundError`` of whatever fails.
    """
    status = getattr(error, "status", 503)
    return type(error).__module__.startswith("aiohttp") and (status >= 500 or status in {408, 429})


def refuse_url(verb: str, path: Any, remedy: str = "Pass the path of a file or directory.") -> None:
    """Raise ``CheckpointError`` if a path looks like a URL."""
    if is_url(path):
        raise CheckpointError(f"{verb}: {os.fspath(path)} is no path: expected a local one, got a URL. {remedy}")


class RemotePath:
    """A place in a file system of fsspec. It does what is asked of a ``pathlib.Path`` here."""

    def __init__(self, system: Any, path: str) -> None:
        self.system = system
        self.path = path.rstrip("/")

    @classmethod
    def of(cls, url: str) -> Path:
        """Return the place that a URL names: to its users, a path."""
        try:
            system, path = import_module("fsspec.core").url_to_fs(url)
        except unsignalled(ImportError, OSError, ValueError) as error:
            msg = f"{url}: cannot be reached: {error}. Install statetree[remote], and what fsspec has for the protocol."
            raise CheckpointError(msg) from error
        return cast("Path", cls(system, path))

    def check_uncached(self, verb: str) -> None:
        """Raise ``CheckpointError`` if files are kept behind the URL, which would stay what they were before a save."""
        if isinstance(self.system, import_module("fsspec.implementations.cached").CachingFileSystem):
            what = f"{verb}: {self} is read through a cache, which would keep what is there now"
            raise CheckpointError(
                f"{what}: expected the place itself. Pass the URL behind simplecache:: or filecache::."
            )

    def __fspath__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return str(self.system.unstrip_protocol(self.path))

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and (self.system, self.path) == (other.system, other.path)

    def __hash__(self) -> int:
        return hash(self.path)

    def __lt__(self, other: RemotePath) -> bool:
        return self.path < other.path

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.system, f"{self.path}/{name}")

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine."""
        protocol = self.system.protocol
        return not _NEAR.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.system, self.path.rpartition("/")[0])

    @property
    def parents(self) -> list[RemotePath]:
        steps = self.path.split("/")
        return [RemotePath(self.system, "/".join(steps[:count])) for count in range(len(steps) - 1, 0, -1)]

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def info(self) -> dict[str, Any]:
        """Ask what lies there now. Raises ``FileNotFoundError`` if nothing does."""
        self._ask(self.system.invalidate_cache, self.parent.path)
        found: dict[str, Any] = self._read(self.system.info, self.path)
        return found

    def _ask(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return what the file system answers: whatever class of error it raises, it is one of reaching it."""
        before = sys.exception()
        try:
            return function(*args, **options)
        except OSError as error:
            if isinstance(error, _ANSWERS) and is_outage(error, before):
                cause = error.__cause__ or error.__context__
                raise OSError(f"{self} cannot be reached: {type(cause).__name__}: {cause}") from error
            raise
        except Exception as error:
            raise OSError(f"{self} cannot be reached: {type(error).__name__}: {error}") from error

    def _read(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return what the file system answers, of what changes nothing there: a request that fails is made again."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._ask(function, *args, **options)
            except unsignalled(OSError) as error:
                if isinstance(error, _ANSWERS):
                    raise
        return self._ask(function, *args, **options)

    def _kind(self) -> str:
        try:
            return str(self.info().get("type", "file"))
        except FileNotFoundError:
            return ""

    def is_dir(self) -> bool:
        """Whether it is a folder, or a DCP directory on a server that does not tell of folders."""
        kind = self._kind()
        if kind == "directory" or self.suffix:
            return kind == "directory"
        with suppress(*[OSError] * (kind == "file")):  # which a server may answer in any way: it has no folder there
            return (self / ".metadata").is_file()
        return False

    def is_file(self) -> bool:
        return self._kind() == "file"

    def exists(self) -> bool:
        return bool(self._kind())

    def resolve(self) -> RemotePath:
        """Return the place itself: there are no links."""
        return self

    def is_relative_to(self, other: RemotePath) -> bool:
        return self.path == other.path or self.path.startswith(f"{other.path}/")

    def stat(self) -> Any:
        """Return size, kind and time, as ``os.stat`` does; the time is 0 where the server does not tell it."""
        inode, info = zlib.crc32(self.path.encode()), self.info()
        times = [info.get(name) for name in ("LastModified", "mtime", "last_modified", "updated", "created")]
        seconds = [time.timestamp() if isinstance(time, datetime) else time for time in times]
        since = next((each for each in seconds if isinstance(each, (int, float))), 0.0)
        size = self.size_of(info)
        return SimpleNamespace(st_size=size, st_mode=stat.S_IFREG, st_dev=0, st_ino=inode, st_mtime=since)

    def size_of(self, info: Mapping[str, Any]) -> int:
        """Return the size out of what ``info`` says of the file."""
        if info.get("size") is None:
            raise OSError("the server does not say how large it is: expected one that serves ranges. Download it")
        return int(info["size"])

    def _rows(self) -> list[dict[str, Any]]:
        self._ask(self.system.invalidate_cache, self.path)
        rows: list[dict[str, Any]] = self._read(self.system.ls, self.path, detail=True)
        return [row for row in rows if row["name"].rstrip("/") != self.path]  # that of a file, or of the folder itself

    def iterdir(self) -> Iterator[RemotePath]:
        for row in self._rows():
            yield RemotePath(self.system, row["name"])

    def folders(self) -> list[RemotePath]:
        """Return the folders in a folder."""
        return [RemotePath(self.system, row["name"]) for row in self._rows() if row["type"] != "file"]

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files in a folder, by their names."""
        return {RemotePath(self.system, row["name"]).name: int(row["size"] or 0) for row in self._rows()}

    def read(self, start: int, stop: int) -> bytes:
        """Return a range of the file."""
        return bytes(self._read(self.system.cat_file, self.path, start=start, end=stop))

    def fetch(self, limit: int) -> bytes:
        """Return the content of a small file."""
        size = self.size_of(self.info())
        if size > limit:
            raise CheckpointError(f"{self.name} has {size} bytes: expected at most {limit}")
        return bytes(self._read(self.system.cat_file, self.path))

    def upload(self, file: Path) -> None:
        """Put a local file there. It is there as a whole, or not at all, if the file system has it so."""
        self._ask(self.system.makedirs, self.parent.path, exist_ok=True)
        self._ask(self.system.put_file, os.fspath(file), self.path)

    def write(self, data: bytes) -> None:
        """Put bytes there. They are there as a whole, or not at all, whatever the file system."""
        self._ask(self.system.makedirs, self.parent.path, exist_ok=True)
        partial = self.with_name(f"{self.name}.partial")
        self._ask(self.system.pipe_file, partial.path, data)
        if not self._is_pattern() or type(self.system).mv is not import_module("fsspec").AbstractFileSystem.mv:
            self._ask(self.system.mv, partial.path, self.path)
        else:
            self._ask(self.system.cp_file, partial.path, self.path)
            self._ask(self.system.rm_file, partial.path)

    def _is_pattern(self) -> bool:
        """Whether fsspec's ``rm`` and ``mv`` take what matches the path: that of ``run[1]`` is one of ``run1``."""
        return not self.is_local and glob.escape(self.path) != self.path

    def unlink(self) -> None:
        """Remove the file, if there is one."""
        if self.exists():
            self._ask(self.system.rm_file, self.path)

    def remove(self) -> None:
        """Remove a folder with all that lies in it."""
        if not self._is_pattern():
            self._ask(self.system.rm, self.path, recursive=True)
            return
        self._ask(self.system.invalidate_cache, self.path)
        found = self._read(self.system.find, self.path, withdirs=True, detail=True)
        for path in sorted(found, reverse=True):  # what lies in a folder before the folder
            if found[path]["type"] != "directory":
                self._ask(self.system.rm_file, path)
            else:
                with suppress(OSError):  # an object store has no folders
                    self._ask(self.system.rmdir, path)


class RemoteFiles(OpenFiles):
    """The files of a checkpoint behind a URL. Nothing is held open, and no memory is mapped: ranges are fetched."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._memory: WeakValueDictionary[Any, torch.UntypedStorage] = WeakValueDictionary()

    is_remote = True

    def identity(self, path: Path) -> FileIdentity:
        """Return what a file was when it was first looked at."""
        if path not in self._identities:
            self._identities[path] = self._now(path)
        return self._identities[path]

    def _now(self, path: Path) -> FileIdentity:
        place = cast("RemotePath", path)
        try:
            info = place.info()
            size = place.size_of(info)
        except unsignalled(FileNotFoundError):
            refuse(path, "there is no such file", "Check the name.")
        except unsignalled(OSError) as error:
            refuse(path, f"it cannot be reached: {error}", REACH)
        mark = zlib.crc32(repr([str(info.get(name)) for name in _MARKS]).encode())
        return FileIdentity(0, zlib.crc32(str(path).encode()), size, mark, 0)

    def check(self, path: Path) -> None:
        """Have it looked at once more when the verb ends: each look is a request."""
        check_later(self._look_again, path)

    def _look_again(self, path: Path) -> None:
        if not self._now(path).is_as(self.identity(path)):
            refuse(path, "it was changed while it was read: expected the file that was opened", "Open it again.")

    def fill(self, file: FileRange, view: memoryview, offset: int) -> None:
        """Fill memory with the bytes of a file from an offset on, several parts at a time."""
        place = cast("RemotePath", file.path)

        def fetch(first: int) -> Generator[None, None, None]:
            part = view[first : first + _PART_BYTES]
            data = place.read(offset + first, offset + first + len(part))
            if len(data) > len(part):
                what = f"the server sent {len(data)} bytes for {len(part)}: it serves no ranges"
                refuse(file.label, what, "Download it.")
            if len(data) < len(part):
                refuse(file.label, f"it ends after {len(data)} of {len(part)} bytes: it was cut off while it was read")
            part[:] = data
            yield

        jobs = list(map(fetch, range(0, len(view), _PART_BYTES)))
        try:
            if len(jobs) < 2:
                deque(chain.from_iterable(jobs), maxlen=0)
            else:
                from statetree.files.job_threads import in_threads  # which imports torch

                in_threads(jobs, _AT_ONCE)
        except unsignalled(OSError) as error:
            refuse(file.label, f"it cannot be read: {error}", REACH)
        self.nbytes_read += len(view)

    def mapped(self, file: FileRange) -> torch.UntypedStorage:
        """Return bytes of a file as a storage, which is fetched, once for all who hold it, and compared then."""
        import torch

        from statetree.files.strided_reading import memory_view

        place = file.path, file.start, file.length
        found = self._memory.get(place)
        if found is None:
            found = torch.UntypedStorage(file.length, device="cpu")
            data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(found)
            file.fill(memory_view(data), 0)
            self._memory[place] = found
        return found
