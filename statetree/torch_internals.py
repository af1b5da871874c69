"""The private parts of torch that everything else stands on, each behind one function.

Tried with torch 2.11.0, 2.13.0 and 2.15.0. (``leaves.types`` touch what is private to their kinds of tensors.)
"""

from __future__ import annotations

import sys
from functools import cache, partial, wraps
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from statetree.errors import unsignalled, with_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

P = ParamSpec("P")
R = TypeVar("R")

#: The classes whose methods and getters work on tensors and storages without looking at subclasses' overrides.
TENSOR_BASE: Final[Any] = torch._C.TensorBase
STORAGE_BASE: Final[Any] = torch._C.StorageBase


def quietly(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function's torch operations mean what they say (a decorator).

    No autograd, no inference mode, no modes and no default device of the user; ``__torch_function__`` of subclasses is
    not called. What ``check_later`` was told is checked in the end. Only context managers written in C are used: one
    written in Python can be interrupted between doing its work and being left, and would leave autograd switched off.
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction(), torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)  # leaving the block above restores this, too
            if torch._C._len_torch_dispatch_stack():
                from torch.utils._python_dispatch import _disable_current_modes

                with _disable_current_modes():
                    return with_checks(function, *args, **kwargs)
            return with_checks(function, *args, **kwargs)

    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch.compiler.disable, without importing it
    return wrapper


#: A context in which ``__torch_function__`` is called again, for code that is not ours.
torch_function_enabled: Final[Any] = torch._C._EnableTorchFunction

#: ``storage_key`` and a tensor's version counter, for asking many at once. Inference tensors have no counter and raise.
storage_key_of: Final[Any] = STORAGE_BASE._cdata.__get__
version_of: Final[Any] = TENSOR_BASE._version.__get__


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number for a storage that no other storage has while this one is alive."""
    key: int = storage._cdata
    return key


def count_references(storages: list[torch.UntypedStorage], keys: Sequence[int]) -> list[int]:
    """Return the references to storages, whose ``storage_key`` are given: of each the C++ ones, then the Python ones.

    Both are needed. There is at most one Python object for a storage, and it counts as one reference in C++ however
    many variables hold it. They are counted in a single C call, in which no other thread runs: one that makes a tensor
    of a storage and drops the storage between two calls would never be seen.
    """
    return list(chain(map(torch._C._storage_Use_Count, keys), map(sys.getrefcount, storages)))


def own_references(tensors: Sequence[int]) -> list[int]:
    """Return what ``count_references`` finds for storages that one list refers to, and as many tensors (at least one).

    This is computed: whatever looks at all objects for a moment (``gc.get_objects()``) holds the storages, too.
    """
    probe = torch.empty(0, device="cpu")
    # In C++ the Python object counts as one. In Python the list counts as one, what counts as another one, and where
    # torch keeps the object of a storage that tensors refer to, that is a third: this asks torch. The probe's storage
    # has an object only inside this one C call, so that nothing else can hold it.
    (counting_and_kept,) = map(sys.getrefcount, map(TENSOR_BASE.untyped_storage, (probe,)))
    return [*(count + 1 for count in tensors), *repeat(1 + counting_and_kept, len(tensors))]


def is_sole_view(tensor: torch.Tensor) -> bool:
    """Whether nothing but one variable refers to a tensor's memory, all of which are its elements."""
    storages = [tensor.untyped_storage()]
    if not storages[0].resizable() or storages[0].nbytes() != tensor.nbytes:  # foreign memory has several storages
        return False
    return count_references(storages, [storage_key(storages[0])]) == own_references([1])


def storages_sent() -> set[int]:
    """Return the ``storage_key`` of every storage alive that was sent to another process (or came from one)."""
    from torch.multiprocessing import reductions

    with reductions.shared_cache.lock:
        references = list(reductions.shared_cache.values())
    return {reference.cdata for reference in references if not reference.expired()}


