"""``convert --match`` and ``--rename``: which entries are there, and under which keys."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from statetree.errors import CheckpointError
from statetree.paths import render_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.files.checkpoint import FileContents

_GONE: Final = object()


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Whether a key matches one of some globs; ``*`` goes over dots. Without globs, every key does."""
    return not patterns or any(fnmatchcase(key, pattern) for pattern in patterns)


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
            re.compile(f"{found[1]}|").sub(found[2], "")  # always matches, so that a wrong group shows
            return cls(re.compile(found[1]), found[2])
        except (re.error, IndexError) as error:
            msg = f"expected a regular expression and a replacement: {error}"
            raise ValueError(msg) from None


def select(contents: FileContents, patterns: Sequence[str], renames: Sequence[Rename] = ()) -> Any:
    """Return a tree with the entries whose keys match, under their new keys.

    An entry whose key changes stays in the innermost mapping whose key still begins its own. Mappings that lose all
    their entries are left out; sequences cannot lose some of theirs.

    Raises:
        CheckpointError: If nothing matches, two entries get one key, or a sequence would get holes.
    """
    chosen = {index for index, entry in enumerate(contents.entries) if matches(entry.key, patterns)}
    if not chosen and (contents.entries or patterns):
        msg = f"convert: none of the {len(contents.entries)} keys matches: expected one or more. Check --match."
        raise CheckpointError(msg)
    return _rebuilt(contents, chosen, _arrivals(contents, chosen, renames), keeps_empty=not patterns)


def without(contents: FileContents, dropped: set[str]) -> Any:
    """Return a tree without the entries of some keys.

    Raises:
        CheckpointError: As ``select``.
    """
    chosen = {index for index, entry in enumerate(contents.entries) if entry.key not in dropped}
    return _rebuilt(contents, chosen, {}, keeps_empty=True)


#: By node and number of a child: the entries that come to lie before it, and their keys there.
_Arrivals = dict[tuple[int, int], list[tuple[str, int]]]


def _arrivals(contents: FileContents, chosen: set[int], renames: Sequence[Rename]) -> _Arrivals:
    """Find the new places of entries whose keys change."""
    keys = {}
    for index in chosen:
        key = contents.entries[index].key
        for rename in renames:
            key = rename.pattern.sub(rename.replacement, key)
        keys[index] = key
    moved = sorted(index for index in chosen if keys[index] != contents.entries[index].key)
    taken = Counter(str(contents.entries[index].path) for index in chosen.difference(moved))
    taken.update(keys[index] for index in moved)
    found: _Arrivals = {}
    above = {ref: (node, at) for node, refs in enumerate(contents.spec.links()) for at, ref in enumerate(refs)}
    for index in moved:
        if taken[keys[index]] > 1:
            _refuse_twice(keys[index])
        place, key = _place(contents, index, keys[index], above)
        found.setdefault(place, []).append((key, index))
    return found


def _place(
    contents: FileContents, index: int, key: str, above: dict[int, tuple[int, int]]
) -> tuple[tuple[int, int], str]:
    """Return where an entry goes, and its key in the innermost mapping whose own key begins the new one."""
    path, old, ref = contents.entries[index].path, contents.entries[index].key, index
    for count in range(len(path) - 1, -1, -1):
        node, at = above[ref]
        start = "".join(f"{render_key(step)}." for step in path[:count])
        if issubclass(contents.spec.nodes[node][0].cls, dict):
            if key.startswith(start) and key != start:
                return (node, at), key[len(start) :]
        elif ref == index:
            msg = f"convert: cannot rename {old}: it is an item of a sequence, which would get a hole. Narrow --rename."
            raise CheckpointError(msg)
        ref = ~node
    msg = f"convert: cannot rename {old} to {key!r}: no mapping is above it. Narrow --rename."
    raise CheckpointError(msg)


def _rebuilt(contents: FileContents, chosen: set[int], arrivals: _Arrivals, *, keeps_empty: bool) -> Any:
    """Return a tree of the chosen entries, some of them at other places."""
    entries, spec = contents
    if not spec.nodes:
        return entries[0].value
    values = {index: entries[index].value for index in chosen}
    for moved in arrivals.values():
        for _, index in moved:
            del values[index]
    made: dict[int, Any] = {}  # the containers, under the references of their parents' links
    for index, (kind, steps, aux, *_) in enumerate(spec.nodes):
        refs = spec.links()[index]
        items: list[tuple[Any, Any]] = []
        for at, (step, ref) in enumerate(zip(steps, refs, strict=True)):
            items += [(key, entries[arrived].value) for key, arrived in arrivals.get((index, at), ())]
            found = (values if ref >= 0 else made).get(ref, _GONE)
            if found is not _GONE:
                items.append((step, found))
        if not items and (refs or not keeps_empty):
            continue
        if len(items) != len(refs) and not issubclass(kind.cls, dict):
            below = next((f" (above {entries[ref].key})" for ref in refs if ref >= 0), "")
            msg = (
                f"convert: {len(refs) - len(items)} of the {len(refs)} items of a {kind.cls.__name__}{below} are left "
                "out: expected all or none. Choose another --match."
            )
            raise CheckpointError(msg)
        keys = tuple(key for key, _ in items)
        if len(set(keys)) != len(keys):
            _refuse_twice(Counter(keys).most_common(1)[0][0])
        made[~index] = kind.unflatten(aux, keys, [value for _, value in items])
    if spec.root() not in made:
        raise CheckpointError("convert: nothing is left of the checkpoint: expected an entry or more. Check --match.")
    return made[spec.root()]


def _refuse_twice(key: Any) -> NoReturn:
    msg = f"convert: two entries would have the key {key!r}: expected one each. Change --rename."
    raise CheckpointError(msg)
