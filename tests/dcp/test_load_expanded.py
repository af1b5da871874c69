"""Loading into tensors that overlap themselves: expanded ones, and windows over one memory."""

import pytest
import torch

import statetree as st
from statetree import dcp

pytestmark = pytest.mark.filterwarnings("ignore:save. what restore does not make")


def expanded(values):
    return {"e": values[:, None].expand(4, 5), "x": values * 2}


def windows(values):
    return {"e": values.unfold(0, 3, 1), "x": values * 2}


def tied(values):
    return {"e": values[:, None].expand(4, 5), "m": values}


def window_of_sparse(values):
    return {"e": torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values[:1].expand(2), (3,), check_invariants=True)}


@pytest.mark.parametrize("make", [expanded, tied, window_of_sparse])
def test_a_state_is_loaded_into_itself(make, tmp_path):
    st.save(make(torch.arange(4.0)), tmp_path / "a")
    template = make(torch.zeros(4))
    loaded = st.load(tmp_path / "a", template, in_place=True)
    assert loaded["e"] is template["e"]
    assert st.similarity(loaded, make(torch.arange(4.0)), values=True)
    with dcp.Checkpointer(tmp_path / "b") as checkpointer:
        checkpointer.save(1, make(torch.arange(4.0)))
        assert st.similarity(checkpointer.restore(make(torch.zeros(4))), make(torch.arange(4.0)), values=True)


def test_they_are_converted_as_others_are(tmp_path):
    st.save(expanded(torch.arange(4.0)), tmp_path)
    template = expanded(torch.zeros(4, dtype=torch.float64))
    loaded = st.load(tmp_path, template, in_place=True, cast=True)
    assert st.similarity(loaded, expanded(torch.arange(4.0, dtype=torch.float64)), values=True)


@pytest.mark.parametrize("make", [expanded, windows])
def test_different_values_for_one_place_are_refused(make, tmp_path):
    saved = make(torch.arange(4.0))
    saved["e"] = saved["e"].contiguous()
    saved["e"][0, 1] = 9
    st.save(saved, tmp_path)
    template = make(torch.zeros(4))
    with pytest.raises(st.TreeMismatch, match="overlap at e: values of its own cannot go into a tensor that overlaps"):
        st.load(tmp_path, template, in_place=True)
    assert not template["e"].any()
