"""What tests of transforms need: trees drawn by hypothesis, assertions, laws, known faults, and real ranks.

Files, bottom up:

- ``contents``: what a tree holds in every place; ``differences``: where two trees differ, by aspects;
  ``assertions``: what transforms leave alone
- ``samples``, ``elements``, ``sources``: classes and elements, and trees as source code; ``dtensor_layout``: a DTensor
  as seen from all ranks at once; ``strategies``, ``layout_strategies``: what hypothesis draws (the extra
  ``testing``)
- ``pace``: limits of time; ``rank_worker``, ``rank_calls``: ranks as processes; ``pytest_plugin``: a fixture
- ``laws``: what may hold of a transform; ``states``: what it is given; ``transform_check``: ``check_transform``
- ``faults``, ``gather_faults``, ``conformance_suite``: ``conformance``

The plugin is imported by every session of pytest, so that importing this package imports neither torch nor hypothesis.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statetree.testing import laws as laws
    from statetree.testing import samples as samples
    from statetree.testing.assertions import assert_independent as assert_independent
    from statetree.testing.assertions import assert_pure as assert_pure
    from statetree.testing.assertions import assert_structure_preserved as assert_structure_preserved
    from statetree.testing.assertions import assert_trees_equal as assert_trees_equal
    from statetree.testing.conformance_suite import conformance as conformance
    from statetree.testing.dtensor_layout import Layout as Layout
    from statetree.testing.laws import Law as Law
    from statetree.testing.layout_strategies import layouts as layouts
    from statetree.testing.rank_calls import run_ranks as run_ranks
    from statetree.testing.strategies import state_trees as state_trees
    from statetree.testing.strategies import tensors as tensors
    from statetree.testing.strategies import tied_trees as tied_trees
    from statetree.testing.transform_check import check_transform as check_transform

_NAMES = {
    "assertions": "assert_independent assert_pure assert_structure_preserved assert_trees_equal",
    "conformance_suite": "conformance",
    "dtensor_layout": "Layout",
    "laws": "Law",
    "layout_strategies": "layouts",
    "rank_calls": "run_ranks",
    "strategies": "state_trees tensors tied_trees",
    "transform_check": "check_transform",
}

if not TYPE_CHECKING:  # a type checker is to know which names there are
    _MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
    __all__ = sorted([*_MODULES, "laws"])

    def __dir__() -> list[str]:
        return list(__all__)

    def __getattr__(name: str) -> Any:
        """Import what is asked for, when it first is."""
        if name not in (*__all__, "samples", "states"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = import_module(f"{__name__}.{_MODULES.get(name, name)}")
        except ModuleNotFoundError as error:
            if error.name != "hypothesis":
                raise
            msg = f"{__name__}.{name} needs hypothesis: pip install statetree[testing]"
            raise ModuleNotFoundError(msg, name="hypothesis") from error
        return globals().setdefault(name, getattr(module, name, module))
