"""Silent faults of copies. Stagers are looked at with these, too."""

import copy
from collections import OrderedDict, namedtuple
from typing import Any

import torch

from statetree.testing.silent_faults import COPY, FaultTable

FAULTS = FaultTable(COPY)
Pair = namedtuple("Pair", ["first", "second"])


@FAULTS.add("A copy has memory of its own.")
def alias_kept(copied: Any) -> None:
    """What is on the right device already is handed out as it is."""
    state = {"w": torch.arange(4.0)}
    result = copied(state)
    state["w"].fill_(-1.0)
    assert result["w"].tolist() == [0.0, 1.0, 2.0, 3.0], result


@FAULTS.add("A view comes out of a copy with memory of its own.")
def view_kept(copied: Any) -> None:
    """Tensors that do not cover their storages go another way than others."""
    base = torch.arange(8.0)
    result = copied({"w": base[2:4], "t": base.view(2, 4).t()})
    base.fill_(-1.0)
    assert result["w"].tolist() == [2.0, 3.0], result
    assert result["t"].tolist() == [[0.0, 4.0], [1.0, 5.0], [2.0, 6.0], [3.0, 7.0]], result


@FAULTS.add("One tensor in two places is one tensor in the copy.")
def tied_weights(copied: Any) -> None:
    """An embedding and the output layer that uses its weights come apart."""
    weight = torch.arange(4.0)
    result = copied({"embed": weight, "head": weight})
    result["embed"].fill_(7.0)
    assert result["head"].tolist() == [7.0] * 4, result


@FAULTS.add("Views that overlap do so in the copy.")
def overlapping_views(copied: Any) -> None:
    """Parameters that are views on one flat buffer come apart."""
    flat = torch.arange(6.0)
    result = copied({"flat": flat, "part": flat[2:4]})
    result["flat"].fill_(7.0)
    assert result["part"].tolist() == [7.0, 7.0], result


@FAULTS.add("Different tensors stay different.")
def separate_tensors_tied(copied: Any) -> None:
    """Tensors are taken for one because they are equal."""
    result = copied({"a": torch.zeros(3), "b": torch.zeros(3)})
    result["a"].fill_(7.0)
    assert result["b"].tolist() == [0.0] * 3, result


@FAULTS.add("A parameter that is tied to a tensor is so in the copy.")
def parameter_tied_to_its_tensor(copied: Any) -> None:
    """A parameter is made anew from a copy of its own."""
    parameter = torch.nn.Parameter(torch.arange(4.0))
    result = copied({"p": parameter, "same": parameter.detach()})
    with torch.no_grad():
        result["p"].fill_(7.0)
    assert result["same"].tolist() == [7.0] * 4, result


@FAULTS.add("A conjugate view has the conjugate values.")
def conjugate_view(copied: Any) -> None:
    """Bytes are copied, and the bit that says how to read them is not."""
    state = {"z": torch.tensor([1 + 2j, 3 - 4j]).conj()}
    result = copied(state)
    assert result["z"].resolve_conj().tolist() == [1 - 2j, 3 + 4j], result


@FAULTS.add("A negated view has the negated values.")
def negated_view(copied: Any) -> None:
    """The imaginary part of a conjugate view is a view with a bit that says that it is negated."""
    state = {"y": torch.tensor([1 + 2j, 3 - 4j]).conj().imag}
    result = copied(state)
    assert result["y"].resolve_neg().tolist() == [-2.0, 4.0], result


@FAULTS.add("Every dtype keeps its bits.")
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


@FAULTS.add("Strides and memory format are kept.")
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


