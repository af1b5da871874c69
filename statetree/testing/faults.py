"""Silent faults: what copies and stagers of states got wrong in ways that no error tells.

Each is a function of an implementation (``copied`` or ``stager``) that raises ``AssertionError`` if it has the fault;
its docstring says what holds where it is absent. All use torch alone, so that their source code is a
reproduction that anybody can run. Stagers are looked at with what is for copies, too.
"""

import contextlib
import copy
import functools
import gc
import time
from collections import OrderedDict, namedtuple
from typing import Any

import torch

Pair = namedtuple("Pair", ["first", "second"])
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32)
_SIXTEEN = torch.tensor([-1, 0x7E01, -0x8000, 0x7C01, 1, 0x3C01], dtype=torch.int16)  # NaNs, -0.0, every bit counts


def _training_state(number: int) -> dict[str, Any]:
    """Return a state of a model and an optimizer in which everything is a number."""
    full = functools.partial(torch.full, fill_value=float(number))
    model = OrderedDict(
        weight=torch.nn.Parameter(full((3, 2))),
        frozen=torch.nn.Parameter(full((2, 2)), requires_grad=False),
        mean=torch.nn.Buffer(full((2, 1, 2, 1))),
        half=full((5,), dtype=torch.bfloat16),
        large=full((1_100_000,)),
        pair=(full((2,), dtype=torch.float64), full((2,), dtype=torch.int8)),
    )
    optimizer: Any = {
        "state": {0: {"step": full(()), "exp_avg": full((3, 2))}},
        "param_groups": [{"lr": number, "betas": [number]}],
    }
    plain = {"w": full((4096,)), "scale": full(()), "seen": full((3,), dtype=torch.int64), "step": number}
    return {"model": model, "optimizer": optimizer, **plain}


def _refill(held: Any, number: int) -> None:
    """Write another number everywhere, of which torch's counters of versions do not tell."""
    for key, value in held.items() if isinstance(held, dict) else enumerate(held):
        if isinstance(value, torch.Tensor):
            value.data.fill_(number)
        elif isinstance(value, int):
            held[key] = number
        else:
            _refill(value, number)


def _numbers(held: Any) -> set[float]:
    """Return the numbers in a state, and in its tensors."""
    if isinstance(held, torch.Tensor):
        return {held.min().item(), held.max().item()}
    values = held.values() if isinstance(held, dict) else held
    return {float(held)} if isinstance(held, int) else set().union(*map(_numbers, values))


