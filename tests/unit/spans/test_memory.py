"""``buffers``: kinds of host memory, and how small buffers share allocations."""

import mmap
import multiprocessing
import subprocess
import sys
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hyp

from statetree.spans import memory as buffers
from statetree.spans.layout import as_bytes
from statetree.spans.memory import ALIGNMENT, LARGE_BYTES, SLAB_BYTES, Buffer, Memory
from statetree.stager.pool import Pool
from tests.pace import units

CONTAINERS = {"plain": {}, "shared": {"share_memory": True}}
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork")


def places(carved, sizes):
    """Return the bytes in memory that each buffer takes, checking that its storage reaches so far."""
    found = []
    for (storage, start), size in zip(carved, sizes, strict=True):
        assert start >= 0
        assert start + size <= storage.nbytes()
        found.append((storage.data_ptr() + start, storage.data_ptr() + start + size))
    return found


def assert_apart(found):
    filled = sorted(place for place in found if place[0] != place[1])
    assert all(stop <= start for (_, stop), (start, _) in pairwise(filled))


# What is plain


@pytest.mark.parametrize(
    ("options", "plain"),
    [({}, True), ({"device": "meta"}, False), ({"share_memory": True}, False), ({"device": torch.device("cpu")}, True)],
    ids=str,
)
def test_plain_host_memory(options, plain):
    assert Memory(**options).is_plain_host is plain


@pytest.mark.parametrize("options", [{"pin_memory": True}, {"share_memory": True}], ids=str)
@pytest.mark.parametrize("device", ["meta", torch.device("meta"), "cuda:1"], ids=str)
def test_only_host_memory_is_pinned_or_shared(options, device):
    with pytest.raises(ValueError, match=f"kinds of host memory: expected the device 'cpu', got '{device}'"):
        Memory(device, **options)


# Carving


def test_plain_buffers_are_allocations_of_their_own():
    sizes = [0, 1, 100, LARGE_BYTES, 7]
    carved = Memory().carve(sizes)
    assert [(storage.nbytes(), start) for storage, start in carved] == [(size, 0) for size in sizes]
    assert len({storage._cdata for storage, _ in carved}) == len(sizes)
    assert_apart(places(carved, sizes))
    assert all(storage.resizable() and not storage.is_shared() for storage, _ in carved)


def test_small_shared_buffers_are_places_in_one_slab():
    sizes = [1, ALIGNMENT, ALIGNMENT + 1, 0, LARGE_BYTES - 1, LARGE_BYTES, 3]
    carved = Memory(share_memory=True).carve(sizes)
    slab = carved[0].storage
    assert [start for _, start in carved] == [0, 64, 128, 256, 256, 0, 256 + LARGE_BYTES]
    assert [storage._cdata == slab._cdata for storage, _ in carved] == [True] * 5 + [False, True]
    assert slab.nbytes() == 256 + LARGE_BYTES + 64
    assert carved[5].storage.nbytes() == LARGE_BYTES
    assert all(storage.is_shared() for storage, _ in carved)


def test_small_plain_buffers_in_slabs_are_storages_of_their_own():
    sizes = [5, 64, 0, 100]
    carved = Pool(Memory()).take(sizes)[0]
    assert [(storage.nbytes(), start) for storage, start in carved] == [(size, 0) for size in sizes]
    begin = carved[0].storage.data_ptr()
    assert [storage.data_ptr() - begin for storage, _ in carved if storage.nbytes()] == [0, 64, 128]


def test_pieces_keep_their_slab_alive():
    kept = Pool(Memory()).take([8, 8])[0][1].storage
    view = as_bytes(kept, 0, 8).fill_(7)
    others = [torch.zeros(2) for _ in range(100)]
    assert view.tolist() == [7] * 8
    del others


@pytest.mark.parametrize("options", CONTAINERS.values(), ids=CONTAINERS)
def test_no_slab_grows_over_the_limit(options, monkeypatch):
    monkeypatch.setattr(buffers, "SLAB_BYTES", 1024)
    memory = Memory(**options)
    allocated = []
    allocate = memory.block
    monkeypatch.setattr(memory, "block", lambda size: allocated.append(size) or allocate(size))
    sizes = [500, 512, 1, 1023, 1, 64, 2000, 1024]
    carved = Pool(memory).take(sizes)[0]
    assert allocated == [1024, 64, 1024, 128, 2048, 1024]
    assert_apart(places(carved, sizes))


@given(
    sizes=hyp.lists(hyp.sampled_from([0, 1, 63, 64, 65, 1000, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1])),
    kind=hyp.sampled_from(sorted(CONTAINERS)),
    pooled=hyp.booleans(),
)
def test_buffers_are_large_enough_aligned_and_apart(sizes, kind, pooled):
    memory = Memory(**CONTAINERS[kind])
    carved = Pool(memory).take(sizes)[0] if pooled else memory.carve(sizes)
    assert all(type(buffer) is Buffer for buffer in carved)
    assert_apart(places(carved, sizes))
    assert all(start % ALIGNMENT == 0 for _, start in carved)
    assert all((storage.data_ptr() + start) % 16 == 0 for storage, start in carved)
    if kind == "shared":
        assert all(storage.is_shared() for (storage, _), size in zip(carved, sizes, strict=True) if size or not pooled)


def test_the_sizes_suit_each_other():
    assert SLAB_BYTES % ALIGNMENT == 0
    assert SLAB_BYTES >= LARGE_BYTES


def test_memory_of_a_device_has_no_bytes_on_meta():
    (buffer,) = Memory("meta").carve([1 << 50])
    assert buffer.storage.device.type == "meta"
    assert buffer.storage.nbytes() == 1 << 50


