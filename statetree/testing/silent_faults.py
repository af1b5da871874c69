"""Silent faults: what copies, stagers and gathers of states got wrong in ways that no error tells.

Each is a function of an implementation that raises ``AssertionError`` if it has the fault. It uses torch alone, so that
its source code is a reproduction that anybody can run.
"""

import copy
import dataclasses
import gc
import inspect
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

#: What an implementation is: a copy of a state, a stager, or a gather of a state on all ranks.
COPY, STAGER, GATHER = "copy", "stager", "gather"
_ARGUMENT = {COPY: "copied", STAGER: "stager", GATHER: "gather"}
_IMPORTS = (
    "import copy",
    "import gc",
    "from collections import OrderedDict, namedtuple",
    "from typing import Any",
    "",
    "import torch",
    "import torch.distributed as dist",
    "",
    'Pair = namedtuple("Pair", ["first", "second"])',
)


@dataclasses.dataclass(frozen=True)
class SilentFault:
    """A fault that no error tells.

    Attributes:
        kind: What kind of implementation may have it: ``copy``, ``stager`` or ``gather``.
        name: One word or a few.
        statement: What holds where it is absent, in one line.
        check: A function of an implementation, which raises ``AssertionError`` if it has the fault.
    """

    kind: str
    name: str
    statement: str
    check: Callable[[Any], None] = dataclasses.field(repr=False)

    @property
    def source(self) -> str:
        """The check as a program that uses torch alone: whoever runs it adds a call with an implementation."""
        lines = inspect.getsource(self.check).splitlines()
        return "\n".join(
            [
                *_IMPORTS,
                "",
                "",
                *lines[lines.index(f"def {self.check.__name__}({_ARGUMENT[self.kind]}: Any) -> None:") :],
                "",
            ]
        )


#: All of them, in the order of tables.
FAULTS: list[SilentFault] = []
Pair = namedtuple("Pair", ["first", "second"])


