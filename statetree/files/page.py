"""``to_html``: a tree as one page to look at, without any network."""

from __future__ import annotations

import html
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.files.publishing import write_whole
from statetree.files.stored import StoredTensor
from statetree.files.untrusted import brief, printable
from statetree.leaves.builtin import facts, is_plain
from statetree.paths import render_key
from statetree.transforms.similarity import similarity
from statetree.tree.flatten import flatten_for

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from statetree.tree.spec import TreeSpec

#: Groups with more entries are folded when the page opens.
_OPEN_ENTRIES: Final = 200
_MAX_BOXES: Final = 400
_STYLE: Final = """
:root{color-scheme:light dark}body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em}
details{margin-left:1.2em}summary{cursor:pointer}i{color:#888;font-style:normal}b{font-weight:600}
p{margin:0 0 0 2.4em;cursor:copy}p:active{background:#8883}.gone{color:#c22}.new{color:#282}
.tie{border-bottom:3px solid;text-decoration:none;color:inherit}
.map{display:flex;height:9em;gap:1px;margin:1em 0}.map div{display:flex;flex-direction:column;gap:1px;min-width:0}
.map span{background:#48c8;min-height:0;overflow:hidden;font-size:11px}
"""
_SCRIPT: Final = (
    "document.addEventListener('click',e=>{const p=e.target.closest('p[title]');"
    "if(p&&navigator.clipboard)navigator.clipboard.writeText(p.title)})"
)


class _Found(NamedTuple):
    """What is said of a leaf."""

    text: str
    nbytes: int
    location: Any


def to_html(tree: Any, path: str | os.PathLike[str], *, other: Any = None) -> None:
    """Write a tree as one page to look at: its structure, which folds, its leaves, and how their bytes are distributed.

    A click on a leaf copies its path. Leaves that lie on the same memory are underlined in one colour. The page is one
    file, which asks for nothing from any network.

    Args:
        tree: Any tree. Elements are not read.
        path: The file.
        other: Another tree: where ``tree`` differs from it, that is said in red, and what ``other`` has in green.

    Raises:
        CheckpointError: If the file cannot be written.

    Example:
        >>> import pathlib, tempfile, statetree as st, torch
        >>> path = pathlib.Path(tempfile.mkdtemp(), "state.html")
        >>> st.to_html({"layer": {"w": torch.ones(2, 3)}}, path)
        >>> "torch.float32 [2, 3]" in path.read_text()
        True
    """
    place = Path(path)

    def write(folder: Path) -> list[str]:
        (folder / place.name).write_text("".join(_page(tree, other)), "utf-8")
        return [place.name]

    write_whole(place, write, is_directory=False, overwrite=True)


def _page(tree: Any, other: Any) -> Iterator[str]:
    leaves, spec = flatten_for("to_html", tree)
    found = [_found(leaf) for leaf in leaves]
    places: dict[Any, list[int]] = {}
    for index, each in enumerate(found):
        if each.location is not None:
            places.setdefault(each.location, []).append(index)
    tied = [group for group in places.values() if len(group) > 1]
    colours = {index: number * 137 % 360 for number, group in enumerate(tied) for index in group}
    differences = {}
    if other is not None:
        differences = {str(found.path): found for found in similarity(tree, other).differences}
    total = sum(each.nbytes for each in found)
    yield f"<!doctype html><meta charset=utf-8><title>State</title><style>{_STYLE}</style>"
    yield f"<h1>{len(leaves):,} leaves, {total:,} bytes</h1>"
    yield from _treemap(spec, found)
    yield from _branch(spec, spec.root(), (), found, colours, differences)
    for key, difference in differences.items():
        yield f"<p class=new>{_escaped(key)}: {_escaped(str(difference))}</p>"
    yield f"<script>{_SCRIPT}</script>"


def _branch(
    spec: TreeSpec,
    ref: int,
    path: tuple[str, ...],
    found: Sequence[_Found],
    colours: Mapping[int, int],
    differences: Mapping[str, Any],
) -> Iterator[str]:
    """Yield what is below a reference: without recursion, since trees may be deep."""
    pending: list[tuple[int, tuple[str, ...]] | str] = [(ref, path)]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
            continue
        here, at = item
        name = _escaped(at[-1]) if at else "root"
        if here >= 0:
            key = ".".join(at)
            marked = " class=gone" if key in differences else ""
            label = f"<b>{name}</b>"
            if here in colours:
                label = f'<b class=tie style="border-color:hsl({colours[here]} 80% 50%)">{name}</b>'
            yield f'<p title="{_escaped(key)}"{marked}>{label} <i>{found[here].text}</i></p>'
            continue
        kind, keys = spec.nodes[~here][:2]
        links = spec.links()[~here]
        is_open = " open" if len(links) <= _OPEN_ENTRIES and len(at) < 2 else ""
        what = f"{_escaped(kind.cls.__name__)} of {len(links):,}"
        yield f"<details{is_open}><summary><b>{name}</b> <i>{what}</i></summary>"
        pending.append("</details>")
        pending += [(child, (*at, render_key(step))) for step, child in reversed(list(zip(keys, links, strict=True)))]


def _treemap(spec: TreeSpec, found: Sequence[_Found]) -> Iterator[str]:
    """Yield boxes for the largest leaves, in columns by the first part of their paths."""
    columns: dict[str, list[tuple[int, str]]] = {}
    rows = sorted(zip(found, spec.flat_keys(), strict=True), key=lambda row: -row[0].nbytes)
    for each, key in islice(rows, _MAX_BOXES):
        if each.nbytes:
            columns.setdefault(key.partition(".")[0], []).append((each.nbytes, key))
    yield "<div class=map>"
    for boxes in columns.values():
        yield f'<div style="flex:{sum(nbytes for nbytes, _ in boxes)}">'
        for nbytes, key in boxes:
            title = f"{_escaped(key)}: {nbytes:,} bytes"
            yield f'<span style="flex:{nbytes}" title="{title}">{_escaped(brief(key, 24))}</span>'
        yield "</div>"
    yield "</div>"


def _found(leaf: Any) -> _Found:
    if isinstance(leaf, StoredTensor):
        outline = leaf.outline
        location = leaf.location() if leaf.is_strided and not outline.is_meta and leaf.numel else None
        return _Found(f"{leaf.dtype} {list(leaf.shape)}", leaf.nbytes, location)
    if is_plain(leaf):
        return _Found(f"{type(leaf).__name__} {_escaped(brief(repr(leaf)[:1000]))}", 0, None)
    if isinstance(leaf, torch.Tensor):
        known = facts(leaf)
        words = f"{known.get('dtype', '')} {list(known.get('shape', ()))} {known.get('placements', '')}"
        is_bare = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided
        is_bare = is_bare and not leaf.is_nested and not leaf.is_meta and leaf.numel() > 0
        return _Found(_escaped(words.strip()), leaf.numel() * leaf.dtype.itemsize, leaf.data_ptr() if is_bare else None)
    return _Found(_escaped(type(leaf).__qualname__), 0, None)


def _escaped(text: str) -> str:
    return html.escape(printable(text))
