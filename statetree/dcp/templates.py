"""A template matched with a checkpoint, before a byte of the data is read."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from statetree.dcp.keys import shown_key
from statetree.dcp.saved_structure import SavedContainer, SavedEntry, Structure, path_of, places, saved_form
from statetree.dcp.tensors import PARTS_ENTRY, TENSOR_ENTRY, VALUE_ENTRY, Content, boxes_of
from statetree.errors import Difference, TreeMismatch
from statetree.files.direct_loading import with_options
from statetree.key_paths import Path, exactly, render_key
from statetree.leaves.casting import castable
from statetree.tree.matching import ABSENT, matched
from statetree.tree.spec import container_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.dcp.flat_state import FlatState

_EMPTY_REMEDY: Final = (
    "Fill what is empty in the template first (a fresh optimizer has no state: take it from "
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or step once), or load without a template."
)
_REMEDY: Final = "Nothing was read. Pass a template like the saved tree; mappings in it may leave keys out."
_SHOWN: Final = {
    TENSOR_ENTRY: "a tensor",
    PARTS_ENTRY: "a tensor saved in parts",
    VALUE_ENTRY: "a plain value",
}


class TemplateMatching:
    """Which entry of a checkpoint belongs to which of a template.

    Args:
        template: The template's entries.
        contents: What there is to fill of each.
        chosen: Which are loaded, ``None`` for all. What the others are does not matter.
        structure: The checkpoint's structure, or ``None`` if DCP itself wrote it.
        metadata: The checkpoint's metadata.
        cast: Whether dtypes may differ where ``copy_into`` converts them.
        strict: Whether the checkpoint must hold all that the template does.
    """

    def __init__(
        self,
        template: FlatState,
        contents: Sequence[Content],
        chosen: Sequence[bool] | None,
        structure: Structure | None,
        metadata: Metadata,
        *,
        cast: bool = False,
        strict: bool = True,
    ) -> None:
        self._spec, self._entries, _ = template
        self._contents = contents
        self._chosen = chosen
        self._places = {
            tuple(entry.path[:count])
            for entry, is_chosen in zip(self._entries, chosen or (), strict=False)
            for count in range(len(entry.path) + 1)
            if is_chosen
        }
        self._structure = structure
        self._stored = metadata.state_dict_metadata
        self._found: list[SavedEntry | None] = [None] * len(self._entries)
        self._differences: list[Difference] = []
        self._remedy = _REMEDY
        self._cast = cast
        self._strict = strict

    def run(self) -> list[SavedEntry | None]:
        """Return the saved entry for each of the template's; ``None`` where there need not be one.

        Raises:
            TreeMismatch: If the checkpoint lacks something, or holds it in another form. It names every place.
        """
        if self._structure is None:
            self._match_by_key()
        else:
            self._match_structure(self._structure)
        for index, entry in enumerate(self._found):
            if self._chosen is not None and not self._chosen[index]:
                self._found[index] = None
            elif entry is not None:
                self._check_entry(index, entry)
        if self._differences:
            raise TreeMismatch.between("load", self._differences, with_options(self._remedy, self._differences))
        return self._found

    def _differ(self, path: Sequence[Any], kind: str, saved: Any, wanted: Any) -> None:
        """Note a difference at a chosen entry, or around one. What the template lacks, it lacks in a container."""
        place = tuple(path[:-1]) if wanted == ABSENT else tuple(path)
        if self._chosen is None or place in self._places:
            self._differences.append(Difference(Path(path), kind, saved, wanted))

    def _match_structure(self, saved: Structure) -> None:
        """Match by typed keys, whatever the flat keys are."""
        ours = saved_form(self._spec)
        order, differences = matched(ours, self._entries, saved.spec, saved.entries)
        for index, other in enumerate(range(len(self._entries)) if order is None else order):
            if other >= 0:
                self._found[index] = saved.entries[other]
        if not differences:
            return
        paths = {texts: path for (texts, _), (path, _) in zip(places(ours), places(self._spec), strict=True)}
        refs, other_refs = dict(places(ours)), dict(places(saved.spec))
        taken = {key for entry in saved.entries for key in entry.keys}
        empty: set[tuple[Any, ...]] = set()
        alike: dict[int, dict[str, list[Any]]] = {}
        for path, kind, left, right, _ in differences:
            texts = tuple(path)
            if not self._strict and ABSENT in (left, right):
                if right == ABSENT:
                    self._match_of_other_ranks(refs[texts], taken)
                continue
            if left == ABSENT:
                above = texts[:-1]
                container, keys = ours.nodes[~refs[above]][:2]
                if container.family == "mapping":  # it may leave out keys, but not all
                    if container.num_items(keys) or texts[-1].startswith("@") or above in empty:
                        continue
                    empty.add(above)
                    texts, kind = above, "length"
                else:
                    self._differ(path_of(texts), kind, _shown_saved(saved, other_refs[texts]), ABSENT)
                    continue
            if right == ABSENT:
                if not self._match_of_other_ranks(refs[texts], taken):
                    above_ref = other_refs[texts[:-1]]
                    if above_ref not in alike:
                        alike[above_ref] = _by_rendering(saved, above_ref)
                    others = _told_of(paths[texts][-1], alike[above_ref])
                    self._differ(paths[texts], kind, ABSENT, f"{self._shown(refs[texts])}{others}")
                continue
            if self._is_empty(refs[texts]):
                self._remedy = _EMPTY_REMEDY
            self._differ(paths[texts], kind, _shown_saved(saved, other_refs[texts]), self._shown(refs[texts]))

    def _match_of_other_ranks(self, ref: int, taken: set[str]) -> bool:
        """Match a subtree with entries that are not in the structure, since only other ranks had them."""
        below, pending = [], [ref]
        while pending:
            ref = pending.pop()
            if ref >= 0:
                below.append(ref)
            else:
                pending += self._spec.links()[~ref]
        keys = [self._entries[index].key for index in below]
        if not keys or any(key in taken or key not in self._stored for key in keys):
            return False
        for index in below:
            self._found[index] = self._by_metadata(index)
        return True

    def _by_metadata(self, index: int) -> SavedEntry:
        key = self._entries[index].key
        return SavedEntry(TENSOR_ENTRY if isinstance(self._stored[key], TensorStorageMetadata) else VALUE_ENTRY, (key,))

    def _match_by_key(self) -> None:
        """Match by flat keys, as DCP does."""
        keys = sorted(self._stored)

        def holds_below(prefix: str) -> bool:
            place = bisect_left(keys, prefix)
            return place < len(keys) and keys[place].startswith(prefix)

        passed_over: set[tuple[Any, ...]] = set()
        for path, ref in places(self._spec):
            if path and path[:-1] in passed_over:
                passed_over.add(path)
                continue
            key = ".".join(map(render_key, path))
            prefix = f"{key}." if path else ""
            if ref >= 0:
                if self._entries[ref].key in self._stored:
                    self._found[ref] = self._by_metadata(ref)
                elif holds_below(prefix):
                    self._differ(path, "structure", f"several entries ({prefix}…)", self._shown(ref))
                    self._remedy = _EMPTY_REMEDY if self._is_empty(ref) else _REMEDY
                elif self._strict:
                    self._differ(path, "missing", ABSENT, self._shown(ref))
                continue
            container, steps = self._spec.nodes[~ref][:2]
            count = container.num_items(steps)
            another = f"{prefix}{count}"
            if path and key in self._stored:
                self._differ(path, "structure", "one entry (DCP pickles tuples whole)", self._shown(ref))
                self._remedy = "Save it with statetree.dcp.save, or convert tuples with tensors to lists on both sides."
                passed_over.add(path)
            elif not count and holds_below(prefix):
                self._differ(path, "length", f"entries ({prefix}…)", self._shown(ref))
                self._remedy = _EMPTY_REMEDY
                passed_over.add(path)
            elif container.family in {"list", "tuple", "deque"} and (
                another in self._stored or holds_below(f"{another}.")
            ):
                self._differ(path, "length", f"more than {count} items", self._shown(ref))

    def _check_entry(self, index: int, entry: SavedEntry) -> None:
        """Compare what an entry holds with what is to be filled."""
        path, content = self._entries[index].path, self._contents[index]
        if entry.sort != content.sort:
            self._differ(path, "leaf type", _SHOWN[entry.sort], _SHOWN[content.sort])
            return
        if entry.sort == VALUE_ENTRY:
            return
        if entry.sort == PARTS_ENTRY and (entry.facts != content.facts or len(entry.keys) != len(content.tensors)):
            self._differ(path, "layout", entry.facts, content.facts)
            return
        if bool(entry.context) != bool(content.contexts) or (entry.context and entry.context not in self._stored):
            self._differ(path, "leaf type", _SHOWN[entry.sort], "a registered leaf type, with its context")
            return
        for key, tensor in zip(entry.keys, content.tensors, strict=True):
            stored = self._stored.get(key)
            if not isinstance(stored, TensorStorageMetadata):
                self._differ(path, "missing", ABSENT, "a tensor")
                continue
            if tuple(stored.size) != tuple(tensor.shape):
                self._differ(path, "shape", tuple(stored.size), tuple(tensor.shape))
            dtype = stored.properties.dtype
            if dtype != tensor.dtype and not (self._cast and castable(dtype, tensor.dtype)):
                self._differ(path, "dtype", dtype, tensor.dtype)
            if any(piece.is_inference() for _, piece in boxes_of(tensor)):
                self._differ(path, "writability", "values to load", "an inference tensor, which cannot be written")

    def _shown(self, ref: int) -> str:
        if ref < 0:
            return container_text(self._spec, ref)
        value, sort = self._entries[ref].value, self._contents[ref].sort
        if sort == VALUE_ENTRY and isinstance(value, (list, tuple)):
            return f"{type(value).__qualname__} of {len(value)}"
        return f"a plain value ({type(value).__qualname__})" if sort == VALUE_ENTRY else _SHOWN[sort]

    def _is_empty(self, ref: int) -> bool:
        """Whether a place of the template has nothing in it that could be filled."""
        if ref < 0:
            container, keys = self._spec.nodes[~ref][:2]
            return not container.num_items(keys)
        value = self._entries[ref].value
        return isinstance(value, (list, tuple)) and not value


def _shown_saved(saved: Structure, ref: int) -> str:
    if ref >= 0:
        return _SHOWN[saved.entries[ref].sort]
    container, keys = saved.spec.nodes[~ref][:2]
    assert isinstance(container, SavedContainer)
    return f"{container.name} of {len(keys)}"


def _by_rendering(saved: Structure, ref: int) -> dict[str, list[Any]]:
    """Return the keys of a saved container by how they are shown: ``0`` and ``"0"`` alike."""
    result: dict[str, list[Any]] = {}
    for key in map(shown_key, saved.spec.nodes[~ref][1]):
        result.setdefault(render_key(key), []).append(key)
    return result


def _told_of(key: Any, by_rendering: dict[str, list[Any]]) -> str:
    """Say of a key that is missing which others look the same."""
    alike = by_rendering.get(render_key(key), ())
    return f" at the key {exactly(key)} (the checkpoint has {' and '.join(map(exactly, alike))})" if alike else ""
