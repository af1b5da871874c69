"""What ``convert`` changes on the way: which entries are there, under which keys, of which dtype."""

from __future__ import annotations

import re
from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import torch

from statetree.cli.checkpoint import tensors_in
from statetree.cli.names import matches
from statetree.cli.stored import CastStorage, Composite, DenseStorage, Storage, StoredStorage, StoredTensor
from statetree.cli.ties import find_ties
from statetree.errors import CheckpointError
from statetree.paths import render_key
from statetree.torch_internals import WITHOUT_KERNELS, can_negate
from statetree.tree.mapping import map_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.cli.outline import Entry, Node, Outline

_GONE: Final = object()
_PACKED: Final = getattr(torch, "float4_e2m1fn_x2", None)


class Rename(NamedTuple):
    """A regular expression, and what is put in the place of every match."""

    pattern: re.Pattern[str]
    replacement: str

    @classmethod
    def parse(cls, text: str) -> Rename:
        """Read ``REGEX=REPL``. The first ``=`` that is not escaped by a backslash divides them.

        Raises:
            ValueError: If it is none.
        """
        found = re.match(r"((?:[^=\\]|\\.)*)=(.*)", text, re.DOTALL)
        if found is None:
            raise ValueError("expected REGEX=REPL")
        try:
            made = cls(re.compile(found[1]), found[2])
            made.pattern.sub(made.replacement, "")
            re.compile(f"{found[1]}|").sub(found[2], "")  # always matches, so that a wrong group shows
        except (re.error, IndexError) as error:
            msg = f"expected a regular expression and a replacement: {error}"
            raise ValueError(msg) from None
        return made


def renamed(key: str, renames: Sequence[Rename]) -> str:
    """Return a key after all renames, one after the other."""
    for rename in renames:
        key = rename.pattern.sub(rename.replacement, key)
    return key


def matching(outline: Outline, patterns: Sequence[str], renames: Sequence[Rename]) -> Any:
    """Return a tree with the entries whose keys match, under their new keys.

    An entry whose key changes stays in the innermost mapping whose key still begins its own. Mappings that lose all
    their entries are left out; sequences cannot lose some of theirs.

    Raises:
        CheckpointError: If nothing matches, two entries get one key, or a sequence would get holes.
    """
    chosen = [matches(entry.key, patterns) for entry in outline.entries]
    if not any(chosen) and (outline.entries or patterns):
        msg = f"convert: none of the {len(outline.entries)} keys matches: expected one or more. Check --match."
        raise CheckpointError(msg)
    return _Selection(outline, chosen, renames, keeps_empty=not patterns).tree()


def without(outline: Outline, dropped: set[str]) -> Any:
    """Return a tree without the entries of some keys.

    Raises:
        CheckpointError: As ``matching``.
    """
    chosen = [entry.key not in dropped for entry in outline.entries]
    return _Selection(outline, chosen, (), keeps_empty=True).tree()


class _Selection:
    def __init__(
        self, outline: Outline, chosen: Sequence[bool], renames: Sequence[Rename], *, keeps_empty: bool
    ) -> None:
        self._outline = outline
        self._keeps_empty = keeps_empty
        self._chosen = chosen
        self._keys = [renamed(entry.key, renames) for entry in outline.entries]
        self._moved: dict[tuple[int, int], list[tuple[str, int]]] = {}  # by mapping, and child before which it goes
        self._left: set[int] = set()
        if any(key != entry.key for key, entry in zip(self._keys, outline.entries, strict=True)):
            self._refuse_collisions()
            self._move()

    def _refuse_collisions(self) -> None:
        """Raise if an entry would get the key of another one, however that is nested."""
        entries = [entry for entry, is_chosen in zip(self._outline.entries, self._chosen, strict=True) if is_chosen]
        keys = [key for key, is_chosen in zip(self._keys, self._chosen, strict=True) if is_chosen]
        moved = {key for key, entry in zip(keys, entries, strict=True) if key != entry.key}
        plain = [str(entry.path) if key == entry.key else key for key, entry in zip(keys, entries, strict=True)]
        twice = next((key for key, count in Counter(plain).items() if count > 1 and key in moved), None)
        if twice is not None:
            _refuse_twice(twice)

    def _move(self) -> None:
        """Find new places for entries whose keys change."""
        if not self._outline.nodes:
            raise CheckpointError(
                "convert: the checkpoint is one leaf without a key: expected a mapping. Do not --rename."
            )
        nodes = self._outline.nodes
        pending: list[tuple[int, tuple[tuple[int, str, int], ...], str]] = [(len(nodes) - 1, (), "")]
        while pending:
            index, above, start = pending.pop()
            for step, child in zip(nodes[index].keys, nodes[index].children, strict=True):
                chain = (*above, (index, start, child))
                if child < 0:
                    pending.append((~child, chain, f"{start}{render_key(step)}."))
                elif self._chosen[child] and self._keys[child] != self._outline.entries[child].key:
                    self._place(child, chain)
        for moved in self._moved.values():
            moved.sort(key=itemgetter(1))  # the order in which they were

    def _place(self, entry: int, chain: Sequence[tuple[int, str, int]]) -> None:
        key, old = self._keys[entry], self._outline.entries[entry].key
        if _is_sequence(self._outline.nodes[chain[-1][0]]):
            msg = f"convert: cannot rename {old}: it is an item of a sequence, which would get a hole. Narrow --rename."
            raise CheckpointError(msg)
        for index, start, child in reversed(chain):
            if key.startswith(start) and key != start and not _is_sequence(self._outline.nodes[index]):
                self._moved.setdefault((index, child), []).append((key[len(start) :], entry))
                self._left.add(entry)
                return
        msg = f"convert: cannot rename {old} to {key!r}: no mapping is above it. Narrow --rename."
        raise CheckpointError(msg)

    def tree(self) -> Any:
        entries, nodes = self._outline.entries, self._outline.nodes
        if not nodes:
            return entries[0].value
        made: list[Any] = []
        for index, node in enumerate(nodes):
            made.append(self._node(index, node, made))
        if made[-1] is _GONE:
            msg = "convert: nothing is left of the checkpoint: expected an entry or more. Check --match."
            raise CheckpointError(msg)
        return made[-1]

    def _node(self, index: int, node: Node, made: list[Any]) -> Any:
        entries = self._outline.entries
        keys: list[Any] = []
        children: list[Any] = []
        for step, child in zip(node.keys, node.children, strict=True):
            for key, moved in self._moved.get((index, child), ()):
                keys.append(key)
                children.append(entries[moved].value)
            if child >= 0:
                value = entries[child].value if self._chosen[child] and child not in self._left else _GONE
            else:
                value = made[~child]
            if value is not _GONE:
                keys.append(step)
                children.append(value)
        if not children and (node.children or not self._keeps_empty):
            return _GONE
        if _is_sequence(node) and len(children) != len(node.children):
            raise CheckpointError(self._hole(node, made))
        if len(set(keys)) != len(keys):
            _refuse_twice(Counter(keys).most_common(1)[0][0])
        return node.kind.unflatten(node.aux, tuple(keys), children)

    def _hole(self, node: Node, made: list[Any]) -> str:
        lost = sum(made[~ref] is _GONE if ref < 0 else not self._chosen[ref] for ref in node.children)
        below = next((self._outline.entries[ref].key for ref in node.children if ref >= 0), "")
        where = f" (above {below})" if below else ""
        return (
            f"convert: {lost} of the {len(node.children)} items of a {node.kind.cls.__name__}{where} are left out: "
            "expected all or none. Choose another --match."
        )


