"""``geometry_cache``: recognised tensors are treated exactly as unknown ones, and nothing of theirs is kept."""

import contextlib
import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import statetree as st
from benchmarks.memory import give_back_freed_memory
from statetree.spans import geometry_cache
from statetree.spans.columns import Columns
from statetree.torch_internals import geometry_guard
from tests.geometries import forget_geometries
from tests.judge import assert_trees_equal
from tests.judge.regions import raw_bytes
from tests.memory import shares_memory, storages
from tests.pace import units
from tests.products import product

COUNT = 80
LONG = 620  # more than one piece


@pytest.fixture(autouse=True)
def _fresh():
    forget_geometries()
    yield
    forget_geometries()


@pytest.fixture
def recognised(monkeypatch):
    """The lists of tensors that were recognised."""
    seen = []
    is_of = geometry_cache.KnownGeometry.is_of

    def watched(self, columns, **options):
        found = is_of(self, columns, **options)
        if found:
            seen.append(list(columns.tensors))
        return found

    monkeypatch.setattr(geometry_cache.KnownGeometry, "is_of", watched)
    yield seen
    seen.clear()


class Subclass(torch.Tensor):
    pass


def ramp(*shape, start=0, dtype=torch.float32):
    return torch.arange(start, start + int(np.prod(shape))).to(dtype).reshape(shape)


def simple(count=COUNT, start=0):
    """Return contiguous tensors on storages of their own."""
    return [ramp(3, 3, start=start + 10 * number) for number in range(count)]


def varied(count=COUNT, start=0):
    """Return tensors of many geometries, among them tied ones."""
    tensors = simple(count, start)
    base = ramp(40, start=start)
    number = torch.complex(ramp(5, start=start), ramp(5, start=start + 1))
    tensors[10:15] = [base, base[3:9], base[::3], base.view(5, 8).t(), base[4:4]]
    tensors[16:21] = [number, number.conj(), number.conj().imag, ramp(4, dtype=torch.bfloat16), torch.tensor(start > 0)]
    tensors[30:32] = [torch.empty(0, 3), torch.empty(4, 0)]
    return tensors


WORLDS = {"simple": simple, "varied": varied, "long": partial(simple, LONG)}


# Each is a function of a tree, which is given a second time as it was before anything happened to it.


def copied_from(tree, before):
    return st.copy_into(tree, [leaf.clone().zero_() for leaf in before])


def staged(tree, before):
    with st.Stager() as stager:
        return stager.stage(tree)


def allocated(tree, before):
    fresh = st.allocate_like(tree)
    for storage in storages(fresh):
        raw_bytes(storage).zero_()
    return fresh


def written_to(tree, before):
    return st.copy_into(st.offload(before), tree)


TRANSFORMS = {
    "offload": lambda tree, before: st.offload(tree),
    "shared": lambda tree, before: st.offload(tree, share_memory=True),
    "without copy": lambda tree, before: st.offload(tree, copy=False),
    "allocate_like": allocated,
    "copy_into from": copied_from,
    "copy_into to": written_to,
    "similarity": lambda tree, before: str(st.similarity(tree, before, values=False)),
    "similarity of values": lambda tree, before: str(st.similarity(before, tree, values=True)),
    "stage": staged,
    "chain": lambda tree, before: st.chain(st.offload, st.offload)(tree),
}
COPIES = ("offload", "without copy", "stage", "chain")


def outcome(transform, world, change, *, warm):
    """Return what a transform makes of a changed list, and the list: whether it was seen before or not."""
    forget_geometries()
    tree, before = world(), world()
    if warm:
        for _ in range(3):
            TRANSFORMS[transform](world(), world())  # elsewhere
            TRANSFORMS[transform](tree, before)
    change(tree)
    with contextlib.nullcontext() if warm else mock.patch.object(geometry_cache, "_FEWEST", 1 << 30):
        try:
            return TRANSFORMS[transform](tree, before), tree
        except Exception as error:
            return (type(error), str(error), getattr(error, "path", None)), tree


def nothing(tree):
    pass


