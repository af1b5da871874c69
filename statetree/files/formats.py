"""Checkpoints opened and saved: the format is detected from what a file begins with."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from numbers import Real
from operator import call as call_alone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from statetree.declare import phase
from statetree.errors import CheckpointError, StateTreeError, unsignalled, with_checks
from statetree.exchange.call import Call, on_all_ranks
from statetree.exchange.consensus import Fingerprint
from statetree.exchange.group import group_of
from statetree.files.checkpoint import CheckpointFormat, OpenedCheckpoint, SaveOptions
from statetree.files.publishing import Together, upload_whole, write_whole
from statetree.files.ranges import OpenFiles
from statetree.files.remote import REACH, RemoteFiles, RemotePath, is_url, located
from statetree.files.safetensors_format import SafetensorsFormat
from statetree.files.torch_format import TorchFormat
from statetree.files.untrusted import refuse
from statetree.leaves.lowering import lie_on_ranks
from statetree.transforms.gather import gather
from statetree.tree.flatten import flatten_for

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch.distributed import ProcessGroup

    from statetree.exchange.group import Group

_FORMATS: Final[list[CheckpointFormat]] = [TorchFormat(), SafetensorsFormat()]
#: A format in a package above this one, which is loaded when a directory is met.
_DIRECTORIES: Final = ("statetree.dcp.stored_directory", "FORMAT")
#: What else is often found where a checkpoint should be, by how it begins.
_OTHERS: Final = {
    b"version https://git-lfs": ("a pointer of Git LFS, not the file itself", "Fetch it with: git lfs pull."),
    b"<!doctype html": ("an HTML page", "Download the file itself: a page was saved in its place."),
    b"<html": ("an HTML page", "Download the file itself: a page was saved in its place."),
    b"GGUF": ("a GGUF file", "Convert it with the tools of llama.cpp."),
    b"\x89HDF": ("an HDF5 file", "Load it with h5py, and save its tensors."),
}


def register_format(checkpoint_format: CheckpointFormat) -> None:
    """Have ``open`` and ``save`` know another format of checkpoints, which goes before those that they know.

    Args:
        checkpoint_format: An instance of a class derived from ``CheckpointFormat``.

    Raises:
        TypeError: If it is something else.
    """
    given: Any = checkpoint_format
    if not isinstance(given, CheckpointFormat):
        raise TypeError(f"register_format: expected a CheckpointFormat, got {given!r}. Derive from CheckpointFormat.")
    _FORMATS.insert(0, checkpoint_format)


def _formats() -> Iterator[CheckpointFormat]:
    """Yield all formats, that of directories last: it is loaded when it is asked for."""
    yield from _FORMATS
    if not any(known.is_directory for known in _FORMATS):
        module, name = _DIRECTORIES
        _FORMATS.append(getattr(import_module(module), name))
        yield _FORMATS[-1]


def opened(
    path: str | os.PathLike[str],
    *,
    skip_foreign: bool = False,
    follow_links: bool = False,
    verify: bool | None = None,
    weights_only: bool = True,
) -> OpenedCheckpoint:
    """Open a checkpoint, and return what is known of it beside its tree.

    ``opened(path).verify()`` reads all of it, compares stored checksums, and returns how many there were; it raises
    ``CheckpointError`` with the file and the entry where one differs. (safetensors has none.)

    Arguments: as ``open``, and ``load``.

    Example:
        >>> import tempfile, statetree as st, torch
        >>> path = tempfile.mkdtemp() + "/model.pt"
        >>> st.save({"w": torch.ones(2)}, path)
        >>> st.files.opened(path).verify() > 0
        True
    """
    options: dict[str, Any] = {"follow_links": follow_links, "verify": verify, "weights_only": weights_only}
    checkpoint: Any = located(path)
    files = RemoteFiles(**options) if isinstance(checkpoint, RemotePath) else OpenFiles(**options)
    known = None
    try:
        beginning = _beginning(checkpoint, files)
        for known in _formats():
            if known.recognises(checkpoint, beginning):
                break
        else:
            expected = ", ".join(f"a {known.title}" for known in _formats())
            refuse(checkpoint, f"it is of no known format: expected {expected}", "Pass a checkpoint.")
        made: Any = known.open(checkpoint, files, skip_foreign=skip_foreign)
    except StateTreeError:
        raise
    except unsignalled(OSError) as error:
        remedy = REACH if files.is_remote else "Check its permissions, and the disk."
        refuse(checkpoint, f"it cannot be read: {error.strerror or error}", remedy)
    except unsignalled(Exception) as error:  # formats are users' code, too
        if known is None or type(known).__module__.startswith("statetree."):
            raise
        what = f"the format {type(known).__qualname__} cannot read it: {type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(f"read: {checkpoint}: {what}. Check the file, and the format.") from error
    if not isinstance(made, OpenedCheckpoint):
        what = f"open of the format {type(known).__qualname__} returned a {type(made).__qualname__}"
        raise TypeError(f"read: {checkpoint}: {what}: expected an OpenedCheckpoint.")
    return made


def _beginning(path: Path, files: OpenFiles) -> bytes:
    if path.is_dir():
        return b""
    if not path.suffix and not path.exists():
        refuse(path, "there is no such directory or file", "Check the name.")
    if (path.name == ".metadata" or path.suffix == ".distcp") and (path.parent / ".metadata").is_file():
        refuse(path, "it is one file of a DCP directory", "Pass the directory.")
    file = files.open(path)
    if not file.length:
        refuse(path, "it is empty", "Its writing broke off, or has not begun: get another copy.")
    beginning = file.read(0, min(file.length, 64), "its beginning")
    for text, (what, remedy) in _OTHERS.items():
        if beginning.lstrip().lower().startswith(text.lower()):
            refuse(path, f"it is {what}", remedy)
    return beginning


def open(  # noqa: A001 - `statetree.files.open` opens files
    path: str | os.PathLike[str], *, skip_foreign: bool = False, follow_links: bool = False
) -> Any:
    """Open a checkpoint as a tree, whose tensors are read when something asks for their elements.

    Safetensors and zip files of ``torch.save`` (a file, the index of several, or a folder of Hugging Face), and
    directories of ``torch.distributed.checkpoint``. The format is detected from the content. Only headers are read.
    Files are not trusted: nothing in them is executed, and sizes are compared with the file before memory is taken.
    Directories that ``statetree.dcp`` wrote are compared with their manifest: all files must be there, whole and of one
    save, and metadata and plain values have the checksums that were written. Those of elements are compared by
    ``load``, and by ``show --verify`` and ``convert``.

    Args:
        path: A file or a directory.
        skip_foreign: Take files that hold objects of classes that are not loaded: each is a ``StoredObject``, which
            knows the name of its class only. By default they are refused. Tensors are loaded, and values of Python, of
            NumPy and of torch that a training state usually holds.
        follow_links: Follow symbolic links in an index (needed for Hugging Face's cache).

    Returns:
        A tree with ``StoredTensor`` leaves, which all transforms take: ``paths``, ``select`` and ``similarity`` look
        at no element, ``offload`` reads them all, ``stream`` a bucket at a time. Tensors that share memory do so again
        in what is read, where the format keeps that (torch's does).

    Raises:
        CheckpointError: If it cannot be read, or is damaged. Also later, if a file was changed when its elements are
            asked for, or while they are read.

    Example:
        >>> import tempfile, statetree as st, torch
        >>> path = tempfile.mkdtemp() + "/state.pt"
        >>> st.save({"w": torch.ones(2, 3), "step": 3}, path)
        >>> st.files.open(path)
        {'w': StoredTensor(float32, [2, 3]), 'step': 3}
    """
    found = opened(path, skip_foreign=skip_foreign, follow_links=follow_links)
    found.check()
    return found.tree


def format_for(path: Path) -> CheckpointFormat:
    """Return the format that the end of a name stands for: none is a directory."""
    name = path.name.lower()
    found = next((known for known in _FORMATS if known.suffixes and name.endswith(known.suffixes)), None)
    if found is not None and not path.is_dir():
        return found
    if not path.suffix or path.suffix[1:2].isdigit() or path.is_dir():
        return next(known for known in _formats() if known.is_directory)
    ends = ", ".join(suffix for known in _FORMATS for suffix in known.suffixes)
    what = f"the suffix {path.suffix!r} stands for no format. Use {ends}, or no suffix for a DCP directory."
    raise CheckpointError(f"save: cannot write {path}: {what}")


def save(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    group: ProcessGroup | None = None,
    overwrite: bool = True,
    shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    protected: Collection[str | os.PathLike[str]] = (),
) -> None:
    """Write a tree to a checkpoint, in the format that the suffix of its name says.

    It is written to a temporary name first, and appears complete or not at all, with the permissions that the user's
    umask gives. Torch files keep ties; other formats write each tensor.

    A DCP directory is written by all ranks, each chunk by one of those that hold it, and plain
    ``torch.distributed.checkpoint`` reads it. Sparse, nested and quantized tensors, and wrapper subclasses, are saved
    in parts; objects of unknown classes are pickled. Plain values and structure are the first rank's, with a warning
    where others hold other numbers or texts; entries that only some ranks hold are saved as well, and a tensor that is
    not distributed is taken to be the same on all: another dtype or shape is an error, unless it has no elements.

    One file is written by one rank: with ``group``, or if a leaf is distributed, by the first one, which gathers what
    is distributed while the others wait. Otherwise each rank that calls writes on its own, without communication. Of
    ranks that write the same to one local path, one publishes it, and the others leave it as it is for its readers;
    ranks that write to one URL pass ``group``.

    Args:
        tree: Any tree, ``StoredTensor`` included.
        path: ``.pt``, ``.pth``, ``.ckpt`` or ``.bin`` for a torch file, ``.safetensors`` or
            ``.safetensors.index.json`` for safetensors, no suffix for a DCP directory. The same on every rank. The
            folder that it lies in must exist. (Torch files take no containers that ``torch.load`` refuses: deques.)
        group: The ranks that hold the tree; by default all.
        overwrite: Whether an existing checkpoint is replaced. (One file of safetensors is not replaced by an index with
            shards, nor these by one file: readers would take either.)
        shard_bytes: The number of bytes after which a new safetensors file begins.
        metadata: Texts for the header of safetensors.
        protected: Files and directories that are never replaced: for example those that ``tree`` is read from, if it is
            only a part of them.

    Collective:
        Every rank of the group calls it for a DCP directory; for a file if a leaf is distributed, or a group is given.
        If one fails, all raise.

    Raises:
        CheckpointError: If the format cannot hold a leaf, the place cannot be written, or a protected file is there.
        UnsupportedLeaf: If a leaf has no elements (a torch file keeps it as a meta tensor), cannot be taken apart, or
            is distributed in a way that the group does not know.
        RankMismatch: If ranks that save together name different paths, or if this process is not in the group (only
            this one raises then).

    Example:
        >>> import tempfile, statetree as st, torch
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> st.save({"layers": [torch.ones(2)]}, path)
        >>> st.files.open(path)
        {'layers.0': StoredTensor(float32, [2])}
    """
    ranks = group_of("save", group, None)
    is_together = group is not None or lie_on_ranks("save", *flatten_for("save", tree))
    if not is_together:
        target, found = _destination(path, shard_bytes)
        is_together = found.by_all_ranks and ranks.process_group is not None
    if is_together:
        with Call("save", ranks, path=os.fspath(path)) as call:
            target, found = _destination(path, shard_bytes)
            call.agree(Fingerprint(call.described()))
    by_all = found.by_all_ranks and ranks.process_group is not None
    options = SaveOptions(shard_bytes, dict(metadata or {}), ranks.process_group if by_all else None)
    if is_together and not by_all:
        tree = gather(tree, dst=0, device="cpu", group=group)

    def write(folder: Path) -> list[str]:
        if is_together and not by_all and ranks.rank:
            return []
        with phase("save.write"):
            names: Any = with_checks(found.write, tree, folder, target.name, options)
        if not isinstance(names, list) or not all(isinstance(n, str) and (folder / n).is_file() for n in names):
            what = f"write of the format {type(found).__qualname__} returned {names!r}"
            raise TypeError(f"save: {what}: expected a list of the names of the files that it wrote.")
        return names

    together: Together = partial(on_all_ranks, "save", ranks) if is_together else call_alone
    named = [protected] if isinstance(protected, (str, os.PathLike)) else protected
    kept = list(map(located, named))
    how = {"is_directory": found.is_directory, "overwrite": overwrite}
    by_several = not is_together and ranks.size > 1

    def whole(fill: Callable[[Path], list[str]]) -> None:
        write_whole(target, fill, **how, protected=kept, by_several=by_several)

    with _errors_named(path):
        if isinstance(far := cast("Any", target), RemotePath):
            upload_whole(far, write, together, **how, protected=kept)
        elif by_all:
            _save_by_all(whole, ranks, write)
        else:
            together(lambda: whole(write) if ranks.rank == 0 or not is_together else None)


@contextmanager
def _errors_named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what a file system raises into a ``CheckpointError`` that names the path."""
    try:
        yield
    except unsignalled(OSError) as error:
        msg = f"save: cannot write {os.fspath(path)}: {error}. Check the name, the place and its permissions."
        raise CheckpointError(msg) from error


def _destination(path: str | os.PathLike[str], shard_bytes: int | None) -> tuple[Path, CheckpointFormat]:
    target: Any = located(path)
    target = target if target.name and target.name != ".." else target.resolve()
    is_number = shard_bytes is None or isinstance(cast("Any", shard_bytes), Real)
    if not is_number or (shard_bytes is not None and shard_bytes < 1):
        raise ValueError(f"save: shard_bytes is no number of bytes: expected 1 or more, got {shard_bytes!r}.")
    if not target.name or target.name == "-" or "\0" in str(target) or not _can_be_named(target):
        msg = f"save: cannot write {str(target)!r}: expected the name of a file or directory. Choose another name."
        raise CheckpointError(msg)
    with _errors_named(path):
        found = format_for(target)
        if isinstance(target, RemotePath):
            target.check_uncached("save")
        if is_url(path) and isinstance(target, Path):  # file://: most of what has URLs has no folders to be made before
            target.parent.mkdir(parents=True, exist_ok=True)
    if shard_bytes is not None and found.suffixes and target.name.endswith(".safetensors"):
        target = target.with_name(f"{target.name}.index.json")
    return target, found


def _can_be_named(path: Path) -> bool:
    try:
        return bool(os.fsencode(path))
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _save_by_all(
    whole: Callable[[Callable[[Path], list[str]]], None], ranks: Group, write: Callable[[Path], list[str]]
) -> None:
    """Have every rank write into a folder that the first one makes and publishes."""
    announced: list[Path] = []

    def write_first(folder: Path) -> list[str]:
        announced.append(folder)
        ranks.told_once(os.fsencode(folder))
        return write(folder)

    def act() -> None:
        if ranks.rank:
            for folder, _ in ranks.told_once(None):
                write(Path(os.fsdecode(folder)))
            return
        try:
            whole(write_first)
        finally:
            if not announced:  # the others wait for it
                ranks.told_once(None)

    on_all_ranks("save", ranks, act)
