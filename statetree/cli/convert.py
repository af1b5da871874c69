"""``statetree convert``: a checkpoint written in another format, or changed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.cli.casting import cast, overflowing
from statetree.cli.describing import dtype_text, human
from statetree.cli.digests import check_sums, digests_path, write_digests
from statetree.cli.opening import INDEX, destination_format
from statetree.cli.progress import progress
from statetree.cli.publishing import absolute, check_destination, folder_beside, keep_private, publish, writing_to
from statetree.cli.selecting import Rename, select, without
from statetree.cli.shared_bytes import find_ties
from statetree.errors import CheckpointError, shown
from statetree.files.checkpoint import (
    DCP,
    SAFETENSORS,
    TORCH,
    Checkpoint,
    contents_of,
    is_value,
    strided,
    tensors_in,
    why_not_plain,
)
from statetree.files.stored import Composite, StoredStorage
from statetree.files.untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from statetree.files.checkpoint import Progress, StoredEntry

    #: Writes to a folder under a name. Returns the names of the files.
    Write = Callable[[Path, str, Progress], list[str]]

#: A file that says little and stands for much (expanded tensors, many views on one storage) is not written out.
_MAX_GROWTH: Final = 100
_ALWAYS: Final = 64 << 20


class Options(NamedTuple):
    """What is asked for."""

    patterns: Sequence[str] = ()
    renames: Sequence[Rename] = ()
    dtype: torch.dtype | None = None
    shard_bytes: int | None = None
    digest: bool = False
    drop_values: bool = False
    force: bool = False


def convert(source: Checkpoint, destination: Path, options: Options) -> list[str]:
    """Write a checkpoint to a place, in the format of its name. Returns what the format could not keep, in words.

    Raises:
        CheckpointError: If something cannot be read or written; the destination is then as it was.
    """
    kind = destination_format(destination)
    is_directory = kind == DCP
    main = _main_file(destination, kind, options)
    with writing_to(main):
        check_destination(main, is_directory=is_directory, force=options.force)
    conversion = _Conversion(source, kind, options)
    _check_size(source, conversion.nbytes, main)
    check_sums(source)
    place = absolute(main)
    with writing_to(main), folder_beside(place) as folder:
        with progress(f"writing {printable(place.name)}", conversion.nbytes) as advance:
            names = conversion.write(folder, place.name, advance)
        count = len(names) - 1
        if options.digest:
            digests = digests_path(folder if is_directory else folder / place.name, is_directory=is_directory)
            write_digests(digests, folder, names)
            names.append(digests.name)
        keep_private(folder, names, source.files)
        publish(folder, place, names, is_directory=is_directory, force=options.force)
    conversion.note_overflows()
    if main != destination:
        others = f"{count} file{'s' * (count != 1)} beside it"
        conversion.notes.append(f"{printable(str(destination))}: written as {printable(main.name)} and {others}")
    return conversion.notes


def _main_file(destination: Path, kind: str, options: Options) -> Path:
    """Return the file (or directory) that makes up the checkpoint, or says what does."""
    if options.shard_bytes is None or kind == DCP:
        return destination
    if kind == TORCH:
        msg = f"convert: cannot write {destination} in shards: torch files are whole. Leave out --shard-bytes."
        raise CheckpointError(msg)
    stem = destination.name.removesuffix(INDEX).removesuffix(".safetensors")
    return destination.with_name(f"{stem}{INDEX}")


def _check_size(source: Checkpoint, nbytes: int, main: Path) -> None:
    """Raise if what would be written is out of proportion, or more than fits."""
    if nbytes > source.nbytes * _MAX_GROWTH + _ALWAYS:
        msg = (
            f"convert: {source.path} has {human(source.nbytes)} and stands for {human(nbytes)} in this format, "
            f"of views that repeat their elements: expected at most {_MAX_GROWTH} times its size. Use --match."
        )
        raise CheckpointError(msg)
    with writing_to(main):
        free = shutil.disk_usage(main.parent).free
    if nbytes > free:
        msg = f"convert: {main.parent} has {human(free)} free: expected {human(nbytes)} or more. Make room."
        raise CheckpointError(msg)


class _Conversion:
    """What is to be written: checked in full before anything is.

    Attributes:
        nbytes: How many bytes of elements.
        notes: What the format does not keep.
        write: Writes it.
    """

    def __init__(self, source: Checkpoint, kind: str, options: Options) -> None:
        self.notes: list[str] = []
        self._options = options
        self._source = source
        self._set(source.tree)
        if options.patterns or options.renames:
            self._set(select(self._contents, options.patterns, options.renames))
        if options.dtype is not None:
            result = cast(self._tree, self._entries, options.dtype)
            self._set(result.tree)
            self._note("are no longer tied, since they lie on one storage with other dtypes", result.untied)
            self._note("not cast: only plain tensors of real numbers are", result.kept)
        self._cast_entries = self._entries
        for key, what in source.containers.items():
            self._note(f"is {what}, and becomes a dict", [key])
        prepare = {TORCH: self._as_torch, SAFETENSORS: self._as_safetensors, DCP: self._as_dcp}[kind]
        self.nbytes, self.write = prepare()

    def _set(self, tree: Any) -> None:
        self._tree = tree
        self._contents = contents_of(tree)

    @property
    def _entries(self) -> Sequence[StoredEntry]:
        return self._contents.entries

    def _as_torch(self) -> tuple[int, Write]:
        from statetree.files.torch_writer import TorchFile  # of the formats, only the one that is written is loaded

        self._check_values()
        self._refuse_parts("torch files", lambda leaf: isinstance(leaf, Composite) and leaf.call is None)
        self._note_header()
        file = TorchFile(self._tree)

        def write(folder: Path, name: str, advance: Progress) -> list[str]:
            with (folder / name).open("xb") as target:
                file.write(target, advance)
            return [name]

        return file.nbytes, write

    def _as_dcp(self) -> tuple[int, Write]:
        from statetree.cli.dcp_writer import write_directory

        self._check_values()
        self._refuse_parts(
            "DCP directories", lambda leaf: isinstance(leaf, Composite) and (leaf.call is None or leaf.kind == "meta")
        )
        self._note_header()
        self._note_names(self._entries)
        self._note_ties(self._entries)

        def write(folder: Path, _name: str, advance: Progress) -> list[str]:
            return write_directory(folder, self._tree, self._options.shard_bytes, advance)

        return self._logical_bytes(self._entries), write

    def _as_safetensors(self) -> tuple[int, Write]:
        from statetree.files.safetensors_writer import why_not_stored, write_safetensors

        leaves = {entry.key: entry.value for entry in self._entries}
        values = [key for key, leaf in leaves.items() if is_value(leaf) or isinstance(leaf, StoredStorage)]
        if values and not self._options.drop_values:
            count = f"{len(values)} plain value{'s' * (len(values) != 1)}"
            msg = (
                f"convert: safetensors hold tensors only: got {count} at\n  {shown(list(map(printable, values)))}\n"
                "Pass --drop-values to leave them out, or choose with --match."
            )
            raise CheckpointError(msg)
        self._note("dropped", values)
        self._refuse_parts("safetensors", lambda leaf: strided(leaf) is None and not isinstance(leaf, StoredStorage))
        tensors = {entry.key: view for entry in self._entries if (view := strided(entry.value)) is not None}
        bad = {key: why_not_stored(key, tensor) for key, tensor in tensors.items()}
        self._refuse_some("convert: safetensors cannot hold\n  {}\nUse --cast, --rename or --match.", bad)
        kept = [entry for entry in self._entries if entry.key in tensors]
        self._note_names(kept)
        self._note_ties(kept)

        def write(folder: Path, name: str, advance: Progress) -> list[str]:
            return write_safetensors(folder, name, tensors, self._source.metadata, self._options.shard_bytes, advance)

        return self._logical_bytes(kept), write

    def _check_values(self) -> None:
        """Leave out, or refuse, values that are no plain data."""
        unknown = {entry.key: why_not_plain(entry.value) for entry in self._entries if is_value(entry.value)}
        dropped = {key for key, why in unknown.items() if why}
        if dropped and self._options.drop_values:
            self._note("dropped", [key for key in unknown if key in dropped])
            self._set(without(self._contents, dropped))
        else:
            self._refuse_some(
                f"convert: {len(dropped)} plain values of {self._source.path} cannot be written: expected data that "
                "torch.load(weights_only=True) admits, got\n  {}\nLeave them out (--match, --drop-values).",
                unknown,
            )

    def _refuse_parts(self, what: str, is_refused: Callable[[Any], bool]) -> None:
        leaves = {entry.key: entry.value for entry in self._entries if not is_value(entry.value)}
        bad = {key: getattr(leaf, "kind", "a storage") for key, leaf in leaves.items() if is_refused(leaf)}
        self._refuse_some(f"convert: {what} cannot hold these tensors of several parts:\n  {{}}\nUse --match.", bad)

    def _refuse_some(self, message: str, why: dict[str, str]) -> None:
        """Raise if there is something to say of a key."""
        lines = [f"{printable(key)}: {what}" for key, what in why.items() if what]
        if lines:
            raise CheckpointError(message.replace("{}", shown(lines)))

    def _note(self, what: str, keys: Sequence[str]) -> None:
        if keys:
            self.notes.append(f"{', '.join(map(printable, keys))}: {what}")

    def note_overflows(self) -> None:
        """Note what a cast did to large elements. This is known only once they were written."""
        dtype = dtype_text(self._options.dtype)
        what = f"has elements beyond the range of {dtype}, which are infinite, NaN or cut off now"
        self._note(what, overflowing(self._cast_entries))

    def _note_names(self, entries: Sequence[StoredEntry]) -> None:
        """Note the entries that could not get their plain names, as others have these."""
        names: dict[str, list[str]] = {}
        for entry in entries:
            if entry.key != str(entry.path):
                names.setdefault(str(entry.path), []).append(entry.key)
        for plain, keys in names.items():
            self._note(f"so named, since {printable(plain)!r} would not be the name of one entry alone", keys)

    def _note_header(self) -> None:
        texts = {key: text for key, text in self._source.metadata.items() if (key, text) != ("format", "pt")}
        self._note("a text of the header, is not kept", list(texts))

    def _note_ties(self, entries: Sequence[StoredEntry]) -> None:
        for group in find_ties(entries).groups:
            self._note("share bytes, and are written once each", [entries[index].key for index in group])

    def _logical_bytes(self, entries: Sequence[StoredEntry]) -> int:
        return sum(part.nbytes for entry in entries for part in tensors_in(entry.value))
