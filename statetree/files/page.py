"""``to_html``: a tree as one page to look at, without any network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.errors import CheckpointError, suppress
from statetree.files.leaf_text import dtype_text, leaf_text
from statetree.files.page_parts import BODY, SCRIPT, SEARCH, ShardFigures, panel
from statetree.files.page_parts import STYLE as PARTS_STYLE
from statetree.files.publishing import write_whole
from statetree.files.shared_bytes import shared_bytes
from statetree.files.stored import StoredTensor
from statetree.files.untrusted import brief, human, shape_text
from statetree.leaves.builtin import facts, is_plain
from statetree.transforms.similarity import similarity
from statetree.tree.flatten import flatten_for
from statetree.tree.html_fragments import STYLE, html_escaped, table, tree_html

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from statetree.transforms.similarity import Similarity

_DOCTYPE: Final = "<!doctype html"
_MAX_BOXES: Final = 400
#: Lines of text that the treemap is high: a box that is lower than one has none.
_LINES: Final = 11
#: What the two trees of a comparison are called that have no names.
_SIDES: Final = ("here", "in the other")


def to_html(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    other: Any = None,
    values: bool = True,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Write a tree as one HTML page: its structure, which folds, its leaves, and how their bytes are distributed.

    Keys with dots fold as modules do, and a search field leaves the leaves that have all its words. A leaf that is
    chosen shows its path, bytes, least and largest element, mean, standard deviation and a histogram. Leaves that share
    memory are underlined in one colour, and linked. For distributed tensors, figures show which ranks hold which part.
    The page is one file, and needs no network.

    Args:
        tree: Any tree. Of a distributed tensor, the elements of this rank are shown.
        path: The file. A page that is there is replaced.
        other: Another tree to compare with: what ``similarity`` finds shows ``tree`` in red and ``other`` in green.
        values: Whether elements are read, to be shown and compared. Without, a large file takes no longer.
        rtol: As for ``similarity``.
        atol: As for ``similarity``.

    Raises:
        CheckpointError: If the file cannot be written, or is there and no page.

    Example:
        >>> import pathlib, tempfile, statetree as st, torch
        >>> path = pathlib.Path(tempfile.mkdtemp(), "state.html")
        >>> st.to_html({"layer": {"w": torch.ones(2, 3)}}, path)
        >>> "float32 [2, 3]" in path.read_text()
        True
    """
    found = None if other is None else similarity(tree, other, values=values, rtol=rtol, atol=atol)
    write_page(tree, path, found, values=values)


def write_page(
    tree: Any,
    path: str | os.PathLike[str],
    found: Similarity | None,
    *,
    values: bool,
    sides: tuple[str, str] = _SIDES,
) -> None:
    """Write the page of a tree, with its values, and with what was found where it was compared with another one.

    ``sides`` are what the two are called.
    """
    target = Path(path)

    def write(folder: Path) -> list[str]:
        if target.is_file():
            with target.open("rb") as file:
                beginning = file.read(len(_DOCTYPE))
            if beginning and beginning.lower() != _DOCTYPE.encode():  # a checkpoint that was meant to be read, say
                what = "a file of that name exists, which is no page"
                raise CheckpointError(f"to_html: cannot write {target}: {what}. Choose another name.")
        (folder / target.name).write_text("".join(_page(tree, found, sides, values=values)), "utf-8")
        return [target.name]

    write_whole(target, write, is_directory=False, overwrite=True)


def _page(tree: Any, found: Similarity | None, sides: tuple[str, str], *, values: bool) -> Iterator[str]:
    yield f"{_DOCTYPE}><meta charset=utf-8><meta name=viewport content='width=device-width'><title>State</title>"
    yield f"<style>{STYLE}{BODY}</style><body class=statetree>"
    marked: set[str] = set()
    if found is not None:
        titles, classes = ("path", "what", *sides, "by at most"), ("", "", "gone", "new", "")
        rows = [
            (path or "<root>", kind, left, right, "" if largest is None else f"{largest:.3g}")
            for path, kind, left, right, largest in found.differences
        ]
        scope = "" if found.values else " in structure; values were not compared"
        yield f"<h2>{found.count:,} difference{'s' * (found.count != 1)}{scope}</h2>"
        yield f"<p>{html_escaped(found.hint)}</p>" if found.hint else ""
        yield from ("<div class=wide>", *table(titles, rows, classes), "</div>")
        if found.count > len(rows):
            yield f"<p>The first {len(rows):,} of {found.count:,} are shown.</p>"
        marked.update(html_escaped(each.path) for each in found.differences)
    yield from tree_fragments(tree, frozenset(marked), values=values, above_leaves=SEARCH)
    yield f"<script>{SCRIPT}</script>"