def alias_kept(copied: Any) -> None:
    """A copy has memory of its own, also that of a view."""
    base = torch.arange(8.0)
    others = {f"{dtype} {dims}": torch.ones((2,) * dims, dtype=dtype) for dims in (0, 1, 3) for dtype in _DTYPES}
    training = _training_state(3)
    result = copied({"w": base, "part": base[2:4], "t": base.view(2, 4).t(), **others, "training": training})
    _refill(training, 4)
    for tensor in (base, *others.values()):
        tensor.fill_(-1.0)
    assert result["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], result
    assert result["part"].tolist() == [2.0, 3.0], result
    assert result["t"].tolist() == [[0.0, 4.0], [1.0, 5.0], [2.0, 6.0], [3.0, 7.0]], result
    for name in others:
        assert torch.equal(result[name], torch.ones_like(result[name])), (name, result[name])
    assert _numbers(result["training"]) == {3.0}, result["training"]


def tied_weights(copied: Any) -> None:
    """One tensor in two places is one tensor in the copy."""
    weight = torch.arange(4.0)
    result = copied({"embed": weight, "head": weight, "model": {"layer": {"w": weight}}})
    result["embed"].fill_(7.0)
    assert result["head"].tolist() == [7.0] * 4, result
    assert result["model"]["layer"]["w"].tolist() == [7.0] * 4, result


def overlapping_views(copied: Any) -> None:
    """Views that overlap do so in the copy."""
    flat = torch.arange(6.0)
    result = copied({"flat": flat, "part": flat[2:4]})
    result["flat"].fill_(7.0)
    assert result["part"].tolist() == [7.0, 7.0], result


def separate_tensors_tied(copied: Any) -> None:
    """Different tensors stay different."""
    result = copied({"a": torch.zeros(3), "b": torch.zeros(3)})
    result["a"].fill_(7.0)
    assert result["b"].tolist() == [0.0] * 3, result


def parameter_tied_to_its_tensor(copied: Any) -> None:
    """A parameter that is tied to a tensor is so in the copy."""
    parameter = torch.nn.Parameter(torch.arange(4.0))
    result = copied({"p": parameter, "same": parameter.detach()})
    with torch.no_grad():
        result["p"].fill_(7.0)
    assert result["same"].tolist() == [7.0] * 4, result


def conjugate_view(copied: Any) -> None:
    """A conjugate view has the conjugate values."""
    result = copied({"z": torch.tensor([1 + 2j, 3 - 4j, 5 + 6j]).conj()})
    assert result["z"].resolve_conj().tolist() == [1 - 2j, 3 + 4j, 5 - 6j], result


def negated_view(copied: Any) -> None:
    """A negated view has the negated values."""
    result = copied({"y": torch.tensor([1 + 2j, 3 - 4j]).conj().imag})
    assert result["y"].resolve_neg().tolist() == [-2.0, 4.0], result


def bits_of_every_dtype(copied: Any) -> None:
    """Every dtype keeps its bits."""
    bits = _SIXTEEN.repeat_interleave(4).view(torch.int64) * 3 + torch.arange(6)
    short = (torch.float16, torch.bfloat16, torch.int16, torch.uint16, torch.uint8, torch.int8, torch.float8_e4m3fn)
    long = (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int32, torch.int64, torch.uint64)
    state = {str(dtype): bits.clone().view(dtype) for dtype in (*short, torch.float8_e5m2, *long)}
    state |= {f"{dtype}, 16 bits": _SIXTEEN.clone().view(dtype) for dtype in short[:4]}
    state["large"] = torch.arange(300_001)
    result = copied({**state, "flag": torch.tensor([True, False])})
    for name, tensor in state.items():
        assert result[name].dtype is tensor.dtype, (name, result[name].dtype)
        assert torch.equal(result[name].view(torch.uint8), tensor.view(torch.uint8)), (name, result[name])
    assert (result["flag"].dtype, result["flag"].tolist()) == (torch.bool, [True, False]), result["flag"]


def strides(copied: Any) -> None:
    """Strides and memory format are kept."""
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    state = {"image": image, "t": torch.arange(6.0).view(2, 3).t()}
    result = copied(state)
    for name, tensor in state.items():
        assert result[name].stride() == tensor.stride(), (name, result[name].stride(), tensor.stride())
        assert torch.equal(result[name], tensor), name


def parameters(copied: Any) -> None:
    """Parameters stay parameters, and need gradients if they did."""
    state = {"p": torch.nn.Parameter(torch.ones(2)), "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False)}
    result = copied(state)
    for name, tensor in state.items():
        assert type(result[name]) is torch.nn.Parameter, (name, type(result[name]))
        assert result[name].requires_grad == tensor.requires_grad, name


def history_of_autograd(copied: Any) -> None:
    """No gradient flows from a copy into the state."""
    weight = torch.ones(2, requires_grad=True)
    result = copied({"w": weight})
    with torch.enable_grad():
        total = result["w"].sum()
    if total.requires_grad:
        total.backward()
    assert weight.grad is None, weight.grad


def container_types(copied: Any) -> None:
    """Tuples, namedtuples and subclasses keep their types."""
    state = {"t": (torch.ones(1), 1), "p": Pair(torch.ones(1), 2), "size": torch.Size([2, 3]), "o": OrderedDict(a=1)}
    result = copied(state)
    for name, value in state.items():
        assert type(result[name]) is type(value), (name, type(result[name]))


def metadata_of_a_state_dict(copied: Any) -> None:
    """The metadata of a module's state dict is kept."""
    state: Any = torch.nn.BatchNorm1d(2).state_dict()
    result = copied(state)
    assert getattr(result, "_metadata", None) == state._metadata, type(result)


def keys(copied: Any) -> None:
    """Keys keep their types and their order."""
    result = copied({"state": {"b": 1, "a": 2, 3: torch.ones(1), 1: torch.ones(1)}})
    assert list(result["state"]) == ["b", "a", 3, 1], list(result["state"])


def plain_values(copied: Any) -> None:
    """None, empty containers and plain values are kept."""
    state: Any = {"none": None, "list": [], "dict": {}, "flag": True, "lr": 0.1, "name": "adam", "dtype": torch.float16}
    result = copied(state)
    for name, value in state.items():
        assert name in result, f"{name} is lost"
        assert (type(result[name]), result[name]) == (type(value), value), (name, result[name])


def containers_shared(copied: Any) -> None:
    """Containers of the copy are its own."""
    state: Any = {"groups": [{"lr": 0.1, "params": [0, 1]}]}
    result = copied(state)
    state["groups"][0]["lr"] = 0.2
    state["groups"][0]["params"].append(2)
    assert result["groups"] == [{"lr": 0.1, "params": [0, 1]}], result


def state_changed(copied: Any) -> None:
    """The state itself is not changed."""
    state: Any = {"w": torch.nn.Parameter(torch.arange(3.0)), "n": [1, {"a": torch.arange(2)}], "t": (torch.ones(2),)}
    before, inner, tensors = copy.deepcopy(state), state["n"], [state["w"], state["n"][1]["a"], state["t"][0]]
    known = [(tensor._version, tensor.data_ptr(), tensor.requires_grad, tensor.grad) for tensor in tensors]
    copied(state)
    assert list(state) == list(before), state
    assert state["n"] is inner, state
    assert [inner[0], list(inner[1])] == [1, ["a"]], state
    for tensor, value in zip(tensors, (before["w"], before["n"][1]["a"], before["t"][0]), strict=True):
        assert torch.equal(tensor, value), state
    now = [state["w"], inner[1]["a"], state["t"][0]]
    assert [(tensor._version, tensor.data_ptr(), tensor.requires_grad, tensor.grad) for tensor in now] == known, state


def tensors_inside_of_objects(copied: Any) -> None:
    """Tensors inside of objects are copied, too."""
    holder = torch.nn.Linear(1, 1, bias=False)
    expected = holder.weight.tolist()
    result = copied({"held": holder})
    with torch.no_grad():
        holder.weight.fill_(-1.0)
    assert result["held"].weight.tolist() == expected, result


def sparse_tensor(copied: Any) -> None:
    """Sparse tensors are copied with all their parts."""
    values = torch.arange(1.0, 3.0)
    result = copied({"s": torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3,), check_invariants=False)})
    values.fill_(-1.0)
    assert result["s"].layout is torch.sparse_coo, result
    assert result["s"].to_dense().tolist() == [1.0, 0.0, 2.0], result


