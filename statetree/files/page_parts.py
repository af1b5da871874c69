"""Of ``page``: its style and its script, and what is shown of a leaf that is chosen."""

from __future__ import annotations

from typing import Any, Final

import torch

from statetree.files.statistics import Statistics, histogram, statistics_of, stats_text
from statetree.files.stored import StoredTensor
from statetree.files.untrusted import brief
from statetree.leaves.builtin import is_distributed, is_plain
from statetree.tree.html_fragments import html_escaped

#: Tensors of as many elements show these.
_FEW: Final = 8
STYLE: Final = """
.tie{border-bottom:3px solid}.statetree a{color:inherit}.statetree [hidden]{display:none}
.map{display:flex;height:11em;gap:1px;margin:1em 0}.map div{display:flex;flex-direction:column;gap:1px;min-width:0}
.map span{background:#48c8;min-height:0;min-width:0;overflow:hidden;font-size:11px;white-space:nowrap}
.leaf>p{cursor:auto}.leaf>svg{display:block;width:12em;height:3em;margin:.2em 0 .6em 2.4em;fill:#48c}
.statetree details:has(.gone)>summary>b{color:var(--gone)}.leaf:target>summary{background:#8883}
.leaf button{font:13px/1.4 monospace;margin-left:2.4em;text-align:left;overflow-wrap:anywhere;cursor:copy}
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
