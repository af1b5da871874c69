"""What lies in a file is no destination: it would hold what its file does not."""

import pytest
import torch

import statetree as st
from statetree import files

WRITES = {
    "copy_into": lambda state, tree, _: st.copy_into(state, tree),
    "copy_into.strict": lambda state, tree, _: st.copy_into({"w": state["w"]}, tree, strict=False),
    "copy_into.where": lambda state, tree, _: st.copy_into(state, tree, where="w"),
    "distribute": lambda state, tree, _: st.distribute(state, tree, in_place=True),
    "reshard": lambda state, tree, _: st.reshard(state, tree, in_place=True),
    "prepare": lambda state, tree, _: st.prepare(st.reshard, state, tree, in_place=True),
    "apply_delta": lambda state, tree, _: st.apply_delta(st.delta(state, st.offload(tree)), tree),
    "load": lambda _, tree, path: st.load(path, tree, in_place=True),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "directory"])
def test_nothing_is_written_to_what_lies_in_a_file(name, write, tmp_path):
    path, state = tmp_path / name, {"w": torch.ones(4), "n": torch.zeros(2)}
    st.save({"w": torch.zeros(4), "n": torch.zeros(2)}, path)
    tree = files.open(path)
    with pytest.raises(st.TreeMismatch, match=r"\bw\b.* a tensor in a file"):
        WRITES[write](state, tree, path)
    assert st.offload(tree)["w"].tolist() == st.load(path)["w"].tolist() == [0.0] * 4


def test_what_nothing_is_written_to_may_lie_in_a_file(tmp_path):
    st.save({"w": torch.zeros(4), "n": torch.zeros(2)}, tmp_path / "a.safetensors")
    tree = files.open(tmp_path / "a.safetensors")
    copied = st.copy_into({"w": torch.ones(4)}, {**tree, "w": torch.zeros(4)}, strict=False)
    assert copied["n"] is tree["n"]
    assert copied["w"].tolist() == [1.0] * 4
    assert st.reshard({"w": torch.ones(4), "n": torch.ones(2)}, tree)["w"].tolist() == [1.0] * 4
    assert st.copy_into({"w": torch.ones(4), "n": tree["n"]}, {"w": torch.zeros(4), "n": tree["n"]})["w"].sum() == 4
