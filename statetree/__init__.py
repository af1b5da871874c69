"""statetree: a PyTorch training state as a pytree, and pure, composable transforms over it.

Importing it imports nothing, not even torch. The first public name that is asked for imports all of them.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The public names, for people, type checkers and Python alike: to add one, add its import. Python passes by them when
# the package is imported, and makes them when it runs this file once more, which `_Package` below has it do.
if TYPE_CHECKING or "_wanted" in globals():
    from statetree.compose import chain as chain
    from statetree.compose import prepare as prepare
    from statetree.compose import stream as stream
    from statetree.declare import collective as collective
    from statetree.declare import leafwise as leafwise
    from statetree.errors import CheckpointError as CheckpointError
    from statetree.errors import CyclicTree as CyclicTree
    from statetree.errors import Difference as Difference
    from statetree.errors import RankMismatch as RankMismatch
    from statetree.errors import StagerBusy as StagerBusy
    from statetree.errors import StagerClosed as StagerClosed
    from statetree.errors import StateTreeError as StateTreeError
    from statetree.errors import TreeMismatch as TreeMismatch
    from statetree.errors import TreeTooDeep as TreeTooDeep
    from statetree.errors import UnsupportedLeaf as UnsupportedLeaf
    from statetree.exchange.prepared import Prepared as Prepared
    from statetree.files.direct_loading import load as load
    from statetree.files.formats import save as save
    from statetree.files.page import to_html as to_html
    from statetree.leaves.delta_tree import Delta as Delta
    from statetree.leaves.registry import LeafType as LeafType
    from statetree.leaves.registry import register_leaf_type as register_leaf_type
    from statetree.paths import Path as Path
    from statetree.stager.stager import Stager as Stager
    from statetree.transforms.allocate_like import allocate_like as allocate_like
    from statetree.transforms.apply_delta import apply_delta as apply_delta
    from statetree.transforms.audit import Audit as Audit
    from statetree.transforms.audit import audit as audit
    from statetree.transforms.broadcast import broadcast as broadcast
    from statetree.transforms.cast import cast as cast
    from statetree.transforms.copy_into import copy_into as copy_into
    from statetree.transforms.delta import delta as delta
    from statetree.transforms.digest import Digest as Digest
    from statetree.transforms.digest import digest as digest
    from statetree.transforms.distribute import distribute as distribute
    from statetree.transforms.gather import gather as gather
    from statetree.transforms.merge import merge as merge
    from statetree.transforms.offload import offload as offload
    from statetree.transforms.partition import partition as partition
    from statetree.transforms.partition_replicas import partition_replicas as partition_replicas
    from statetree.transforms.rename import rename as rename
    from statetree.transforms.reshard import reshard as reshard
    from statetree.transforms.select import select as select
    from statetree.transforms.similarity import Similarity as Similarity
    from statetree.transforms.similarity import similarity as similarity
    from statetree.transforms.update import update as update
    from statetree.tree.atoms import HOLE as HOLE
    from statetree.tree.flatten import flatten as flatten
    from statetree.tree.flatten import paths as paths
    from statetree.tree.flatten import unflatten as unflatten
    from statetree.tree.mapping import from_flat as from_flat
    from statetree.tree.mapping import map_leaves as map_leaves
    from statetree.tree.mapping import map_with_path as map_with_path
    from statetree.tree.mapping import to_flat as to_flat
    from statetree.tree.registry import register_container as register_container
    from statetree.tree.rename_rules import Renaming as Renaming
    from statetree.tree.spec import TreeSpec as TreeSpec
else:

    class _Package(ModuleType):
        """This package, until its names are asked for (and afterwards, when it has nothing more to do)."""

        def __getattr__(self, name: str) -> Any:
            if "__all__" not in vars(self) and (not name.startswith("_") or name == "__all__"):
                self._wanted = True
                self.__spec__.loader.exec_module(self)  # again if that was interrupted: imports are made once
                if name in vars(self):
                    return vars(self)[name]
            msg = f"module {self.__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)

        def __setattr__(self, name: str, value: Any) -> None:
            # `import statetree.paths` would put that module in the place of the function `paths`.
            if name != "paths" or not isinstance(value, ModuleType):
                super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return [*self.__all__, *vars(self)]

    sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING and "_wanted" in globals():
    _values = {name: value for name, value in globals().items() if name[0] != "_" and not isinstance(value, ModuleType)}
    __all__ = sorted(_values.keys() - {"Any", "ModuleType", "TYPE_CHECKING"})
