"""Which leaf of a checkpoint belongs to which of a tree, before an element is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.errors import Difference, TreeMismatch
from statetree.files.checkpoint import is_entry
from statetree.files.key_texts import is_readable, key_text
from statetree.key_paths import Path, exactly
from statetree.leaves.casting import is_castable
from statetree.leaves.divided import DividedLeaf
from statetree.leaves.ties import view_key
from statetree.tree.atoms import HOLE
from statetree.tree.flatten import flatten_for

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from statetree.tree.spec import TreeSpec

_REMEDY: Final = "Nothing was read. Pass a tree like the saved one, or where=."
_UNLIKE_REMEDY: Final = "Nothing was read. Leave what differs out of the tree, with strict=False, or pass where=."
_EMPTY_REMEDY: Final = (
    "Nothing was read. Fill what is empty in the tree first (a fresh optimizer has no state: take it from "
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or step once), or load without it."
)
_ABSENT: Final = "absent"


class _Entries:
    """The leaves of a tree by typed texts of their keys, or by rendered paths: some formats do not tell the nesting."""

    def __init__(self, spec: TreeSpec, *, is_nested: bool = True) -> None:
        self.spec, self.is_nested = spec, is_nested
        self.paths, self.names = spec.paths(), spec.flat_keys()
        self.keys: list[tuple[Any, ...]] = []
        self.place: dict[tuple[Any, ...], int] = {}
        for path, name in zip(self.paths, self.names, strict=True):
            key: tuple[Any, ...] = _key(path) if is_nested else (f"s{name}",)
            while key in self.place:  # NaNs are alike
                key = (*key, None)
            self.place[key] = len(self.keys)
            self.keys.append(key)

    def find(self, key: tuple[Any, ...], name: str) -> int | None:
        """Return the leaf that one of another tree belongs to.

        Where classes of containers or keys are unknown, the file has texts for attributes and for these keys; what
        ranks other than the first saved beside the structure, it has by names alone.
        """
        if key in self.place:
            return self.place[key]
        as_text = [f"s{text[1:]}" if text and (text[0] == "@" or not is_readable(text)) else text for text in key]
        candidates = (
            tuple([f"s{text[1:]}~" if text and text[0] == "@" else text for text in key]),  # beside an equal key
            *((*key[:known], *as_text[known:]) for known in range(len(key))),  # below containers that are known
            *((*as_text[:unknown], *key[unknown:]) for unknown in range(1, len(key))),  # above them
            (f"s{name}",),
        )
        return next((self.place[found] for found in candidates if found in self.place), None)


def _key(path: Path) -> tuple[str, ...]:
    return (*map(key_text, path),)


def matched_entries(
    stored: tuple[Any, bool, Collection[int]],
    like: TreeSpec,
    leaves: Sequence[Any],
    chosen: Sequence[int] | None,
    *,
    strict: bool,
    partly: set[str] | None,
) -> dict[int, Any]:
    """Return what a checkpoint has of the leaves of a tree, by their indices.

    ``stored`` is the checkpoint's tree, whether that says how it was nested, and its ``holders``, which are taken whole
    where ``like`` has one leaf: in that, lists and tuples of plain values are leaves. If all are loaded (``chosen`` is
    ``None``), the checkpoint may have no others; with ``partly``, which notes the paths, mappings that are not empty
    may leave out keys of it.
    """
    ours, opened = _Entries(like), set[int]()
    while True:
        values, spec = flatten_for("load", stored[0], is_leaf=lambda node: is_entry(node) and id(node) not in opened)
        theirs = _Entries(spec, is_nested=stored[1])
        found, taken = _found(theirs, ours, values)
        untaken = {id(value) for place, value in enumerate(values) if place not in taken} if stored[2] else set[int]()
        inside = untaken.intersection(stored[2])
        if not inside:
            break
        opened.update(inside)
    found.update(_under_other_names(leaves, found))
    if not stored[1]:  # names alone tell of no empty list
        lists = [i for i, leaf in enumerate(leaves) if type(leaf) in (list, tuple) and not leaf and i not in found]
        others = [name for place, name in enumerate(theirs.names) if place not in taken]
        inside = {i for i in lists for name in others if name.startswith(f"{ours.names[i]}.")}
        found.update((i, type(leaves[i])()) for i in lists if i not in inside)
    if not strict:  # a HOLE counts as a leaf that is not there
        found = {index: value for index, value in found.items() if (value is HOLE) is (leaves[index] is HOLE)}
    wanted = range(len(leaves)) if chosen is None else chosen
    found = {index: found[index] for index in wanted if index in found}
    absent = [index for index in wanted if index not in found]
    lacking = [index for index in absent if not _is_nothing(leaves[index])]
    spare = [place for place, value in enumerate(values) if place not in taken and not _is_nothing(value)]
    unlike = _of_other_kinds(theirs, spare, ours, lacking)
    in_part = _in_part(theirs, spare, ours, lacking, found)
    if strict:
        missing, is_empty = _missing(theirs, ours, leaves, absent)
        left = set(range(len(values))).difference(taken) if chosen is None else set()
        more, has_empty = _left(theirs, ours, left, partly=partly)
        remedy = _EMPTY_REMEDY if is_empty or has_empty else _REMEDY
        refuse_all([*missing, *more], remedy, may_lack=not (unlike or in_part))
    refuse_all([*unlike, *in_part], _UNLIKE_REMEDY)
    return found


def _found(theirs: _Entries, ours: _Entries, values: Sequence[Any]) -> tuple[dict[int, Any], dict[int, int]]:
    """Return what a checkpoint has of leaves, by their indices, and the leaf that each of its entries stands for."""
    found: dict[int, Any] = {}
    taken: dict[int, int] = {}
    for index, (key, name) in enumerate(zip(ours.keys, ours.names, strict=True)):
        place = theirs.find(key, name)
        if place is None:
            continue
        other = taken.setdefault(place, index)
        if other != index:
            what = f"an entry of its own, beside {ours.paths[other]}"
            refuse_all([Difference(ours.paths[index], "structure", "one that stands for both", what)])
        found[index] = values[place]
    return found, taken


def _under_other_names(leaves: Sequence[Any], found: Mapping[int, Any]) -> dict[int, Any]:
    """Return what a checkpoint has of leaves that it lacks, and that are tied to others: some write ties once."""
    lacking = [index for index, leaf in enumerate(leaves) if index not in found and isinstance(leaf, torch.Tensor)]
    if not lacking:
        return {}
    first: dict[Any, Any] = {}
    for index, value in found.items():
        if isinstance(leaves[index], torch.Tensor):
            first.setdefault(view_key(leaves[index]), value)
    keys = {index: view_key(leaves[index]) for index in lacking}
    return {index: first[key] for index, key in keys.items() if key in first}


def _missing(
    theirs: _Entries, ours: _Entries, leaves: Sequence[Any], missing: Sequence[int]
) -> tuple[list[Difference], bool]:
    """Return what a checkpoint lacks, and whether it has entries where a list is empty."""
    inside = {key[:length] for key in theirs.place for length in range(len(key))} if missing else set()
    by_name = dict(zip(theirs.names, theirs.paths, strict=True)) if missing else {}
    found: list[Difference] = []
    is_empty = False
    for index in missing:
        path, wanted = ours.paths[index], "an entry of the checkpoint, since the tree has this leaf"
        if ours.keys[index] in inside or not path:
            is_empty = is_empty or leaves[index] in ([], ())
            one = type(leaves[index]).__qualname__ + "; pass its state_dict()" * hasattr(leaves[index], "state_dict")
            found.append(Difference(path, "structure", "several entries", f"one ({one})"))
            continue
        if other := by_name.get(ours.names[index]):
            alike = f"the checkpoint has {', '.join(map(exactly, other))}"
            wanted = f"the keys {', '.join(map(exactly, path))} ({alike})"
        found.append(Difference(path, "missing", _ABSENT, wanted))
    return found, is_empty


def _is_nothing(value: Any) -> bool:
    """Whether a value holds nothing: all that another tree has there, it lacks (a scheduler, say, that is ``None``)."""
    if type(value) in (list, tuple, dict):
        return all(map(_is_nothing, value.values() if type(value) is dict else value))
    return value is HOLE or value is None


def _of_other_kinds(
    theirs: _Entries, untaken: Sequence[int], ours: _Entries, lacking: Sequence[int]
) -> list[Difference]:
    """Return where one side has one leaf and the other entries inside it: then neither lacks anything.

    Names alone do not tell: where a file has ``a.b``, a leaf ``a`` of the tree may have been renamed.
    """
    if not theirs.is_nested:
        return []
    opened = {key[:count] for key in map(theirs.keys.__getitem__, untaken) for count in range(len(key))}
    inside = {key[:count] for key in map(ours.keys.__getitem__, lacking) for count in range(len(key))}
    whole = [ours.paths[index] for index in lacking if ours.keys[index] in opened]
    parted = [theirs.paths[place] for place in untaken if theirs.keys[place] in inside]
    return [
        *[Difference(path, "structure", "entries inside it", "one entry") for path in whole],
        *[Difference(path, "structure", "one entry", "entries inside it") for path in parted],
    ]


def _in_part(
    theirs: _Entries, spare: Sequence[int], ours: _Entries, lacking: Sequence[int], found: Collection[int]
) -> list[Difference]:
    """Return which leaves that are made of several tensors would get some of them."""
    if not (spare or lacking):
        return []
    divided = {_key(visit.path): visit.path for visit in ours.spec.walk() if visit.cls is DividedLeaf}

    def above(keys: Sequence[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
        return {key[:count] for key in keys for count in range(len(key))} & divided.keys()

    others = above([ours.keys[index] for index in lacking]) | above([theirs.keys[place] for place in spare])
    both = above([ours.keys[index] for index in found]) & others if divided else set()
    return [
        Difference(path, "structure", "a leaf made of other tensors", "the same tensors")
        for key, path in divided.items()
        if key in both
    ]


def _left(
    theirs: _Entries, ours: _Entries, left: Collection[int], *, partly: set[str] | None
) -> tuple[list[Difference], bool]:
    """Return what a checkpoint has beside a tree, and whether that has an empty container there."""
    containers = {_key(visit.path): visit for visit in ours.spec.walk() if visit.cls is not None} if left else {}
    empty: dict[Path, None] = {}
    found: list[Difference] = []
    for key, place in theirs.place.items():
        if place not in left:
            continue
        length = next((n for n in reversed(range(len(key) + 1)) if key[:n] in containers), 0)
        above = containers.get(key[:length])
        if above is not None and not above.keys:
            empty[above.path] = None
        elif key[: length + 1] in ours.place:
            continue  # a leaf where the checkpoint has several, which is told already
        elif partly is not None and above is not None and above.cls is not None and issubclass(above.cls, Mapping):
            partly.add(str(theirs.paths[place]))
        else:
            found.append(Difference(theirs.paths[place], "missing", "present", _ABSENT))
    return [*(Difference(path, "length", "entries", "an empty container") for path in empty), *found], bool(empty)


def refuse_all(differences: Sequence[Difference], remedy: str = _REMEDY, *, may_lack: bool = True) -> None:
    """Raise ``TreeMismatch`` if there are differences. ``may_lack`` is whether ``strict=False`` would help."""
    if not differences:
        return
    if may_lack and any(found.kind == "missing" for found in differences):
        remedy += " With strict=False, what one side lacks is left alone."
    if any(map(is_castable, differences)):
        remedy += " With cast=True, dtypes are converted."
    raise TreeMismatch.between("load", differences, remedy)