def _fault(kind: str, statement: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def add(check: Callable[[Any], None]) -> Callable[[Any], None]:
        FAULTS.append(SilentFault(kind, check.__name__, statement, check))
        return check

    return add


# Copies. Stagers are looked at with these, too.


@_fault(COPY, "A copy has memory of its own.")
def alias_kept(copied: Any) -> None:
    """What is on the right device already is handed out as it is."""
    state = {"w": torch.arange(4.0)}
    result = copied(state)
    state["w"].fill_(-1.0)
    assert result["w"].tolist() == [0.0, 1.0, 2.0, 3.0], result


@_fault(COPY, "A view comes out of a copy with memory of its own.")
def view_kept(copied: Any) -> None:
    """Tensors that do not cover their storages go another way than others."""
    base = torch.arange(8.0)
    result = copied({"w": base[2:4], "t": base.view(2, 4).t()})
    base.fill_(-1.0)
    assert result["w"].tolist() == [2.0, 3.0], result
    assert result["t"].tolist() == [[0.0, 4.0], [1.0, 5.0], [2.0, 6.0], [3.0, 7.0]], result


@_fault(COPY, "One tensor in two places is one tensor in the copy.")
def tied_weights(copied: Any) -> None:
    """An embedding and the output layer that uses its weights come apart."""
    weight = torch.arange(4.0)
    result = copied({"embed": weight, "head": weight})
    result["embed"].fill_(7.0)
    assert result["head"].tolist() == [7.0] * 4, result


@_fault(COPY, "Views that overlap do so in the copy.")
def overlapping_views(copied: Any) -> None:
    """Parameters that are views on one flat buffer come apart."""
    flat = torch.arange(6.0)
    result = copied({"flat": flat, "part": flat[2:4]})
    result["flat"].fill_(7.0)
    assert result["part"].tolist() == [7.0, 7.0], result


@_fault(COPY, "Different tensors stay different.")
def separate_tensors_tied(copied: Any) -> None:
    """Tensors are taken for one because they are equal."""
    result = copied({"a": torch.zeros(3), "b": torch.zeros(3)})
    result["a"].fill_(7.0)
    assert result["b"].tolist() == [0.0] * 3, result


@_fault(COPY, "A parameter that is tied to a tensor is so in the copy.")
def parameter_tied_to_its_tensor(copied: Any) -> None:
    """A parameter is made anew from a copy of its own."""
    parameter = torch.nn.Parameter(torch.arange(4.0))
    result = copied({"p": parameter, "same": parameter.detach()})
    with torch.no_grad():
        result["p"].fill_(7.0)
    assert result["same"].tolist() == [7.0] * 4, result


@_fault(COPY, "A conjugate view has the conjugate values.")
def conjugate_view(copied: Any) -> None:
    """Bytes are copied, and the bit that says how to read them is not."""
    state = {"z": torch.tensor([1 + 2j, 3 - 4j]).conj()}
    result = copied(state)
    assert result["z"].resolve_conj().tolist() == [1 - 2j, 3 + 4j], result


@_fault(COPY, "A negated view has the negated values.")
def negated_view(copied: Any) -> None:
    """The imaginary part of a conjugate view is a view with a bit that says that it is negated."""
    state = {"y": torch.tensor([1 + 2j, 3 - 4j]).conj().imag}
    result = copied(state)
    assert result["y"].resolve_neg().tolist() == [-2.0, 4.0], result


@_fault(COPY, "Every dtype keeps its bits.")
def bits_of_every_dtype(copied: Any) -> None:
    """NaN payloads, signs of zero, and dtypes without arithmetic."""
    bits = torch.tensor([0x7FC00001, -0x80000000, 1], dtype=torch.int32)
    half = torch.tensor([-1, 0x7E01, 1], dtype=torch.int16)
    eight = torch.tensor([0x80, 0x7F, 1], dtype=torch.uint8)
    state = {"f": bits.view(torch.float32), "b": half.view(torch.bfloat16), "e": eight.view(torch.float8_e4m3fn)}
    result = copied(state)
    assert result["f"].view(torch.int32).tolist() == bits.tolist(), result
    assert result["b"].view(torch.int16).tolist() == half.tolist(), result
    assert result["e"].view(torch.uint8).tolist() == eight.tolist(), result


@_fault(COPY, "Strides and memory format are kept.")
def strides(copied: Any) -> None:
    """Channels last, transposed, and expanded tensors become contiguous."""
    state = {
        "image": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "t": torch.arange(6.0).view(2, 3).t(),
    }
    result = copied(state)
    for name, tensor in state.items():
        assert result[name].stride() == tensor.stride(), (name, result[name].stride(), tensor.stride())
        assert torch.equal(result[name], tensor), name


@_fault(COPY, "Parameters stay parameters, and need gradients if they did.")
def parameters(copied: Any) -> None:
    """The class and the flag are lost."""
    state = {"p": torch.nn.Parameter(torch.ones(2)), "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False)}
    result = copied(state)
    for name, tensor in state.items():
        assert type(result[name]) is torch.nn.Parameter, (name, type(result[name]))
        assert result[name].requires_grad == tensor.requires_grad, name


@_fault(COPY, "No gradient flows from a copy into the state.")
def history_of_autograd(copied: Any) -> None:
    """A copy is an operation that autograd has recorded."""
    weight = torch.ones(2, requires_grad=True)
    result = copied({"w": weight})
    with torch.enable_grad():
        total = result["w"].sum()
    if total.requires_grad:
        total.backward()
    assert weight.grad is None, weight.grad


@_fault(COPY, "Tuples, namedtuples and subclasses keep their types.")
def container_types(copied: Any) -> None:
    """Containers become lists and dicts."""
    state = {"t": (torch.ones(1), 1), "p": Pair(torch.ones(1), 2), "size": torch.Size([2, 3]), "o": OrderedDict(a=1)}
    result = copied(state)
    for name, value in state.items():
        assert type(result[name]) is type(value), (name, type(result[name]))


@_fault(COPY, "The metadata of a module's state dict is kept.")
def metadata_of_a_state_dict(copied: Any) -> None:
    """Versions of modules are an attribute of the dict, which a new dict does not have."""
    state = torch.nn.BatchNorm1d(2).state_dict()
    result = copied(state)
    assert getattr(result, "_metadata", None) == state._metadata, type(result)


@_fault(COPY, "Keys keep their types and their order.")
def keys(copied: Any) -> None:
    """Keys are sorted, or become strings."""
    state = {"b": 1, "a": 2, 3: torch.ones(1), 1: torch.ones(1)}
    result = copied({"state": state})
    assert list(result["state"]) == ["b", "a", 3, 1], list(result["state"])


@_fault(COPY, "None, empty containers and plain values are kept.")
def plain_values(copied: Any) -> None:
    """What is no tensor is dropped, or taken for another type."""
    state = {"none": None, "list": [], "dict": {}, "flag": True, "lr": 0.1, "name": "adam", "dtype": torch.float16}
    result = copied(state)
    for name, value in state.items():
        assert name in result, f"{name} is lost"
        assert type(result[name]) is type(value), (name, result[name])
        assert result[name] == value, (name, result[name])


@_fault(COPY, "Containers of the copy are its own.")
def containers_shared(copied: Any) -> None:
    """Lists without tensors are handed out as they are."""
    state = {"groups": [{"lr": 0.1, "params": [0, 1]}]}
    result = copied(state)
    state["groups"][0]["lr"] = 0.2  # type: ignore[index] - a dict in a list
    state["groups"][0]["params"].append(2)  # type: ignore[index]
    assert result["groups"] == [{"lr": 0.1, "params": [0, 1]}], result


@_fault(COPY, "The state itself is not changed.")
def state_changed(copied: Any) -> None:
    """Writing to the argument, to its attributes, or to what needs gradients."""
    state = {"w": torch.nn.Parameter(torch.arange(3.0)), "n": [1, {"a": torch.arange(2)}]}
    before = copy.deepcopy(state)
    version, pointer = state["w"]._version, state["w"].data_ptr()  # type: ignore[attr-defined] - a tensor
    copied(state)
    assert torch.equal(state["w"], before["w"]), state  # type: ignore[arg-type]
    assert state["w"].requires_grad, state  # type: ignore[attr-defined]
    assert (state["w"]._version, state["w"].data_ptr()) == (version, pointer), state  # type: ignore[attr-defined]
    assert list(state) == list(before), state


@_fault(COPY, "Tensors inside of objects are copied, too.")
def tensors_inside_of_objects(copied: Any) -> None:
    """An object of a class that is not known is handed out as it is."""
    holder = torch.nn.Linear(1, 1, bias=False)
    expected = holder.weight.tolist()
    result = copied({"held": holder})
    with torch.no_grad():
        holder.weight.fill_(-1.0)
    assert result["held"].weight.tolist() == expected, result


@_fault(COPY, "Sparse tensors are copied with all their parts.")
def sparse_tensor(copied: Any) -> None:
    """Values or indices are shared with the state."""
    values = torch.arange(1.0, 3.0)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3,), check_invariants=False)
    result = copied({"s": sparse})
    values.fill_(-1.0)
    assert result["s"].to_dense().tolist() == [1.0, 0.0, 2.0], result


