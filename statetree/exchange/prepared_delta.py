"""Prepared transfers that send what changed: the source as it was sent last is kept, and compared with what it is now.

The whole is sent first, wherever the changes would be more bytes, and after a call that failed on any rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.chunks.ranks import own_ranks
from statetree.exchange.call import Call
from statetree.exchange.consensus import Fingerprint
from statetree.exchange.group import group_of
from statetree.exchange.prepared import Prepared
from statetree.leaves.copying import copied_leaves, prepared_copy
from statetree.leaves.delta_applying import prepared_apply
from statetree.leaves.delta_making import make_delta
from statetree.leaves.tensor_entries import TreeEntries
from statetree.torch_internals import quietly
from statetree.tree.atoms import HOLE
from statetree.tree.flatten import flatten_for, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from statetree.exchange.group import Timeout
    from statetree.leaves.delta_tree import Delta

#: What a position takes on its way.
_POSITION_BYTES: Final = 8


class PreparedDelta(Prepared):
    """A prepared ``reshard`` that sends what changed, where that is fewer bytes than the whole.

    Args:
        whole: The transfer of all elements.
        reshard: Brings a delta to the layout of ``like``.
        source: The tree that elements come from.
        like: The tree that they are written to.
        group: The ranks that take part.
        timeout: How long each collective may take.
    """

    def __init__(
        self,
        whole: Prepared,
        reshard: Callable[..., Delta],
        source: Any,
        like: Any,
        *,
        group: Any = None,
        timeout: Timeout = None,
    ) -> None:
        self._whole = whole
        self._reshard, self._options = reshard, {"group": group, "timeout": timeout}
        self._source, self._like = _tensors_of(source), _tensors_of(like)
        leaves, spec = flatten_for("prepare", self._source)
        self._base = unflatten(spec, copied_leaves("prepare", leaves, spec.paths))
        self._nbytes = sum(entry.held * entry.dtype.itemsize for entry in _entries(self._source).tensors.values())
        self._sent = False  # the target holds what the base does, as far as this rank knows

    @quietly
    def __call__(self) -> Any:
        """Move the elements that changed, or all, and return the tree that they are in."""
        change = None
        with Call("reshard", group_of("reshard", self._options["group"], self._options["timeout"]), delta=True) as call:
            if self._sent:
                change = make_delta("prepare", self._source, self._base, own_ranks())
            call.agree(Fingerprint("the deltas of a prepared reshard"))
        own = [self._nbytes - _moved_bytes(change), 0] if change is not None else [0, 1]
        saved, unsent = call.group.all_reduce(torch.tensor(own, dtype=torch.int64, device="cpu")).tolist()
        self._sent = False  # until all is done
        if change is None or unsent or saved <= 0:
            result = self._whole()
            prepared_copy("prepare", self._source, self._base)[1]()
        else:
            moved = self._reshard(change, self._like, **self._options)
            for delta, tree in ((moved, self._like), (change, self._base)):
                for write in prepared_apply("prepare", delta, tree, own_ranks(), everything=False)[1]:
                    write()
            result = self._whole.tree
        self._sent = True
        return result

    def close(self) -> None:
        """Let go of the tensors, the kept ones among them. Later calls raise; closing again does nothing."""
        self._whole.close()
        self._source = self._like = self._base = None
        self._sent = False


def _tensors_of(tree: Any) -> Any:
    """Return a tree without the leaves whose elements are not moved: plain values, sparse tensors, objects."""
    entries = _entries(tree)
    return unflatten(entries.spec, [leaf if i in entries.tensors else HOLE for i, leaf in enumerate(entries.leaves)])


def _entries(tree: Any) -> TreeEntries:
    return TreeEntries("prepare", tree, own_ranks())


def _moved_bytes(delta: Delta) -> int:
    return sum(change.values.numel() * (_POSITION_BYTES + change.values.itemsize) for change in delta.tensors.values())
