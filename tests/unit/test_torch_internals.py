"""What stands between us and the state of the calling thread."""

import sys

import pytest
import torch

import statetree as st
from statetree.torch_internals import count_references, own_references, storage_key


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_compiled_code_may_call_transforms():
    def step(x):
        doubled = x * 2
        return st.offload({"y": doubled})["y"] + 1

    compiled = torch.compile(step, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))


def lay_tensors(storage, count):
    return [torch.empty(0, dtype=torch.uint8).set_(storage, number, (3,), (1,)) for number in range(count)]


@pytest.mark.parametrize("counts", [[1], [3], [1, 4, 2]], ids=str)
def test_what_is_computed_is_what_is_counted_where_nothing_else_refers_to_storages(counts):
    storages = [torch.UntypedStorage(16) for _ in counts]
    tensors = list(map(lay_tensors, storages, counts))
    keys = list(map(storage_key, storages))
    assert count_references(storages, keys) == own_references(counts)
    for index, more in enumerate(tensors):
        more.append(more[0][1:])
        assert count_references(storages, keys) != own_references(counts)
        more.pop()
        held = storages[index]
        assert count_references(storages, keys) != own_references(counts)
        del held
    assert count_references(storages, keys) == own_references(counts)


@pytest.mark.parametrize("begin", ["with the tensor", "with the storage"])
def test_a_reference_that_changes_its_kind_while_references_are_counted_is_seen(begin):
    """Another thread makes a tensor of a storage, or asks a tensor for it, and drops the first of the two."""
    storages = [torch.UntypedStorage(16)]
    keys = [storage_key(storages[0])]
    tensors = lay_tensors(storages[0], 1)
    own = own_references([1])

    def count(at):
        held = [tensors[0][1:] if begin == "with the tensor" else storages[0]]
        steps = 0

        def trace(frame, event, _):
            nonlocal steps
            if frame.f_code is not count_references.__code__:
                return None
            frame.f_trace_opcodes = True
            steps += event == "opcode"
            if event == "opcode" and steps == at:
                is_tensor = isinstance(held[0], torch.Tensor)
                held.append(storages[0] if is_tensor else lay_tensors(storages[0], 1)[0])
                del held[0]
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return count_references(storages, keys), steps
        finally:
            sys.settrace(before)
            held.clear()

    found, steps = count(0)
    assert found != own
    assert steps > 10
    for at in range(1, steps + 1):
        assert count(at)[0] != own
    assert count_references(storages, keys) == own