#: Whether a tensor is one of autograd's, which are all zeros and have no memory whatever their storage says.
is_zero_tensor: Final[Any] = TENSOR_BASE._is_zerotensor
#: Whether a tensor is a wrapper of ``torch.func.functionalize``, whose address is 0.
is_functional: Final[Any] = torch._is_functional_tensor
#: Whether a tensor is a wrapper inside a function of ``torch.func`` (``vmap``, ``grad``): it has no storage.
is_transformed: Final[Any] = torch._C._functorch.is_functorch_wrapped_tensor
#: Whether torch's profiler records this thread.
is_profiling: Final[Any] = torch._C._autograd._profiler_enabled
#: A storage on an address, a device and a number of bytes: no memory is taken for it, and none freed.
storage_at: Final[Any] = torch._C._construct_storage_from_data_pointer
#: Makes an object whose ``wait()`` lasts until its ``set_result(None)``, and during which no signal handler runs, as
#: handlers do while Python's own locks and queues wait.
uninterrupted_event: Final[Any] = partial(torch._C.Future, [])


def carry_tangents(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any tensor is a dual one, of forward-mode differentiation."""
    level = forward_ad._current_level
    if level < 0:
        return False
    unpack: Any = torch._VF._unpack_dual
    return any(unpack(tensor, level=level)[1] is not None for tensor in tensors)


def set_bits(tensor: torch.Tensor, *, conj: bool, neg: bool) -> None:
    """Make a tensor read as the conjugate or the negative of what its memory holds."""
    torch._C._set_conj(tensor, conj)
    torch._C._set_neg(tensor, neg)


def as_class(tensor: torch.Tensor, cls: type, *, requires_grad: bool) -> torch.Tensor:
    """Return a tensor of a subclass on the same memory, without running the subclass's constructor."""
    return torch.Tensor._make_subclass(cls, tensor, requires_grad)


#: Dtypes that torch can store but neither copy nor convert: they are moved as bytes.
WITHOUT_KERNELS: Final = frozenset(
    getattr(torch, name)
    for name in (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    )
    if hasattr(torch, name)
)
#: Complex dtypes whose conjugate torch cannot read (since 2.14), and those of which it warns when it allocates one.
_UNCONJUGATED: Final = frozenset(getattr(torch, name) for name in ("bcomplex32",) if hasattr(torch, name))
_WARNED_OF: Final = _UNCONJUGATED | {torch.complex32}
#: Dtypes whose bytes a copy does not keep, or which cannot be copied (a transposed float4 cannot): they are copied as
#: integers. A copy of a bool is 0 or 1, but a view of other numbers as bools may look at any bytes.
COPIED_AS_INTEGERS: Final = WITHOUT_KERNELS | _UNCONJUGATED | {torch.bool, torch.float4_e2m1fn_x2}
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: What CUDA's ``_foreach_copy_`` copies as it is. It takes narrow floats through float32, which changes NaNs, and has
#: no kernels for unsigned integers.
_WIDE: Final = {torch.float32, torch.float64, torch.complex64, torch.complex128}
_EXACT_TOGETHER: Final = frozenset(_WIDE.union(_INTEGERS.values(), (torch.int8,)))


def copied_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype as which elements of a dtype are copied: its own, or integers of its size."""
    return _INTEGERS[dtype.itemsize] if dtype in COPIED_AS_INTEGERS else dtype


def without_elements(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor, to be set on some memory. torch warns of some dtypes where one is allocated."""
    if dtype not in _WARNED_OF:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.empty(0, dtype=torch.int32, device=device).view(dtype).data


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds what it reads like: without conjugate and negative bits."""
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    if tensor.dtype not in _UNCONJUGATED or not tensor.is_conj():
        return tensor.resolve_conj().resolve_neg()
    tensor = tensor.conj()
    flipped = tensor.view(torch.int32).clone()
    flipped ^= torch.iinfo(torch.int32).min  # the sign of the imaginary part, which comes second
    return flipped.view(tensor.dtype)


def as_copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory that torch copies without changing a byte."""
    return tensor.view(copied_dtype(tensor.dtype)) if tensor.dtype in COPIED_AS_INTEGERS else tensor


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view whose negative bit is the other way about."""
    return torch._neg_view(tensor)


def without_common_bits(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop conjugate and negative bits that both have: they cost a pass, and some dtypes have no kernel for it."""
    a, b = a.detach(), b.detach()
    if a.is_neg() and b.is_neg():
        a, b = negated_view(a), negated_view(b)
    if a.is_conj() and b.is_conj():
        a, b = a.conj(), b.conj()
    return a, b


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Do as ``copy_all``, for tensors of any kind and whatever their bits: the targets then read like the sources."""
    copy_all(*plain_pairs(targets, sources))


def plain_pairs(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return tensors that ``copy_all`` takes, on the memory of others, so that the targets then read like the sources.

    Of sources that are converted into targets with bits, copies are made.
    """
    dtypes = set(map(TENSOR_BASE.dtype.__get__, targets))
    has_bits = any(map(TENSOR_BASE.is_neg, targets)) or (
        any(dtype.is_complex for dtype in dtypes) and any(map(TENSOR_BASE.is_conj, targets))
    )
    if dtypes.isdisjoint(COPIED_AS_INTEGERS) and not has_bits:
        return targets, sources
    pairs = list(map(plain_pair, targets, sources))
    return [to for to, _ in pairs], [of for _, of in pairs]


def plain_pair(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor on the memory of the target, and one to copy into it, so that the target reads like the source.

    Elements that are converted are so first: torch gives a conjugate bit to complex tensors only, a negative one to
    whatever it cannot negate, and to unsigned integers, which then wrap around.
    """
    if target.dtype != source.dtype and (target.is_neg() or target.is_conj() or source.dtype in _UNCONJUGATED):
        source = resolved(source).to(target.dtype)
    target, source = without_common_bits(target, source)
    if target.is_conj():
        target, source = torch._conj(target), torch._conj(source)
    if source.dtype in _UNCONJUGATED:
        source = resolved(source)
    if target.is_neg():
        target, source = negated_view(target), negated_view(source)
    if target.dtype == source.dtype:
        target, source = as_copied(target), as_copied(source)
    return target, source


@cache
def can_negate(dtype: torch.dtype) -> bool:
    """Whether torch can read a tensor of a dtype that has a negative bit, and a conjugate one too if it is complex."""
    try:
        negated_view(torch.zeros(16, dtype=torch.uint8, device="cpu").view(dtype).conj()).clone()
    except NotImplementedError:  # nothing else: a lack of memory says nothing about the dtype, and is not remembered
        return False
    return True


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copy tensors into others of the same shapes, in one call, which no signal handler interrupts half-way."""
    if not targets:
        return
    if not targets[0].is_cpu:  # otherwise not all are on one accelerator: torch then copies one by one, exactly
        pairs = list(map(as_integers, targets, sources))
        targets, sources = [to for to, _ in pairs], [of for _, of in pairs]
    torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def as_integers(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors on the same memory that an accelerator copies without changing a byte."""
    if target.dtype in _EXACT_TOGETHER or target.dtype != source.dtype:
        return target, source
    target, source = without_common_bits(target, source)
    if target.is_neg() or target.is_conj():  # then torch copies through a tensor in between
        return target, source
    integers = _INTEGERS[target.dtype.itemsize]
    return target.view(integers), resolved(source).view(integers)


def clone_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Clone tensors, in one call where there is one (not in torch 2.11)."""
    if not tensors:
        return []
    clone = getattr(torch, "_foreach_clone", None)
    return list(map(TENSOR_BASE.clone, tensors)) if clone is None else list(clone(list(tensors)))


def shared_storage(nbytes: int, descriptor: int | None = None) -> torch.UntypedStorage:
    """Return host memory that other processes can map: that of an open file of this size, which may be closed then."""
    cls: Any = torch.UntypedStorage  # with methods that its type does not know
    made: torch.UntypedStorage
    made = cls._new_shared(nbytes, device="cpu") if descriptor is None else cls._new_shared_fd_cpu(descriptor, nbytes)
    return made


def geometry_guard(
    tensors: Sequence[torch.Tensor], shapes: Sequence[Any], strides: Sequence[Any]
) -> Callable[[Sequence[torch.Tensor]], bool] | None:
    """Return a function that tells quickly whether other tensors look the same.

    It compares classes, dtypes, layouts, devices, bits, ``requires_grad``, shapes and strides in C++: it is what
    ``torch.compile`` guards its graphs with, at a fifth of the cost of asking each tensor. It holds no reference to the
    tensors. It may say no where nothing changed (a tensor given twice), but never yes where something did. ``None`` if
    this torch has no such thing.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes = {"dynamic_dims_sizes": list(map(list, shapes)), "dynamic_dims_strides": list(map(list, strides))}
        check = _while_recording(TensorGuards, *tensors, **sizes).check
    except unsignalled(Exception):  # anything at all: this is only a shortcut
        return None
    return lambda others: bool(_while_recording(check, *others))


def _while_recording(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function while gradients are recorded: a guard looks at ``requires_grad`` only then."""
    recording = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    try:
        return function(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(recording)


def device_types(group: Any) -> Sequence[torch.device]:
    """Return the types of the devices that a process group sends from and receives into, with torch 2.11 to 2.15.

    Gloo is registered for accelerators, too, but sends from host memory alone ("Backends" in torch.distributed's
    documentation).
    """
    found: Sequence[torch.device] = group._device_types
    return [device for device in found if device.type == "cpu" or group._get_backend(device).name() != "gloo"]


def start_all_gather(group: Any, received: torch.Tensor, sent: torch.Tensor, timeout: timedelta | None) -> Any:
    """Start an all-gather, and return the work to wait for. The public function takes no timeout."""
    return group._allgather_base(received, sent, _options("AllgatherOptions", timeout))


def _options(kind: str, timeout: timedelta | None, **fields: Any) -> Any:
    options = getattr(torch._C._distributed_c10d, kind)()
    for name, value in fields.items():
        setattr(options, name, value)
    if timeout is not None:
        options.timeout = timeout
    return options


def start_all_reduce(group: Any, data: torch.Tensor, timeout: timedelta | None, *, greatest: bool = False) -> Any:
    """Start adding up what the ranks of a group hold, in its place, and return the work to wait for.

    With ``greatest``, each element becomes the greatest that a rank has there instead.
    """
    operation = torch._C._distributed_c10d.ReduceOp
    chosen = operation(operation.MAX if greatest else operation.SUM)
    return group.allreduce([data], _options("AllreduceOptions", timeout, reduceOp=chosen))


def start_broadcast(group: Any, data: torch.Tensor, source: int, timeout: timedelta | None) -> Any:
    """Start sending what one rank of a group holds to all, and return the work to wait for."""
    return group.broadcast([data], _options("BroadcastOptions", timeout, rootRank=source))


def start_exchange(
    group: Any, sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]
) -> list[Any]:
    """Start sending tensors to ranks of a group and receiving others, all at once; return the works to wait for."""
    from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

    operations = [P2POp(irecv, tensor, group=group, group_peer=peer) for peer, tensor in received]
    operations += [P2POp(isend, tensor, group=group, group_peer=peer) for peer, tensor in sent]
    return list(batch_isend_irecv(operations))


def compressed_indices(leaf: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices of a sparse tensor by rows or by columns: the compressed ones, and the plain ones."""
    if leaf.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [leaf.crow_indices(), leaf.col_indices()]
    return [leaf.ccol_indices(), leaf.row_indices()]


def check_sparse_indices(leaf: torch.Tensor) -> None:
    """Raise ``RuntimeError`` if the indices of a sparse tensor lead outside of it: torch would use other memory."""
    if leaf.layout is torch.sparse_coo:
        torch._validate_sparse_coo_tensor_args(leaf._indices(), leaf._values(), leaf.shape, leaf.is_coalesced())
    elif leaf.layout is not torch.strided and not leaf.is_nested:
        first, second = compressed_indices(leaf)
        torch._validate_sparse_compressed_tensor_args(first, second, leaf.values(), leaf.shape, leaf.layout)


def are_flattened(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether FSDP1 has put parameters into flat memory, of which each rank holds a part (all of it with NO_SHARD)."""
    found = [parameter for parameter in parameters if getattr(parameter, "_fsdp_flattened", False)]
    sizes = [(getattr(each, "_sharded_size", None), getattr(each, "_unpadded_unsharded_size", None)) for each in found]
    if any(size is not None for size, _ in sizes):  # flat parameters
        return any(size is not None and whole is not None and size.numel() < whole.numel() for size, whole in sizes)
    return bool(found) and all(parameter.dim() == 1 for parameter in found)  # the original ones: views of a part
