"""Arrays of NumPy: opaque objects whose elements are copied once, exactly, into memory of their own."""

import gc
import pickle
import tempfile
import weakref

import numpy as np
import pytest
import torch

import statetree as st
from benchmarks.memory import peak_of
from statetree.leaves import take_apart
from statetree.leaves.builtin import OPAQUE
from statetree.leaves.types.arrays import is_array
from statetree.testing import run_ranks
from tests.judge import assert_independent

MANY = 3000  # NumPy makes its arrays on the very bytes that they were pickled into, if these are many


class Named(np.ndarray):
    pass


class WithNote(np.ndarray):
    """Pickled in a way of its own, around NumPy's."""

    def __reduce__(self):
        function, arguments, state = super().__reduce__()
        return function, arguments, (state, self.note)

    def __setstate__(self, state):
        super().__setstate__(state[0])
        self.note = state[1]


class Buffered:
    """Gives pickle a buffer of its own."""

    def __init__(self, buffer):
        self.buffer = buffer

    def __reduce_ex__(self, protocol):
        return Buffered, (pickle.PickleBuffer(self.buffer),)


def locked(array):
    array.flags.writeable = False
    return array


def mapped(mode):
    with tempfile.NamedTemporaryFile() as file:
        file.write(np.arange(float(MANY)).tobytes())
        file.flush()
        return np.memmap(file.name, dtype="f8", mode=mode, shape=(MANY // 2, 2), order="F")


def with_note():
    array = np.arange(MANY).view(WithNote)
    array.note = "note"
    return array


ARRAYS = {
    "contiguous": lambda: np.arange(MANY).reshape(-1, 3),
    "fortran": lambda: np.asfortranarray(np.arange(MANY).reshape(-1, 3)),
    "transposed": lambda: np.arange(MANY).reshape(10, 3, -1).transpose(1, 0, 2),
    "strided": lambda: np.arange(2 * MANY)[::2],
    "reversed": lambda: np.arange(MANY)[::-1],
    "broadcast": lambda: np.broadcast_to(np.arange(MANY), (2, MANY)),
    "structured": lambda: np.arange(4 * MANY, dtype="u1").view([("a", "<f4"), ("b", "S4"), ("c", ">i4", (2,))]),
    "records": lambda: np.rec.array(np.arange(4 * MANY, dtype="u1").view([("a", "<f4"), ("b", ">i8")])),
    "other_byte_order": lambda: np.arange(MANY, dtype=">i4"),
    "nan_payloads": lambda: (np.arange(MANY, dtype="u8") | 0x7FF0_0000_0000_0001).view("f8"),
    "dates": lambda: np.arange(MANY).astype("M8[s]"),
    "text": lambda: np.arange(MANY).astype("U5"),
    "float16": lambda: np.arange(MANY, dtype="f2"),
    "without_dims": lambda: np.array(3.5),
    "without_dims_or_lock": lambda: locked(np.array(3.5)),
    "empty": lambda: np.empty((0, 3), "i2", order="F"),
    "without_bytes": lambda: np.zeros(5, "V0"),
    "objects": lambda: np.array([1, "two", [3], None] * 4, dtype=object),
    "locked": lambda: locked(np.arange(MANY)),
    "locked_and_strided": lambda: locked(np.arange(2 * MANY)[::2]),
    "locked_subclass": lambda: locked(np.arange(MANY).view(Named)),
    "subclass": lambda: np.arange(MANY).view(Named),
    "matrix": lambda: np.arange(MANY).reshape(-1, 3).view(np.matrix).T,
    "with_note": with_note,
    "masked": lambda: np.ma.array(np.arange(MANY), mask=np.arange(MANY) % 3 == 0, fill_value=7),
    "mapped": lambda: mapped("r+"),
    "mapped_for_reading": lambda: mapped("r"),
    "of_a_tensor": lambda: torch.arange(MANY).share_memory_().numpy(),
}
#: What pickles itself decides by itself what can be written.
DECIDES = {"with_note", "masked"}


def assert_same_array(again, array, *, flags=True):
    assert type(again) is type(array)
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes() or array.dtype.hasobject
    assert again.dtype.byteorder == array.dtype.byteorder
    if array.dtype.hasobject:
        assert again.tolist() == array.tolist()
    elif flags and array.nbytes:
        assert again.flags.writeable == array.flags.writeable
        assert again.strides == array.copy("K").strides
        assert again.flags.aligned == array.copy("K").flags.aligned
    assert not np.shares_memory(again, array)


def staged(tree):
    with st.Stager() as stager:
        return stager.stage(tree)


def staged_in_the_background(tree):
    with st.Stager() as stager:
        return stager.stage_async(tree).result()


VERBS = {
    "offload": st.offload,
    "allocate_like": st.allocate_like,
    "stage": staged,
    "stage_async": staged_in_the_background,
    "copy_into": lambda tree: st.copy_into(
        tree, st.map_leaves(lambda leaf: None if is_array(leaf) else torch.zeros(1), tree)
    ),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ARRAYS)
def test_copies_are_exact_and_independent(verb, name):
    tree = {"a": ARRAYS[name](), "b": ARRAYS[name](), "in": [{"c": (ARRAYS[name](), torch.ones(1))}]}
    tree["again"] = tree["a"]
    copied = VERBS[verb](tree)
    for again, array in zip((copied["a"], copied["in"][0]["c"][0]), (tree["a"], tree["in"][0]["c"][0]), strict=True):
        assert_same_array(again, array, flags=name not in DECIDES)
    assert copied["again"] is copied["a"]
    assert not np.shares_memory(copied["a"], copied["b"])
    if name == "masked":
        assert (copied["a"].mask == tree["a"].mask).all()
        assert not np.shares_memory(copied["a"].mask, copied["b"].mask)
        assert copied["a"].fill_value == 7
    if name == "with_note":
        assert copied["a"].note == "note"


@pytest.mark.parametrize("name", ["strided", "masked", "with_note", "dates", "contiguous"])
def test_a_tree_put_together_twice_shares_nothing(name):
    parts = take_apart("test", {"a": ARRAYS[name](), "t": torch.ones(1)})
    first, second = (parts.put_together([torch.zeros(1)])["a"] for _ in range(2))
    assert not np.shares_memory(first, second)
    first[:] = first[::-1]
    assert_same_array(second, ARRAYS[name](), flags=name not in DECIDES)


@pytest.mark.parametrize("name", ["masked", "with_note"])
def test_bytes_beside_arrays_of_the_same_bytes_are_left_alone(name):
    array = ARRAYS[name]()
    for data in (bytes(array.tobytes()), bytes(memoryview(array.tobytes()))):
        copied = st.offload({"x": [data, array, {"y": UserHeld(array, data)}]})["x"]
        expected = bytes(bytearray(data))
        copied[1][:] = 0
        copied[2]["y"].array[:] = 0
        assert copied[0] == copied[2]["y"].data == expected


class UserHeld:
    def __init__(self, array, data):
        self.array, self.data = array, data


@pytest.mark.parametrize("verb", [staged, staged_in_the_background])
def test_what_is_staged_does_not_change_with_its_source(verb):
    tree = {"a": np.arange(MANY), "held": UserHeld(np.arange(MANY).reshape(-1, 2).T, b"")}
    copied = verb(tree)
    tree["a"][:] = 0
    tree["held"].array[:] = 0
    assert (copied["a"] == np.arange(MANY)).all()
    assert (copied["held"].array == np.arange(MANY).reshape(-1, 2).T).all()


def test_arrays_are_staged_as_they_are_when_the_stage_begins():
    array, tensor = np.arange(MANY), torch.arange(MANY)
    with st.Stager() as stager:
        before = [stager.stage_async({"a": array, "t": tensor})]
        array[:] = 0
        stager.synchronize()
        tensor.zero_()
    result = before[0].result()
    assert (result["a"] == np.arange(MANY)).all()
    assert (result["t"] == torch.arange(MANY)).all()


def test_views_of_one_array_are_copied_each():
    base = np.arange(MANY)
    copied = st.offload([UserHeld(base, base[5:]), base.reshape(-1, 2), base])
    assert_same_array(copied[0].array, base)
    assert_same_array(copied[0].data, base[5:])
    assert_same_array(copied[1], base.reshape(-1, 2))
    assert copied[2] is copied[0].array
    assert_independent(base, copied)


@pytest.mark.parametrize(
    "buffer", [bytearray(b"ab" * MANY), b"ab" * MANY, np.arange(MANY)], ids=["mutable", "bytes", "array"]
)
def test_classes_that_give_pickle_a_buffer(buffer):
    copied = st.offload([Buffered(buffer)])[0].buffer
    assert type(copied) is (bytes if isinstance(buffer, bytes) else bytearray)
    assert copied == memoryview(buffer).cast("B")
    assert copied is not buffer


def test_a_buffer_with_gaps_is_refused_with_its_path():
    with pytest.raises(st.UnsupportedLeaf, match=r"at x \(Buffered\) cannot be taken apart: .* non-contiguous buffer"):
        st.offload({"x": Buffered(np.arange(10)[::2])})


def test_byte_arrays_are_copied():
    source = bytearray(b"ab" * MANY)
    copied = st.offload({"a": source, "b": source})
    assert copied["a"] is copied["b"]
    assert copied["a"] is not source
    assert copied["a"] == source
    source.append(1)  # nothing holds its memory


@pytest.mark.parametrize(
    "name",
    sorted(
        ARRAYS.keys()
        - {
            "empty",
            "without_bytes",
            "objects",
            "locked",
            "locked_and_strided",
            "locked_subclass",
            "mapped_for_reading",
            "without_dims_or_lock",
            "broadcast",
            "masked",
            "with_note",
        }
    ),
)
def test_one_changed_byte_is_noticed(name):
    state, other = {"a": ARRAYS[name]()}, {"a": ARRAYS[name]()}
    digest = st.digest(state)
    assert st.similarity(state, other, values=True)
    assert st.digest(other) == digest
    assert not st.delta(other, state)
    flat = np.lib.stride_tricks.as_strided(other["a"], subok=False)
    bits = flat.reshape(1).view("u1") if not flat.ndim else flat[-1:].copy().reshape(-1).view("u1")
    bits[-1] ^= 1
    if flat.ndim:
        other["a"][-1:] = bits.view(flat.dtype).reshape(flat[-1:].shape)
    assert st.similarity(state, other, values=False)
    assert not st.similarity(state, other, values=True)
    assert st.digest(other) != digest
    assert list(st.delta(other, state).changed) == ["a"]


def test_changes_far_behind_are_noticed():
    state, other = {"a": np.zeros(5 << 20, "u1")}, {"a": np.zeros(5 << 20, "u1")}
    for place in (0, (1 << 20) - 1, 1 << 20, -1):
        other["a"][place] = 1
        assert not st.similarity(state, other, values=True)
        assert st.digest(state) != st.digest(other)
        other["a"][place] = 0
    assert st.similarity(state, other, values=True)
    assert st.digest(state) == st.digest(other)


def _broadcast():
    names = sorted(ARRAYS.keys() - {"with_note"})
    tree = {name: ARRAYS[name]() for name in names} if torch.distributed.get_rank() == 0 else None
    received = st.broadcast(tree)
    for name in names:
        assert_same_array(received[name], ARRAYS[name](), flags=name not in DECIDES)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_arrays_reach_other_ranks():
    run_ranks(2, _broadcast)


MEGABYTES = 200


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("verb", ["offload", "stage", "stage_async", "copy_into"])
def test_a_copy_takes_the_memory_of_one(verb, order):
    tree = {"a": np.ones((MEGABYTES << 10, 1 << 10), "u1", order=order)}
    VERBS[verb]({"a": np.ones(5)})
    peak = peak_of(lambda: VERBS[verb](tree))
    assert peak is None or peak < 1.2 * (MEGABYTES << 20)


def similar(a, b):
    return st.similarity(a, b, values=True)


def digests(a, b):
    return st.digest(a) == st.digest(b)


@pytest.mark.parametrize("verb", [similar, digests])
def test_looking_at_an_array_takes_no_copy_of_it(verb):
    a, b = ({"a": np.ones(MEGABYTES << 20, "u1")} for _ in range(2))
    verb({"a": np.ones(5)}, {"a": np.ones(5)})
    peak = peak_of(lambda: verb(a, b))
    assert peak is None or peak < 0.2 * (MEGABYTES << 20)


@pytest.mark.parametrize("verb", ["offload", "stage", "copy_into"])
def test_an_array_is_not_left_to_the_garbage_collector(verb):
    array = np.arange(MANY)
    held = weakref.ref(array)
    gc.collect()
    gc.disable()
    try:
        VERBS[verb]({"a": array, "t": torch.ones(1)})
        del array
        assert held() is None
    finally:
        gc.enable()


def test_no_buffer_of_a_view_is_held():
    """CPython before 3.13 crashes if a view and a buffer of it are in one cycle of garbage, as exceptions make them."""
    _, rest = OPAQUE.unpack(np.arange(MANY))
    assert len(rest.buffers) == 1
    assert not isinstance(rest.buffers[0].raw().obj, memoryview)