@FAULTS.add("Parameters stay parameters, and need gradients if they did.")
def parameters(copied: Any) -> None:
    """The class and the flag are lost."""
    state = {"p": torch.nn.Parameter(torch.ones(2)), "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False)}
    result = copied(state)
    for name, tensor in state.items():
        assert type(result[name]) is torch.nn.Parameter, (name, type(result[name]))
        assert result[name].requires_grad == tensor.requires_grad, name


@FAULTS.add("No gradient flows from a copy into the state.")
def history_of_autograd(copied: Any) -> None:
    """A copy is an operation that autograd has recorded."""
    weight = torch.ones(2, requires_grad=True)
    result = copied({"w": weight})
    with torch.enable_grad():
        total = result["w"].sum()
    if total.requires_grad:
        total.backward()
    assert weight.grad is None, weight.grad


@FAULTS.add("Tuples, namedtuples and subclasses keep their types.")
def container_types(copied: Any) -> None:
    """Containers become lists and dicts."""
    state = {"t": (torch.ones(1), 1), "p": Pair(torch.ones(1), 2), "size": torch.Size([2, 3]), "o": OrderedDict(a=1)}
    result = copied(state)
    for name, value in state.items():
        assert type(result[name]) is type(value), (name, type(result[name]))


@FAULTS.add("The metadata of a module's state dict is kept.")
def metadata_of_a_state_dict(copied: Any) -> None:
    """Versions of modules are an attribute of the dict, which a new dict does not have."""
    state: Any = torch.nn.BatchNorm1d(2).state_dict()
    result = copied(state)
    assert getattr(result, "_metadata", None) == state._metadata, type(result)


@FAULTS.add("Keys keep their types and their order.")
def keys(copied: Any) -> None:
    """Keys are sorted, or become strings."""
    state = {"b": 1, "a": 2, 3: torch.ones(1), 1: torch.ones(1)}
    result = copied({"state": state})
    assert list(result["state"]) == ["b", "a", 3, 1], list(result["state"])


@FAULTS.add("None, empty containers and plain values are kept.")
def plain_values(copied: Any) -> None:
    """What is no tensor is dropped, or taken for another type."""
    state: Any = {"none": None, "list": [], "dict": {}, "flag": True, "lr": 0.1, "name": "adam", "dtype": torch.float16}
    result = copied(state)
    for name, value in state.items():
        assert name in result, f"{name} is lost"
        assert type(result[name]) is type(value), (name, result[name])
        assert result[name] == value, (name, result[name])


@FAULTS.add("Containers of the copy are its own.")
def containers_shared(copied: Any) -> None:
    """Lists without tensors are handed out as they are."""
    state: Any = {"groups": [{"lr": 0.1, "params": [0, 1]}]}
    result = copied(state)
    state["groups"][0]["lr"] = 0.2
    state["groups"][0]["params"].append(2)
    assert result["groups"] == [{"lr": 0.1, "params": [0, 1]}], result


@FAULTS.add("The state itself is not changed.")
def state_changed(copied: Any) -> None:
    """Writing to the argument, to its attributes, or to what needs gradients."""
    state: Any = {"w": torch.nn.Parameter(torch.arange(3.0)), "n": [1, {"a": torch.arange(2)}]}
    before = copy.deepcopy(state)
    version, pointer = state["w"]._version, state["w"].data_ptr()
    copied(state)
    assert torch.equal(state["w"], before["w"]), state
    assert state["w"].requires_grad, state
    assert (state["w"]._version, state["w"].data_ptr()) == (version, pointer), state
    assert list(state) == list(before), state


@FAULTS.add("Tensors inside of objects are copied, too.")
def tensors_inside_of_objects(copied: Any) -> None:
    """An object of a class that is not known is handed out as it is."""
    holder = torch.nn.Linear(1, 1, bias=False)
    expected = holder.weight.tolist()
    result = copied({"held": holder})
    with torch.no_grad():
        holder.weight.fill_(-1.0)
    assert result["held"].weight.tolist() == expected, result


@FAULTS.add("Sparse tensors are copied with all their parts.")
def sparse_tensor(copied: Any) -> None:
    """Values or indices are shared with the state."""
    values = torch.arange(1.0, 3.0)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3,), check_invariants=False)
    result = copied({"s": sparse})
    values.fill_(-1.0)
    assert result["s"].to_dense().tolist() == [1.0, 0.0, 2.0], result
