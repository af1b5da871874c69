"""Selection: which leaves of a tree a user means, said by globs over rendered paths, by paths, or by a predicate."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

from statetree.errors import TreeMismatch, note_leaf, shown
from statetree.paths import Path, nearest, render_key, same_key
from statetree.tree.atoms import HOLE

if TYPE_CHECKING:
    from statetree.tree.spec import TreeSpec

#: Which leaves are meant: a glob, a path (of a leaf, or of a container with all that is in it), several of these, or a
#: predicate over path and leaf.
Where = str | Path | Sequence[str | Path] | Callable[[Path, Any], bool]

#: Structures with more leaves are matched anew each time: what the cache holds stays small.
_CACHED_LEAVES: Final = 100_000


def selected(where: Where, spec: TreeSpec, leaves: Sequence[Any], *, verb: str, missing_ok: bool = False) -> list[bool]:
    """Return, for every leaf of a tree, whether it is meant.

    A glob is matched against the whole flat key of a leaf, as ``to_flat`` makes it: ``*`` stands for any characters
    but dots, ``**`` for any number of components (also none); a backslash takes the meaning from what follows it. Dots
    inside a key count like those between keys, so that a glob reads a flat state dict and a nested one alike.

    Args:
        where: Which leaves.
        spec: The tree's structure.
        leaves: Its leaves. A predicate is not asked about ``HOLE``, which it does not select.
        verb: On whose behalf, for messages.
        missing_ok: Whether a glob or path may match nothing.

    Raises:
        TreeMismatch: If a glob or path matches nothing.
        TypeError: If ``where`` is none of these.
    """
    return selected_in(where, [(spec, leaves)], verb=verb, missing_ok=missing_ok)[0]


def selected_in(
    where: Where, trees: Sequence[tuple[TreeSpec, Sequence[Any]]], *, verb: str, missing_ok: bool = False
) -> list[list[bool]]:
    """Do as ``selected`` for several trees: what a glob or path matches may be in any one of them."""
    patterns = _patterns(verb, where)
    if patterns is None:
        return [_asked(cast("Callable[[Path, Any], bool]", where), spec, leaves) for spec, leaves in trees]
    masks = [[False] * spec.num_leaves for spec, _ in trees]
    unmatched = []
    for pattern in patterns:
        found = [_matches(pattern, spec) for spec, _ in trees]
        for mask, indices in zip(masks, found, strict=True):
            for index in indices:
                mask[index] = True
        if not any(found):
            unmatched.append(pattern)
    if unmatched and not missing_ok:
        keys = [key for spec, _ in trees for key in spec.flat_keys()]
        lines = [f"no path matches {str(pattern)!r}{_suggestion(pattern, keys)}" for pattern in unmatched]
        raise TreeMismatch(f"{verb}: {shown(lines)} Give a glob over whole paths, or pass missing_ok=True.")
    return masks


def _patterns(verb: str, where: Any) -> list[str | Path] | None:
    if isinstance(where, (str, Path)):
        return [where]
    if isinstance(where, Sequence) and all(isinstance(pattern, (str, Path)) for pattern in where):
        return list(where)
    if not callable(where):
        msg = (
            f"{verb}: where does not say which leaves: expected a glob, a Path, a sequence of them, or a function of "
            f"path and leaf, got {type(where).__qualname__}."
        )
        raise TypeError(msg)
    return None


def _asked(predicate: Callable[[Path, Any], bool], spec: TreeSpec, leaves: Sequence[Any]) -> list[bool]:
    result = []
    for path, leaf in zip(spec.paths(), leaves, strict=True):
        try:
            result.append(leaf is not HOLE and bool(predicate(path, leaf)))
        except Exception as error:
            note_leaf(error, path, leaf)
            raise
    return result


def _matches(pattern: str | Path, spec: TreeSpec) -> Sequence[int]:
    """Return the indices of the leaves that a glob or path matches."""
    if isinstance(pattern, Path):
        return [index for index, path in enumerate(spec.paths()) if _lies_in(path, pattern)]
    keys = tuple(spec.flat_keys())
    find = _cached_matches if len(keys) <= _CACHED_LEAVES else _find_matches
    return find(pattern, keys)


def _lies_in(path: Path, start: Path) -> bool:
    return len(path) >= len(start) and all(map(same_key, start, path))


def _find_matches(glob: str, keys: tuple[str, ...]) -> Sequence[int]:
    fits = compiled_glob(glob).fullmatch
    return [index for index, key in enumerate(keys) if fits(key)]


# By the flat keys, not by the structure: its auxiliary data may hold anything, and is not to be kept alive.
_cached_matches = lru_cache(maxsize=16)(_find_matches)


@lru_cache(maxsize=256)
def compiled_glob(glob: str) -> re.Pattern[str]:
    """Return the regular expression of a glob.

    Example:
        >>> from statetree.tree.selection import compiled_glob
        >>> bool(compiled_glob("model.**.w").fullmatch("model.w"))
        True
    """
    return re.compile("".join(glob_parts(glob, lambda stars: r"[^.]*" if stars == "*" else ".*")), re.DOTALL)


_TOKEN: Final = re.compile(
    r"(?P<whole>(?:(?:^|(?<=\.))\*\*\.)+|\.\*\*$)|(?P<stars>\*\*+|\*)|\\(?P<quoted>.)|.", re.DOTALL
)


def glob_parts(glob: str, wildcard: Callable[[str], str]) -> list[str]:
    """Return the parts of the regular expression of a glob, one for each character or wildcard.

    Args:
        glob: The glob.
        wildcard: Returns the expression of ``*`` and of ``**``. Where the latter is a whole component, the dot beside
            it goes with it if it stands for nothing.
    """
    parts = []
    for token in _TOKEN.finditer(glob):
        if token["whole"]:
            inner = wildcard("**")
            parts.append(rf"(?:\.{inner})?" if token["whole"].startswith(".") else rf"(?:{inner}\.)?")
        elif token["stars"]:
            parts.append(wildcard(token["stars"][:2]))
        else:
            parts.append(re.escape(token["quoted"] or token[0]))
    return parts


def escaped(text: str) -> str:
    """Return a glob that matches a text and nothing else: wildcards and braces are quoted by backslashes."""
    return re.sub(r"([\\*{}])", r"\\\1", text)


def _suggestion(pattern: str | Path, keys: Sequence[str]) -> str:
    if isinstance(pattern, str) and any(map(compiled_glob(f"{pattern}.**").fullmatch, keys)):
        return f", which is a container: did you mean {f'{pattern}.**'!r}?"
    if isinstance(pattern, Path):
        pattern = ".".join(map(render_key, pattern))
    found = nearest(pattern, keys)
    return f": did you mean {found}?" if found else "."
