"""The stager: the only stateful object, which copies states into host memory that it uses again.

Memory is laid out once for a geometry and filled at every stage, and a staged tree *leases* it for as long as anything
refers to one of its tensors. From the top to the bottom:

- ``stager``: ``Stager``, which hands out snapshots and takes them back.
- ``capture``: a tree as it is when it is staged, all but the elements.
- ``snapshot``: memory laid out for one geometry.
- ``batches``: small tensors that are copied by one call.
- ``frozen``: storages that are copied once.
- ``stats``: what a stager says of itself.
- ``pool``: the blocks of memory that no snapshot uses.
- ``workers``, ``streams``: the background thread; copies from an accelerator beside what it computes.
"""

from statetree.stager.stager import Stager
from statetree.stager.stats import StagerStats

__all__ = ["Stager", "StagerStats"]
