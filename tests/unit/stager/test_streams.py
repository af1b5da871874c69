"""Which devices copies are asynchronous on."""

import pytest
import torch

from statetree.stager.streams import devices_of


@pytest.mark.parametrize(("accelerator", "kept"), [("cuda", 2), ("xpu", 0), ("mps", 0), (None, 0)])
def test_only_devices_with_streams_are_copied_from_asynchronously(monkeypatch, accelerator, kept):
    """Tensors of torch_xla lie on a device that is no accelerator to torch, and mps has but one stream."""
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    devices = [torch.device(name) for name in ("cuda:0", "cpu", "xla:0", "cuda:1", "meta", "mps", "cuda:0")]
    assert devices_of(devices) == [torch.device("cuda:0"), torch.device("cuda:1")][:kept]
