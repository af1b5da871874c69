"""Ways in which the ranks of a collective can disagree: each rank makes a call, and one of them another one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import statetree
from statetree.testing import Layout

VERBS = ("gather", "distribute", "broadcast", "reshard", "partition_replicas")

#: Changes of a tree that all ranks must hear of, and what their errors name.
CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {}
#: Changes of a tree that one rank cannot go on with, its own error, and the verbs for which that holds.
FAULTS: dict[str, tuple[Callable[[Any], None], str, tuple[str, ...]]] = {}
#: Changes of a tree that do not matter.
VARIATIONS: dict[str, Callable[[Any], None]] = {}


def base_tree() -> dict[str, Any]:
    """Return a tree of everything: the same on every rank up to elements."""
    ranks = tuple(range(dist.get_world_size()))
    return {
        "sharded": Layout((5, 3), ranks, ("S0",)).build(),
        "inner": {
            "0": torch.arange(4.0),
            "list": [torch.arange(3), 1],
            "columns": Layout((2, 5), ranks, ("S1",)).build(),
            "tied": None,
        },
        "text": "a",
        "none": None,
        "empty": {},
        "copies": Layout((4,), ranks, ("R",)).build(),
    }


def change(named: str) -> Any:
    """Register a change of a tree after which every rank raises RankMismatch (a decorator)."""

    def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
        CHANGES[function.__name__] = function, named
        return function

    return register


def fault(own: str, *verbs: str) -> Any:
    """Register a change of a tree that makes a rank raise an error of its own (a decorator)."""

    def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
        FAULTS[function.__name__] = function, own, verbs or VERBS
        return function

    return register


@change("at inner.0: ")
def missing_leaf(tree: Any) -> None:
    del tree["inner"]["0"]


@change("at copies: ")
def missing_distributed_leaf(tree: Any) -> None:
    del tree["copies"]


@change("at inner.extra: ")
def extra_leaf(tree: Any) -> None:
    tree["inner"]["extra"] = torch.zeros(1)


@change("at a: ")
def extra_first_leaf(tree: Any) -> None:
    tree["a"] = 1


@change("at inner.0: ")
def other_dtype(tree: Any) -> None:
    tree["inner"]["0"] = tree["inner"]["0"].double()


@change("at inner.0: ")
def other_shape(tree: Any) -> None:
    tree["inner"]["0"] = tree["inner"]["0"].view(2, 2)


@change("at sharded: ")
def other_distributed_dtype(tree: Any) -> None:
    tree["sharded"] = Layout((5, 3), tuple(range(dist.get_world_size())), ("S0",), torch.float64).build()


@change("at sharded: ")
def other_global_shape(tree: Any) -> None:
    tree["sharded"] = Layout((6, 3), tuple(range(dist.get_world_size())), ("S0",)).build()


@change("at inner.columns: ")
def other_placements(tree: Any) -> None:
    tree["inner"]["columns"] = Layout((2, 5), tuple(range(dist.get_world_size())), ("S0",)).build()


@change("at copies: ")
def other_mesh(tree: Any) -> None:
    tree["copies"] = Layout((4,), (tuple(range(dist.get_world_size())),), ("R", "R")).build()


@change("at sharded: ")
def whole_instead_of_distributed(tree: Any) -> None:
    tree["sharded"] = torch.zeros(5, 3)


@change("at text: ")
def tensor_instead_of_text(tree: Any) -> None:
    tree["text"] = torch.zeros(1)


@change("at none: ")
def object_instead_of_none(tree: Any) -> None:
    tree["none"] = random.Random(1)


@change("at inner.list (container): ")
def tuple_instead_of_list(tree: Any) -> None:
    tree["inner"]["list"] = tuple(tree["inner"]["list"])


@change("at inner (container): ")
def number_instead_of_digit(tree: Any) -> None:
    tree["inner"][0] = tree["inner"].pop("0")


@change("at empty (container): ")
def list_instead_of_dict(tree: Any) -> None:
    tree["empty"] = []


@change("at empty: ")
def none_instead_of_empty(tree: Any) -> None:
    tree["empty"] = None


@change("at inner.\ud800: ")
def key_without_unicode(tree: Any) -> None:
    tree["inner"]["\ud800"] = torch.zeros(1)


@change("at 0: ")
def extra_number(tree: Any) -> None:
    tree[0] = 1


@fault("UnsupportedLeaf")
def object_without_pickle(tree: Any) -> None:
    tree["none"] = threading.Lock()


@fault("CyclicTree")
def cycle(tree: Any) -> None:
    tree["inner"]["self"] = tree


@fault("TreeTooDeep")
def depth(tree: Any) -> None:
    inner = tree
    for _ in range(10_000):
        inner["empty"] = {"empty": {}}
        inner = inner["empty"]


@fault("UnsupportedLeaf", "gather", "broadcast", "reshard")
def freed_storage(tree: Any) -> None:
    tree["copies"]._local_tensor.untyped_storage().resize_(0)


@fault("UnsupportedLeaf")
def hidden_shards(tree: Any) -> None:
    tree["none"] = Holder()
    tree["none"].held = tree["sharded"]


@fault("UnsupportedLeaf")
def hidden_attribute(tree: Any) -> None:
    tree["inner"]["0"].held = [tree["sharded"]]


@fault("UnsupportedLeaf")
def hostile_reduce(tree: Any) -> None:
    tree["none"] = Hostile()


class Holder:
    """An object of a class that nobody knows."""


class Hostile:
    """An object that cannot be pickled, and whose error cannot be shown."""

    def __reduce__(self) -> Any:
        raise HostileError


class HostileError(Exception):
    """An error without a message."""

    def __str__(self) -> str:
        raise ValueError("no message")


def variation(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Register a change of a tree that does not matter (a decorator)."""
    VARIATIONS[function.__name__] = function
    return function