@pytest.mark.parametrize(("transform", "world"), product(TRANSFORMS, WORLDS))
def test_recognised_tensors_are_treated_as_unknown_ones(transform, world, recognised):
    slow, tree = outcome(transform, WORLDS[world], nothing, warm=False)
    assert not recognised
    fast, again = outcome(transform, WORLDS[world], nothing, warm=True)
    assert any(one is other for seen in recognised for one, other in zip(seen, again, strict=False))
    storages_kept = transform != "shared"
    assert_trees_equal(fast, slow, storages=storages_kept)
    assert_trees_equal(again, tree)
    if transform in COPIES:
        assert_trees_equal(fast, again, storages=storages_kept)


# Tensors that change after they were seen


def replace(index, make):
    def change(tree):
        tree[index] = make(tree[index])

    return change


def in_place(index, do):
    def change(tree):
        do(tree[index], tree)

    return change


def point_at(tensor, data):
    tensor.data = data


def lie_on(tensor, other, offset=0):
    tensor.set_(other.untyped_storage(), offset, tensor.shape, tensor.stride())


def with_attribute(tensor, tree):
    tensor.note = "kept"


def grown(tensor, tree):
    storage = tensor.untyped_storage()
    before = storage.nbytes()
    storage.resize_(1000)
    raw_bytes(storage)[before:].fill_(1)


@torch.inference_mode()
def inference(tensor):
    return tensor.clone()


CHANGES = {
    "values": in_place(5, lambda t, tree: t.mul_(-3)),
    "requires_grad_": in_place(5, lambda t, tree: t.requires_grad_()),
    "attribute": in_place(5, with_attribute),
    "t_": in_place(5, lambda t, tree: t.t_()),
    "shape": in_place(5, lambda t, tree: t.resize_(9)),
    "data elsewhere": in_place(5, lambda t, tree: point_at(t, ramp(3, 3, start=900))),
    "data of another shape": in_place(5, lambda t, tree: point_at(t, ramp(3, start=900))),
    "data of another dtype": in_place(5, lambda t, tree: point_at(t, t.data.view(torch.int32))),
    "data as complex": in_place(5, lambda t, tree: point_at(t, torch.complex(ramp(3, 3), ramp(3, 3)).conj())),
    "data of another tensor": in_place(5, lambda t, tree: point_at(t, tree[6].data)),
    "on another's storage": in_place(5, lambda t, tree: lie_on(t, tree[6])),
    "over another": in_place(5, lambda t, tree: (grown(tree[6], tree), lie_on(t, tree[6], 4))),
    "beside another": in_place(5, lambda t, tree: (grown(tree[6], tree), lie_on(t, tree[6], 9))),
    "larger storage": in_place(5, grown),
    "further on a storage": in_place(5, lambda t, tree: lie_on(t, torch.zeros(20), 7)),
    "negative": in_place(5, lambda t, tree: torch._C._set_neg(t, True)),
    "freed": in_place(5, lambda t, tree: t.untyped_storage().resize_(0)),
    "shrunk": in_place(5, lambda t, tree: t.untyped_storage().resize_(12)),
    "freed and restored": in_place(5, lambda t, tree: (t.untyped_storage().resize_(0), grown(t, tree), t.fill_(3))),
    "parameter": replace(5, lambda t: torch.nn.Parameter(t)),
    "frozen parameter": replace(5, lambda t: torch.nn.Parameter(t, requires_grad=False)),
    "buffer": replace(5, lambda t: torch.nn.Buffer(t)),
    "subclass": replace(5, lambda t: t.as_subclass(Subclass)),
    "another with the same memory": replace(5, lambda t: t.view(3, 3)),
    "conjugate": replace(5, lambda t: torch.complex(t, t).conj()),
    "negative view": replace(5, lambda t: torch._neg_view(t)),
    "sparse": replace(5, lambda t: t.to_sparse()),
    "quantized": replace(5, lambda t: torch.quantize_per_tensor(t, 1.0, 0, torch.qint8)),
    "meta": replace(5, lambda t: t.to("meta")),
    "meta view": replace(5, lambda t: torch.empty(5, 3, device="meta")[2:]),
    "inference": replace(5, inference),
    "expanded": replace(5, lambda t: ramp(3).expand(3, 3)),
    "number": replace(5, lambda t: 7),
    "none": replace(5, lambda t: None),
    "twice": lambda tree: tree.__setitem__(5, tree[6]),
    "shorter": lambda tree: tree.pop(),
    "other order": lambda tree: tree.reverse(),
}


