"""Which rank writes what of a state that all ranks hold a part of, from what each tells the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from statetree.chunks.boxes import Box, is_covered, whole_box
from statetree.dcp.metadata_pickle import StoredEntry
from statetree.errors import CheckpointError, shown
from statetree.files.key_texts import shown_key
from statetree.key_paths import Path

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from statetree.dcp.file_manifest import Index


_RENAME: Final = " Rename a key, so that no two read the same."


class Holdings(NamedTuple):
    """What a rank has to save, as it tells the first one."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtypes and global shapes
    pieces: dict[Index, Box | None]  # where the pieces that it holds lie in them
    #: The leaf that a tensor is a part of, by the tensor's key, where one rank has to write all of its parts.
    inseparable: dict[str, tuple[str, ...]]
    packed: set[str]  # which of these only the structure of the first rank says how to put together
    dcp_paths: dict[str, tuple[str | int, ...]]
    #: The key of each leaf in the checkpoint, by the texts of the keys of its path.
    names: dict[tuple[str, ...], str]
    #: Of leaves that are made of several tensors, sums of those that are not cut as the leaf, by their keys and boxes:
    #: ranks hold them alike.
    assumed: dict[tuple[str, tuple[Box, ...]], tuple[int, ...]]
    #: What such leaves are beside their tensors, by the texts of the keys of their paths: ranks hold that alike, too.
    divided: dict[tuple[str, ...], str]
    values: dict[str, int]  # numbers of simple values, by their keys: others have other numbers


def check_keys(told: Sequence[Holdings]) -> None:
    """Raise ``CheckpointError`` if a key stands for two leaves, or two keys for one.

    Each rank tells apart what reads the same in its own tree, and knows nothing of those of others.
    """
    leaves: dict[str, tuple[str, ...]] = {}
    names: dict[tuple[str, ...], str] = {}
    for rank, one in enumerate(told):
        if rank and one.names == told[0].names:
            continue
        for keys, name in one.names.items():
            other, known = leaves.setdefault(name, keys), names.setdefault(keys, name)
            if other != keys:
                got = f"{list(map(shown_key, other))} and, on rank {rank}, {list(map(shown_key, keys))}"
                raise _unlike(f"leaves whose keys read {name!r}: expected one leaf, got {got}", _RENAME)
            if known != name:
                got = f"{known!r} and, on rank {rank}, {name!r}"
                what = f"other leaves beside that at {_named(keys)}: expected one name for it, got {got}"
                raise _unlike(what, _RENAME)


def check_alike(told: Sequence[Holdings]) -> None:
    """Raise ``CheckpointError`` if ranks differ in what they must hold alike of leaves made of several tensors."""
    known: dict[tuple[str, Any], Any] = {}
    for rank, one in enumerate(told):
        parts: dict[tuple[str, ...], set[str]] = {}
        for key, keys in one.inseparable.items():
            parts.setdefault(keys, set()).add(key)
        own: dict[tuple[str, Any], Any] = {("elements of", part): sums for part, sums in one.assumed.items()}
        own |= {("leaves at", keys): text for keys, text in one.divided.items()}
        own |= {("parts of the leaf at", keys): sorted(names) for keys, names in parts.items()}
        for named, held in own.items():
            if known.setdefault(named, held) != held:
                what, place = named
                where = repr(place[0]) if what == "elements of" else _named(place)
                raise _unlike(
                    f"{what} {where}: expected all of them to hold the same scales, metadata and whatever else is "
                    f"not cut with a tensor that is made of several, got {known[named]} and {held}"
                )
        if unknown := sorted(one.packed - told[0].packed):
            raise CheckpointError(
                f"save: rank {rank} holds a tensor of several parts that the first rank does not ({unknown[0]}): "
                "expected one that both hold, since the first rank says how it is put together. Save what it is made "
                "of, or have the first rank hold it, too."
            )