def tree_fragments(
    tree: Any, marked: frozenset[str] = frozenset(), *, values: bool = False, above_leaves: str = ""
) -> Iterator[str]:
    """Yield what is shown of a tree: a sum, its bytes as a treemap, figures of shards, and its leaves."""
    leaves, spec = flatten_for("to_html", tree)
    said = [_said(leaf) for leaf in leaves]
    groups = shared_bytes(leaves)
    tied = {index: (number * 137 % 360, group) for number, group in enumerate(groups) for index in group}
    keys = spec.flat_keys()
    figures = ShardFigures()
    numbers = [figures.number(leaf) for leaf in leaves]

    def line(index: int, path: str, name: str) -> str:
        label, more = f"<b>{name}</b>", ""
        if index in tied:
            hue, group = tied[index]
            label = f'<b class=tie style="border-color:hsl({hue} 80% 50%)">{name}</b>'
            following = group[(group.index(index) + 1) % len(group)]
            more = f" <a href=#leaf{following}>= {html_escaped(keys[following])}</a>"
        if numbers[index] is not None:
            more += f" <a href=#shards{numbers[index]}>shards {numbers[index]}</a>"
        number = f" id=leaf{index}" if index in tied else ""
        chosen, notice = panel(leaves[index], path, said[index][1], values=values)
        gone = " class=gone" if path in marked else ""
        summary = f"<summary{gone}>{label} <i>{html_escaped(said[index][0])}</i>{notice}{more}</summary>"
        return f"<details class=leaf{number}>{summary}{chosen}</details>"

    total = sum(nbytes for _, nbytes in said)
    yield f"<h1>{len(leaves):,} leaves, {human(total)}</h1>"
    yield f"<style>{PARTS_STYLE}</style>"
    yield from _treemap(keys, said)
    yield from figures.fragments()
    yield above_leaves
    yield from tree_html(spec, line)


def _treemap(keys: Sequence[str], said: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Yield boxes for the largest leaves, in columns by the first part of their paths."""
    columns: dict[str, list[tuple[int, str]]] = {}
    rows = sorted(((nbytes, key) for (_, nbytes), key in zip(said, keys, strict=True)), key=lambda row: -row[0])
    least = sum(nbytes for _, nbytes in said) / 1000
    for nbytes, key in rows[:_MAX_BOXES]:
        if nbytes > least:
            columns.setdefault(key.partition(".")[0], []).append((nbytes, key))
    yield "<div class=map>"
    for boxes in columns.values():
        height = sum(nbytes for nbytes, _ in boxes)
        yield f'<div style="flex:{height}">'
        for nbytes, key in boxes:
            title = f"{html_escaped(key)}: {human(nbytes)}"
            text = html_escaped(brief(key, 24)) if nbytes * _LINES > height else ""
            yield f'<span style="flex:{nbytes}" title="{title}">{text}</span>'
        yield "</div>"
    yield "</div>"


def _said(leaf: Any) -> tuple[str, int]:
    """Return a leaf in words, and its bytes."""
    if isinstance(leaf, StoredTensor):
        return (leaf_text(leaf), leaf.nbytes)
    if is_plain(leaf):
        return (f"{type(leaf).__name__} {brief(repr(leaf)[:1000])}", 0)
    if isinstance(leaf, torch.Tensor):
        with suppress(Exception):  # uninitialized, nested, of a layout that has no copy, or a subclass that refuses
            placements = str(facts(leaf).get("placements", ""))
            words = (dtype_text(leaf.dtype), shape_text(leaf.shape), placements)
            return (" ".join(filter(None, words)), leaf.numel() * leaf.dtype.itemsize)
    return (type(leaf).__qualname__, 0)
