"""The exchange engine: the chunks of distributed leaves brought from the ranks that hold them to those that want them.

Every collective is one block: describe what this rank holds (a *manifest*), say where it goes (a *destination*), and
move. Moving agrees with the other ranks, plans, and sends in buckets of bounded size::

    with exchange("gather", group, timeout) as run:
        source = run.manifest(tree, complete=True)
        return run.move(source, run.destination(source, WholeOn(run.ranks(None))))

- ``driver``: ``exchange`` and what a block can do; ``call``: who waits for whom, and what they hear of a failure
- ``manifest``: what a rank holds (``path_order``: in which order); ``discovery``, ``replica_check``: what ranks tell
  each other of that, where they must
- ``destination``: fresh tensors by a rule; ``like``: the layouts of another tree, and ``fitting``: whether they fit;
  ``allocation``: fresh tensors of these layouts
- ``description``: one rank's tree told to all
- ``key_union``: ranks that hold different keys tell each other
- ``consensus``: fingerprints compared before anything moves; ``group``: the few collectives all this is made of
- ``transfers``: planned once for a fingerprint; ``plan``: what moves in which round; ``buckets``: how it is moved
- ``routes``: which boxes go where; ``senders``: who sends what several have; ``stacks``: where boxes lie in a bucket
- ``digesting``: numbers for distributed tensors, whatever their layout, and replicas compared by them
- ``partial_reduction``: partials put together on the way
- ``executor``: moves what a plan says, or records it; ``prepared``: what was recorded, to be run again and again;
  ``recognition``: calls that are recorded without being asked for, and known again by a ``sighting``
"""

from statetree.chunks.boxes import Box
from statetree.chunks.layouts import ChunkLayout, layout_of
from statetree.chunks.local import LocalChunks
from statetree.exchange.destination import WholeOn
from statetree.exchange.driver import Exchange, exchange
from statetree.exchange.manifest import Manifest

__all__ = ["Box", "ChunkLayout", "Exchange", "LocalChunks", "Manifest", "WholeOn", "exchange", "layout_of"]