def many_leaves(copied: Any) -> None:
    """A state of hundreds of leaves is copied whole."""
    result = copied({f"layer{number}": [torch.full((2,), float(number)), number] for number in range(300)})
    for number in range(300):
        tensor, value = result[f"layer{number}"]
        assert (tensor.tolist(), value) == ([number, number], number), (number, tensor, value)


def staged_again(stager: Any) -> None:
    """A state is staged as it is then, however it was changed and as often as it is staged."""
    state = _training_state(0)
    for step in range(1, 31):
        _refill(state, step)
        found = _numbers(stager.wait(stager.stage(state)))
        assert found == {float(step)}, (step, found)


def torn_snapshot(stager: Any) -> None:
    """What was staged does not change when the next state is staged."""
    state = _training_state(0)
    first = stager.wait(stager.stage(state))
    _refill(state, 1)
    second = stager.wait(stager.stage(state))
    time.sleep(0.1)  # what is copied behind the back of `wait`
    assert _numbers(first) == {0.0}, "the first snapshot has become the second one"
    assert _numbers(second) == {1.0}, _numbers(second)


def view_of_a_snapshot(stager: Any) -> None:
    """A kept view of a snapshot does not change."""
    state = {"w": torch.zeros(64)}
    view = stager.wait(stager.stage(state))["w"][2:4]
    gc.collect()
    for value in range(1, 10):
        state["w"].fill_(value)
        stager.wait(stager.stage(state))
    assert view.tolist() == [0.0, 0.0], view