# Stagers: objects with ``stage``, ``wait`` and ``close``


@_fault(STAGER, "What was staged does not change when the next state is staged.")
def torn_snapshot(stager: Any) -> None:
    """The next stage writes into the memory of the last one, which may still be being saved."""
    state = {"w": torch.zeros(64)}
    first = stager.wait(stager.stage(state))
    state["w"].fill_(1.0)
    stager.wait(stager.stage(state))
    assert first["w"].tolist() == [0.0] * 64, "the first snapshot has become the second one"


@_fault(STAGER, "What was staged does not change when training goes on.")
def source_changed_after_staging(stager: Any) -> None:
    """A snapshot shares memory with the state."""
    state = {"w": torch.zeros(64)}
    staged = stager.wait(stager.stage(state))
    state["w"].fill_(1.0)
    assert staged["w"].tolist() == [0.0] * 64, "the snapshot has the state's memory"


@_fault(STAGER, "A kept view of a snapshot does not change.")
def view_of_a_snapshot(stager: Any) -> None:
    """Memory is used again because nothing refers to the tree, while a view on it is still there."""
    state = {"w": torch.zeros(64)}
    view = stager.wait(stager.stage(state))["w"][2:4]
    gc.collect()
    for value in (1.0, 2.0, 3.0):
        state["w"].fill_(value)
        stager.wait(stager.stage(state))
    assert view.tolist() == [0.0, 0.0], view


