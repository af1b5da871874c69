"""What tests of transforms need: trees drawn by hypothesis, strict assertions, and real ranks.

Files, bottom up:

- ``contents``: what a value holds, and what is true of it; ``differences``: where two trees differ, by aspects;
  ``assertions``: what transforms leave alone
- ``laws``: what may hold of a transform; ``known_states``, ``transform_examples``: the states that it is given;
  ``shrinking``, ``snippets``: counter-examples; ``transform_report``, ``transform_check``: ``check_transform``
- ``silent_faults``, ``copy_faults``, ``stager_faults``, ``gather_faults``, ``conformance_suite``: ``conformance``;
  ``stager_machine``: a stateful test of stagers
- ``arguments``: checks of arguments; ``samples``, ``elements``, ``source_code``: classes, elements and values as code;
  ``dtensor_layout``: a DTensor as seen from all ranks at once; ``plans``: trees as the code that makes them
- ``plan_strategies``, ``strategies``, ``layout_strategies``: what hypothesis draws (the extra ``testing``)
- ``tensor_pickles``, ``rank_worker``, ``rank_process``, ``rank_pool``, ``rank_calls``: ranks as processes;
  ``single_process_ranks``: ``local_ranks``; ``pace``: limits of time; ``pytest_plugin``: fixtures

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
    from statetree.testing.dtensor_layout import Layout
    from statetree.testing.laws import Law
    from statetree.testing.layout_strategies import layouts
    from statetree.testing.rank_calls import run_ranks
    from statetree.testing.single_process_ranks import local_ranks
    from statetree.testing.stager_machine import StagerMachine
    from statetree.testing.strategies import state_trees, tensors, tied_trees
    from statetree.testing.transform_check import check_transform

__all__ = [
    "Law",
    "Layout",
    "StagerMachine",
    "assert_independent",
    "assert_pure",
    "assert_structure_preserved",
    "assert_trees_equal",
    "check_transform",
    "conformance",
    "laws",
    "layouts",
    "local_ranks",
    "run_ranks",
    "state_trees",
    "tensors",
    "tied_trees",
]

if not TYPE_CHECKING:  # a type checker is to know which names there are
    _MODULES = {
        "Law": "laws",
        "Layout": "dtensor_layout",
        "StagerMachine": "stager_machine",
        **dict.fromkeys([name for name in __all__ if name.startswith("assert_")], "assertions"),
        "check_transform": "transform_check",
        "conformance": "conformance_suite",
        "layouts": "layout_strategies",
        "local_ranks": "single_process_ranks",
        "run_ranks": "rank_calls",
        **dict.fromkeys(("state_trees", "tensors", "tied_trees"), "strategies"),
    }
    _NEED_HYPOTHESIS = ("StagerMachine", "layouts", "state_trees", "tensors", "tied_trees")

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
