"""Draws the pictures of the documentation: ``python docs/pictures/draw.py`` writes the SVG files beside this one."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

INK, GREY, PAPER = "#1f2933", "#7b8794", "#ffffff"
BLUE, GREEN, ORANGE, PURPLE, PALE = "#d6e6f7", "#d7eed9", "#fbe3c4", "#e6dbf3", "#eef1f4"


class Picture:
    """An SVG picture on a white card, so that it can be read on dark pages."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = (width, height)
        self.title = title
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = PAPER,
        *,
        stroke: str = INK,
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="1.2"{dashes}/>'
        )

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "middle", size: int = 14, bold: bool = False,
        fill: str = INK, mono: bool = False,
    ) -> None:  # fmt: skip
        """Write a line of text."""
        family = "ui-monospace, monospace" if mono else "system-ui, sans-serif"
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-family="{family}" font-size="{size}" '
            f'fill="{fill}"{weight}>{escape(words)}</text>'
        )

    def label(self, x: float, y: float, width: float, height: float, words: str, fill: str = PAPER) -> None:
        """Draw a rectangle with a line of text in its middle."""
        self.box(x, y, width, height, fill)
        self.text(x + width / 2, y + height / 2 + 5, words)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = INK) -> None:
        """Draw an arrow."""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" stroke-width="1.4" '
            'marker-end="url(#head)"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = GREY) -> None:
        """Draw a dashed line."""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" stroke-dasharray="4 4"/>'
        )

    def svg(self) -> str:
        """Return the file."""
        width, height = self.size
        head = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{INK}"/></marker>'
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img">\n<title>{escape(self.title)}</title>\n<defs>{head}</defs>\n'
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>\n{body}\n</svg>\n'
        )


def levels() -> Picture:
    """The three levels, the engine of each, and the leaf type between them."""
    picture = Picture(760, 400, "Containers, leaves and bytes, and the engine of each")
    rows = [
        (20, BLUE, "containers", "tree", "flatten  unflatten  map_leaves  paths  to_flat"),
        (150, ORANGE, "leaves", "exchange", "gather  distribute  broadcast  reshard  partition_replicas"),
        (280, GREEN, "bytes", "spans", "allocate_like  offload  copy_into  Stager"),
    ]
    for y, fill, name, engine, verbs in rows:
        picture.box(20, y, 720, 106, fill, stroke=GREY)
        picture.text(36, y + 24, name, anchor="start", bold=True)
        picture.text(724, y + 24, f"engine: {engine}", anchor="end", fill=GREY)
        picture.text(724, y + 97, verbs, anchor="end", size=13, mono=True)
    picture.label(190, 32, 60, 26, "dict")
    for x, words in ((130, "list"), (250, "step: 7")):
        picture.arrow(220, 58, x + 35, 68)
        picture.label(x, 68, 70, 24, words)
    picture.text(430, 50, "a tree: nodes and leaves", size=13)
    for index in range(3):
        picture.label(120 + 74 * index, 192, 74, 36, f"rank {index}")
    picture.text(231, 184, "global shape (9, 4): one box a rank", size=12)
    picture.arrow(165, 92, 165, 150)
    picture.text(175, 142, "leaf type: unpack, pack", anchor="start", size=13, bold=True)
    for index in range(16):
        used = 3 <= index < 12
        picture.box(120 + 24 * index, 312, 24, 24, PAPER if used else PALE, stroke=INK if used else GREY)
    picture.text(192 + 108, 354, "the span of the storage that views cover", size=12)
    picture.arrow(157, 228, 205, 312)
    picture.text(205, 273, "plain tensors: views on storages", anchor="start", size=13, bold=True)
    return picture


def _cells(picture: Picture, x: float, y: float, count: int, used: range, fill: str) -> None:
    for index in range(count):
        inside = index in used
        picture.box(x + 26 * index, y, 26, 26, fill if inside else PALE, stroke=INK if inside else GREY)


