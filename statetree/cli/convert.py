"""``statetree convert``: a checkpoint written in another format, or changed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.cli.checkpoint import (
    DCP,
    SAFETENSORS,
    TORCH,
    Checkpoint,
    is_value,
    strided,
    tensors_in,
    why_not_plain,
)
from statetree.cli.describing import dtype_text, human
from statetree.cli.destination import (
    absolute,
    check_destination,
    folder_beside,
    keep_private,
    publish,
    writing_to,
)
from statetree.cli.digests import Written, digests_path, digests_text
from statetree.cli.edits import Rename, cast, matching, overflowing, without
from statetree.cli.files import Files
from statetree.cli.names import printable
from statetree.cli.opening import INDEX, destination_format
from statetree.cli.outline import Entry, Outline, outline_of
from statetree.cli.progress import progress
from statetree.cli.stored import Composite, StoredStorage, StoredTensor
from statetree.cli.ties import find_ties
from statetree.cli.verify import check_sums
from statetree.errors import CheckpointError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from statetree.cli.progress import Progress

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
    main = _main_file(destination, kind, options)
    with writing_to(main):
        check_destination(main, is_directory=kind == DCP, force=options.force)
    job = _Job(source, kind, options)
    _check_size(source, job.nbytes, main)
    check_sums(source)
    place = absolute(main)
    with writing_to(main), folder_beside(place) as folder:
        with progress(f"writing {printable(place.name)}", job.nbytes) as advance:
            written = job.write(folder, place.name, advance)
        names = [file.name for file in written]
        if options.digest:
            names.append(_write_digests(folder, place, written, is_directory=kind == DCP))
        keep_private(folder, names, source.files)
        publish(folder, place, names, is_directory=kind == DCP, force=options.force)
    job.note_overflows()
    if main != destination:
        others = f"{len(written) - 1} file{'s' * (len(written) != 2)} beside it"
        job.notes.append(f"{printable(str(destination))}: written as {printable(main.name)} and {others}")
    return job.notes


def _main_file(destination: Path, kind: str, options: Options) -> Path:
    """Return the file (or directory) that makes up the checkpoint, or says what does."""
    if options.shard_bytes is None or kind == DCP:
        return destination
    if kind == TORCH:
        msg = f"convert: cannot write {destination} in shards: torch files are whole. Leave out --shard-bytes."
        raise CheckpointError(msg)
    stem = destination.name.removesuffix(INDEX).removesuffix(".safetensors")
    return destination.with_name(f"{stem}{INDEX}")


def _write_digests(folder: Path, main: Path, written: Sequence[Written], *, is_directory: bool) -> str:
    place = digests_path(folder if is_directory else folder / main.name, is_directory=is_directory)
    total = sum((folder / file.name).stat().st_size for file in written)
    with Files() as files, progress("computing digests", total) as advance:
        place.write_text(digests_text(written, folder, files, advance))
    return place.name


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


class _Job:
    """What is to be written: checked in full before anything is.

    Attributes:
        nbytes: How many bytes of elements.
        notes: What the format does not keep.
    """

    def __init__(self, source: Checkpoint, kind: str, options: Options) -> None:
        self.notes: list[str] = []
        self._options = options
        self._source = source
        tree = source.tree
        if options.patterns or options.renames:
            tree = matching(source.outline(), options.patterns, options.renames)
        outline = outline_of(tree)
        if options.dtype is not None:
            result = cast(tree, outline.entries, options.dtype)
            tree, outline = result.tree, outline_of(result.tree)
            self._note("are no longer tied, since they lie on one storage with other dtypes", result.untied)
            self._note("not cast: only plain tensors of real numbers are", result.kept)
        self._outline = outline
        self._entries = outline.entries
        for key, what in source.containers.items():
            self._note(f"is {what}, and becomes a dict", [key])
        self._prepare = {TORCH: self._as_torch, SAFETENSORS: self._as_safetensors, DCP: self._as_dcp}[kind]
        self.nbytes, self.write = self._prepare(tree)

    def _note(self, what: str, keys: Sequence[str]) -> None:
        if keys:
            self.notes.append(f"{', '.join(map(printable, keys))}: {what}")

    def note_overflows(self) -> None:
        """Note what a cast did to large elements. This is known only once they were written."""
        dtype = dtype_text(self._options.dtype)
        self._note(
            f"has elements beyond the range of {dtype}, which are infinite, NaN or cut off now",
            overflowing(self._entries),
        )

    def _note_names(self) -> None:
        """Note the entries that could not get their plain names, as others have these."""
        names: dict[str, list[str]] = {}
        for entry in self._outline.entries:
            if entry.key != str(entry.path):
                names.setdefault(str(entry.path), []).append(entry.key)
        for plain, keys in names.items():
            self._note(f"so named, since {printable(plain)!r} would not be the name of one entry alone", keys)

    def _refuse_unknown(self) -> None:
        unknown = {entry.key: why_not_plain(entry.value) for entry in self._outline.entries if is_value(entry.value)}
        lines = [f"{printable(key)}: {why}" for key, why in unknown.items() if why]
        if lines:
            msg = (
                f"convert: {len(lines)} plain values of {self._source.path} cannot be written: expected data that "
                f"torch.load(weights_only=True) admits, got\n  {shown(lines)}\nLeave them out (--match, --drop-values)."
            )
            raise CheckpointError(msg)

    def _without_values(self, tree: Any, is_dropped: Callable[[Any], bool]) -> Any:
        """Return the tree without some values, which are noted."""
        dropped = {entry.key for entry in self._outline.entries if is_value(entry.value) and is_dropped(entry.value)}
        if not dropped:
            return tree
        self._note("dropped", [entry.key for entry in self._outline.entries if entry.key in dropped])
        return without(self._outline, dropped)

    def _as_torch(self, tree: Any) -> tuple[int, Callable[[Path, str, Progress], list[Written]]]:
        from statetree.cli.formats.torch_writer import TorchFile

        if self._options.drop_values:
            tree = self._without_values(tree, lambda value: bool(why_not_plain(value)))
            self._outline = outline_of(tree)
        self._refuse_unknown()
        self._refuse_parts("torch files", lambda leaf: isinstance(leaf, Composite) and leaf.call is None)
        self._note_header()
        file = TorchFile(tree)

        def write(folder: Path, name: str, advance: Progress) -> list[Written]:
            with (folder / name).open("xb") as target:
                return [Written(name, file.write(target, advance))]

        return file.nbytes, write

    def _as_dcp(self, tree: Any) -> tuple[int, Callable[[Path, str, Progress], list[Written]]]:
        from statetree.cli.formats.dcp_writer import write_directory

        if self._options.drop_values:
            self._outline = outline_of(self._without_values(tree, lambda value: bool(why_not_plain(value))))
        self._refuse_unknown()
        self._note_header()
        self._refuse_parts("DCP directories", lambda leaf: isinstance(leaf, Composite) and leaf.call is None)
        self._refuse_parts("DCP directories", lambda leaf: isinstance(leaf, Composite) and leaf.kind == "meta")
        self._note_names()
        self._note_ties()

        def write(folder: Path, _name: str, advance: Progress) -> list[Written]:
            return write_directory(folder, self._outline, self._options.shard_bytes, advance)

        return self._logical_bytes(), write

    def _as_safetensors(self, _tree: Any) -> tuple[int, Callable[[Path, str, Progress], list[Written]]]:
        from statetree.cli.formats.safetensors_writer import why_not_stored, write_safetensors

        entries = self._outline.entries
        values = [entry.key for entry in entries if is_value(entry.value) or isinstance(entry.value, StoredStorage)]
        if values and not self._options.drop_values:
            count = f"{len(values)} plain value{'s' * (len(values) != 1)}"
            msg = (
                f"convert: safetensors hold tensors only: got {count} at\n  "
                f"{shown([printable(key) for key in values])}\n"
                "Pass --drop-values to leave them out, or choose with --match."
            )
            raise CheckpointError(msg)
        self._note("dropped", values)
        self._outline = Outline(self._outline.nodes, [entry for entry in entries if entry.key not in set(values)])
        self._refuse_parts("safetensors", lambda leaf: strided(leaf) is None)
        tensors = {entry.key: _view(entry) for entry in self._outline.entries}
        bad = {key: why_not_stored(key, tensor) for key, tensor in tensors.items()}
        lines = [f"{printable(key)}: {why}" for key, why in bad.items() if why]
        if lines:
            msg = f"convert: safetensors cannot hold\n  {shown(lines)}\nUse --cast, --rename or --match."
            raise CheckpointError(msg)
        self._note_names()
        self._note_ties()

        def write(folder: Path, name: str, advance: Progress) -> list[Written]:
            return write_safetensors(folder, name, tensors, self._source.metadata, self._options.shard_bytes, advance)

        return self._logical_bytes(), write

    def _refuse_parts(self, what: str, is_refused: Callable[[Any], bool]) -> None:
        found = [entry for entry in self._outline.entries if not is_value(entry.value) and is_refused(entry.value)]
        if found:
            kinds = [f"{printable(entry.key)}: {getattr(entry.value, 'kind', 'a storage')}" for entry in found]
            msg = f"convert: {what} cannot hold these tensors of several parts:\n  {shown(kinds)}\nUse --match."
            raise CheckpointError(msg)

    def _note_header(self) -> None:
        texts = {key: text for key, text in self._source.metadata.items() if (key, text) != ("format", "pt")}
        self._note("a text of the header, is not kept", list(texts))

    def _note_ties(self) -> None:
        entries = self._outline.entries
        for group in find_ties(entries).groups:
            self._note("share bytes, and are written once each", [entries[index].key for index in group])

    def _logical_bytes(self) -> int:
        return sum(part.nbytes for entry in self._outline.entries for part in tensors_in(entry.value))


def _view(entry: Entry) -> StoredTensor:
    view = strided(entry.value)
    assert view is not None
    return view
