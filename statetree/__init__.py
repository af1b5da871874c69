"""statetree: a PyTorch training state as a pytree, and pure, composable transforms over it.

Importing it imports nothing, not even torch. Each public name is imported when it is first asked for.
"""

import _imp
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# A public name stands twice: here, where type checkers and editors look, and in the table below, for Python.
if TYPE_CHECKING:
    from statetree import files as files
    from statetree.compose import chain as chain
    from statetree.compose import prepare as prepare
    from statetree.compose import stream as stream
    from statetree.dcp.checkpointer import Checkpointer as Checkpointer
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
    from statetree.files.formats import save as save
    from statetree.files.loading import load as load
    from statetree.files.page import to_html as to_html
    from statetree.key_paths import Path as Path
    from statetree.leaves.leaf_type import LeafType as LeafType
    from statetree.leaves.registry import register_leaf_type as register_leaf_type
    from statetree.stager.stager import Stager as Stager
    from statetree.transforms.allocate_like import allocate_like as allocate_like
    from statetree.transforms.audit import Audit as Audit
    from statetree.transforms.audit import audit as audit
    from statetree.transforms.broadcast import broadcast as broadcast
    from statetree.transforms.cast import cast as cast
    from statetree.transforms.combine import combine as combine
    from statetree.transforms.conversions.rule_set import Conversion as Conversion
    from statetree.transforms.copy_into import copy_into as copy_into
    from statetree.transforms.deltas.delta import Delta as Delta
    from statetree.transforms.deltas.delta import apply_delta as apply_delta
    from statetree.transforms.deltas.delta import delta as delta
    from statetree.transforms.digest import Digest as Digest
    from statetree.transforms.digest import digest as digest
    from statetree.transforms.distribute import distribute as distribute
    from statetree.transforms.gather import gather as gather
    from statetree.transforms.merge import merge as merge
    from statetree.transforms.offload import offload as offload
    from statetree.transforms.partition import partition as partition
    from statetree.transforms.partition_replicas import partition_replicas as partition_replicas
    from statetree.transforms.rename import Renaming as Renaming
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
    from statetree.tree.spec import TreeSpec as TreeSpec

_NAMES = {
    "compose": "chain prepare stream",
    "declare": "collective leafwise",
    "dcp.checkpointer": "Checkpointer",
    "errors": "CheckpointError CyclicTree Difference RankMismatch StagerBusy StagerClosed StateTreeError TreeMismatch"
    " TreeTooDeep UnsupportedLeaf",
    "exchange.prepared": "Prepared",
    "files.formats": "save",
    "files.loading": "load",
    "files.page": "to_html",
    "leaves.leaf_type": "LeafType",
    "leaves.registry": "register_leaf_type",
    "key_paths": "Path",
    "stager.stager": "Stager",
    "transforms.allocate_like": "allocate_like",
    "transforms.audit": "Audit audit",
    "transforms.broadcast": "broadcast",
    "transforms.cast": "cast",
    "transforms.combine": "combine",
    "transforms.conversions.rule_set": "Conversion",
    "transforms.copy_into": "copy_into",
    "transforms.deltas.delta": "Delta apply_delta delta",
    "transforms.digest": "Digest digest",
    "transforms.distribute": "distribute",
    "transforms.gather": "gather",
    "transforms.merge": "merge",
    "transforms.offload": "offload",
    "transforms.partition": "partition",
    "transforms.partition_replicas": "partition_replicas",
    "transforms.rename": "Renaming rename",
    "transforms.reshard": "reshard",
    "transforms.select": "select",
    "transforms.similarity": "Similarity similarity",
    "transforms.update": "update",
    "tree.atoms": "HOLE",
    "tree.flatten": "flatten paths unflatten",
    "tree.mapping": "from_flat map_leaves map_with_path to_flat",
    "tree.registry": "register_container",
    "tree.spec": "TreeSpec",
}
_MODULES = {name: f"statetree.{module}" for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # a type checker is to know which names there are
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> Any:
        """Import what a public name stands for, once: afterwards it is an ordinary attribute."""
        if name == "files":
            return import_module("statetree.files")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Two threads that ask for different names would import packages and what these import in different orders, each
        # wait for the other, and one get a `_DeadlockError`. So they take turns. This lock, Python's own, is the only
        # one that no forked child finds held: `os.fork` takes it as well.
        _imp.acquire_lock()
        try:
            globals()[name] = value = getattr(import_module(_MODULES[name]), name)
        finally:
            _imp.release_lock()
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, "files", *globals()})
