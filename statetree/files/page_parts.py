"""Of ``page``: its style and its script, what is shown of a leaf that is chosen, and which rank holds which box."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.chunks.layouts import by_rank
from statetree.chunks.ranks import own_ranks
from statetree.errors import StateTreeError
from statetree.files.leaf_text import Statistics, histogram, statistics_of, stats_text
from statetree.files.stored import StoredTensor
from statetree.files.untrusted import brief
from statetree.leaves.builtin import is_distributed, is_plain, leaf_type_of
from statetree.tree.html_fragments import html_escaped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statetree.chunks.boxes import Box

#: Tensors of as many elements show these.
_FEW: Final = 8
#: How many boxes, and how many figures, are drawn.
_MAX_BOXES: Final = 256
_MAX_FIGURES: Final = 50
STYLE: Final = """
.tie{border-bottom:3px solid}.statetree a{color:inherit}.statetree [hidden]{display:none}
.map{display:flex;height:11em;gap:1px;margin:1em 0}.map div{display:flex;flex-direction:column;gap:1px;min-width:0}
.map span{background:#48c8;min-height:0;min-width:0;overflow:hidden;font-size:11px;white-space:nowrap}
.leaf>p{cursor:auto}.leaf>svg{display:block;width:12em;height:3em;margin:.2em 0 .6em 2.4em;fill:#48c}
.statetree details:has(.gone)>summary>b{color:var(--gone)}.leaf:target>summary{background:#8883}
.leaf button{font:13px/1.4 monospace;margin-left:2.4em;text-align:left;overflow-wrap:anywhere;cursor:copy}
.statetree figure{display:inline-block;margin:0 1em 1em 0;vertical-align:top}.statetree figcaption{max-width:14em}
.shards{position:relative;width:14em;height:9em}.shards span{position:absolute;box-sizing:border-box;overflow:hidden;
border:1px solid #8888;font-size:12px;padding:0 .3em;color:#000}
"""
BODY: Final = """
:root{color-scheme:light dark}body{margin:1.5em auto;max-width:72em;padding:0 1em}.wide{overflow-x:auto}
body.statetree{--gone:#b3261e;--new:#176f2c}
search{position:sticky;top:0;z-index:1;display:block;background:Canvas;padding:.4em 0}
search input{font:inherit;width:22em;max-width:70%;padding:.2em .5em}
@media(prefers-color-scheme:dark){body.statetree{--gone:#ff8a80;--new:#7bd88f}}
@media(max-width:600px){.statetree details{margin-left:.6em}.statetree .leaf>*{margin-left:.6em}
.statetree td,.statetree th{padding-right:.5em;font-size:12px}}
"""
SEARCH: Final = (
    "<search><input type=search placeholder='Search: path, dtype, shape' aria-label='Search the leaves'> "
    "<output></output></search>"
)
#: Leaves that have all words of the search are left, in groups that open if there are not too many.
SCRIPT: Final = """
const input=document.querySelector('search input'),output=document.querySelector('search output'),
all=[...document.querySelectorAll('details')],leaves=all.filter(e=>e.classList.contains('leaf')),
groups=all.filter(e=>!e.classList.contains('leaf')),first=groups.map(e=>e.open);let texts;
input.oninput=()=>{
texts??=leaves.map(e=>(e.firstChild.textContent+' '+e.children[1].textContent).toLowerCase());
const words=input.value.toLowerCase().split(/\\s+/).filter(Boolean),seen=new Set;let count=0;
leaves.forEach((e,i)=>{e.hidden=!words.every(word=>texts[i].includes(word));
if(!e.hidden){count++;for(let up=e.parentElement;up&&!seen.has(up);up=up.parentElement)seen.add(up)}});
groups.forEach((e,i)=>{e.hidden=words.length>0&&!seen.has(e);e.open=words.length?seen.has(e)&&(count<500||first[i]):first[i]});
output.textContent=words.length?`${count} of ${leaves.length}`:''};
document.onclick=e=>{const copied=e.target.closest('.leaf>button'),link=e.target.closest('a');
if(copied)navigator.clipboard?.writeText(copied.textContent);
let up=link&&document.querySelector(link.hash);
for(;up;up=up.parentElement){up.hidden=false;if(up.open===false)up.open=true}};
"""
#: The parts of a tensor: where each lies, in thousandths of the figure, and which ranks hold it.
Cut = tuple[tuple[int, int, int, int, tuple[int, ...]], ...]


def panel(leaf: Any, path: str, nbytes: int, *, values: bool) -> tuple[str, str]:
    """Return what is shown of a leaf that is chosen, and what of its elements deserves notice at once."""
    words, notice, figure = [f"{nbytes:,} bytes"] if nbytes else [], "", ""
    tensor = leaf.to_local() if is_distributed(leaf) and hasattr(leaf, "to_local") else leaf
    if is_plain(leaf):
        words.append(brief(repr(leaf)[:1000], 1000))
    elif values and nbytes and (isinstance(tensor, StoredTensor) or type(tensor) in (torch.Tensor, torch.nn.Parameter)):
        found = statistics_of(tensor)
        whose = "" if tensor.shape == leaf.shape else "this rank's part: "
        words.append(whose + stats_text(found))
        figure, notice = _shown(tensor, found)
    said = html_escaped(", ".join(filter(None, words)))
    return f"<button title=Copy>{path or '&lt;root&gt;'}</button><p>{said}</p>{figure}", notice


def _shown(tensor: Any, found: Statistics | None) -> tuple[str, str]:
    """Return a histogram, and the elements of a tensor that has few of them, or how many are no numbers."""
    if found is None:
        return "", ""
    count = tensor.numel if isinstance(tensor, StoredTensor) else tensor.numel()
    if 0 < count <= _FEW:
        dense = tensor.tensor() if isinstance(tensor, StoredTensor) else tensor
        return "", "" if found.least is None else f" = {html_escaped(brief(str(dense.to_dense().tolist())))}"
    special = zip(("NaN", "inf"), (found.num_nan, found.num_inf), strict=True)
    notice = "".join(f" <b class=gone>{number:,} {name}</b>" for name, number in special if number)
    counts = histogram(tensor, found) if found.least != found.most else []
    heights = [round(30 * number / max(counts)) for number in counts]
    bars = "".join(f"V{30 - height}h1" for height in heights)
    return f"<svg viewBox='0 0 16 30' preserveAspectRatio=none><path d=M0,30{bars}V30z /></svg>" if bars else "", notice


class ShardFigures:
    """The figures of the leaves of a tree, numbered from 1."""

    def __init__(self) -> None:
        self._counts: dict[Cut, int] = {}  # how many leaves have it, in the order of their numbers

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
        if cut not in self._counts and len(self._counts) == _MAX_FIGURES:
            return None
        self._counts[cut] = self._counts.get(cut, 0) + 1
        return list(self._counts).index(cut) + 1

    def fragments(self) -> Iterator[str]:
        """Yield the figures."""
        for number, (cut, count) in enumerate(self._counts.items(), 1):
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
            spans = [(0, 1000), (0, 1000)]
            for number, dim in enumerate(dims[:2]):
                size = max(1, shape[dim])
                spans[number] = round(1000 * box.start[dim] / size), round(1000 * box.sizes[dim] / size)
            (top, height), (left, width) = spans
            ranks.setdefault((top, left, height, width), set()).add(rank)
    return tuple([(*span, tuple(sorted(of))) for span, of in sorted(ranks.items())])
