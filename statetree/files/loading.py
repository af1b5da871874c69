"""``load``: a checkpoint read into the layout of another tree, each rank its own boxes, or as it was saved."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from statetree.chunks.boxes import whole_box
from statetree.declare import phase, with_collections, without_collections
from statetree.errors import Difference, TreeMismatch, UnsupportedLeaf, check_function, check_later
from statetree.exchange.allocation import allocated
from statetree.exchange.call import on_all_ranks
from statetree.exchange.group import group_of
from statetree.files.checkpoint import StoredParts, is_entry, not_admitted
from statetree.files.entry_matching import matched_entries, refuse_all
from statetree.files.filling import Target, check_elements, fill, held_chunks
from statetree.files.formats import opened
from statetree.files.key_texts import key_text
from statetree.files.remote import RemotePath, is_url
from statetree.files.stored import StoredTensor
from statetree.files.unpickling import StoredObject, all_within
from statetree.leaves.builtin import IN_A_FILE, is_cuttable, is_distributed, is_stored, is_value, materialized
from statetree.leaves.casting import castable
from statetree.leaves.copying import prepared_copy
from statetree.leaves.lowering import is_made_of_tensors, lie_on_ranks, lower
from statetree.leaves.replicas import replicated
from statetree.spans.memory import memory_of
from statetree.torch_internals import quietly
from statetree.tree.flatten import flatten_for
from statetree.tree.pruning import pruned
from statetree.tree.selection import selected

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Mapping

    from torch.distributed import ProcessGroup
    from typing_extensions import TypeVar

    from statetree.chunks.local import LocalChunks
    from statetree.exchange.group import Group
    from statetree.files.checkpoint import OpenedCheckpoint
    from statetree.key_paths import Path
    from statetree.tree.selection import Where
    from statetree.tree.spec import TreeSpec

    T = TypeVar("T", default=Any)  # without ``like``, anything may come back

_UNKNOWN_REMEDY: Final = (
    "Pass like=, a tree like the saved one, or make the classes known: register_container, or "
    "torch.serialization.add_safe_globals."
)


def load(
    path: str | os.PathLike[str],
    like: T | None = None,
    *,
    in_place: bool = False,
    through: Callable[[Any], Any] | None = None,
    where: Where | None = None,
    cast: bool = False,
    strict: bool = True,
    verify: bool = True,
    weights_only: bool = True,
    group: ProcessGroup | None = None,
) -> T:
    """Load a checkpoint, in the layout of another tree or as it was saved.

    Leaves are matched by their paths; where the format keeps names alone, by these (``model.layers.0.weight``). A list
    or tuple of plain values is one leaf. Each rank reads the bytes of its own boxes and, where these lie close
    together, at most as many between them. Beside the result, two buckets of 16 MiB are in memory.

    Args:
        path: Any checkpoint that ``statetree.files.open`` opens: a file, a directory, or a URL that fsspec knows
            (``s3://``, ``hf://``; extra ``remote``), of which only the ranges that are needed are fetched.
        like: A tree that gives structure, layouts, devices and dtypes. Without ``in_place`` its contents do not matter,
            and its tensors may be ``meta`` ones. Without it, what was saved comes back, on the CPU, whole.
        in_place: Fill the tensors of ``like`` instead of fresh ones.
        through: What becomes of the checkpoint's tree of stored tensors before it is matched: ``rename`` with rules,
            say, or any transform that does not read.
        where: Which leaves of ``like`` are loaded, as for ``select``; by default all. The others are ``like``'s own.
            Without ``like``: which leaves of the checkpoint.
        cast: Convert dtypes, as ``copy_into`` does.
        strict: Whether the checkpoint must have all leaves to load, and (without ``where``) no others. Otherwise leaves
            that only one side has are left alone, and where one side has ``None`` or an empty container. A leaf where
            the other side has entries inside it is an error in any case, if the file tells how entries are nested.
        verify: Whether what is read is compared with its checksums first, where the checkpoint has some. Directories
            that ``save`` wrote have one for each block of a tensor (128 KiB, or up to 1/64 of what one rank saved of
            it); what is at most 1 MiB is read whole. Torch files, and directories that DCP wrote, have one for each
            tensor or piece, which is read whole.
        weights_only: Whether the plain values of a DCP directory are read by the rules of
            ``torch.load(weights_only=True)``. With ``False``, what the checkpoint holds may run any code.
        group: The ranks that hold ``like``; by default all.

    Returns:
        A tree of the structure of ``like``, with fresh tensors, and the plain values of the checkpoint.

    Aliasing:
        Leaves that are not loaded are those of ``like``, and with ``in_place`` all tensors.

    Collective:
        If ``like`` holds distributed tensors, or a group is given: every rank of the group calls it, and none returns
        before all have read. Otherwise there is no communication.

    Raises:
        TreeMismatch: If leaves are missing or left over, or shapes or dtypes differ, and nothing was read then. Or if
            values are out of range, or tensors of ``like`` share memory that the checkpoint has different values for:
            others may be filled then.
        CheckpointError: If the checkpoint is missing, incomplete, damaged or hostile. If damage is found only while
            data is read, tensors may be filled in part.
        UnsupportedLeaf: If a leaf of ``like`` cannot be filled.

    Example:
        >>> import tempfile, statetree as st, torch
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> st.save({"layer": {"w": torch.ones(2)}}, path)
        >>> st.load(path, {"layer": {"w": torch.empty(2, device="meta")}})
        {'layer': {'w': tensor([1., 1.])}}
        >>> st.load(path)
        {'layer.w': tensor([1., 1.])}
    """
    if through is not None:
        check_function("load", "through", through)
    together = group is not None or lie_on_ranks("load", *flatten_for("load", like))
    ranks = group_of("load", group, None)
    options = LoadOptions(in_place, cast, strict, verify, weights_only, where=where, through=through)
    return load_tree(path, like, ranks, options, together=together)


class LoadOptions(NamedTuple):
    """How a checkpoint is loaded: as ``load`` has it, and ``partly``."""

    in_place: bool = False
    cast: bool = False
    strict: bool = True
    verify: bool = True
    weights_only: bool = True
    partly: set[str] | None = None  # notes what mappings of ``like`` leave out, if they may (but for empty ones)
    where: Where | None = None
    through: Callable[[Any], Any] | None = None


def load_tree(path: str | os.PathLike[str], like: Any, ranks: Group, options: LoadOptions, *, together: bool) -> Any:
    """Do as ``load``."""
    # Of a server, each small tensor takes long. What is no path at all is told to all ranks, later.
    is_far = isinstance(path, (str, RemotePath)) and is_url(path)
    run = _load_tree if is_far else without_collections(_load_tree)
    return run(path, like, ranks, options, together=together)


@quietly
def _load_tree(path: str | os.PathLike[str], like: Any, ranks: Group, options: LoadOptions, *, together: bool) -> Any:
    job = _Whole(options) if like is None else _Filled(like, options, ranks)

    @without_collections
    def plan() -> None:
        checkpoint = opened(path, skip_foreign=True, verify=options.verify, weights_only=options.weights_only)
        for file in checkpoint.files.paths:
            check_later(checkpoint.files.check, file)
        tree = checkpoint.tree if options.through is None else options.through(checkpoint.tree)
        job.plan(tree, checkpoint)

    def ready(step: Callable[[], Any]) -> Any:
        return on_all_ranks("load", ranks, step) if together else step()

    with phase("load.plan"):
        ready(plan)
    with phase("load.read"):
        return ready(job.read)


class _Whole:
    """Loads what was saved."""

    def __init__(self, options: LoadOptions) -> None:
        self._where, self._through = options.where, options.through
        self._tree: Any = None

    def plan(self, tree: Any, checkpoint: OpenedCheckpoint) -> None:
        """Choose what is read, and refuse what would not come back as it was."""
        leaves, spec = flatten_for("load", tree)
        if self._where is not None:
            tree = pruned("load", spec, leaves, selected(self._where, spec, leaves, verb="load"))
            leaves, spec = flatten_for("load", tree)
        self._tree = tree
        unknown = checkpoint.unknown
        if self._where is not None and self._through is None:  # else the paths may be others by now
            above = {path[:count] for path in map(tuple, spec.paths()) for count in range(len(path) + 1)}
            unknown = [each for each in unknown if tuple(each.path) in above]
        if unknown:
            raise TreeMismatch.between("load", unknown, _UNKNOWN_REMEDY)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, StoredParts):
                path = spec.paths()[index]
                msg = (
                    f"load: the leaf at {path or '<root>'} was saved in parts: expected a strided tensor or a plain "
                    f"value, got {leaf.name}. Pass like=, a tree like the saved one."
                )
                raise UnsupportedLeaf(msg, path)
            _check_known(spec, index, leaf)
        if checkpoint.foreign and self._where is None:
            raise not_admitted("load: the checkpoint holds objects", ", ".join(checkpoint.foreign[:5]))

    @with_collections
    def read(self) -> Any:
        return replicated("load", self._tree, memory_of("cpu"), copy=True)


class _Filled:
    """Loads in the layout of a tree."""

    def __init__(self, like: Any, options: LoadOptions, ranks: Group) -> None:
        self._like = like
        self._options = options
        self._ranks = ranks
        self._result: list[Any] = []
        self._targets: list[Target] = []
        self._parts: dict[int, StoredParts] = {}
        self._write: Callable[[], None] | None = None

    def plan(self, tree: Any, checkpoint: OpenedCheckpoint) -> None:
        """Match the trees, and take the memory that is filled."""
        flat = partial(flatten_for, "load", is_leaf=is_entry)
        outer, spec = flat(self._like)
        read = list(map(materialized, outer))
        self._lowered = lowered = lower("load", read, spec, flat, wanted=is_made_of_tensors)
        self._paths = lowered.spec.paths()
        chosen = None
        if self._options.where is not None:
            mask = selected(self._options.where, lowered.outline.spec, lowered.outer, verb="load")
            chosen = [index for index, owner in enumerate(lowered.outline.owners()) if mask[owner]]
        opened_tree = tree, checkpoint.is_nested, checkpoint.holders
        strict, partly = self._options.strict, self._options.partly
        stored = matched_entries(opened_tree, lowered.spec, lowered.leaves, chosen, strict=strict, partly=partly)
        for index, found in stored.items():
            _check_known(lowered.spec, index, found)
        if self._options.in_place:
            both = zip(outer, read, strict=True)
            unwritable = {id(tensor) for leaf, tensor in both if is_stored(leaf) and tensor.numel()}
            within = [self._paths[i] for i in stored if id(lowered.leaves[i]) in unwritable]
            found = [Difference(path, "writability", "values to load", IN_A_FILE) for path in within]
            refuse_all(found, "Nothing was read. Load without in_place, or pass tensors.")
        if self._options.through is None and lowered.texts:
            owners, named = lowered.outline.owners(), lowered.outline.spec.paths()
            found = _divided_otherwise({named[owners[i]] for i in stored}, checkpoint.divided, lowered.texts)
            refuse_all([each for each in found if not (self._options.cast and _differ_in_dtypes(each))])
        strided = {i for i, found in stored.items() if isinstance(found, StoredTensor) and found.is_strided}
        cuttable = {i for i in strided if is_distributed(lowered.leaves[i]) or is_cuttable(lowered.leaves[i])}
        boxes = {
            i: held_chunks("load", lowered.leaves[i], self._paths[i], self._ranks) for i in stored if i in cuttable
        }
        refuse_all([found for index, held in boxes.items() for found in self._unfit(index, stored[index], held)])
        plain = {i: found for i, found in stored.items() if not isinstance(found, StoredParts)}
        values = {i: found for i, found in plain.items() if is_value(found) or is_entry(found)}
        others = [(i, leaf) for i, leaf in enumerate(lowered.leaves) if not (is_value(leaf) or is_entry(leaf))]
        kinds = {i: "tensor" if isinstance(leaf, torch.Tensor) else type(leaf).__qualname__ for i, leaf in others}
        refuse_all(
            [Difference(self._paths[i], "leaf type", "a plain value", f"a {kinds[i]}") for i in values if i in kinds]
        )
        filled = [leaf if i in stored and i not in values else None for i, leaf in enumerate(lowered.leaves)]
        fresh = filled if self._options.in_place else allocated("load", filled, lowered.spec)
        self._result = [fresh[i] if kept is not None else lowered.leaves[i] for i, kept in enumerate(filled)]
        for index, value in values.items():
            self._result[index] = value
        for index, found in stored.items():
            if index in boxes:
                self._add_boxes(index, found)
            elif isinstance(found, StoredParts):
                self._parts[index] = found
                self._targets += found.targets(self._paths[index], self._result[index])
        for target in self._targets:
            check_elements("load", target.tensor, target.path)
        self._prepare_rest({i: stored[i] for i in stored.keys() - boxes.keys() - values.keys() - self._parts.keys()})

    def _unfit(self, index: int, stored: StoredTensor, held: LocalChunks | None) -> list[Difference]:
        like, path = self._lowered.leaves[index], self._paths[index]
        shape, dtype = (held.shape, held.dtype) if held else (tuple(like.shape), like.dtype)
        found: list[Difference] = []
        if tuple(stored.shape) != tuple(shape):
            found.append(Difference(path, "shape", tuple(stored.shape), tuple(shape)))
        if stored.dtype != dtype and not (self._options.cast and castable(stored.dtype, dtype)):
            found.append(Difference(path, "dtype", stored.dtype, dtype))
        if held is not None and held.partials is not None:
            found.append(Difference(path, "placements", "elements", "Partial"))
        if self._options.in_place and any(piece.is_inference() for piece in (held.pieces if held else [like])):
            found.append(Difference(path, "writability", "values to load", "an inference tensor"))
        return found

    def _add_boxes(self, index: int, stored: StoredTensor) -> None:
        leaf = self._result[index]
        held = held_chunks("load", leaf, self._paths[index], self._ranks)
        whole = [(whole_box(leaf.shape), leaf)] if held is None else []
        for box, piece in zip(held.boxes, held.pieces, strict=True) if held else whole:
            tensor = piece.detach().as_subclass(torch.Tensor)
            if tensor.numel():
                self._targets.append(Target(self._paths[index], stored, box, tensor))

    def _prepare_rest(self, stored: dict[int, Any]) -> None:
        """Prepare copying leaves that are read whole: sparse tensors, and tensors inside of plain values."""
        keys = self._lowered.spec.flat_keys()
        sides = ({keys[i]: leaf for i, leaf in stored.items()}, {keys[i]: self._result[i] for i in stored})
        copied, self._write = prepared_copy("load", *sides, cast=self._options.cast)
        for index in stored:
            self._result[index] = copied[keys[index]]

    def read(self) -> Any:
        for index, parts in self._parts.items():
            parts.check(self._paths[index], self._result[index])
        fill("load", self._targets)
        if self._write is not None:
            with_collections(self._write)()
        for index, parts in self._parts.items():
            self._result[index] = parts.completed(self._paths[index], self._result[index])
        return self._lowered.outline.lift("load", self._result, self._lowered.recipes)


def _divided_otherwise(
    paths: Collection[Path], divided: Mapping[tuple[str, ...], str], texts: Mapping[Path, str]
) -> list[Difference]:
    """Return which leaves, made of several tensors, are something else than what was saved, beside these tensors."""
    pairs = [(path, divided.get((*map(key_text, path),), own), own) for path, own in texts.items() if path in paths]
    return [Difference(path, "leaf type", saved, own) for path, saved, own in pairs if saved != own]


def _differ_in_dtypes(found: Difference) -> bool:
    """Whether texts of leaves differ in nothing but the leaves' own dtypes, wherever these stand."""
    sides = found.left, found.right
    left, right = (re.findall(r"torch\.dtype (torch\.\w+)", text) for text in sides)
    ours, theirs = (set(re.findall(r"\bdtype torch\.dtype (torch\.\w+)", text)) for text in sides)
    rest, other = (re.sub(r"torch\.dtype torch\.\w+", "torch.dtype", text) for text in sides)
    return rest == other and all(a == b or (a in ours and b in theirs) for a, b in zip(left, right, strict=True))


def _check_known(spec: TreeSpec, index: int, leaf: Any) -> None:
    for held in () if isinstance(leaf, StoredParts) else all_within(leaf):
        if isinstance(held, StoredObject):
            raise not_admitted(f"load: the plain value at {spec.paths()[index] or '<root>'} cannot be read", held.name)
