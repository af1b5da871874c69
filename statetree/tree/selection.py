"""Selection: which leaves of a tree a user means, said by globs over rendered paths, by paths, or by a predicate."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, Final, cast

from statetree.errors import TreeMismatch, note_leaf, shown
from statetree.key_paths import Path, key_identity
from statetree.tree.atoms import HOLE
from statetree.tree.spec import TreeSpec
from statetree.tree.stand_ins import unread_leaf

#: Which leaves are meant: a glob, a path (of a leaf, or of a container with all that is in it), several of these, or a
#: predicate over path and leaf.
Where = str | Path | Sequence[str | Path] | Callable[[Path, Any], bool]

#: What of a node says where its children lie: keys, which of them are containers, how many leaves it takes.
_PLACE: Final = itemgetter(1, 3, 4)
#: Keys that read the same if they are equal (``True`` and ``1`` are, and do not).
_PLAIN_KEYS: Final = frozenset({str, int})
_REMEDY: Final = "Give a glob over whole paths, or pass missing_ok=True."
#: Structures with more leaves are matched anew each time: what the cache holds stays small.
_CACHED_LEAVES: Final = 100_000


def selected(
    where: Where, spec: TreeSpec, leaves: Sequence[Any], *, verb: str, missing_ok: bool | None = None
) -> list[bool]:
    """Return, for every leaf of a tree, whether it is meant.

    A glob is matched against the whole path of a leaf, rendered plainly: ``*`` stands for any characters but dots,
    ``**`` for any number of components (also none); a backslash takes the meaning from what follows it. A glob that
    begins with ``!`` matches all paths that the rest of it does not. Dots inside a key count like those between keys,
    so that a glob reads a flat state dict and a nested one alike. Where two paths read the same (``{0: …, "0": …}``),
    it means both; a ``Path`` means one. A predicate is not asked about ``HOLE``, which it does not select.

    What matches nothing raises ``TreeMismatch``, unless ``missing_ok``, which is ``None`` where the user has no say.
    """
    return selected_in(where, [(spec, leaves)], verb=verb, missing_ok=missing_ok)[0]


def selected_in(
    where: Where, trees: Sequence[tuple[TreeSpec, Sequence[Any]]], *, verb: str, missing_ok: bool | None = None
) -> list[list[bool]]:
    """Do as ``selected`` for several trees: what a glob or path matches may be in any one of them."""
    patterns = _patterns(verb, where)
    if patterns is None:
        return [_asked(cast("Callable[[Path, Any], bool]", where), spec, leaves) for spec, leaves in trees]
    starts = [pattern for pattern in patterns if isinstance(pattern, Path)]
    globs = [pattern for pattern in patterns if not isinstance(pattern, Path)]
    found = [[_matches(glob, spec) for spec, _ in trees] for glob in globs]
    below = [_below(starts, spec) for spec, _ in trees] if starts else []
    met = set[Path]().union(*[starts for _, starts in below])
    unmatched: list[str | Path] = [glob for glob, masks in zip(globs, found, strict=True) if not any(map(any, masks))]
    unmatched += [start for start in starts if start not in met]
    if unmatched and not missing_ok:
        texts = [text for spec, _ in trees for text in spec.rendered_paths()]
        lines = [f"no path matches {str(pattern)!r}{suggestion(pattern, texts)}" for pattern in unmatched]
        remedy = "Give a glob over whole paths." if missing_ok is None else _REMEDY
        raise TreeMismatch(f"{verb}: {shown(lines)} {remedy}")
    if below:
        found.append([mask for mask, _ in below])
    if len(found) == 1:
        return list(map(list, found[0]))
    return [
        list(map(any, zip(*masks, strict=True))) or [False] * spec.num_leaves
        for (spec, _), *masks in zip(trees, *found, strict=True)
    ]


def _patterns(verb: str, where: Any) -> list[str | Path] | None:
    if isinstance(where, (str, Path)):
        return [where]
    if isinstance(where, Sequence) and all(isinstance(pattern, (str, Path)) for pattern in where):
        return list(where)
    if not callable(where):
        raise TypeError(
            f"{verb}: which leaves are meant cannot be told: expected a glob, a Path, several of these, or a "
            f"function of path and leaf, got {type(where).__qualname__}."
        )
    return None


def _asked(predicate: Callable[[Path, Any], bool], spec: TreeSpec, leaves: Sequence[Any]) -> list[bool]:
    result = []
    for path, leaf in zip(spec.paths(), leaves, strict=True):
        try:
            result.append(leaf is not HOLE and bool(predicate(path, unread_leaf(leaf))))
        except Exception as error:
            note_leaf(error, path, leaf)
            raise
    return result


def _matches(glob: str, spec: TreeSpec) -> Sequence[bool]:
    # By the keys alone: what else belongs to a structure may be anything, and is not to be kept alive.
    places = (*map(_PLACE, spec.nodes),)
    is_plain = _PLAIN_KEYS.issuperset(map(type, chain.from_iterable(map(itemgetter(0), places))))
    if is_plain and spec.num_leaves <= _CACHED_LEAVES:
        return _cached_matches(glob, places, spec.num_leaves)
    return _find_matches(glob, spec.rendered_paths())


def _below(starts: Sequence[Path], spec: TreeSpec) -> tuple[list[bool], set[Path]]:
    """Return for every leaf whether its path begins with one of some paths, and which of these there are."""
    start_of = {(*map(key_identity, start),): start for start in starts}
    lengths = sorted(set(map(len, start_of)))
    met: set[Path] = set()
    mask = []
    for path in spec.paths():
        keys = (*map(key_identity, path),)
        found = [start_of[keys[:length]] for length in lengths if length <= len(keys) and keys[:length] in start_of]
        met.update(found)
        mask.append(bool(found))
    return mask, met


def _find_matches(glob: str, texts: Sequence[str]) -> Sequence[bool]:
    fits = compiled_glob(glob).fullmatch
    return [fits(text) is not None for text in texts]


@lru_cache(maxsize=16)
def _cached_matches(glob: str, places: tuple[tuple[Any, ...], ...], num_leaves: int) -> Sequence[bool]:
    nodes: Any = tuple([(None, keys, None, kids, take) for keys, kids, take in places])
    return _find_matches(glob, TreeSpec(nodes, num_leaves).rendered_paths())


@lru_cache(maxsize=256)
def compiled_glob(glob: str) -> re.Pattern[str]:
    """Return the regular expression of a glob.

    Example:
        >>> from statetree.tree.selection import compiled_glob
        >>> bool(compiled_glob("model.**.w").fullmatch("model.w"))
        True
        >>> bool(compiled_glob("!model.**").fullmatch("model.w"))
        False
    """
    inner = "".join(
        glob_expression(before, _WILDCARDS.get(meant, re.escape(meant)), behind)
        for before, meant, behind in glob_tokens(glob.removeprefix("!"))
    )
    return re.compile(rf"(?!(?:{inner})\Z).*" if glob.startswith("!") else inner, re.DOTALL)


_WILDCARDS: Final = {"*": "[^.]*", "**": ".*"}
_TOKEN: Final = re.compile(
    r"(?P<whole>(?:\.\*\*)+$|(?:(?:^|(?<=\.))\*\*\.)+)|(?P<stars>\*\*+|\*)|\\(?P<quoted>.)"
    r"|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}|.",
    re.DOTALL,
)


def glob_tokens(glob: str) -> Iterator[tuple[str, str, str]]:
    """Yield the tokens of a glob: literal text, a wildcard or a name in braces, and literal text again.

    Where ``**`` is a whole component, the dot beside it is in its token: it goes with it if it stands for nothing.
    """
    for token in _TOKEN.finditer(glob):
        if token["whole"]:
            yield (".", "**", "") if token["whole"].startswith(".") else ("", "**", ".")
        elif token["stars"] or token["name"]:
            yield "", token["stars"][:2] if token["stars"] else token[0], ""
        else:
            yield token["quoted"] or token[0], "", ""


def glob_expression(before: str, meant: str, behind: str) -> str:
    """Return the regular expression of a token, given that of its wildcard or name."""
    text = f"{re.escape(before)}{meant}{re.escape(behind)}"
    return f"(?:{text})?" if meant and before + behind else text


def suggestion(pattern: str | Path, texts: Sequence[str]) -> str:
    """Return the end of a sentence that says that a pattern matches no path: maybe what is in a container was meant."""
    if isinstance(pattern, str) and any(map(compiled_glob(f"{pattern}.**").fullmatch, texts)):
        return f", which is a container: did you mean {f'{pattern}.**'!r}?"
    return "."