@variation
def other_order(tree: Any) -> None:
    for mapping in (tree["inner"], tree):
        items = list(mapping.items())
        mapping.clear()
        mapping.update(reversed(items))


@variation
def other_mapping(tree: Any) -> None:
    from collections import OrderedDict

    tree["inner"] = OrderedDict(tree["inner"])


@variation
def other_values(tree: Any) -> None:
    tree["text"] = 2.5
    tree["inner"]["list"][1] = None


@variation
def other_class(tree: Any) -> None:
    tree["inner"]["0"] = torch.nn.Parameter(tree["inner"]["0"])


@variation
def other_strides(tree: Any) -> None:
    tree["inner"]["0"] = torch.zeros(8)[::2]


@dataclass
class Call:
    """A collective with its options."""

    verb: str
    tree: Any
    options: dict[str, Any]

    def __call__(self) -> Any:
        """Make it."""
        if self.verb in ("reshard", "distribute"):
            like = self.options.pop("like", None)
            like = self.tree if like is None else like
            full = self.options.pop("full", None)
            return getattr(statetree, self.verb)(self.tree if self.verb == "reshard" else full, like, **self.options)
        return getattr(statetree, self.verb)(self.tree, **self.options)


def usual_call(verb: str, source: int) -> Call:
    """Return what the ranks agree on."""
    tree = base_tree()
    options: dict[str, Any] = {}
    if verb in ("distribute", "broadcast"):
        options["src"] = source
    if verb == "distribute" and dist.get_rank() == source:
        options["full"] = whole_tree()
    return Call(verb, tree, options)


def whole_tree() -> dict[str, Any]:
    """Return the tree with whole tensors."""
    tree = base_tree()
    tree["sharded"], tree["copies"] = torch.arange(15.0).view(5, 3), torch.arange(4.0)
    tree["inner"]["columns"] = torch.arange(10.0).view(2, 5)
    return tree


def other_options(verb: str, chance: random.Random, size: int) -> dict[str, Any]:
    """Return options other than the usual ones."""
    found: list[dict[str, Any]] = []
    if verb != "partition_replicas":
        found.append({"bucket_bytes": 1 + chance.randrange(100)})
    if verb == "gather":
        found += [{"dst": chance.randrange(size)}, {"dst": [0]}]
    if verb in ("distribute", "reshard"):
        found.append({"in_place": True})
    return chance.choice(found) if found else {}
