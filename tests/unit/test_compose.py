"""``chain`` and ``stream``: buckets, what is alive at a time, ties, errors and odd steps."""

import weakref
from functools import partial

import pytest
import torch

import statetree as st
from statetree import compose, declare
from statetree.compose import Chain
from tests.judge import assert_trees_equal
from tests.judge.watch import Watch


class Box:
    """An opaque object."""

    def __init__(self, **content):
        self.__dict__.update(content)


def ramp(*shape, start=0):
    count = 1
    for size in shape:
        count *= size
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


@pytest.fixture
def bucket_bytes(monkeypatch):
    return partial(monkeypatch.setattr, compose, "BUCKET_BYTES")


class Recorder:
    """A step that notes the buckets it gets."""

    def __init__(self, step=st.offload):
        self.step = step
        self.buckets = []

    def __call__(self, bucket):
        self.buckets.append(list(bucket))
        return self.step(bucket)


def buckets_of(tree):
    recorder = Recorder()
    result = dict(st.stream(tree, recorder))
    assert sorted(key for bucket in recorder.buckets for key in bucket) == sorted(map(str, result))
    return recorder.buckets


# What is leafwise


def unhashable():
    class Step:
        __hash__ = None

        def __call__(self, tree):
            return tree

    return Step()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (st.offload, True),
        (st.allocate_like, True),
        (partial(partial(st.offload, share_memory=True), copy=False), True),
        (st.chain(st.offload, partial(st.allocate_like)), True),
        (partial(st.chain(st.offload)), True),
        (st.chain(), True),
        (st.chain(st.offload, len), False),
        (st.similarity, False),
        (partial(st.map_leaves, abs), False),
        (lambda tree: st.offload(tree), False),
        (unhashable(), False),
    ],
    ids=range(11),
)
def test_is_leafwise(step, expected):
    assert compose._streams(step) is expected


def test_a_step_can_be_declared_leafwise(monkeypatch, bucket_bytes):
    monkeypatch.setattr(declare, "_LEAFWISE", set(declare._LEAFWISE))
    bucket_bytes(1)
    sizes = []

    @declare.leafwise
    def step(tree):
        sizes.append(len(tree))
        return tree

    st.chain(step, st.offload)({"a": ramp(1), "b": ramp(1)})
    assert sizes == [1, 1]


# chain


def test_a_chain_applies_its_steps_in_turn():
    chained = st.chain(lambda tree: [*tree, 1], lambda tree: [*tree, 2], tuple)
    assert chained([]) == (1, 2)
    assert st.chain()(chained) is chained


def test_chains_within_chains_are_flat_and_frozen():
    inner = st.chain(st.offload, len)
    outer = st.chain(inner, st.chain(), inner)
    assert outer.steps == (st.offload, len, st.offload, len)
    assert outer == st.chain(st.offload, len, st.offload, len)
    with pytest.raises(AttributeError):
        outer.steps = ()


@pytest.mark.parametrize(("steps", "position"), [((None,), 0), ((st.offload, 3), 1), ((len, len, {"a": 1}), 2)])
def test_what_cannot_be_called_is_refused_at_once(steps, position):
    with pytest.raises(TypeError, match=f"chain: step {position} cannot be called: expected a transform.*, got "):
        st.chain(*steps)


def test_only_runs_of_leafwise_steps_go_by_bucket(monkeypatch, bucket_bytes):
    bucket_bytes(1)
    applied = []
    by_bucket = compose._apply_by_bucket
    monkeypatch.setattr(
        compose, "_apply_by_bucket", lambda tree, steps: applied.append(len(steps)) or by_bucket(tree, steps)
    )
    seen = []

    def whole(tree):
        seen.append(list(tree))
        return tree

    tree = {"b": ramp(2), "a": ramp(3)}
    st.chain(st.offload, whole, st.offload, partial(st.offload, copy=False), st.offload, whole, st.offload)(tree)
    assert applied == [3]
    assert seen == [["b", "a"]] * 2


def test_between_two_steps_lies_a_bucket(monkeypatch, bucket_bytes):
    bucket_bytes(400)
    alive, most = weakref.WeakSet(), []
    first = st.offload

    def intermediate(tree):
        result = first(tree)
        alive.update(result.values())
        most.append(sum(tensor.nbytes for tensor in alive))
        return result

    monkeypatch.setattr(declare, "_LEAFWISE", {intermediate, st.offload})
    tree = {f"t{number}": ramp(50, start=number) for number in range(20)}
    result = st.chain(intermediate, st.offload)(tree)
    assert_trees_equal(result, tree)
    assert len(most) == 10
    assert max(most) == 400


def test_a_chain_keeps_containers_ties_and_purity(bucket_bytes):
    bucket_bytes(10)
    base = ramp(9)
    tree = {"z": [base, {"m": (base[2:4], 1)}], "a": Box(inner=base, other=ramp(2)), "n": None, "p": ramp(3)}
    watch = Watch(tree)
    result = st.chain(st.offload, st.offload)(tree)
    watch.check()
    assert_trees_equal(result, tree)
    assert list(result) == list(tree)


# stream


