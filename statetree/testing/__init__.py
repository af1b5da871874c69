"""What tests of transforms need: trees drawn by hypothesis, assertions, laws, known faults, and real ranks.

Files, bottom up:

- ``arguments``: checks of arguments
- ``contents``: what a tree holds in every place; ``differences``: where two trees differ, by aspects;
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
        "assertions": ("assert_independent", "assert_pure", "assert_structure_preserved", "assert_trees_equal"),
        "conformance_suite": ("conformance",),
        "conversion_strategies": ("conversions",),
        "dtensor_layout": ("Layout",),
        "laws": ("Law",),
        "layout_strategies": ("layouts",),
        "rank_calls": ("run_ranks",),
        "strategies": ("state_trees", "tensors", "tied_trees"),
        "transform_check": ("check_transform",),
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> Any:
        """Import what is asked for, when it first is."""
        from statetree.testing.arguments import needing_hypothesis

        if name not in __all__:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        with needing_hypothesis(name):
            module = import_module(f"{__name__}.{_MODULE_OF.get(name, name)}")
        return globals().setdefault(name, getattr(module, name, module))
