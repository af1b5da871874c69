"""What stands between us and the state of the calling thread."""

import pytest
import torch

import statetree as st


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_compiled_code_may_call_transforms():
    def step(x):
        doubled = x * 2
        return st.offload({"y": doubled})["y"] + 1

    compiled = torch.compile(step, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
