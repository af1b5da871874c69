"""What stands between us and the state of the calling thread."""

import sys

import pytest
import torch

import statetree as st
from statetree.torch_internals import as_integers, copy_all, count_references, own_references, storage_key


@pytest.mark.slow
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
    if not steps and sys.version_info[:2] == (3, 12):
        pytest.skip("this Python does not trace opcodes that are asked for while it traces")
    assert steps > 10
    for at in range(1, steps + 1):
        assert count(at)[0] != own
    assert count_references(storages, keys) == own


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2", "bool"])
@pytest.mark.parametrize("more", [[], ["uint16", "uint32", "uint64", "complex32"], ["float32", "complex64", "int16"]])
def test_what_an_accelerator_would_change_or_refuse_is_copied_as_integers(monkeypatch, name, more):
    """CUDA takes narrow floats through float32, so that NaNs lose their payload. Meta stands for an accelerator."""
    copied = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of, **_: copied.append([t.dtype for t in [*to, *of]]))
    dtypes = [getattr(torch, each) for each in (name, *more)]
    kept = {torch.float32, torch.complex64, torch.int16}
    for device in ("meta", "cpu"):
        pairs = [
            [torch.empty(12, dtype=torch.uint8, device=device).repeat(dtype.itemsize).view(dtype) for dtype in dtypes]
            for _ in range(2)
        ]
        copy_all(*pairs)
    integers = [dtype if dtype in kept else INTEGERS[dtype.itemsize] for dtype in dtypes]
    assert copied == [integers * 2, dtypes * 2]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_copied_as_integers_read_like_their_sources():
    numbers = torch.arange(1.0, 7).view(2, 3)
    halves, complexes = numbers.half(), torch.complex(numbers, numbers + 9).to(torch.complex32)
    for source, target in (
        (halves.t(), torch.zeros(3, 2, dtype=torch.float16)),
        (torch._neg_view(halves), torch.zeros(2, 3, dtype=torch.float16)),
        (torch._neg_view(halves), torch._neg_view(torch.zeros(2, 3, dtype=torch.float16))),
        (halves, torch._neg_view(torch.zeros(2, 3, dtype=torch.float16))),
        (complexes.conj(), torch.zeros(2, 3, dtype=torch.complex32)),
        (complexes.conj(), torch.zeros(2, 3, dtype=torch.complex32).conj()),
    ):
        to, of = as_integers(target, source)
        to.copy_(of)
        assert torch.equal(target.to(torch.complex64), source.to(torch.complex64))
