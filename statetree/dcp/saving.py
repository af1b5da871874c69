"""A whole state written by DCP: taken apart into entries, with a structure beside them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import torch

from statetree.dcp.directory_writer import DirectoryWriter
from statetree.dcp.failures import checkpoint_errors
from statetree.dcp.flat_state import STRUCTURE_KEY, flat_state, free_key
from statetree.dcp.groups import check_alive, ranks_of
from statetree.dcp.internals import run_save
from statetree.dcp.plain_values import why_not_restorable
from statetree.dcp.save_planner import SavePlanner, ToSave
from statetree.dcp.saved_structure import (
    SavedEntry,
    path_of,
    places,
    rebuilt_classes,
    saved_form,
    structure_text,
    why_not_rebuilt,
)
from statetree.dcp.tensors import PARTS_ENTRY, VALUE_ENTRY, compact, content_of, is_array_of_numbers, to_save
from statetree.errors import StateTreeError, UnsupportedLeaf, shown, warn, with_checks
from statetree.files.checkpoint import is_entry
from statetree.key_paths import Path
from statetree.leaves.builtin import is_distributed, leaf_type_of, taken_over
from statetree.leaves.lowering import is_several
from statetree.leaves.types.converted import joined
from statetree.leaves.types.special import QUANTIZED
from statetree.torch_internals import WITHOUT_KERNELS
from statetree.tree.flatten import flatten_for

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.storage import StorageWriter

    from statetree.tree.spec import TreeSpec


def warn_of_values(verb: str, state: Any) -> None:
    """Warn of what does not come back by default (containers, leaves, plain values), each with its path.

    Args:
        verb: On whose behalf.
        state: What is to be saved.
    """
    try:
        leaves, spec = flatten_for(verb, state, is_leaf=is_entry)
        chosen = [index for index, leaf in enumerate(leaves) if not _comes_back(leaf)]
        found = [(spec.paths()[index], type(leaves[index]), _why_not(leaves[index])) for index in chosen]
        containers = list(_not_rebuilt(spec))
        parts = [str(spec.paths()[index]) or "<root>" for index, leaf in enumerate(leaves) if _is_saved_in_parts(leaf)]
    except StateTreeError:  # the save itself raises it
        return
    if containers:
        msg = (
            f"{verb}: containers that restore makes with a template only, at:\n  {shown(containers)}\nPass it one, "
            "or make their classes known: register_container, or torch.serialization.add_safe_globals."
        )
        warn(msg)
    if parts:
        msg = f"{verb}: leaves that restore makes with a template only, at:\n  {shown(parts)}\nPass it one."
        warn(msg)
    lines = [f"{path or '<root>'} ({cls.__qualname__}): {why}" for path, cls, why in found if why]
    if lines:
        msg = (
            f"{verb}: plain values that restore refuses by default, at:\n  {shown(lines)}\nSave what they hold (of a "
            "module or an optimizer, the state_dict()), name their classes with "
            "torch.serialization.add_safe_globals, or restore with weights_only=False."
        )
        warn(msg)


def _not_rebuilt(spec: TreeSpec) -> Iterator[str]:
    """Yield where restore needs a template, and why."""
    keys = {type(key) for _, keys, *_ in spec.nodes for key in keys}
    if {kind.cls for kind, *_ in spec.nodes} <= {dict, list, tuple} and keys <= {str, int}:
        return  # most states
    form, known = saved_form(spec), rebuilt_classes()
    for texts, ref in places(form):
        why = "" if ref >= 0 else why_not_rebuilt(form.nodes[~ref], known)
        if why:
            yield f"{path_of(texts) or '<root>'}: {why}"


#: Strided tensors of these dtypes are saved as tensors of others.
_IN_PARTS: Final = WITHOUT_KERNELS | frozenset(QUANTIZED)


def _is_saved_in_parts(leaf: Any) -> bool:
    """Whether a leaf is made of several tensors, so that a template has to say how (quantized, nested, wrappers)."""
    if type(leaf) is torch.Tensor:
        if leaf.layout is not torch.strided and not leaf.is_nested:
            return False  # sparse: what it is made of says how
        if not leaf.is_nested and leaf.dtype not in _IN_PARTS:
            return False
    elif type(leaf) in _COMING_BACK or taken_over(leaf):
        return False
    leaf = joined(leaf)
    return is_several(leaf) or (not is_distributed(leaf) and content_of("save", leaf, Path()).sort == PARTS_ENTRY)


#: Classes of values that always come back. Asking that of every number in a state would take as long as saving it.
_COMING_BACK: Final = frozenset(
    {int, float, str, bool, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
)


def _comes_back(leaf: Any) -> bool:
    cls = type(leaf)
    if cls in _COMING_BACK or cls is torch.Tensor or is_array_of_numbers(leaf):
        return True
    if cls in (list, tuple):
        return all(type(item) in _COMING_BACK for item in leaf)
    leaf_type = leaf_type_of(cls)
    return leaf_type is not None and not leaf_type.opaque and not leaf_type.registered


def _why_not(value: Any) -> str:
    leaf_type = leaf_type_of(type(value))
    try:
        if leaf_type is not None and leaf_type.registered:
            value = content_of("save", value, Path()).contexts
        return why_not_restorable(_pickled(value, Path()).getvalue())
    except UnsupportedLeaf:  # the save itself raises it, with its path
        return ""


def write(
    state: Callable[[], Any], directory: pathlib.Path, group: ProcessGroup | None, writer: StorageWriter | None = None
) -> None:
    """Save the state that a function returns. What it raises reaches every rank. Without a group, this one saves alone.

    Raises:
        CheckpointError: Also if the group was destroyed.
    """
    check_alive("save", group)
    if writer is None:
        writer = DirectoryWriter(directory)
    planner = SavePlanner(lambda is_coordinator: _prepared(state(), group, with_structure=is_coordinator))
    with checkpoint_errors("save", directory):
        with_checks(run_save, writer, planner, group)


def _prepared(state: Any, group: ProcessGroup | None, *, with_structure: bool) -> ToSave:
    """Take a state apart into what DCP saves."""
    ranks = ranks_of("save", group)
    spec, entries, _ = flat_state(state, verb="save")
    prepared = ToSave({}, {}, set())
    taken = {entry.key for entry in entries}
    saved = []
    for entry in entries:
        content = content_of("save", entry.value, entry.path, ranks)
        keys: tuple[str, ...] = (entry.key,)
        if content.sort == PARTS_ENTRY:
            keys = tuple([free_key(f"{entry.key}.<part {number}>", taken) for number in range(len(content.tensors))])
            prepared.inseparable.update(keys)
        if content.sort == VALUE_ENTRY:
            prepared.flat[entry.key] = _pickled(entry.value, entry.path)
        else:
            prepared.flat.update(zip(keys, map(to_save, content.tensors), strict=True))
        prepared.dcp_paths.update((key, entry.dcp_path_of(key)) for key in keys)
        context = ""
        if content.contexts:
            context = free_key(f"{entry.key}.<context>", taken)
            prepared.flat[context] = _pickled(content.contexts, entry.path)
            prepared.dcp_paths[context] = (context,)
        saved.append(SavedEntry(content.sort, keys, content.facts, context))
    if with_structure:
        prepared.flat[STRUCTURE_KEY] = _pickled(structure_text(spec, saved), Path())
        prepared.dcp_paths[STRUCTURE_KEY] = (STRUCTURE_KEY,)
    return prepared


def _pickled(value: Any, path: Path) -> io.BytesIO:
    file = io.BytesIO()
    try:
        torch.save(compact(value), file)
    except Exception as error:
        msg = (
            f"save: the leaf at {path or '<root>'} ({type(value).__qualname__}) cannot be pickled: "
            f"{type(error).__name__}: {error}. Leave it out, or register its class as a container (register_container)."
        )
        raise UnsupportedLeaf(msg, path) from error
    return file