def differing_values(told: Sequence[Holdings]) -> list[str]:
    """Return where ranks hold other plain values than the first one that has any there, whose are saved."""
    known = dict(told[0].values)
    others = [one.values for one in told[1:] if one.values != known]
    return sorted({key for values in others for key, value in values.items() if known.setdefault(key, value) != value})


def _named(keys: Sequence[str]) -> str:
    return str(Path(list(map(shown_key, keys)))) or "<root>"


def _unlike(what: str, remedy: str = "") -> CheckpointError:
    return CheckpointError(f"save: the ranks hold different {what}.{remedy}")


def planned(told: Sequence[Holdings]) -> tuple[list[list[Index]], dict[str, StoredEntry]]:
    """Return what each rank writes of what all hold, and the entries of the whole.

    What several hold is written by the one that has least to write: all that is inseparable, by the same one. Values,
    and what is put together with a value, are written by the first.
    """
    holders: dict[Index, list[int]] = {}
    for rank, described in enumerate(told):
        for index in described.pieces:
            holders.setdefault(index, []).append(rank)
    shares: list[list[Index]] = [[] for _ in told]
    load = [0] * len(told)
    outlines: dict[str, Any] = {}
    boxes: dict[str, list[Box]] = {}
    writers: dict[str | tuple[str, ...], int] = {}
    packed = {one.inseparable[key] for one in told for key in one.packed}
    for index, ranks in holders.items():
        key = index.key
        if index.start is not None and len(ranks) > 1:
            ranks = _agreeing(told, index, ranks, is_alone=key not in told[ranks[0]].inseparable)
        rank = min(ranks, key=load.__getitem__)
        leaf = told[ranks[0]].inseparable.get(key)
        if index.start is None or leaf is not None:
            named = key if leaf is None else leaf
            rank = writers.setdefault(named, ranks[0] if leaf is None or leaf in packed else rank)
            if rank not in ranks:
                continue
        shares[rank].append(index)
        outline: Any = (None, ()) if index.start is None else told[rank].tensors[key]
        if outlines.setdefault(key, outline) != outline:
            _refuse_disagreement(key)
        box = told[rank].pieces[index]
        if box is not None:
            load[rank] += box.volume * outline[0].itemsize or 1
            boxes.setdefault(key, []).append(box)
    for key, found in boxes.items() if len(told) > 1 else ():
        whole = whole_box(outlines[key][1])
        if sum(box.volume for box in found) != whole.volume or not is_covered(whole, found):
            _refuse_disagreement(key)
    entries = {key: StoredEntry(dtype, shape, (*boxes.get(key, ()),)) for key, (dtype, shape) in outlines.items()}
    return shares, entries


def _agreeing(told: Sequence[Holdings], index: Index, ranks: list[int], *, is_alone: bool) -> list[int]:
    """Return the ranks one of which writes a piece: all that hold it, if they know it by one dtype and shape.

    Otherwise, if it is all of a leaf, those that hold elements of it, who must agree: outside of its mesh, a rank may
    know another shape.
    """
    outlines = {rank: told[rank].tensors[index.key] for rank in ranks}
    if len(set(outlines.values())) > 1:
        full = {rank: held for rank, held in outlines.items() if 0 not in held[1]}
        if not is_alone or len(set(full.values())) != 1:
            texts = [f"{dtype} {shape} on rank {rank}" for rank, (dtype, shape) in outlines.items()]
            raise _unlike(
                f"tensors {index.key!r}: expected one dtype and shape, since one rank's is saved, got {shown(texts)}",
                " Give each rank's a key of its own, or leave them out.",
            )
        return [*full]
    return ranks


def _refuse_disagreement(key: str) -> NoReturn:
    raise CheckpointError(
        f"save: the ranks hold pieces of {key!r} that make up no tensor: expected one dtype and shape, and each "
        "element once. Pass the process_group of all ranks that hold it."
    )