@_fault(STAGER, "A new tensor at an old address is staged as it is.")
def address_used_again(stager: Any) -> None:
    """A cache by address takes a new tensor for one that was freed."""
    for size, dtype in ((64, torch.float32), (32, torch.float64), (64, torch.int32), (16, torch.float32)):
        tensor = torch.arange(size).to(dtype)
        staged = stager.wait(stager.stage({"w": tensor}))
        assert staged["w"].dtype is dtype, (staged["w"].dtype, dtype)
        assert staged["w"].tolist() == list(range(size)), staged
        del tensor, staged


@_fault(STAGER, "A tensor that is resized is staged as it is now.")
def resized_tensor(stager: Any) -> None:
    """A cached buffer has the size that the tensor had."""
    tensor = torch.arange(8.0)
    stager.wait(stager.stage({"w": tensor}))
    tensor.resize_(3).copy_(torch.tensor([5.0, 6.0, 7.0]))
    staged = stager.wait(stager.stage({"w": tensor}))
    assert staged["w"].tolist() == [5.0, 6.0, 7.0], staged


@_fault(STAGER, "A tensor whose data was swapped is staged as it is now.")
def data_swapped(stager: Any) -> None:
    """A cache by the tensor object does not see that it lies elsewhere."""
    tensor = torch.zeros(8)
    stager.wait(stager.stage({"w": tensor}))
    tensor.data = torch.arange(8.0)
    staged = stager.wait(stager.stage({"w": tensor}))
    assert staged["w"].tolist() == list(range(8)), staged


@_fault(STAGER, "Ties that change between two stages are as they are now.")
def ties_changed_between_stages(stager: Any) -> None:
    """A cache remembers which tensors were tied."""
    weight = torch.zeros(4)
    stager.wait(stager.stage({"a": weight, "b": weight}))
    staged = stager.wait(stager.stage({"a": weight, "b": torch.ones(4)}))
    assert staged["a"].tolist() == [0.0] * 4, staged
    assert staged["b"].tolist() == [1.0] * 4, staged


@_fault(STAGER, "A state of another structure can be staged next.")
def structure_changed_between_stages(stager: Any) -> None:
    """The first state decides what is copied later."""
    stager.wait(stager.stage({"a": torch.zeros(4), "n": 1}))
    staged = stager.wait(stager.stage({"a": torch.ones(2), "b": [torch.ones(3)], "n": 2}))
    assert staged["a"].tolist() == [1.0, 1.0], staged
    assert staged["b"][0].tolist() == [1.0] * 3, staged
    assert staged["n"] == 2, staged


@_fault(STAGER, "A failed stage changes no earlier snapshot.")
def snapshot_after_a_failed_stage(stager: Any) -> None:
    """A stage has written a part when it fails."""

    class Unpicklable:
        def __reduce__(self) -> Any:
            raise ValueError("no")

        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("no")

    state: dict[str, Any] = {"w": torch.zeros(64)}
    first = stager.wait(stager.stage(state))
    state["w"].fill_(1.0)
    try:
        stager.wait(stager.stage({**state, "x": Unpicklable()}))
    except Exception:
        pass
    assert first["w"].tolist() == [0.0] * 64, "the first snapshot has a part of the one that failed"


