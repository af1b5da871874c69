"""Which rank holds which box of distributed tensors, as figures: one for all tensors that are cut alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from statetree.chunks.layouts import by_rank
from statetree.chunks.ranks import own_ranks
from statetree.errors import StateTreeError
from statetree.leaves.builtin import is_distributed, leaf_type_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statetree.chunks.boxes import Box

#: How many boxes, and how many figures, are drawn.
_MAX_BOXES: Final = 256
_MAX_FIGURES: Final = 50
STYLE: Final = """
.statetree figure{display:inline-block;margin:0 1em 1em 0;vertical-align:top}.statetree figcaption{max-width:14em}
.shards{position:relative;width:14em;height:9em}.shards span{position:absolute;box-sizing:border-box;overflow:hidden;
border:1px solid #8888;font-size:12px;padding:0 .3em;color:#000}
"""
#: The parts of a tensor: where each lies, in thousandths of the figure, and which ranks hold it.
Cut = tuple[tuple[int, int, int, int, tuple[int, ...]], ...]


class ShardFigures:
    """The figures of the leaves of a tree, numbered from 1."""

    def __init__(self) -> None:
        self._numbers: dict[Cut, int] = {}
        self._counts: list[int] = []

    def number(self, leaf: Any) -> int | None:
        """Return the figure of a distributed leaf; ``None`` for others, and where a rank knows only its own boxes."""
        leaf_type = leaf_type_of(type(leaf))
        if leaf_type is None or not is_distributed(leaf):
            return None
        try:
            chunks = leaf_type.local_chunks(leaf, own_ranks())
        except StateTreeError:  # chunks that are not to be told
            return None
        if chunks.layout is None or len(chunks.layout.ranks) > _MAX_BOXES:
            return None
        cut = _cut(chunks.shape, by_rank(chunks.layout))
        if cut not in self._numbers and len(self._numbers) < _MAX_FIGURES:
            self._numbers[cut] = len(self._numbers) + 1
            self._counts.append(0)
        number = self._numbers.get(cut)
        if number is not None:
            self._counts[number - 1] += 1
        return number

    def fragments(self) -> Iterator[str]:
        """Yield the figures."""
        for (cut, number), count in zip(self._numbers.items(), self._counts, strict=True):
            yield f"<figure id=shards{number}><div class=shards>"
            for top, left, height, width, ranks in cut:
                style = f"top:{top / 10}%;left:{left / 10}%;height:{height / 10}%;width:{width / 10}%"
                colour, text = f"hsl({ranks[0] * 137 % 360} 60% 75%)", ", ".join(map(str, ranks))
                yield f'<span style="{style};background:{colour}" title="{text}">{text}</span>'
            noun = "tensor" if count == 1 else "tensors"
            yield f"</div><figcaption>shards {number}: the ranks of {count:,} {noun}</figcaption></figure>"


def _cut(shape: Sequence[int], held: dict[int, list[Box]]) -> Cut:
    """Return the boxes in the two dims that are cut first, each with its ranks."""
    dims = [dim for dim in range(len(shape)) if len({box.start[dim] for boxes in held.values() for box in boxes}) > 1]
    ranks: dict[tuple[int, int, int, int], set[int]] = {}
    for rank, boxes in held.items():
        for box in boxes:
            spans = []
            for dim in range(2):
                at = dims[dim] if dim < len(dims) else None
                size = 1 if at is None else max(1, shape[at])
                start, stop = (0, 1) if at is None else (box.start[at], box.stop[at])
                spans.append((round(1000 * start / size), round(1000 * (stop - start) / size)))
            ranks.setdefault((spans[0][0], spans[1][0], spans[0][1], spans[1][1]), set()).add(rank)
    return tuple([(*span, tuple(sorted(of))) for span, of in sorted(ranks.items())])