def address_used_again(stager: Any) -> None:
    """A new tensor at an old address is staged as it is."""
    for size, dtype in ((64, torch.float32), (32, torch.float64), (64, torch.int32), (16, torch.float32)):
        tensor = torch.arange(size).to(dtype)
        staged = stager.wait(stager.stage({"w": tensor}))
        assert (staged["w"].dtype, staged["w"].tolist()) == (dtype, list(range(size))), staged
        del tensor, staged


def resized_tensor(stager: Any) -> None:
    """A tensor that is resized is staged as it is now."""
    tensor = torch.arange(8.0)
    stager.wait(stager.stage({"w": tensor}))
    tensor.resize_(3).copy_(torch.tensor([5.0, 6.0, 7.0]))
    staged = stager.wait(stager.stage({"w": tensor}))
    assert staged["w"].tolist() == [5.0, 6.0, 7.0], staged


def data_swapped(stager: Any) -> None:
    """A tensor whose data was swapped is staged as it is now."""
    tensor = torch.zeros(8)
    stager.wait(stager.stage({"w": tensor}))
    tensor.data = torch.arange(8.0)
    staged = stager.wait(stager.stage({"w": tensor}))
    assert staged["w"].tolist() == list(range(8)), staged


def ties_changed_between_stages(stager: Any) -> None:
    """Ties that change between two stages are as they are now."""
    weight = torch.zeros(4)
    stager.wait(stager.stage({"a": weight, "b": weight}))
    staged = stager.wait(stager.stage({"a": weight, "b": torch.ones(4)}))
    assert (staged["a"].tolist(), staged["b"].tolist()) == ([0.0] * 4, [1.0] * 4), staged
    staged = stager.wait(stager.stage({"a": weight, "b": weight}))
    staged["a"].fill_(7.0)
    assert staged["b"].tolist() == [7.0] * 4, staged


def structure_changed_between_stages(stager: Any) -> None:
    """A state of another structure can be staged next."""
    stager.wait(stager.stage({"a": torch.zeros(4), "n": 1}))
    staged = stager.wait(stager.stage({"a": torch.ones(2), "b": [torch.ones(3)], "n": 2}))
    assert (staged["a"].tolist(), staged["b"][0].tolist(), staged["n"]) == ([1.0] * 2, [1.0] * 3, 2), staged


def snapshot_after_a_failed_stage(stager: Any) -> None:
    """A failed stage changes no earlier snapshot."""

    class Unpicklable:
        def __reduce__(self) -> Any:
            raise ValueError("no")

        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("no")

    state = _training_state(0)
    first = stager.wait(stager.stage(state))
    _refill(state, 1)
    with contextlib.suppress(Exception):
        stager.wait(stager.stage({**state, "x": Unpicklable()}))
    assert _numbers(first) == {0.0}, "the first snapshot has a part of the one that failed"


def snapshot_after_close(stager: Any) -> None:
    """A snapshot outlives its stager."""
    state = {"w": torch.arange(64.0), "large": torch.arange(300_000)}
    first, staged = (stager.wait(stager.stage({**state, "training": _training_state(3)})) for _ in range(2))
    stager.close()
    gc.collect()
    others = [torch.full_like(tensor, -1) for tensor in state.values() for _ in range(8)]
    assert _numbers([first["training"], staged["training"]]) == {3.0}, (first, staged)
    for name, tensor in state.items():
        assert torch.equal(first[name], tensor), (name, first[name])
        assert torch.equal(staged[name], tensor), (name, staged[name])
    del others
