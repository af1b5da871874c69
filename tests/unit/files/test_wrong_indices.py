"""Sparse tensors whose indices lead outside of them: every verb refuses the file that they come from, by its name."""

import pytest
import torch

import statetree as st

WRONG = {
    "csr": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2, 9]), torch.tensor([0, 1, 2]), torch.ones(3), size=(3, 3), check_invariants=False
    ),
    "coo": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 9]]), torch.ones(2), (4,), check_invariants=False),
}
VERBS = {
    "digest": st.digest,
    "delta": lambda tree: st.delta(tree, tree),
    "cast": lambda tree: st.cast(tree, torch.float16),
    "offload": st.offload,
    "broadcast": st.broadcast,
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", WRONG)
def test_verbs_name_the_file(kind, verb, tmp_path):
    torch.save({"leaf": WRONG[kind]()}, tmp_path / "a.pt")
    with pytest.raises(st.CheckpointError, match=r"a\.pt: "):
        VERBS[verb](st.files.open(tmp_path / "a.pt"))


@pytest.mark.parametrize("kind", WRONG)
def test_they_are_not_saved_again(kind, tmp_path):
    torch.save({"leaf": WRONG[kind]()}, tmp_path / "a.pt")
    with pytest.raises(st.CheckpointError, match=r"a\.pt: "):
        st.save(st.files.open(tmp_path / "a.pt"), tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_default_device_does_not_matter(layout, tmp_path):
    leaf = torch.eye(3).to_sparse() if layout == "coo" else torch.eye(3).to_sparse_csr()
    st.save({"leaf": leaf}, tmp_path / "step")
    template = st.allocate_like({"leaf": leaf})
    with torch.device("meta"):
        loaded = st.load(tmp_path / "step", template, in_place=True)
    assert loaded["leaf"].to_dense().equal(torch.eye(3))