def test_leaves_come_in_the_order_of_the_paths(bucket_bytes):
    tree = {"b": [ramp(10), ramp(5)], "a": {"y": ramp(10), "x": ramp(4)}, "c": 1}
    for limit in (1, 80, 1 << 20):
        bucket_bytes(limit)
        found = list(st.stream(tree, st.offload))
        assert [str(path) for path, _ in found] == ["a.x", "a.y", "b.0", "b.1", "c"]
        assert_trees_equal([leaf for _, leaf in found], [tree["a"]["x"], tree["a"]["y"], *tree["b"], 1])


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (80, [["a", "b"], ["c"], ["d", "e"]]),
        (79, [["a"], ["b"], ["c"], ["d", "e"]]),
        (84, [["a", "b"], ["c"], ["d", "e"]]),
        (164, [["a", "b", "c"], ["d", "e"]]),
        (0, [["a"], ["b"], ["c"], ["d"], ["e"]]),
        (1 << 30, [["a", "b", "c", "d", "e"]]),
    ],
)
def test_a_bucket_takes_at_most_its_bytes_or_one_leaf(bucket_bytes, limit, expected):
    bucket_bytes(limit)
    tree = {"e": ramp(1), "d": ramp(2), "c": ramp(21), "b": ramp(10), "a": ramp(10)}
    assert [sorted(bucket) for bucket in buckets_of(tree)] == expected


def test_plain_values_take_no_bytes(bucket_bytes):
    bucket_bytes(0)
    tree = {"a": 1, "b": None, "c": "x", "d": ramp(1), "e": ramp(1)}
    assert buckets_of(tree) == [["a", "b", "c"], ["d"], ["e"]]


def test_tied_leaves_are_in_one_bucket(bucket_bytes):
    bucket_bytes(40)
    base, other, shared = ramp(10), ramp(10), Box(held=3)
    tree = {
        "a": base[:5],
        "b": other[:2],
        "c": base[5:],  # no overlap, but one storage
        "d": Box(inner=other),
        "e": shared,
        "f": ramp(10),
        "g": shared,
        "h": torch.nn.Parameter(base[2:3]),
    }
    buckets = list(map(set, buckets_of(tree)))
    for group in ({"a", "c", "h"}, {"b", "d"}, {"e", "g"}):
        assert sum(not group.isdisjoint(bucket) for bucket in buckets) == 1
    assert {"e", "f", "g"} in buckets  # what takes no bytes goes with the next
    assert_trees_equal({str(path): leaf for path, leaf in st.stream(tree, st.offload)}, tree)


def test_ties_are_followed_through_leaves_that_hold_several_tensors(bucket_bytes):
    bucket_bytes(1)
    x, y, z = ramp(3), ramp(3), ramp(3)
    tree = {"a": x, "b": Box(one=x, other=y), "c": Box(one=y, other=z), "d": z, "e": ramp(3)}
    assert [sorted(bucket) for bucket in buckets_of(tree)] == [["a", "b", "c", "d"], ["e"]]


def test_no_tensor_is_an_own_bucket_twice_for_a_tied_group(bucket_bytes):
    bucket_bytes(1)
    base = ramp(4)
    tree = {"a": base, "b": ramp(4), "c": base, "d": ramp(4)}
    paths = [str(path) for path, _ in st.stream(tree, st.offload)]
    assert paths == ["a", "b", "c", "d"]
    assert [sorted(bucket) for bucket in buckets_of(tree)] == [["a", "c"], ["b"], ["d"]]


def test_keys_that_look_alike_are_kept_apart(bucket_bytes):
    tree = {"a.b": ramp(1), "a": {"b": ramp(2)}, 0: ramp(3), "0": ramp(4)}
    for limit in (1, 1 << 20):
        bucket_bytes(limit)
        found = {tuple(path): leaf.numel() for path, leaf in st.stream(tree, st.offload)}
        assert found == {("a.b",): 1, ("a", "b"): 2, (0,): 3, ("0",): 4}


def test_a_stream_is_lazy(bucket_bytes):
    bucket_bytes(1)
    recorder = Recorder()
    streamed = st.stream({"a": ramp(1), "b": ramp(1), "c": ramp(1)}, recorder)
    assert recorder.buckets == []
    next(streamed)
    assert recorder.buckets == [["a"]]
    next(streamed)
    streamed.close()
    assert recorder.buckets == [["a"], ["b"]]


def test_an_empty_tree_streams_nothing():
    assert list(st.stream({}, Recorder())) == []
    assert [(str(path), leaf) for path, leaf in st.stream(5, st.offload)] == [("", 5)]


def alive_when_called(tree, *, leaf_bytes):
    """Return how many bytes of results are alive whenever the next bucket is asked for."""
    alive, at_calls = weakref.WeakSet(), []

    def step(bucket):
        at_calls.append(sum(tensor.nbytes for tensor in alive))
        result = st.offload(bucket)
        alive.update(result.values())
        return result

    streamed = st.stream(tree, step)
    while next(streamed, None) is not None:
        assert len(alive) * leaf_bytes <= compose.BUCKET_BYTES
    return at_calls