def _refuse_twice(key: Any) -> NoReturn:
    msg = f"convert: two entries would have the key {key!r}: expected one each. Change --rename."
    raise CheckpointError(msg)


def _is_sequence(node: Node) -> bool:
    return not issubclass(node.kind.cls, dict)


class Cast(NamedTuple):
    """What became of a cast.

    Attributes:
        tree: The tree, its floating-point tensors of another dtype.
        untied: The keys of those that are no longer tied.
        kept: The keys of other tensors of numbers that are no integers, which keep their dtypes.
    """

    tree: Any
    untied: list[str]
    kept: list[str]


def cast(tree: Any, entries: Sequence[Entry], dtype: torch.dtype) -> Cast:
    """Convert the floating-point tensors of a tree.

    Tensors that share a storage go on sharing one, unless something of another dtype lies on it.
    """
    dtypes: dict[int, set[Any]] = {}
    for entry in entries:
        for part in tensors_in(entry.value):
            dtypes.setdefault(id(part.storage), set()).add(part.dtype if part is entry.value else None)
        if isinstance(entry.value, StoredStorage):
            dtypes.setdefault(id(entry.value.storage), set()).add(None)
    cast_storages: dict[int, Storage] = {}
    made: dict[int, Any] = {}
    untied: set[int] = set()

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, StoredTensor) or not is_castable(leaf.dtype) or leaf.dtype == dtype:
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = new(leaf)
        return made[id(leaf)]

    def new(leaf: StoredTensor) -> StoredTensor:
        if len(dtypes[id(leaf.storage)]) > 1 or (leaf.is_neg and not can_negate(dtype)):
            untied.add(id(leaf))
            dense = leaf.changed(storage=DenseStorage(leaf), stride=None, offset=0, is_conj=False, is_neg=False)
            return dense.changed(storage=CastStorage(dense.storage, leaf.dtype, dtype), dtype=dtype)
        key = id(leaf.storage)
        if key not in cast_storages:
            cast_storages[key] = CastStorage(leaf.storage, leaf.dtype, dtype)
        return leaf.changed(storage=cast_storages[key], dtype=dtype)

    result = map_leaves(convert, tree)
    ties = find_ties(entries)
    lost = [entry.key for index, entry in enumerate(entries) if id(entry.value) in untied and index in ties.group_of]
    return Cast(result, lost, [entry.key for entry in entries if _is_passed_over(entry.value, dtype)])


def _is_passed_over(leaf: Any, dtype: torch.dtype) -> bool:
    """Whether a leaf is not cast though its elements are no integers: complex ones, and tensors of several parts."""
    if isinstance(leaf, Composite):
        return leaf.dtype is None or (_is_fractional(leaf.dtype) and leaf.dtype != dtype)
    return isinstance(leaf, StoredTensor) and _is_fractional(leaf.dtype) and not is_castable(leaf.dtype)


def _is_fractional(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def overflowing(entries: Sequence[Entry]) -> list[str]:
    """Return the keys of tensors with elements that a cast, as they were read, found beyond the range of its dtype."""
    return [
        entry.key
        for entry in entries
        if any(
            isinstance(part.storage, CastStorage) and part.storage.has_overflowed for part in tensors_in(entry.value)
        )
    ]


def is_castable(dtype: torch.dtype) -> bool:
    """Whether elements of a dtype are floating-point numbers that torch converts."""
    return dtype.is_floating_point and dtype not in WITHOUT_KERNELS and dtype != _PACKED
