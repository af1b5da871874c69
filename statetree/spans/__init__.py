"""The spans engine: the bytes of storages that plain tensors cover, copied once however many tensors look at them.

A *plain* tensor is a strided view on a storage, a *span* a stretch of a storage that such views cover. Transforms ask
about thousands of tensors at once, over *columns*. From the top to the bottom:

- ``replicate``: tensors with the same geometry and overlap in other memory.
- ``overlaps``: whether writing to tensors that share memory depends on the order of writing.
- ``threads``: copies by threads of our own, each of which takes whole pieces.
- ``layout``: storages cut into spans, and views made on them.
- ``memory``: plain, pinned and shared host memory, and memory of a device.
- ``geometry_cache``: lists of tensors that look like one seen before are not asked again.
- ``columns``: the attributes of a list of tensors, each as a list.
- ``sums``: what only the same bits at the same positions add up to, however they are cut and laid out.
- ``element_differences``: how elements differ: how many, where, by how much, and within a tolerance.
- ``bits``: tensors compared bit by bit.
"""

from statetree.spans.columns import Columns
from statetree.spans.layout import Span, SpanLayout, extents, lay_out
from statetree.spans.memory import Memory, memory_of
from statetree.spans.replicate import replicate

__all__ = ["Columns", "Memory", "Span", "SpanLayout", "extents", "lay_out", "memory_of", "replicate"]
