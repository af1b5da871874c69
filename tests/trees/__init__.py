"""Awkward trees: one corpus, for every test that must hold for any tree.

``TREES`` holds named factories, each of which makes the same tree anew every time, with elements that are unique by
position. ``DISTRIBUTED_TREES`` are those that need a process group (the fixture ``one_rank_group``). Use them with
``pytest.mark.parametrize("tree", TREES, ids=str)`` and call ``tree.make()``.

Classes live at module level so that they can be pickled; functions and modes do, so that two trees of one factory
hold the very same ones.
"""

from tests.trees import classes, containers, distributed, fields, keys, layouts, objects, tensors  # noqa: F401
from tests.trees.corpus import DISTRIBUTED_TREES, TREES, Ramp, Tree, quiet

__all__ = ["DISTRIBUTED_TREES", "TREES", "Ramp", "Tree", "quiet"]