def test_nothing_of_a_bucket_is_alive_when_the_next_is_made(bucket_bytes):
    bucket_bytes(80)
    tree = {f"t{number}": ramp(10, start=number) for number in range(8)}
    assert alive_when_called(tree, leaf_bytes=40) == [0, 0, 0, 0]


def test_a_stream_keeps_its_source_alive_only_by_the_leaves():
    tree = {"a": ramp(1), "b": ramp(1)}
    streamed = st.stream(tree, st.offload)
    next(streamed)
    tree.clear()
    assert [str(path) for path, _ in streamed] == ["b"]


# Errors


def freed():
    tensor = ramp(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("limit", [1, 1 << 20])
@pytest.mark.parametrize(
    "apply", [lambda tree: list(st.stream(tree, st.offload)), st.chain(st.offload, st.offload)], ids=["stream", "chain"]
)
def test_errors_name_the_path_in_the_tree(apply, limit, bucket_bytes):
    bucket_bytes(limit)
    tree = {"model": {"layers": [ramp(2), freed()]}, "a": ramp(3)}
    with pytest.raises(st.UnsupportedLeaf, match=r"the leaf at model\.layers\.1 was freed") as caught:
        apply(tree)
    assert tuple(caught.value.path) == ("model", "layers", 1)
    assert str(caught.value.path) == "model.layers.1"


@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_the_path_of_an_odd_key_is_the_trees(limit, bucket_bytes):
    bucket_bytes(limit)
    tree = {"x": ramp(2), ("t", 1): {"a.b": freed()}}
    with pytest.raises(st.UnsupportedLeaf, match="was freed") as caught:
        list(st.stream(tree, st.offload))
    assert tuple(caught.value.path) == (("t", 1), "a.b")


def test_leaves_that_cannot_be_taken_apart_are_named_before_anything_is_done():
    recorder = Recorder()
    with pytest.raises(st.UnsupportedLeaf, match=r"stream: .*b\.c") as caught:
        list(st.stream({"a": ramp(1), "b": {"c": Box(cannot=(number for number in range(3)))}}, recorder))
    assert tuple(caught.value.path) == ("b", "c")
    assert recorder.buckets == []


def test_a_cycle_is_refused():
    tree = {"a": []}
    tree["a"].append(tree)
    with pytest.raises(st.CyclicTree, match=r"a\.0"):
        next(st.stream(tree, st.offload))
    with pytest.raises(st.CyclicTree, match=r"a\.0"):
        st.chain(st.offload, st.offload)(tree)


def test_a_steps_own_error_comes_through():
    class Own(Exception):
        pass

    def step(bucket):
        raise Own("own")

    with pytest.raises(Own, match="own"):
        list(st.stream({"a": 1}, step))
    with pytest.raises(Own, match="own"):
        st.chain(st.offload, step, st.offload)({"a": 1})


STRUCTURE_CHANGES = {
    "list": (lambda bucket: list(bucket.values()), "got list"),
    "none": (lambda bucket: None, "got NoneType"),
    "fewer": (lambda bucket: dict(list(bucket.items())[1:]), "got "),
    "more": (lambda bucket: {**bucket, "extra": 1}, "got "),
    "renamed": (lambda bucket: {key + "x": value for key, value in bucket.items()}, r"got \['a\.0x'"),
}


@pytest.mark.parametrize("change", STRUCTURE_CHANGES)
def test_a_step_that_changes_the_structure_is_refused(change):
    step, got = STRUCTURE_CHANGES[change]
    expected = rf"stream: the step changed the structure of a bucket: expected a dict of 2 leaves from 'a.0' on, {got}"
    with pytest.raises(st.TreeMismatch, match=expected):
        list(st.stream({"a": [ramp(1), ramp(1)]}, step))


def test_a_step_may_reorder_its_bucket_and_change_the_leaves():
    def step(bucket):
        return {key: str(bucket[key].item()) for key in reversed(bucket)}

    tree = {"b": torch.tensor(2), "a": torch.tensor(1), "c": torch.tensor(3)}
    assert [leaf for _, leaf in st.stream(tree, step)] == ["1", "2", "3"]


def test_a_step_of_a_chain_may_change_the_structure():
    assert st.chain(st.offload, list, st.offload, len)({"a": ramp(1), "b": ramp(1)}) == 2


def test_a_failed_chain_leaves_the_tree_alone(bucket_bytes):
    bucket_bytes(1)
    tree = {"a": ramp(3), "b": freed()}
    watch = Watch(tree["a"])
    with pytest.raises(st.UnsupportedLeaf, match="at b was freed"):
        st.chain(st.offload, st.offload)(tree)
    watch.check()


def test_a_chain_is_a_value():
    assert isinstance(st.chain(len), Chain)
    assert hash(st.chain(len)) == hash(st.chain(len))
    assert st.chain(len) != st.chain(st.offload)


def test_a_step_need_not_be_hashable():
    class Doubled:
        __hash__ = None

        def __call__(self, tree):
            return st.map_leaves(lambda leaf: leaf * 2, tree)

    assert st.chain(Doubled(), Doubled())({"a": 1}) == {"a": 4}
