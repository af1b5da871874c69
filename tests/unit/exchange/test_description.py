"""Descriptions of leaves: what another rank makes of them, on which devices."""

import pytest
import torch

from statetree.errors import UnsupportedLeaf
from statetree.exchange import description
from statetree.exchange.description import metadata_of
from statetree.key_paths import Path
from statetree.spans.columns import Columns
from statetree.spans.memory import Memory
from statetree.torch_internals import quietly

LEAVES = [torch.arange(4.0), torch.arange(4.0, 7.0), torch.arange(7.0, 9.0)]


@pytest.fixture
def two_devices(monkeypatch):
    """Have the tensors of a tree seem to lie on ``cuda:0`` and ``cuda:1`` in turn; return where memory is taken."""
    taken = []

    def take(device):
        taken.append(str(device))
        return Memory(torch.device("cpu"))

    monkeypatch.setattr(description, "Memory", take)
    devices = property(lambda columns: [torch.device("cuda", number % 2) for number in range(len(columns.tensors))])
    monkeypatch.setattr(Columns, "devices", devices)
    return taken


def described():
    return quietly(metadata_of)("broadcast", list(LEAVES), lambda: [Path()] * len(LEAVES))


def test_tensors_on_several_devices_of_a_type_keep_apart(two_devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    metadata, spans = described()
    assert list(metadata.tensors) == ["cuda:0", "cuda:1"]
    parts, places = quietly(metadata.allocate)("broadcast")
    assert two_devices == ["cuda:0", "cuda:1"]
    for place, span in zip(places, spans, strict=True):
        place.copy_(span)
    for part, leaf in zip(parts, LEAVES, strict=True):
        assert torch.equal(part, leaf)


@pytest.mark.usefixtures("two_devices")
def test_a_rank_that_lacks_one_of_several_devices_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    metadata, _ = described()
    with pytest.raises(UnsupportedLeaf, match="expected cuda:1 on every rank, got 1 of its type"):
        metadata.allocate("broadcast")


def test_a_lone_device_is_each_ranks_own(monkeypatch):
    monkeypatch.setattr(Columns, "devices", property(lambda columns: [torch.device("cuda", 1)] * len(columns.tensors)))
    metadata, _ = described()
    assert list(metadata.tensors) == ["cuda"]
