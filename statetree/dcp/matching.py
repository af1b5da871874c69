"""Matching a template with a checkpoint, before a byte of the data is read."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from statetree.dcp.keys import key_text
from statetree.dcp.structure import SavedEntry, SavedNode, Structure, family_text, path_of
from statetree.dcp.tensors import PARTS_ENTRY, TENSOR_ENTRY, VALUE_ENTRY, Content, why_not_writable
from statetree.errors import Difference, TreeMismatch
from statetree.paths import Path, exactly, render_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.dcp.outline import Node, Outline

_EMPTY_REMEDY: Final = (
    "Fill what is empty in the template first (a fresh optimizer has no state: take it from "
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or step once), or load without a template."
)
_REMEDY: Final = "Nothing was read. Pass a template like the saved tree; mappings in it may leave keys out."


class Matching:
    """Which entry of a checkpoint belongs to which of a template.

    Args:
        template: The template's outline.
        contents: What there is to fill of each of its entries.
        structure: The checkpoint's structure, or ``None`` if DCP itself wrote it.
        metadata: The checkpoint's metadata.
    """

    def __init__(
        self, template: Outline, contents: Sequence[Content], structure: Structure | None, metadata: Metadata
    ) -> None:
        self._template = template
        self._contents = contents
        self._structure = structure
        self._stored = metadata.state_dict_metadata
        self._found: list[SavedEntry | None] = [None] * len(template.entries)
        self._differences: list[Difference] = []
        self._remedy = _REMEDY
        self._claimed: set[str] = set()

    def run(self) -> list[SavedEntry]:
        """Return the saved entry for each of the template's.

        Raises:
            TreeMismatch: If the checkpoint lacks something, or holds it in another form. It names every place.
        """
        root = ~(len(self._template.nodes) - 1) if self._template.nodes else 0
        if self._structure is None:
            self._match_by_key(root)
        else:
            self._claimed = {key for entry in self._structure.entries for key in entry.keys}
            self._match_structures(self._structure, root)
        matched = [entry for entry in self._found if entry is not None]
        for index, entry in enumerate(self._found):
            if entry is not None:
                self._check_entry(index, entry)
        if self._differences:
            raise TreeMismatch.between("load", self._differences, self._remedy)
        return matched

    def _differ(self, path: Sequence[Any], kind: str, saved: Any, wanted: Any) -> None:
        self._differences.append(Difference(Path(path), kind, saved, wanted))

    # With the checkpoint's structure: keys are matched with their types, whatever the flat keys are.

    def _match_structures(self, structure: Structure, root: int) -> None:
        pending: list[tuple[tuple[Any, ...], int, int]] = [((), root, structure.root())]
        while pending:
            path, ours, saved = pending.pop()
            if ours >= 0 and saved >= 0:
                self._found[ours] = structure.entries[saved]
            elif ours >= 0 or saved >= 0:
                self._differ(path, "structure", _shown_saved(structure, saved), self._shown(ours))
                if ours >= 0 and _is_empty(self._template.entries[ours].value):
                    self._remedy = _EMPTY_REMEDY
            else:
                pending += reversed(self._match_nodes(path, structure, ~ours, ~saved))

    def _match_nodes(
        self, path: tuple[Any, ...], structure: Structure, ours: int, saved: int
    ) -> list[tuple[tuple[Any, ...], int, int]]:
        node, other = self._template.nodes[ours], structure.nodes[saved]
        if family_text(node.kind.family) != other.family:
            self._differ(path, "structure", _shown_saved(structure, ~saved), self._shown(~ours))
            return []
        count, saved_count = node.kind.num_items(node.keys), other.num_items()
        if not count and saved_count:
            self._remedy = _EMPTY_REMEDY
            self._differ(path, "length", _shown_saved(structure, ~saved), self._shown(~ours))
            return []
        if node.kind.family != "mapping" and count != saved_count:
            self._differ(path, "length", _shown_saved(structure, ~saved), self._shown(~ours))
            return []
        by_key = _by_key(other.keys, other.children)
        pairs, missing = [], []
        for key, (child, shown) in _by_key(list(map(key_text, node.keys)), node.children, node.keys).items():
            if key in by_key:
                pairs.append(((*path, shown), child, by_key.pop(key)[0]))
            elif not self._match_unclaimed(child):
                missing.append((shown, child))
        alike = _by_rendering(other) if missing else {}
        for shown, child in missing:
            wanted = f"{self._shown(child)}{_told_of(shown, alike.get(render_key(shown), []))}"
            self._differ((*path, shown), "missing", "absent", wanted)
        if node.kind.family != "mapping":
            for child, _ in by_key.values():
                self._differ(path, "missing", _shown_saved(structure, child), "absent")
        return pairs

    def _match_unclaimed(self, ref: int) -> bool:
        """Match a subtree with entries that are not in the structure: those that only other ranks had."""
        entries = self._below(ref)
        keys = [self._template.entries[index].key for index in entries]
        if not keys or any(key in self._claimed or key not in self._stored for key in keys):
            return False
        for index in entries:
            self._found[index] = self._by_metadata(index)
        return True

    def _below(self, ref: int) -> list[int]:
        found, pending = [], [ref]
        while pending:
            ref = pending.pop()
            if ref >= 0:
                found.append(ref)
            else:
                pending += self._template.nodes[~ref].children
        return found

    def _by_metadata(self, index: int) -> SavedEntry:
        key = self._template.entries[index].key
        return SavedEntry(TENSOR_ENTRY if isinstance(self._stored[key], TensorStorageMetadata) else VALUE_ENTRY, (key,))

    # Without it: by flat keys, as DCP does.

    def _match_by_key(self, root: int) -> None:
        self._sorted_keys = sorted(self._stored)
        pending: list[tuple[int, tuple[Any, ...], str]] = [(root, (), "")]
        while pending:
            ref, path, key = pending.pop()
            if ref >= 0:
                self._match_leaf_by_key(ref, path, key)
            elif self._fits_by_key(ref, path, key):
                node = self._template.nodes[~ref]
                prefix = _prefix(path, key)
                below = [
                    (child, (*path, step), f"{prefix}{render_key(step)}")
                    for step, child in zip(node.keys, node.children, strict=True)
                ]
                pending += reversed(below)

    def _match_leaf_by_key(self, ref: int, path: tuple[Any, ...], key: str) -> None:
        entry = self._template.entries[ref]
        if entry.key in self._stored:
            self._found[ref] = self._by_metadata(ref)
        elif self._holds_below(_prefix(path, key)):
            self._differ(path, "structure", f"several entries ({_prefix(path, key)}…)", self._shown(ref))
            self._remedy = _EMPTY_REMEDY if _is_empty(entry.value) else _REMEDY
        else:
            self._differ(path, "missing", "absent", self._shown(ref))

    def _fits_by_key(self, ref: int, path: tuple[Any, ...], key: str) -> bool:
        node = self._template.nodes[~ref]
        count = node.kind.num_items(node.keys)
        prefix = _prefix(path, key)
        if path and key in self._stored:
            self._differ(path, "structure", "one entry (DCP pickles tuples whole)", self._shown(ref))
            self._remedy = "Save it with statetree.dcp.save, or convert tuples with tensors to lists on both sides."
            return False
        if not count and self._holds_below(prefix):
            self._differ(path, "length", f"entries ({prefix}…)", self._shown(ref))
            self._remedy = _EMPTY_REMEDY
            return False
        numbered, another = node.kind.family in {"list", "tuple", "deque"}, f"{prefix}{count}"
        if numbered and (another in self._stored or self._holds_below(f"{another}.")):
            self._differ(path, "length", f"more than {count} items", self._shown(ref))
        return True

    def _holds_below(self, prefix: str) -> bool:
        place = bisect_left(self._sorted_keys, prefix)
        return place < len(self._sorted_keys) and self._sorted_keys[place].startswith(prefix)

    def _check_entry(self, index: int, entry: SavedEntry) -> None:
        """Compare what an entry holds with what is to be filled."""
        path, content = self._template.entries[index].path, self._contents[index]
        if entry.sort != content.sort:
            self._differ(path, "leaf type", _SHOWN[entry.sort], _SHOWN[content.sort])
            return
        if entry.sort == VALUE_ENTRY:
            return
        if entry.sort == PARTS_ENTRY and (entry.facts != content.facts or len(entry.keys) != len(content.tensors)):
            self._differ(path, "layout", entry.facts, content.facts)
            return
        for key, tensor in zip(entry.keys, content.tensors, strict=True):
            stored = self._stored.get(key)
            if not isinstance(stored, TensorStorageMetadata):
                self._differ(path, "missing", "absent", "a tensor")
                continue
            if tuple(stored.size) != tuple(tensor.shape):
                self._differ(path, "shape", tuple(stored.size), tuple(tensor.shape))
            if stored.properties.dtype != tensor.dtype:
                self._differ(path, "dtype", stored.properties.dtype, tensor.dtype)
            why = why_not_writable(tensor)
            if why:
                self._differ(path, "writability", "values to load", why)

    def _shown(self, ref: int) -> str:
        if ref >= 0:
            content = self._contents[ref]
            return (
                _shown_value(self._template.entries[ref].value) if content.sort == VALUE_ENTRY else _SHOWN[content.sort]
            )
        return _shown_node(self._template.nodes[~ref])


_SHOWN: Final = {
    TENSOR_ENTRY: "a tensor",
    PARTS_ENTRY: "a tensor saved in parts",
    VALUE_ENTRY: "a plain value",
}


def _prefix(path: tuple[Any, ...], key: str) -> str:
    return f"{key}." if path else ""


def _is_empty(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not value


def _shown_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{type(value).__qualname__} of {len(value)}"
    return f"a plain value ({type(value).__qualname__})"


def _shown_node(node: Node) -> str:
    return f"{node.kind.cls.__qualname__} of {len(node.keys)}"


def _shown_saved(structure: Structure, ref: int) -> str:
    if ref >= 0:
        return _SHOWN[structure.entries[ref].sort]
    node: SavedNode = structure.nodes[~ref]
    return f"{node.name} of {len(node.keys)}"


def _by_rendering(node: SavedNode) -> dict[str, list[Any]]:
    """Return the keys of a saved container by how they are shown: ``0`` and ``"0"`` alike."""
    result: dict[str, list[Any]] = {}
    for key in path_of(node.keys):
        result.setdefault(render_key(key), []).append(key)
    return result


def _told_of(key: Any, alike: Sequence[Any]) -> str:
    """Say of a key that is missing which others look the same."""
    return f" at the key {exactly(key)} (the checkpoint has {' and '.join(map(exactly, alike))})" if alike else ""


def _by_key(
    texts: Sequence[str], children: Sequence[int], shown: Sequence[Any] | None = None
) -> dict[tuple[str, int], tuple[int, Any]]:
    """Return children by key; keys that are alike (NaNs) are numbered."""
    result: dict[tuple[str, int], tuple[int, Any]] = {}
    for text, child, key in zip(texts, children, shown or path_of(texts), strict=True):
        number = 0
        while (text, number) in result:
            number += 1
        result[text, number] = (child, key)
    return result
