"""Deltas: what changed between two states, as a tree of positions and values over the parts of leaves.

- ``change``: positions of elements; what is written over one part, or takes the place of one leaf
- ``state_parts``: a tree down to its parts; a change and the memory that it is read from or written to
- ``delta``: ``Delta``, and the verbs that make and apply it
- ``moving``: a delta brought to another layout
"""
