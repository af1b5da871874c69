"""Plans, all in one place: descriptions of trees that print as code, and make the same tree as often as they are asked.

Not public. What a test prints of a tree that was drawn runs with ``from statetree.testing.plans import *``.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from statetree.testing import samples
from statetree.testing.container_plan import Again, Node, Value
from statetree.testing.dtensor_layout import Layout
from statetree.testing.numbered import Numbers
from statetree.testing.tensor_plan import TensorPlan, ViewPlan

__all__ = ["Again", "Layout", "Node", "TensorPlan", "TreePlan", "Value", "ViewPlan", "build", "samples", "torch"]


@runtime_checkable
class TreePlan(Protocol):
    """How a value is made."""

    def make(self, numbers: Numbers) -> Any:
        """Make the value, with elements counted by ``numbers``."""


def build(plan: Any) -> Any:
    """Return the tree of a plan: an equal one every time, on new memory. What is no plan is returned as it is."""
    return plan.make(Numbers()) if isinstance(plan, TreePlan) else plan