def ties() -> Picture:
    """Two views on a storage, and what a copy allocates."""
    picture = Picture(760, 330, "Tied views share one span, before and after a copy")
    picture.text(20, 32, "before: one storage of 24 elements", anchor="start", bold=True)
    _cells(picture, 20, 90, 24, range(4, 16), BLUE)
    picture.text(20 + 26 * 8, 62, "embed: elements 4 to 11", size=13)
    picture.line(20 + 26 * 4, 70, 20 + 26 * 12, 70, stroke=INK)
    picture.line(20 + 26 * 4, 70, 20 + 26 * 4, 90)
    picture.line(20 + 26 * 12, 70, 20 + 26 * 12, 90)
    picture.text(20 + 26 * 12, 150, "head: elements 8 to 15", size=13)
    picture.line(20 + 26 * 8, 134, 20 + 26 * 16, 134, stroke=INK)
    picture.line(20 + 26 * 8, 116, 20 + 26 * 8, 134)
    picture.line(20 + 26 * 16, 116, 20 + 26 * 16, 134)
    picture.arrow(20 + 26 * 10, 168, 20 + 26 * 10, 214)
    picture.text(20 + 26 * 10 + 14, 196, "offload: the span is copied once", anchor="start", size=13)
    picture.text(20, 238, "after:", anchor="start", bold=True)
    _cells(picture, 20 + 26 * 4, 244, 12, range(12), GREEN)
    picture.text(20 + 26 * 8, 234, "embed", size=13)
    picture.text(20 + 26 * 12, 290, "head", size=13)
    picture.text(20 + 26 * 17, 262, "12 elements, the same overlap", anchor="start", size=13)
    note = "Grey elements are covered by no view of the tree: they are neither allocated nor copied."
    picture.text(20, 316, note, anchor="start", size=13, fill=GREY)
    return picture


def leases() -> Picture:
    """A stager with two snapshots over time."""
    picture = Picture(760, 300, "Snapshots of a stager and who refers to them, over time")
    left, width = 130, 600

    def at(time: float) -> float:
        return left + width * time / 10

    for time, words in ((1, "stage 1"), (3.5, "stage 2"), (6, "stage 3"), (8.2, "stage 4")):
        picture.line(at(time), 40, at(time), 250)
        picture.text(at(time), 30, words, size=13, bold=True)
    picture.text(20, 85, "snapshot A", anchor="start", size=13)
    picture.text(20, 165, "snapshot B", anchor="start", size=13)
    for start, stop, y, words, fill in (
        (1, 5, 65, "leased: tree 1, being written", BLUE),
        (6, 10, 65, "leased: tree 3", ORANGE),
        (3.5, 7.6, 145, "leased: tree 2, being written", GREEN),
        (8.2, 10, 145, "leased: tree 4", PURPLE),
    ):
        picture.label(at(start), y, at(stop) - at(start), 34, words, fill)
    for start, stop, y in ((5, 6, 65), (7.6, 8.2, 145)):
        picture.box(at(start), y, at(stop) - at(start), 34, PALE, stroke=GREY, dashed=True)
    picture.text(at(5.5), 118, "idle: nothing refers to tree 1", size=12, fill=GREY)
    picture.text(at(7.9), 198, "idle", size=12, fill=GREY)
    picture.arrow(at(0), 250, at(10), 250)
    picture.text(at(10), 270, "time", anchor="end", size=12, fill=GREY)
    note = "Stage 3 writes into A. Had tree 1 still been referred to, it would have raised StagerBusy."
    picture.text(20, 288, note, anchor="start", size=13, fill=GREY)
    return picture


def reshard() -> Picture:
    """A tensor of 5 by 4 from row shards to column shards."""
    picture = Picture(760, 330, "Chunks of two layouts and their intersections")
    cell = 34
    picture.text(98, 34, "tree: Shard(0)", bold=True)
    picture.label(30, 60, 4 * cell, 3 * cell, "rank 0: 3 x 4", BLUE)
    picture.label(30, 60 + 3 * cell, 4 * cell, 2 * cell, "rank 1: 2 x 4", GREEN)
    picture.text(365, 34, "intersections", bold=True)
    parts = [
        (0, 0, 3, PAPER, "0 keeps"),
        (2, 0, 3, ORANGE, "0 to 1"),
        (0, 3, 2, ORANGE, "1 to 0"),
        (2, 3, 2, PAPER, "1 keeps"),
    ]
    for column, row, high, fill, words in parts:
        picture.label(277 + column * 44, 60 + row * cell, 88, high * cell, words, fill)
    picture.text(642, 34, "like: Shard(1)", bold=True)
    picture.label(564, 60, 78, 5 * cell, "0: 5 x 2", BLUE)
    picture.label(642, 60, 78, 5 * cell, "1: 5 x 2", GREEN)
    picture.arrow(180, 145, 262, 145)
    picture.arrow(468, 145, 550, 145)
    lines = (
        "Each chunk is a box in the global shape (5, 4): where it starts and where it stops in each dim.",
        "A rank sends what its boxes have in common with another rank's target boxes, and nothing else:",
        "here 6 elements one way and 4 the other, of 20.",
    )
    for number, words in enumerate(lines):
        picture.text(30, 270 + 22 * number, words, anchor="start", size=13)
    return picture


PICTURES = {"levels": levels, "ties": ties, "leases": leases, "reshard": reshard}


def drawn() -> dict[str, str]:
    """Return the files by their names."""
    return {f"{name}.svg": draw().svg() for name, draw in PICTURES.items()}


if __name__ == "__main__":
    for name, svg in drawn().items():
        (Path(__file__).parent / name).write_text(svg, encoding="utf-8")
