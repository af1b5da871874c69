"""statetree: a PyTorch training state as a pytree, and pure, composable transforms over it."""

from statetree.compose import chain, stream
from statetree.declare import collective, leafwise
from statetree.errors import (
    CheckpointError,
    CyclicTree,
    Difference,
    RankMismatch,
    StagerBusy,
    StagerClosed,
    StateTreeError,
    TreeMismatch,
    TreeTooDeep,
    UnsupportedLeaf,
)
from statetree.leaves.registry import LeafType, register_leaf_type
from statetree.paths import Path
from statetree.stager.stager import Stager
from statetree.transforms.allocate_like import allocate_like
from statetree.transforms.broadcast import broadcast
from statetree.transforms.cast import cast
from statetree.transforms.copy_into import copy_into
from statetree.transforms.distribute import distribute
from statetree.transforms.gather import gather
from statetree.transforms.merge import merge
from statetree.transforms.offload import offload
from statetree.transforms.partition import partition
from statetree.transforms.partition_replicas import partition_replicas
from statetree.transforms.rename import rename
from statetree.transforms.reshard import reshard
from statetree.transforms.select import select
from statetree.transforms.similarity import Similarity, similarity
from statetree.transforms.update import update
from statetree.tree.atoms import HOLE
from statetree.tree.flatten import flatten, paths, unflatten
from statetree.tree.mapping import from_flat, map_leaves, map_with_path, to_flat
from statetree.tree.registry import register_container
from statetree.tree.rename_rules import Renaming
from statetree.tree.spec import TreeSpec

__version__ = "0.1.0.dev0"

__all__ = [
    "HOLE",
    "CheckpointError",
    "CyclicTree",
    "Difference",
    "LeafType",
    "Path",
    "RankMismatch",
    "Renaming",
    "Similarity",
    "Stager",
    "StagerBusy",
    "StagerClosed",
    "StateTreeError",
    "TreeMismatch",
    "TreeSpec",
    "TreeTooDeep",
    "UnsupportedLeaf",
    "allocate_like",
    "broadcast",
    "cast",
    "chain",
    "collective",
    "copy_into",
    "distribute",
    "flatten",
    "from_flat",
    "gather",
    "leafwise",
    "map_leaves",
    "map_with_path",
    "merge",
    "offload",
    "partition",
    "partition_replicas",
    "paths",
    "register_container",
    "register_leaf_type",
    "rename",
    "reshard",
    "select",
    "similarity",
    "stream",
    "to_flat",
    "unflatten",
    "update",
]
