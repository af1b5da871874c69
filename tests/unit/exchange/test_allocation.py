"""Fresh tensors like others hold what nobody sends them: the tensors in the others' attributes."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import statetree as st


def parameter():
    value = torch.nn.Parameter(torch.ones(3))
    value.main_grad, value.listed = torch.full((4,), 7.0), [{"x": torch.arange(4.0)}]
    return value


def wrapper():
    value = TwoTensor(torch.ones(3), torch.ones(3))
    value.main_grad = torch.full((4,), 7.0)
    return value


def tensor():
    value = torch.ones(3)
    value.main_grad = torch.full((1,), 7.0).expand(4)
    return value


def loaded(source, like, tmp_path):
    st.save(source, tmp_path / "saved")
    return st.load(tmp_path / "saved", like)


@pytest.mark.filterwarnings("ignore:save. what restore does not make by itself")
@pytest.mark.parametrize("make", [parameter, wrapper, tensor])
@pytest.mark.parametrize(
    "verb",
    [lambda source, like, _: st.reshard(source, like), lambda source, like, _: st.distribute(source, like), loaded],
    ids=["reshard", "distribute", "load"],
)
def test_attributes_are_those_of_the_tensors_that_others_are_like(verb, make, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        source, like = make(), make()
        for tensor in (source, source.main_grad):
            tensor.detach().zero_()
        fresh = verb({"w": source}, {"w": like}, tmp_path)["w"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert st.similarity(getattr(fresh, "a", fresh).detach(), torch.zeros(3))
    assert torch.equal(fresh.main_grad, torch.full((4,), 7.0))
    assert fresh.main_grad is not like.main_grad
    if make is parameter:
        assert torch.equal(fresh.listed[0]["x"], torch.arange(4.0))


@pytest.mark.parametrize("verb", [st.distribute, st.reshard])
def test_storages_are_fresh_too(verb):
    source, like = (torch.full((4,), number, dtype=torch.uint8) for number in (1, 2))
    fresh = verb({"s": source.untyped_storage()}, {"s": like.untyped_storage()})["s"]
    assert fresh.tolist() == [1] * 4
    assert like.tolist() == [2] * 4