@pytest.mark.filterwarnings("ignore:.*torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(("transform", "change"), product(TRANSFORMS, CHANGES))
def test_what_changes_after_it_was_seen_is_seen(transform, change):
    slow, _ = outcome(transform, simple, CHANGES[change], warm=False)
    fast, tree = outcome(transform, simple, CHANGES[change], warm=True)
    assert_trees_equal(fast, slow, storages=transform != "shared")
    if transform in COPIES and not isinstance(slow, tuple):
        assert_trees_equal(fast, tree)


def test_all_tensors_turned_into_frozen_parameters():
    """Lists of parameters are remembered as well, where two trees are compared."""

    def parameters():
        return [torch.nn.Parameter(tensor, requires_grad=False) for tensor in simple()]

    tree = parameters()
    for _ in range(3):
        assert st.similarity(tree, parameters(), values=False)
    for transform in ("offload", "stage", "chain", "without copy"):
        assert_trees_equal(TRANSFORMS[transform](tree, None), tree)
    tensors = simple()
    assert_trees_equal(st.offload(tensors), tensors)


def test_a_tensor_given_twice_in_a_long_list():
    tree = simple(LONG)
    for _ in range(3):
        st.offload(tree)
    tree[LONG - 1] = tree[0]
    for transform in ("offload", "stage", "chain"):
        result = TRANSFORMS[transform](tree, None)
        assert result[LONG - 1] is result[0]
        assert_trees_equal(result, tree)


# Storages that are freed


@pytest.mark.parametrize("warm", [True, False], ids=["recognised", "unknown"])
@pytest.mark.parametrize("left", [0, 35])
@pytest.mark.parametrize("verb", ["offload", "copy_into", "into", "stage", "chain"])
def test_a_freed_storage_is_refused(verb, left, warm):
    tree = {"model": simple(), "other": ramp(3)}
    target = {"model": simple(start=7), "other": ramp(3, start=50)}
    expected = st.offload(target)
    apply = {
        "offload": lambda: st.offload(tree),
        "copy_into": lambda: st.copy_into(tree, target),
        "into": lambda: st.copy_into(target, tree),
        "stage": lambda: staged(tree, None),
        "chain": lambda: st.chain(st.offload, st.offload)(tree),
    }[verb]
    if warm:
        for _ in range(4):
            apply()
        st.copy_into(expected, target)
    else:
        forget_geometries()
    tree["model"][70].untyped_storage().resize_(left)
    with pytest.raises(st.StateTreeError, match=r"model.70") as caught:
        apply()
    assert isinstance(caught.value, st.UnsupportedLeaf | st.TreeMismatch)
    if isinstance(caught.value, st.UnsupportedLeaf):
        assert tuple(caught.value.path) == ("model", 70)
    assert_trees_equal(target, expected)
    tree["model"][70].untyped_storage().resize_(36)
    tree["model"][70].fill_(1)
    apply()


def test_a_storage_that_shrank_and_came_to_lie_where_it_was_is_refused():
    size = 300_000
    tree = [torch.zeros(size) if number == 5 else ramp(2) for number in range(COUNT)]
    storage = tree[5].untyped_storage()
    for _ in range(50):  # until the allocator gives the same address
        storage.resize_(0)
        storage.resize_(4 * size)
        tree[5].zero_()
        address = storage.data_ptr()
        for _ in range(3):
            st.offload(tree)
        storage.resize_(0)
        storage.resize_(3 * size)
        if storage.data_ptr() == address:
            break
    else:
        pytest.skip("the allocator never gave the same address again")
    to, of = (lambda tree: st.copy_into(simple_like(tree), tree)), (lambda tree: st.copy_into(tree, simple_like(tree)))
    for apply in (st.offload, lambda tree: staged(tree, None), to, of):
        with pytest.raises(st.StateTreeError, match=r"(of the leaf|differs) at 5"):
            apply(tree)


def simple_like(tree):
    return [torch.zeros(tensor.shape) for tensor in tree]


# Memory that others own: the same addresses, on other storages


def separate(array):
    """Return pieces of an array, each on a storage of its own."""
    return [torch.from_numpy(array[number : number + 4]) for number in range(0, array.size, 4)]


def together(array):
    """Return the same pieces, as views on one storage."""
    whole = torch.from_numpy(array)
    return [whole[number : number + 4] for number in range(0, array.size, 4)]


def by_halves(array):
    half = array.size // 8 * 4
    return [*together(array[:half]), *together(array[half:])]


MAKERS = [separate, together, by_halves]


@pytest.mark.parametrize("first", MAKERS, ids=lambda maker: maker.__name__)
@pytest.mark.parametrize("then", MAKERS, ids=lambda maker: maker.__name__)
@pytest.mark.parametrize("transform", ["offload", "stage", "chain", "copy_into from"])
def test_ties_are_those_of_the_storages_at_hand(transform, first, then, recognised):
    array = np.arange(4.0 * COUNT)
    with st.Stager(max_snapshots=9) as stager:
        apply = stager.stage if transform == "stage" else partial(TRANSFORMS[transform], before=simple_rows())
        before = first(array)
        for _ in range(4):
            apply(before)
        recognised.clear()
        tree = then(array)
        result = apply(tree)
        assert recognised  # the addresses are the same
        if transform != "copy_into from":
            assert_trees_equal(result, tree)
            assert len(storages(result)) == len(storages(tree))
            assert not shares_memory(result, tree)
        assert_trees_equal(result, tree, ties=False)
    del before


def simple_rows():
    return [ramp(4, dtype=torch.float64) for _ in range(COUNT)]


def test_targets_that_come_to_overlap_at_known_addresses_are_refused():
    """Of two lists at the same places, only one may be written to: for overlap, addresses and sizes decide."""
    array = np.zeros(4 * COUNT + 2)
    source = [ramp(4, start=number, dtype=torch.float64) for number in range(COUNT)]
    for _ in range(4):
        st.copy_into(source, separate(array[: 4 * COUNT]))
    overlapping = separate(array[: 4 * COUNT])
    overlapping[7] = torch.from_numpy(array[30:34])
    with pytest.raises(st.TreeMismatch, match="overlap"):
        st.copy_into(source, overlapping)


# What is remembered


def test_a_list_is_remembered_the_second_time(recognised):
    tree = simple()
    st.offload(tree)
    assert geometry_cache._remembered == ()
    st.offload(simple(start=4))
    assert len(geometry_cache._remembered) == 1
    assert not recognised
    st.offload(simple(start=9))
    assert len(recognised) >= 1
    assert len(geometry_cache._remembered) == 1


@pytest.mark.parametrize("count", [1, geometry_cache._FEWEST - 1])
def test_short_lists_are_not_remembered(count):
    tree = simple(count)
    for _ in range(4):
        assert_trees_equal(st.offload(tree), tree)
    assert geometry_cache._remembered == ()
    assert geometry_cache._glimpsed == {}


def test_lists_that_are_too_long_are_not_remembered(monkeypatch):
    monkeypatch.setattr(geometry_cache, "_MOST_BYTES", COUNT * geometry_cache._TENSOR_BYTES)
    tree = simple()
    for _ in range(4):
        st.offload(tree)
    assert geometry_cache._remembered == ()


def layers(count, shapes=((4, 3), (4,), (2, 2), ())):
    """Return tensors whose shapes come again and again, as those of a model's layers do."""
    return [ramp(*shapes[number % len(shapes)], start=number) for number in range(count)]


def telling(count):
    """Return tensors of which every piece looks different."""
    return [ramp(1, number % 50 + 1, number // 50 + 1) for number in range(count)]


def test_equal_pieces_of_a_list_are_remembered_once(recognised):
    count = 5 * geometry_cache._PIECE + 7
    for _ in range(2):
        st.offload(layers(count))
    (remembered,) = geometry_cache._remembered
    assert len(set(map(id, remembered._pieces))) == 2  # and the shorter one at the end
    assert (
        remembered.nbytes
        < count * geometry_cache._TENSOR_BYTES + 2 * geometry_cache._PIECE * geometry_cache._GUARD_BYTES + 1
    )
    tree = layers(count)
    result = st.offload(tree)
    assert recognised
    assert_trees_equal(result, tree)


@pytest.mark.parametrize(
    ("change", "place"),
    product(
        ["requires_grad_", "t_", "data of another dtype", "parameter", "conjugate", "meta"],
        [0, 600, 5 * 500 + 6],
        every=9,
    ),
)
def test_a_change_is_seen_in_whichever_equal_piece(change, place):
    count = 5 * geometry_cache._PIECE + 7
    slow, fast = ([torch.zeros(3, 3) for _ in range(count)] for _ in range(2))
    for _ in range(3):
        st.offload(fast)
    for tree in (slow, fast):
        CHANGES[change](tree)  # number 5
        tree[5], tree[place] = tree[place], tree[5]
    with mock.patch.object(geometry_cache, "_FEWEST", 1 << 30):
        expected = st.offload(slow)
    result = st.offload(fast)
    assert_trees_equal(result, expected)
    assert_trees_equal(result, fast)


def test_pieces_that_differ_only_in_strides_are_told_apart(recognised):
    def tensors():
        tree = [ramp(3, 3) for _ in range(2 * geometry_cache._PIECE)]
        tree[geometry_cache._PIECE + 7].t_()
        return tree

    for _ in range(3):
        tree = tensors()
        assert_trees_equal(st.offload(tree), tree)
    assert recognised
    (remembered,) = geometry_cache._remembered
    assert len(set(map(id, remembered._pieces))) == 2


def test_equal_columns_are_one_list_only_if_their_elements_are_of_one_type():
    tree = [torch.zeros(1) for _ in range(LONG)]  # of shape (1,) and strides (1,)
    flags = [torch.zeros(1, dtype=torch.bool) for _ in range(LONG)]  # one byte, and contiguous
    for state in (tree, flags):
        for _ in range(3):
            st.offload(state)
        facts = geometry_cache._remembered[0]._facts
        assert {type(shape) for shape in facts["shapes"]} == {torch.Size}
        assert {type(strides) for strides in facts["strides"]} == {tuple}
        assert {type(nbytes) for nbytes in facts["nbytes"]} == {int}
        assert facts["neg"] is facts["nested"]


def test_a_list_of_addresses_is_another_one_if_one_differs_in_the_last_bit():
    memory = torch.zeros(COUNT + 1, dtype=torch.uint8)
    one, other = ([memory[start + number :][:1] for number in range(COUNT)] for start in (0, 1))
    for _ in range(3):
        st.offload(one)
        st.offload(other)
    (remembered,) = geometry_cache._remembered
    assert {place.pointers[0] for place in remembered._known_addresses} == {memory.data_ptr(), memory.data_ptr() + 1}


def remembered_bytes(make):
    """Return what it takes to remember a list at four places, but for guards, and how much it is said to take."""
    forget_geometries()
    trees = [make() for _ in range(geometry_cache._LISTS)]
    for tree in (*trees, *trees):
        st.offload(tree)
    (remembered,) = geometry_cache._remembered
    assert len(remembered._known_addresses) == geometry_cache._LISTS
    seen: set[int] = set()
    taken = 0
    pending = [remembered._facts, *(piece.facts for piece in remembered._pieces)]
    pending += [getattr(place, name) for place in remembered._known_addresses for name in ("pointers", "storage_bytes")]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        taken += sys.getsizeof(value)
        pending += value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return taken, remembered.nbytes


@pytest.mark.slow
@pytest.mark.parametrize(("make", "guarded"), [(layers, 500), (telling, 20_000)], ids=["layers", "telling"])
def test_no_more_memory_is_taken_than_is_said(make, guarded):
    taken, said = remembered_bytes(partial(make, 20_000))
    assert taken + guarded * GUARD_BYTES < said
    assert said < 1.25 * (taken + guarded * GUARD_BYTES)


#: More than a guard takes for one tensor.
GUARD_BYTES = 176
STATUS = Path("/proc/self/status")


def in_use():
    return next(int(line.split()[1]) << 10 for line in STATUS.read_text().splitlines() if line.startswith("VmRSS"))


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells a process how much memory it takes")
def test_guards_take_no_more_than_is_said():
    tensors = telling(30_000)
    shapes, strides = Columns(tensors).shapes, Columns(tensors).strides
    give_back_freed_memory()
    guards, before = [], in_use()
    for start in range(0, len(tensors), geometry_cache._PIECE):
        piece = slice(start, start + geometry_cache._PIECE)
        guards.append(geometry_guard(tensors[piece], shapes[piece], strides[piece]))
    assert (in_use() - before) / len(tensors) < GUARD_BYTES
    assert guards[-1](tensors[piece])


def test_memory_is_bounded(recognised):
    for size in range(1, 3 * geometry_cache._REMEMBERED):
        tree = [torch.zeros(size) for _ in range(COUNT + size % 5)]
        for _ in range(3):
            st.offload(tree)
    assert len(geometry_cache._remembered) == geometry_cache._REMEMBERED
    assert len(geometry_cache._glimpsed) <= geometry_cache._REMEMBERED
    recognised.clear()
    st.offload(tree)
    assert recognised  # the latest are the ones that are kept
    forget_geometries()
    trees = [simple() for _ in range(3 * geometry_cache._LISTS)]
    for tree in [*trees, *trees]:
        st.offload(tree)
    (remembered,) = geometry_cache._remembered
    assert len(remembered._known_addresses) == geometry_cache._LISTS
    for count in range(COUNT, COUNT + 50):
        st.offload(simple(count))
        assert len(geometry_cache._glimpsed) <= geometry_cache._REMEMBERED


def test_nothing_is_kept_alive():
    trees = [simple(), varied(), simple(LONG)]
    for tree in trees:
        other = [tensor.clone() for tensor in tree]
        for _ in range(4):
            st.offload(tree)
            st.similarity(tree, other, values=True)
            st.copy_into(tree, other)
            staged(tree, None)
    assert geometry_cache._remembered
    every = [tensor for tree in (*trees, other) for tensor in tree]
    dead = [weakref.ref(tensor) for tensor in every] + [weakref.ref(tensor.untyped_storage()) for tensor in every]
    del trees, tree, every, other
    gc.collect()
    assert [ref() for ref in dead] == [None] * len(dead)


def test_forget_forgets():
    for _ in range(2):
        st.offload(simple())
        st.offload(simple(COUNT + 1))
    st.offload(simple(COUNT + 2))
    assert geometry_cache._remembered
    assert geometry_cache._glimpsed
    forget_geometries()
    assert geometry_cache._remembered == ()
    assert geometry_cache._glimpsed == {}


def test_a_torch_without_guards_is_only_slower(monkeypatch, recognised):
    monkeypatch.setattr(geometry_cache, "geometry_guard", lambda *_: None)
    tree = varied()
    for _ in range(5):
        assert_trees_equal(st.offload(tree), tree)
    assert not recognised


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode, contextlib.nullcontext])
def test_modes_of_autograd_change_nothing(mode, recognised):
    tree, grown_up = simple(), simple()
    for _ in range(3):
        st.offload(tree)
    grown_up[5].requires_grad_()
    recognised.clear()
    with mode():
        enabled = torch.is_grad_enabled()
        result, other = st.offload(tree), st.offload(grown_up)
        assert torch.is_grad_enabled() is enabled
    assert recognised
    assert_trees_equal(result, tree)
    assert_trees_equal(other, grown_up)
    assert not any(tensor.is_inference() for tensor in (*result, *other))


# Threads


def test_another_thread_that_remembers_the_same_first_does_no_harm(monkeypatch):
    class Contended(dict):
        def get(self, key, default=None):
            found = super().get(key, default)
            self.clear()  # just after, another thread has taken it
            return found

    monkeypatch.setattr(geometry_cache, "_glimpsed", Contended())
    tree = simple()
    for _ in range(4):
        assert_trees_equal(st.offload(tree), tree)


def test_threads_that_see_each_others_lists():
    ready = threading.Barrier(4, timeout=units(30))

    def work(number):
        ready.wait()
        for turn in range(25):
            tree = simple(COUNT + (number + turn) % 3, start=number)
            if turn % 4 == 0:
                tree[turn].requires_grad_()
            if turn % 7 == 3:
                forget_geometries()
            result = st.offload(tree)
            assert all(torch.equal(*pair) for pair in zip(result, tree, strict=True))
            assert [t.requires_grad for t in result] == [t.requires_grad for t in tree]

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, number) for number in range(4)]:
            future.result(timeout=units(60))
