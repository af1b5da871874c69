"""Trees and tables as HTML, for notebooks and pages. It asks for nothing from any network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from statetree.key_paths import printable, render_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_ESCAPES: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
#: Containers with more children are folded at first.
_OPEN_CHILDREN: Final = 200
#: A notebook keeps what it shows: longer trees are cut off.
_MAX_CELL: Final = 1 << 20
#: A key with more dots than these does not fold at each.
_MAX_PARTS: Final = 32
STYLE: Final = """
.statetree{font:14px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
.statetree details{margin-left:1.2em}.statetree summary{cursor:pointer}.statetree b{font-weight:600}
.statetree i{opacity:.7;font-style:normal}.statetree .gone i{opacity:1}.statetree p{margin:0 0 0 2.4em;cursor:copy}
.statetree p:active,.statetree p:target{background:#8883}
.statetree{--gone:#d33;--new:#2a3}.statetree .gone{color:var(--gone)}.statetree .new{color:var(--new)}
.statetree td,.statetree th{padding:.1em .8em .1em 0;text-align:left;vertical-align:top;overflow-wrap:break-word}
.statetree td:first-child{overflow-wrap:anywhere;min-width:9em}
"""


def html_escaped(text: object) -> str:
    """Return a text as HTML has it. Control characters are written as escapes."""
    return printable(str(text)).translate(_ESCAPES)


def cell(parts: Iterable[str]) -> str:
    """Return fragments as what a notebook shows of a value."""
    made, size = [f"<div class=statetree><style>{STYLE}</style>"], 0
    for part in parts:
        size += len(part)
        made.append(part)
        if size > _MAX_CELL:
            made.append("<p>…")
            break
    return "".join(made) + "</div>"


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], classes: Sequence[str] = ()) -> Iterator[str]:
    """Yield a table of texts; ``classes`` are those of its columns."""
    yield f"<table><tr>{''.join(f'<th>{html_escaped(title)}' for title in titles)}"
    names = [f" class={name}" if name else "" for name in classes] or [""] * len(titles)
    for row in rows:
        yield "<tr>" + "".join(f"<td{name}>{html_escaped(text)}" for name, text in zip(names, row, strict=True))
    yield "</table>"


def tree_html(spec: Any, leaf: Callable[[int, str, str], str]) -> Iterator[str]:
    """Yield a ``TreeSpec`` as elements that fold; ``leaf`` returns those of leaves, of number, path and name (escaped).

    Keys with dots fold like containers in containers, as the names in a state dict do. Trees may be deep: no recursion.
    """
    pending: list[tuple[_Child, int] | str] = [(_Child(["root"], (), spec.root()), 0)]
    links = spec.links()
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
            continue
        (parts, at, here), depth = item
        name = html_escaped(".".join(parts))
        if isinstance(here, int) and here >= 0:
            yield leaf(here, html_escaped(".".join(at)), name)
            continue
        if isinstance(here, int):
            kind, keys = spec.nodes[~here][:2]
            texts = [render_key(key) for key in keys]
            children = [_Child(_parts(text), (*at, text), ref) for text, ref in zip(texts, links[~here], strict=True)]
            what = f"{html_escaped(kind.cls.__name__)} of {len(children):,}"
        else:
            children, what = here, f"{len(here):,}"
        below = _folded(children)
        is_open = " open" if len(below) <= _OPEN_CHILDREN and depth < 2 else ""
        yield f"<details{is_open}><summary><b>{name}</b> <i>{what}</i></summary>"
        pending.append("</details>")
        pending += [(child, depth + 1) for child in reversed(below)]


class _Child(NamedTuple):
    """What is in a container: the parts of its name, its path, and its number, or children whose names begin alike."""

    parts: list[str]
    at: tuple[str, ...]
    what: int | list[_Child]


def _parts(key: str) -> list[str]:
    parts = key.split(".", _MAX_PARTS)
    return parts if all(parts) else [key]  # a part without a name could not be told


def _folded(children: list[_Child]) -> list[_Child]:
    """Put together children whose names begin with the same part, and take from these all parts that they share."""
    groups: dict[Any, list[_Child]] = {}
    for index, child in enumerate(children):
        groups.setdefault(child.parts[0] if len(child.parts) > 1 else index, []).append(child)
    found = []
    for group in groups.values():
        first, size = group[0].parts, 1
        if len(group) == 1:
            found += group
            continue
        while all(len(child.parts) > size + 1 and child.parts[size] == first[size] for child in group):
            size += 1
        found.append(_Child(first[:size], (), [child._replace(parts=child.parts[size:]) for child in group]))
    return found
