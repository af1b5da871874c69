"""``statetree convert``: a checkpoint written in another format, of what is selected of it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from statetree.cli.entries import CheckpointEntry, Choice, entries_of, selection
from statetree.cli.progress import bytes_written, progress
from statetree.cli.rows import plural
from statetree.errors import CheckpointError, UnsupportedLeaf
from statetree.files.formats import format_for, save
from statetree.files.shared_bytes import shared_bytes
from statetree.files.stored import StoredTensor
from statetree.files.torch_format import is_loaded
from statetree.files.unpickling import StoredObject
from statetree.files.untrusted import printable
from statetree.leaves.casting import castable
from statetree.transforms.cast import cast
from statetree.transforms.rename import rename
from statetree.transforms.select import select
from statetree.tree.flatten import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path as FilePath

    from statetree.files.checkpoint import OpenedCheckpoint
    from statetree.transforms.conversions.rule_set import Conversion


class ConvertOptions(NamedTuple):
    """What is written, and how. ``None`` leaves dtypes as they are, and makes one file."""

    choice: Choice
    rules: Sequence[tuple[str, str]] = ()
    dtype: torch.dtype | None = None
    shard_bytes: int | None = None
    drop_values: bool = False
    force: bool = False
    conversion: Conversion | None = None


def convert(
    source: FilePath, checkpoint: OpenedCheckpoint, destination: FilePath, options: ConvertOptions
) -> Iterator[str]:
    """Write a checkpoint to a destination. Yields what there is to note.

    Raises:
        CheckpointError: If the destination would replace a part of the source, or its format cannot hold an entry; or
            as ``save``.
    """
    (chosen,) = options.choice.of(checkpoint.tree)
    target = format_for(destination)
    holds_values = ".safetensors" not in target.suffixes
    if options.shard_bytes is not None and holds_values:
        raise CheckpointError(f"convert: --shard-bytes is for safetensors: got {destination.name}. Leave it out.")
    values = [entry for entry in chosen if not isinstance(entry.leaf, StoredTensor)]
    if options.conversion is not None:
        values = [entry for entry in values if not options.conversion.ignores(entry.key)]
    if target.title == "torch file":
        dropped = [entry.key for entry in values if isinstance(entry.leaf, StoredObject) or not is_loaded(entry.leaf)]
        why = "torch.load(weights_only=True) refuses some objects"
    elif holds_values:
        dropped = [entry.key for entry in values if isinstance(entry.leaf, StoredObject)]
        why = "objects that are not loaded cannot be written"
    else:
        dropped, why = [entry.key for entry in values], "safetensors hold tensors only"
    if dropped and not options.drop_values:
        what = plural(len(dropped), "object" if holds_values else "plain value")
        remedy = "Pass --drop-values to leave them out, or choose with --match."
        msg = f"convert: {why}, and {printable(str(source))} has {what} at\n  {_listed(dropped)}\n{remedy}"
        raise CheckpointError(msg)
    kept = [entry for entry in chosen if entry.key not in set(dropped)]
    if dropped and not kept:
        what = f"convert: nothing is left to write, since these were dropped:\n  {_listed(dropped)}"
        raise CheckpointError(f"{what}\nChoose others with --match, or another format.")
    tree = checkpoint.tree
    if kept and len(kept) < len(entries_of(tree)):
        tree = select(tree, selection(kept))
    try:
        tree = tree if options.conversion is None else options.conversion(tree)
        tree = rename(tree, options.rules) if options.rules else tree
    except (ValueError, UnsupportedLeaf) as error:  # a rule that cannot be, or that matches nothing
        raise CheckpointError(str(error).replace("Change it, or pass missing_ok=True", "Change --rename")) from None
    made = entries_of(tree)
    if options.dtype is not None:
        tree = _converted(tree, options.dtype, keeps_ties=target.title == "torch file")
    files, before = checkpoint.files, (checkpoint.files.nbytes_read, bytes_written())
    with progress("convert: compared with checksums", files.nbytes, lambda: files.nbytes_read - before[0]):
        checkpoint.verify()
    read, size = (source, *files.paths), options.shard_bytes
    total = sum(leaf.nbytes for leaf in flatten(tree)[0] if isinstance(leaf, StoredTensor))
    with progress("convert: written", total, lambda: bytes_written() - before[1]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the command says by itself what does not come back
        save(tree, destination, overwrite=options.force, shard_bytes=size, metadata=checkpoint.metadata, protected=read)
    if dropped:
        yield f"{_listed(dropped, ', ')}: dropped"
    yield from _notes(checkpoint, made, target.title)


def _converted(tree: Any, dtype: torch.dtype, *, keeps_ties: bool) -> Any:
    """Return a tree whose floating-point tensors have another dtype: as they are written, unless they share bytes."""

    def later(leaf: Any) -> Any:  # negative bits are no property of every dtype
        return leaf.to(dtype) if _is_floating(leaf) and (leaf.outline.is_neg() or not keeps_ties) else leaf

    leaves, spec = flatten(tree)  # mapped, they would be read
    floating = [path for path, leaf in zip(spec.paths(), leaves, strict=True) if _is_floating(leaf)]
    return cast(unflatten(spec, list(map(later, leaves))), dtype, where=floating)


def _is_floating(leaf: Any) -> bool:
    is_strided = isinstance(leaf, StoredTensor) and leaf.is_strided
    return is_strided and leaf.dtype.is_floating_point and castable(leaf.dtype, torch.float64)


def _notes(checkpoint: OpenedCheckpoint, made: Sequence[CheckpointEntry], title: str) -> Iterator[str]:
    """Yield what is different in the new checkpoint."""
    if title != "torch file":
        for group in shared_bytes([entry.leaf for entry in made]):
            yield f"{_listed([made[index].key for index in group], ', ')}: share bytes, and are written once each"
    texts = [key for key, text in checkpoint.metadata.items() if (key, text) != ("format", "pt")]
    if texts and title != "safetensors file":
        yield f"{_listed(texts, ', ')}: a text of the header, is not kept"


def _listed(keys: Sequence[str], between: str = "\n  ") -> str:
    more = [f"… and {len(keys) - 20} more"] * (len(keys) > 20)
    return between.join([*map(printable, keys[:20]), *more])
