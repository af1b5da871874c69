"""The leaves engine: values of any class taken apart into plain tensors and packed again, by their *leaf types*.

It is the hinge between trees and bytes: above it there are leaves, below it plain tensors only. From the top to the
bottom:

- ``copying``: what ``copy_into`` is made of; ``replicas``: a tree taken apart into plain tensors, for ``offload``,
  ``allocate_like`` and other transforms on spans.
- ``casting``: which dtypes are converted, and which values are too large for that.
- ``value_texts``, ``leaf_numbers``: texts for plain values; numbers for values, and for tensors with their elements.
- ``recasting``: elements in another dtype, ties kept.
- ``pairing``, ``ties``: the leaves of two trees side by side; which leaves of a tree share memory.
- ``lowering``: a tree down to the parts of its leaves; ``divided``: what stands for those that have several, and how
  they are put together again; ``laid_out``: tensors in the blocks of leaves that were converted.
- ``parts``: many leaves taken apart at once, each tensor object once, and packed again.
- ``held_memory``: whether the tensors of leaves still lie where they lay.
- ``location``: errors that say which leaf could not be.
- ``builtin``: the leaf type of every class, looked up.
- ``types/``: the leaf types that come with statetree, a file each.
- ``registry``: those that users registered; ``engine_type``: what the engines ask of one beside what users
  write, and the parts of distributed values.
- ``leaf_type``: ``LeafType``, from which all derive.
"""

from statetree.leaves.leaf_type import LeafType
from statetree.leaves.parts import Unpacked, unpack
from statetree.leaves.registry import register_leaf_type
from statetree.leaves.replicas import TreeParts, take_apart

__all__ = ["LeafType", "TreeParts", "Unpacked", "register_leaf_type", "take_apart", "unpack"]
