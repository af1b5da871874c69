"""Silent faults of copies. Stagers are looked at with these, too."""

import copy
from collections import OrderedDict, namedtuple
from typing import Any

import torch

Pair = namedtuple("Pair", ["first", "second"])


def alias_kept(copied: Any) -> None:
    """A copy has memory of its own."""
    state = {"w": torch.arange(4.0)}
    result = copied(state)
    state["w"].fill_(-1.0)
    assert result["w"].tolist() == [0.0, 1.0, 2.0, 3.0], result


def view_kept(copied: Any) -> None:
    """A view comes out of a copy with memory of its own."""
    base = torch.arange(8.0)
    result = copied({"w": base[2:4], "t": base.view(2, 4).t()})
    base.fill_(-1.0)
    assert result["w"].tolist() == [2.0, 3.0], result
    assert result["t"].tolist() == [[0.0, 4.0], [1.0, 5.0], [2.0, 6.0], [3.0, 7.0]], result


def tied_weights(copied: Any) -> None:
    """One tensor in two places is one tensor in the copy."""
    weight = torch.arange(4.0)
    result = copied({"embed": weight, "head": weight})
    result["embed"].fill_(7.0)
    assert result["head"].tolist() == [7.0] * 4, result


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
    state = {"z": torch.tensor([1 + 2j, 3 - 4j]).conj()}
    result = copied(state)
    assert result["z"].resolve_conj().tolist() == [1 - 2j, 3 + 4j], result


def negated_view(copied: Any) -> None:
    """A negated view has the negated values."""
    state = {"y": torch.tensor([1 + 2j, 3 - 4j]).conj().imag}
    result = copied(state)
    assert result["y"].resolve_neg().tolist() == [-2.0, 4.0], result


def bits_of_every_dtype(copied: Any) -> None:
    """Every dtype keeps its bits."""
    bits = torch.tensor([0x7FC00001, -0x80000000, 1], dtype=torch.int32)
    half = torch.tensor([-1, 0x7E01, 1], dtype=torch.int16)
    eight = torch.tensor([0x80, 0x7F, 1], dtype=torch.uint8)
    state = {"f": bits.view(torch.float32), "b": half.view(torch.bfloat16), "e": eight.view(torch.float8_e4m3fn)}
    result = copied(state)
    assert result["f"].view(torch.int32).tolist() == bits.tolist(), result
    assert result["b"].view(torch.int16).tolist() == half.tolist(), result
    assert result["e"].view(torch.uint8).tolist() == eight.tolist(), result


def strides(copied: Any) -> None:
    """Strides and memory format are kept."""
    state = {
        "image": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "t": torch.arange(6.0).view(2, 3).t(),
    }
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
    state = {"b": 1, "a": 2, 3: torch.ones(1), 1: torch.ones(1)}
    result = copied({"state": state})
    assert list(result["state"]) == ["b", "a", 3, 1], list(result["state"])


def plain_values(copied: Any) -> None:
    """None, empty containers and plain values are kept."""
    state: Any = {"none": None, "list": [], "dict": {}, "flag": True, "lr": 0.1, "name": "adam", "dtype": torch.float16}
    result = copied(state)
    for name, value in state.items():
        assert name in result, f"{name} is lost"
        assert type(result[name]) is type(value), (name, result[name])
        assert result[name] == value, (name, result[name])


def containers_shared(copied: Any) -> None:
    """Containers of the copy are its own."""
    state: Any = {"groups": [{"lr": 0.1, "params": [0, 1]}]}
    result = copied(state)
    state["groups"][0]["lr"] = 0.2
    state["groups"][0]["params"].append(2)
    assert result["groups"] == [{"lr": 0.1, "params": [0, 1]}], result


def state_changed(copied: Any) -> None:
    """The state itself is not changed."""
    state: Any = {"w": torch.nn.Parameter(torch.arange(3.0)), "n": [1, {"a": torch.arange(2)}]}
    before = copy.deepcopy(state)
    version, pointer = state["w"]._version, state["w"].data_ptr()
    copied(state)
    assert torch.equal(state["w"], before["w"]), state
    assert state["w"].requires_grad, state
    assert (state["w"]._version, state["w"].data_ptr()) == (version, pointer), state
    assert list(state) == list(before), state


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
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3,), check_invariants=False)
    result = copied({"s": sparse})
    values.fill_(-1.0)
    assert result["s"].to_dense().tolist() == [1.0, 0.0, 2.0], result
