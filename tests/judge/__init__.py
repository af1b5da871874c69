"""The judge of our own tests: strict assertions that use none of statetree's engines, so that these can be judged.

Every rule about containers, tensors, ties and memory is written down here a second time.

- ``values``, ``messages``, ``objects``, ``pickled_state``, ``walk``, ``regions``: what a tree is made of, one record of
  each object for all who look at one
- ``findings``, ``element_pairs``, ``aliasing``, ``tensor_judge``, ``judge``: whether two trees are the same
- ``recorded_structure``, ``sharing``, ``watch``, ``assertions``: what transforms leave alone
"""

from tests.judge.assertions import (
    assert_independent,
    assert_pure,
    assert_structure_preserved,
    assert_trees_equal,
    tree_differences,
)

__all__ = [
    "assert_independent",
    "assert_pure",
    "assert_structure_preserved",
    "assert_trees_equal",
    "tree_differences",
]