@_fault(STAGER, "A snapshot outlives its stager.")
def snapshot_after_close(stager: Any) -> None:
    """Memory is given back while a snapshot lies in it."""
    staged = stager.wait(stager.stage({"w": torch.arange(64.0)}))
    stager.close()
    gc.collect()
    others = [torch.full((64,), -1.0) for _ in range(8)]
    assert staged["w"].tolist() == list(range(64)), staged
    del others


# Gathers: functions of a state that every rank calls, and that give every rank whole tensors


@_fault(GATHER, "Shards of different sizes come together in their places.")
def uneven_shards(gather: Any) -> None:
    """Every rank is taken to hold as much as the first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(2.0 * (2 * dist.get_world_size() - 1)).view(-1, 2)
    result = gather({"w": distribute_tensor(rows, mesh, [Shard(0)]), "n": 3})
    assert result["w"].tolist() == rows.tolist(), result
    assert result["n"] == 3, result


@_fault(GATHER, "Empty shards are nothing.")
def empty_shards(gather: Any) -> None:
    """A rank without elements hangs, or adds some."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    result = gather({"w": distribute_tensor(torch.arange(1.0, 2.0), mesh, [Shard(0)])})
    assert result["w"].tolist() == [1.0], result


@_fault(GATHER, "Shards of any dim come together along it.")
def shards_of_another_dim(gather: Any) -> None:
    """Shards are put one below the other, whichever dim was cut."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(12.0).view(3, 4)
    result = gather({"w": distribute_tensor(whole, mesh, [Shard(1)])})
    assert result["w"].tolist() == whole.tolist(), result


@_fault(GATHER, "Partial sums are added up.")
def partial_sums(gather: Any) -> None:
    """A summand is taken for the sum."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = torch.full((2,), float(dist.get_rank() + 1))
    result = gather({"w": DTensor.from_local(part, mesh, [Partial()], run_check=False)})
    total = sum(range(1, dist.get_world_size() + 1))
    assert result["w"].tolist() == [total, total], result


@_fault(GATHER, "Shards that are not contiguous are sent as they read.")
def shards_that_are_not_contiguous(gather: Any) -> None:
    """Bytes are sent in the order of memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(12.0 * dist.get_world_size()).view(-1, 4)
    own = whole.chunk(dist.get_world_size())[dist.get_rank()].t().contiguous().t()
    result = gather({"w": DTensor.from_local(own, mesh, [Shard(0)], run_check=False)})
    assert result["w"].tolist() == whole.tolist(), result


@_fault(GATHER, "Every dtype is gathered bit for bit.")
def dtypes_without_arithmetic(gather: Any) -> None:
    """Backends do not know eight-bit floats, and some add where they should copy."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(1, 4 * dist.get_world_size() + 1, dtype=torch.uint8)
    own = whole.chunk(dist.get_world_size())[dist.get_rank()].clone().view(torch.float8_e4m3fn)
    result = gather({"w": DTensor.from_local(own, mesh, [Shard(0)], run_check=False)})
    assert result["w"].view(torch.uint8).tolist() == whole.tolist(), result


@_fault(GATHER, "Dicts in another order on each rank do no harm.")
def order_of_keys(gather: Any) -> None:
    """Ranks call collectives in the order of their dicts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    size = 2 * dist.get_world_size()
    state = {name: distribute_tensor(torch.arange(size) + at, mesh, [Shard(0)]) for at, name in enumerate("abc")}
    if dist.get_rank() % 2:
        state = dict(reversed(state.items()))
    result = gather(state)
    for at, name in enumerate("abc"):
        assert result[name].tolist() == list(range(at, at + size)), (name, result[name])


@_fault(GATHER, "What a collective has not finished is waited for.")
def collective_in_flight(gather: Any) -> None:
    """A tensor that stands for the result of a collective is read before that is there."""
    from torch.distributed._functional_collectives import all_reduce

    reduced = all_reduce(torch.full((3,), 1.0), "sum", dist.group.WORLD)
    result = gather({"w": reduced})
    assert reduced.tolist() == [float(dist.get_world_size())] * 3, "it is waited for, whatever was gathered"
    assert result["w"].tolist() == [float(dist.get_world_size())] * 3, result