@pytest.mark.parametrize("size", [LARGE_BYTES, (2 << 20) - 1, 2 << 20, (4 << 20) + 1])
@pytest.mark.parametrize("options", CONTAINERS.values(), ids=CONTAINERS)
def test_large_buffers_can_be_written_from_end_to_end(options, size):
    (buffer,) = Memory(**options).carve([size])
    view = as_bytes(buffer.storage, buffer.start, buffer.start + size).fill_(3)
    assert int(view.sum()) == 3 * size


# Other processes


def add_one(views):
    for view in views:
        view.add_(1)


def shared_views():
    carved = Memory(share_memory=True).carve([8, 8, LARGE_BYTES])
    views = [as_bytes(storage, start, start + 8) for storage, start in carved]
    for number, view in enumerate(views):
        view.copy_(torch.arange(8) + 10 * number)
    return views


def assert_seen_elsewhere(views, context):
    expected = [view + 1 for view in views]
    process = context.Process(target=add_one, args=(views,))
    process.start()
    process.join(units(30))
    assert process.exitcode == 0
    for view, wanted in zip(views, expected, strict=True):
        assert torch.equal(view, wanted)


@linux
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_what_a_forked_process_writes_to_shared_memory_is_seen():
    assert_seen_elsewhere(shared_views(), multiprocessing.get_context("fork"))


@linux
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_what_a_forked_process_writes_to_plain_memory_is_not():
    (buffer,) = Memory().carve([8])
    view = as_bytes(buffer.storage, 0, 8).fill_(1)
    process = multiprocessing.get_context("fork").Process(target=add_one, args=([view],))
    process.start()
    process.join(units(30))
    assert process.exitcode == 0
    assert view.tolist() == [1] * 8


@pytest.mark.slow
def test_what_a_spawned_process_writes_to_shared_memory_is_seen():
    assert_seen_elsewhere(shared_views(), torch.multiprocessing.get_context("spawn"))


# Pinning

without_accelerator = pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")


@without_accelerator
def test_pinning_without_an_accelerator_warns_once_and_gives_ordinary_memory():
    buffers._can_pin.cache_clear()
    with pytest.warns(UserWarning, match="pin_memory=True needs an accelerator and there is none") as caught:
        memory = Memory(pin_memory=True)
    assert len(caught) == 1
    assert memory.is_plain_host
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shared = Memory(pin_memory=True, share_memory=True)
        Memory()
    assert not shared.pin_memory
    assert shared.carve([5])[0].storage.is_shared()
    assert not memory.carve([5])[0].storage.is_shared()


@pytest.mark.slow
@without_accelerator
def test_the_warning_names_the_line_of_the_caller():
    code = """
import statetree as st, torch
st.offload([torch.ones(1)], pin_memory=True)  # warns here
st.allocate_like([torch.ones(1)], pin_memory=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=units(60), check=True)
    assert "<string>:3: UserWarning: pin_memory=True needs an accelerator" in done.stderr
    assert done.stderr.count("UserWarning") == 1


def test_pinned_memory_is_asked_for_in_slabs_and_given_back(monkeypatch):
    """What pins and unpins, with a stand-in for the driver."""
    from torch.cuda import _pin_memory_utils

    pinned, log = {}, []
    monkeypatch.setattr(buffers, "_can_pin", lambda: True)
    monkeypatch.setattr(_pin_memory_utils, "pin_memory", lambda *call: (log.append(call), pinned.update([call])))
    monkeypatch.setattr(_pin_memory_utils, "unpin_memory", pinned.pop)
    memory = Memory(pin_memory=True)
    assert not memory.is_plain_host
    carved = memory.carve([5, 100, 0, LARGE_BYTES, 64])
    assert sorted(size for _, size in log) == [256, LARGE_BYTES]
    for (storage, start), size in zip(carved, [5, 100, 0, LARGE_BYTES, 64], strict=True):
        begin = storage.data_ptr() + start
        assert not size or any(at <= begin and begin + size <= at + length for at, length in log)
    small = carved[1]
    del carved, storage
    assert list(pinned.values()) == [256]  # for as long as a piece of it is in use
    del small
    assert pinned == {}


def test_no_two_pinned_blocks_lie_on_one_page(monkeypatch):
    """CUDA does not register a page twice."""
    from torch.cuda import _pin_memory_utils

    log = []
    monkeypatch.setattr(buffers, "_can_pin", lambda: True)
    monkeypatch.setattr(_pin_memory_utils, "pin_memory", lambda *call: log.append(call))
    monkeypatch.setattr(_pin_memory_utils, "unpin_memory", lambda pointer: None)
    held = [Memory(pin_memory=True, share_memory=shared).carve([100]) for shared in (False, True) for _ in range(8)]
    pages = {start // mmap.PAGESIZE for start, _ in log}
    assert [start % mmap.PAGESIZE for start, _ in log] == [0] * 16
    assert len(pages) == len(held) == 16


def test_accelerators_that_register_no_memory_allocate_what_is_pinned(monkeypatch):
    asked = []
    empty = torch.empty
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(
        torch, "empty", lambda *a, pin_memory=False, **o: asked.append((*a, pin_memory)) or empty(*a, **o)
    )
    monkeypatch.setattr(buffers, "_pin", None)
    buffers._can_pin.cache_clear()
    try:
        carved = Memory(pin_memory=True).carve([5, 100, 0, LARGE_BYTES])
        assert sorted(asked) == [(192, True), (LARGE_BYTES, True)]
        assert carved[1].storage.nbytes() == 100
        shared = Memory(pin_memory=True, share_memory=True)
        assert not shared.pin_memory
        assert shared.carve([5])[0].storage.is_shared()
    finally:
        buffers._can_pin.cache_clear()
