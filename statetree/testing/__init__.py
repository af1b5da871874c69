"""What tests of transforms need: trees drawn by hypothesis, assertions, laws, known faults, and real ranks.

Files, bottom up:

- ``arguments``: checks of arguments
- ``contents``: what a value holds, and what is true of it; ``differences``: where two trees differ, by aspects;
  ``assertions``: what transforms leave alone
- ``samples``, ``elements``, ``plans``: classes, elements, and trees as the code that makes them; ``dtensor_layout``: a
  DTensor as seen from all ranks at once; ``strategies``, ``layout_strategies``, ``conversion_strategies``: what
  hypothesis draws (the extra ``testing``)
- ``pace``: limits of time; ``rank_worker``, ``rank_calls``: ranks as processes; ``pytest_plugin``: a fixture
- ``laws``: what may hold of a transform; ``states``: what it is given; ``transform_check``: ``check_transform``
- ``faults``, ``conformance_suite``: ``conformance``

The plugin is imported by every session of pytest, so that importing this package imports neither torch nor hypothesis.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statetree.testing import laws
    from statetree.testing.assertions import (
        assert_independent,
        assert_pure,
        assert_structure_preserved,
        assert_trees_equal,
    )
    from statetree.testing.conformance_suite import conformance
    from statetree.testing.conversion_strategies import conversions
    from statetree.testing.dtensor_layout import Layout
    from statetree.testing.laws import Law
    from statetree.testing.layout_strategies import layouts
    from statetree.testing.rank_calls import run_ranks
    from statetree.testing.strategies import state_trees, tensors, tied_trees
    from statetree.testing.transform_check import check_transform

__all__ = [
    "Law",
    "Layout",
    "assert_independent",
    "assert_pure",
    "assert_structure_preserved",
    "assert_trees_equal",
    "check_transform",
    "conformance",
    "conversions",
    "laws",
    "layouts",
    "run_ranks",
    "state_trees",
    "tensors",
    "tied_trees",
]

if not TYPE_CHECKING:  # a type checker is to know which names there are
    _MODULES = {
        "Law": "laws",
        "Layout": "dtensor_layout",
        **dict.fromkeys([name for name in __all__ if name.startswith("assert_")], "assertions"),
        "check_transform": "transform_check",
        "conformance": "conformance_suite",
        "conversions": "conversion_strategies",
        "layouts": "layout_strategies",
        "run_ranks": "rank_calls",
        **dict.fromkeys(("state_trees", "tensors", "tied_trees"), "strategies"),
    }
    _NEED_HYPOTHESIS = ("conversions", "layouts", "state_trees", "tensors", "tied_trees")

    def __getattr__(name: str) -> Any:
        """Import what is asked for, when it first is."""
        if name == "laws":
            return import_module(f"{__name__}.laws")
        if name not in _MODULES:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        if name in _NEED_HYPOTHESIS:
            from statetree.testing.arguments import needing_hypothesis

            with needing_hypothesis(name):
                import_module("hypothesis")
        found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return globals().setdefault(name, found)
