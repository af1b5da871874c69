"""Memory filled with boxes of stored tensors, also where several tensors share memory, or one overlaps itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import torch

from statetree.chunks.local import location_of
from statetree.declare import with_collections
from statetree.errors import CheckpointError, Difference, TreeMismatch, UnsupportedLeaf, unsignalled
from statetree.exchange.manifest import chunks_of
from statetree.files.job_threads import in_threads
from statetree.files.pickled_tensors import MAX_DIMS
from statetree.files.stored import OutOfRange
from statetree.leaves.location import located_error
from statetree.spans.bits import same_bytes
from statetree.spans.columns import Columns
from statetree.spans.layout import extent_bytes, holds_memory
from statetree.spans.overlaps import once, overlaps_itself, shared_elements
from statetree.torch_internals import is_functional, is_transformed, is_zero_tensor, quietly
from statetree.transforms.copy_into import copy_into

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from statetree.chunks.boxes import Box
    from statetree.chunks.local import LocalChunks
    from statetree.exchange.group import Group
    from statetree.files.stored import StoredTensor
    from statetree.key_paths import Path

_REMEDY: Final = "Other tensors may be filled. Pass a tree in which these have memory of their own."
#: From here on a tensor takes much longer to be read than a thread takes to get to it.
_LARGE_BYTES: Final = 1 << 18
_RANGE_REMEDY: Final = "Other tensors may be filled. Convert to a dtype of a larger range."


class Target(NamedTuple):
    """A plain tensor to fill, which may be of another dtype than what is stored."""

    path: Path  # where its leaf lies
    stored: StoredTensor  # what it is filled from
    box: Box  # which elements of that
    tensor: torch.Tensor  # of the shape of the box

    def read(self, verb: str, tensor: torch.Tensor) -> None:
        """Read the elements into a tensor."""
        try:
            self.stored.read_into(self.box.start, tensor)
        except OutOfRange as error:  # nothing is wrong with the checkpoint
            raise TreeMismatch.between(verb, [Difference(self.path, "range", *error.found)], _RANGE_REMEDY) from None
        except CheckpointError as error:
            raise CheckpointError(f"{verb}: the leaf at {self.path or '<root>'} cannot be read: {error}") from error

    def fresh(self, verb: str) -> torch.Tensor:
        """Read the elements into fresh memory."""
        made = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device=self.tensor.device)
        self.read(verb, made)
        return made


@quietly
def fill(verb: str, targets: Sequence[Target]) -> None:
    """Read what there is to fill. Where two tensors share memory, what is stored must agree.

    Otherwise, and where values are out of range, it raises ``TreeMismatch``: others are filled then, and these in part,
    except that a tensor that overlaps itself keeps what it held.
    """
    plain: list[Target] = []
    overlapping: list[Target] = []
    filled: set[Any] = set()
    for target in targets:
        location = location_of(target.tensor)
        if location not in filled:  # otherwise it is compared below
            filled.add(location)
            tensor = target.tensor
            is_plain = tensor.is_contiguous() or not overlaps_itself(tensor.shape, tensor.stride())
            (plain if is_plain else overlapping).append(target)
    _read_each(verb, plain)
    refused = [target.path for target in overlapping if not _fill_overlapping(target.tensor, target.fresh(verb))]
    pairs = shared_elements(Columns([target.tensor for target in targets]))
    tied = [targets[index] for index in sorted({index for pair in pairs for index in pair})]
    wrong = {target.path: None for target in tied if not same_bytes(target.tensor, target.fresh(verb))}
    found = [Difference(path, "overlap", "values of its own", "a tensor that overlaps itself") for path in refused]
    found += [Difference(path, "ties", "values of its own", "a tensor that shares memory") for path in wrong]
    if found:
        raise TreeMismatch.between(verb, found, _REMEDY)


def _read_each(verb: str, targets: Sequence[Target]) -> None:
    """Fill tensors: large ones by two threads, of which one reads while the other sums up what it has read."""

    def read(some: Sequence[Target]) -> None:
        for target in some:
            target.read(verb, target.tensor)

    def reading(target: Target) -> Generator[None, None, None]:
        read([target])
        yield

    @with_collections
    def read_large() -> None:
        large = [target for target in targets if target.tensor.nbytes >= _LARGE_BYTES]
        read([target for target in large if target.tensor.device.type != "cpu"])
        here = [target for target in large if target.tensor.device.type == "cpu"]
        in_threads(list(map(reading, here)), min(2, torch.get_num_threads()))

    read([target for target in targets if target.tensor.nbytes < _LARGE_BYTES])
    read_large()


def _fill_overlapping(tensor: torch.Tensor, fresh: torch.Tensor) -> bool:
    """Fill a tensor that overlaps itself, if its elements for one place are the same, and return whether they are."""
    count = extent_bytes(tensor.shape, tensor.stride(), 1)
    at = torch.arange(count, device=fresh.device).as_strided(tensor.shape, tensor.stride()).flatten()
    # Bytes are put in their places, not elements: some dtypes cannot be put anywhere by an index.
    places = torch.empty((count, fresh.itemsize), dtype=torch.uint8, device=fresh.device)
    places[at] = fresh.flatten().view(torch.uint8).view(-1, fresh.itemsize)
    copy = places.flatten().view(fresh.dtype).as_strided(tensor.shape, tensor.stride())
    left = once(tensor, copy) if same_bytes(copy, fresh) else None
    if left is not None:
        copy_into(left[1], left[0])  # whatever its bits and device
    return left is not None


def check_elements(verb: str, tensor: torch.Tensor, path: Path) -> None:
    """Raise ``UnsupportedLeaf`` if a tensor has no memory, not enough for its elements, or more dims than are read."""
    check_dims(verb, tensor, path)
    if tensor.is_meta:
        refuse_leaf(verb, path, "a meta tensor, which has no elements", "Materialize it (to_empty)")
    if is_zero_tensor(tensor):
        refuse_leaf(verb, path, "torch's zero tensor, which has no memory", "Replace it by torch.zeros")
    if not holds_memory(tensor):
        if is_functional(tensor) or is_transformed(tensor):
            refuse_leaf(verb, path, "one inside a function of torch.func (vmap, grad, functionalize)", "Leave that")
        held = f"a tensor whose storage was freed or resized to {tensor.untyped_storage().nbytes()} bytes"
        refuse_leaf(verb, path, held, "Restore it (FSDP: unshard, or use its state_dict)")


def check_dims(verb: str, tensor: torch.Tensor, path: Path) -> None:
    """Raise ``UnsupportedLeaf`` if a tensor has more dims than are read from any file."""
    if tensor.dim() > MAX_DIMS:
        refuse_leaf(verb, path, f"one of {tensor.dim()} dims: at most {MAX_DIMS} are read", "Reshape it")


def held_chunks(verb: str, leaf: Any, path: Path, ranks: Group) -> LocalChunks | None:
    """Return the chunks that this rank holds of a distributed leaf; ``None`` of another. An error has the path."""
    try:
        return chunks_of(leaf, ranks)
    except unsignalled(Exception) as error:
        raise located_error(verb, "tell the chunks of", error, lambda: [path], [leaf], 0) from error


def refuse_leaf(verb: str, path: Path, got: str, remedy: str) -> NoReturn:
    """Raise ``UnsupportedLeaf``."""
    where = path or "<root>"
    msg = f"{verb}: cannot take the leaf at {where}: expected a tensor with elements, got {got}. {remedy} first."
    raise UnsupportedLeaf(msg, path)
