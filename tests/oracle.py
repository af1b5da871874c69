"""The old names of what is in statetree.testing now."""

from statetree.testing import assert_independent
from statetree.testing import assert_trees_equal as assert_same
from statetree.testing import tree_differences as differences

__all__ = ["assert_independent", "assert_same", "differences"]
