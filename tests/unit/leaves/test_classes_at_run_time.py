"""Classes that a program makes as it runs: they are recognised, and not kept for ever."""

import gc
import subprocess
import sys
import weakref
from collections import namedtuple

import pytest
import torch

import statetree as st


class Opaque:
    def __init__(self):
        self.inside = torch.arange(3.0)


MAKERS = {
    "mapping": lambda number: type(f"Mapping{number}", (dict,), {})(w=torch.arange(3.0)),
    "named tuple": lambda number: namedtuple(f"Row{number}", "w")(torch.arange(3.0)),
    "tensor": lambda number: torch.arange(3.0).as_subclass(type(f"Tensor{number}", (torch.Tensor,), {})),
    "parameter": lambda number: type(f"Parameter{number}", (torch.nn.Parameter,), {})(torch.arange(3.0)),
}


def meet(count, make):
    for number in range(count):
        st.offload([make(number)])
        st.similarity(make(number), None, values=False)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_they_are_forgotten(make):
    value = make(9_999)
    st.offload([value])
    gone = weakref.ref(type(value))
    assert gone() is not None
    del value
    meet(2_200, make)
    gc.collect()
    assert gone() is None


def test_structures_that_are_kept_still_equal_those_of_trees_of_the_same_class():
    cls = type("Kept", (dict,), {})
    leaves, spec = st.flatten(cls(w=torch.arange(3.0)))
    meet(2_200, MAKERS["mapping"])
    assert st.flatten(cls(w=1))[1] == spec
    assert type(st.unflatten(spec, leaves)) is cls


@pytest.mark.slow
def test_registered_classes_are_kept():
    leaf, container, atom = type("Leaf", (Opaque,), {}), type("Container", (Opaque,), {}), type("Atom", (Opaque,), {})

    class InsideType(st.LeafType):
        def unpack(self, value):
            return [value.inside], None

        def pack(self, context, parts):
            fresh = leaf()
            fresh.inside = parts[0]
            return fresh

    st.register_leaf_type(leaf, InsideType())
    st.register_leaf_type(atom, None)
    st.register_container(container, lambda value: ((value.inside,), None, ("inside",)), lambda _, children: children)
    meet(2_200, MAKERS["mapping"])
    meet(2_200, MAKERS["tensor"])
    value = atom()
    copied = st.offload([leaf(), value])
    assert type(copied[0]) is leaf
    assert copied[1] is value
    assert [str(path) for path in st.paths(container())] == ["inside"]


USED = """
import gc, tempfile, torch, statetree as st
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(3, 3)).sum().backward()
optimizer.step()

class Own(dict):
    pass

state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "own": Own(a=None), "length": len}
state |= {"most": torch.ones(2).max(0), "size": torch.Size([1]), "device": torch.device("cpu"), "later": lambda: 0}
st.similarity(st.offload(state), state)
folder = tempfile.mkdtemp()
with st.Checkpointer(folder) as checkpointer:
    checkpointer.save(1, {"model": model, "optim": optimizer})
    checkpointer.restore({"model": model, "optim": optimizer})
assert gc.callbacks == [], gc.callbacks  # else a Ctrl-C that comes while garbage is collected would be lost

class Own(dict):  # as in a notebook whose cell runs once more
    pass

st.offload([Own(a=1)])
assert len(gc.callbacks) == 1
"""

THROWN_AWAY = """
import gc, sys, types, weakref, torch, statetree as st

def meet(name):
    module = sys.modules[name] = types.ModuleType(name)
    exec("class Own(dict): pass\\nclass Opaque: pass", vars(module))
    st.offload([module.Own(a=1), module.Opaque()])
    return module.Own, module.Opaque

gone = [weakref.ref(cls) for cls in meet("plugin_1")]
assert gc.callbacks == []
del sys.modules["plugin_1"]
meet("plugin_2")
gc.collect()
assert [each() for each in gone] == [None, None]

class Odd(dict):
    __module__ = ["x"]

sys.modules["nothing"] = None
class Lost(dict):
    __module__ = "nothing"

st.offload([Odd(a=1), Lost(a=1)])
"""


@pytest.mark.slow
def test_classes_of_modules_that_are_thrown_away_are_forgotten_when_others_are_met():
    subprocess.run([sys.executable, "-c", THROWN_AWAY], check=True)


@pytest.mark.slow
def test_the_collector_calls_nothing_where_all_classes_are_those_of_modules():
    subprocess.run([sys.executable, "-c", USED], check=True)
