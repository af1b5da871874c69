"""``load``: a checkpoint read into the layout of another tree, each rank its own boxes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from statetree.chunks.boxes import whole_box
from statetree.errors import Difference, TreeMismatch
from statetree.exchange.allocation import allocated
from statetree.exchange.group import group_of
from statetree.exchange.manifest import chunks_of, is_cuttable
from statetree.files.filling import Target, fill
from statetree.files.formats import opened
from statetree.files.stored import StoredTensor
from statetree.key_paths import Path
from statetree.leaves.builtin import is_distributed
from statetree.leaves.casting import castable
from statetree.leaves.copying import prepared_copy
from statetree.leaves.lowering import is_made_of_tensors, lower
from statetree.torch_internals import quietly
from statetree.tree.flatten import flatten_for
from statetree.tree.mapping import to_flat
from statetree.tree.selection import selected

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from statetree.chunks.local import LocalChunks
    from statetree.exchange.group import Group
    from statetree.tree.selection import Where

_REMEDY: Final = "Nothing was read. Pass a tree of the checkpoint's structure, or where=."
T = TypeVar("T")


def load(
    path: str | os.PathLike[str],
    like: T,
    *,
    where: Where | None = None,
    strict: bool = True,
    cast: bool = False,
    group: ProcessGroup | None = None,
) -> T:
    """Load a checkpoint in the layout of another tree.

    Leaves are matched by their flat keys (``model.layers.0.weight``), as ``to_flat`` gives them. Each rank reads the
    bytes of its own boxes and, where these lie close together, at most as many between them, and communicates nothing.
    Beside the result, one bucket of 16 MiB is in memory.

    Args:
        path: Any checkpoint that ``statetree.files.open`` opens. Checksums of elements are not compared: for a
            directory of ``statetree.dcp``, its ``load`` and ``Checkpointer.restore`` do that.
        like: A tree that gives structure, layouts, devices and dtypes. Its contents do not matter, and its tensors may
            be ``meta`` ones.
        where: Which leaves of ``like`` are loaded, as for ``select``; by default all. The others are ``like``'s own.
        strict: Whether the checkpoint must have all leaves to load, and no others. Otherwise leaves that only one side
            has are left alone.
        cast: Convert dtypes, as ``copy_into`` does.
        group: The ranks that hold ``like``; by default all.

    Returns:
        A tree of the structure of ``like``, with fresh tensors, and the plain values of the checkpoint.

    Aliasing:
        Leaves that are not loaded are those of ``like``.

    Raises:
        TreeMismatch: If leaves are missing or left over, or shapes or dtypes differ, or values are out of range, or
            tensors of ``like`` share memory that the checkpoint has different values for.
        CheckpointError: If the checkpoint cannot be read.

    Example:
        >>> import tempfile, statetree as st, torch
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> st.save({"layer": {"w": torch.ones(2)}}, path)
        >>> st.load(path, {"layer": {"w": torch.empty(2, device="meta")}})
        {'layer': {'w': tensor([1., 1.])}}
    """
    return _Loading(path, like, where, strict=strict, cast=cast).run(group)


class _Loading:
    def __init__(self, path: Any, like: Any, where: Any, *, strict: bool, cast: bool) -> None:
        self._cast = cast
        flat = partial(flatten_for, "load")
        self._lowered = lower("load", *flat(like), flat, wanted=is_made_of_tensors)
        self._leaves, self._spec = self._lowered.leaves, self._lowered.spec
        self._paths: Sequence[Path] = self._spec.paths()
        keys = self._spec.flat_keys()
        stored = to_flat(opened(path).tree)[0]
        chosen: Sequence[int] = range(len(keys))
        if where is not None:
            mask = selected(where, self._lowered.outline.spec, self._lowered.outer, verb="load")
            chosen = [index for index, owner in enumerate(self._lowered.outline.owners()) if mask[owner]]
        self._stored = {index: stored[keys[index]] for index in chosen if keys[index] in stored}
        differences = [
            Difference(self._paths[i], "missing", "absent", "present") for i in chosen if i not in self._stored
        ]
        if where is None:
            known = set(keys)
            differences += [
                Difference(Path((key,)), "missing", "present", "absent") for key in stored if key not in known
            ]
        refuse_all(differences if strict else [])
        self._is_direct = {i: self._reads_directly(i, leaf) for i, leaf in self._stored.items()}

    def _reads_directly(self, index: int, stored: Any) -> bool:
        like = self._leaves[index]
        return isinstance(stored, StoredTensor) and stored.is_strided and (is_distributed(like) or is_cuttable(like))

    @quietly
    def run(self, process_group: ProcessGroup | None) -> Any:
        group = group_of("load", process_group, None)
        direct = [index for index, is_direct in self._is_direct.items() if is_direct]
        self._check(direct, {index: chunks_of(self._leaves[index], group) for index in direct})
        result = list(self._leaves)
        chosen = [leaf if index in self._stored else None for index, leaf in enumerate(self._leaves)]
        fresh = allocated("load", chosen, self._spec)
        self._fill(direct, group, fresh)
        for index in direct:
            result[index] = fresh[index]
        keys, rest = self._spec.flat_keys(), [index for index in self._stored if not self._is_direct[index]]
        sides = ({keys[i]: self._stored[i] for i in rest}, {keys[i]: fresh[i] for i in rest})
        copied, write = prepared_copy("load", *sides, cast=self._cast)
        write()
        for index in rest:
            result[index] = copied[keys[index]]
        return self._lowered.outline.lift("load", result, self._lowered.recipes)

    def _check(self, direct: Sequence[int], chunks: dict[int, LocalChunks | None]) -> None:
        """Raise ``TreeMismatch`` where shapes or dtypes differ."""
        found: list[Difference] = []
        for index in direct:
            stored, held, like = self._stored[index], chunks[index], self._leaves[index]
            shape, dtype = (held.shape, held.dtype) if held else (tuple(like.shape), like.dtype)
            if tuple(stored.shape) != shape:
                found.append(Difference(self._paths[index], "shape", tuple(stored.shape), shape))
            if stored.dtype != dtype and not (self._cast and castable(stored.dtype, dtype)):
                found.append(Difference(self._paths[index], "dtype", stored.dtype, dtype))
            if held is not None and held.partials is not None:
                found.append(Difference(self._paths[index], "placements", "elements", "Partial"))
        refuse_all(found)

    def _fill(self, direct: Sequence[int], group: Group, fresh: Sequence[Any]) -> None:
        """Read the boxes of this rank."""
        targets: list[Target] = []
        for index in direct:
            leaf, held = fresh[index], chunks_of(fresh[index], group)
            whole = [(whole_box(leaf.shape), leaf)] if held is None else []
            for box, piece in zip(held.boxes, held.pieces, strict=True) if held else whole:
                tensor = piece.detach().as_subclass(torch.Tensor)
                if tensor.numel():
                    targets.append(Target(self._paths[index], self._stored[index], box, tensor))
        fill("load", targets)


def refuse_all(differences: Sequence[Difference]) -> None:
    """Raise ``TreeMismatch`` if there are differences."""
    if differences:
        raise TreeMismatch.between("load", differences, with_options(_REMEDY, differences))


def with_options(remedy: str, differences: Sequence[Difference]) -> str:
    """Return a remedy with the options by which the differences would not matter."""
    if any(found.kind == "missing" for found in differences):
        remedy += " With strict=False, what one side lacks is left alone."
    if any(found.kind == "dtype" and castable(found.left, found.right) for found in differences):
        remedy += " With cast=True, dtypes are converted."
    return remedy
