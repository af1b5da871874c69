"""``delta`` and ``apply_delta``: encodings, ties, damage, and writing that is interrupted."""

from dataclasses import replace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import statetree as st
from statetree.transforms.deltas import state_parts
from tests.judge import assert_trees_equal
from tests.judge.watch import Watch


def states(dtype=torch.float32):
    base = {"a": torch.arange(5000).to(dtype), "b": torch.arange(30).view(5, 6), "rest": torch.ones(9), "step": 1}
    new = st.offload(base)
    new["a"][7], new["a"][4000] = -1, -2
    new["b"][2:4] = -3
    new["step"] = 2
    return base, new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex128], ids=str)
def test_positions_take_few_bytes(dtype):
    base, new = states(dtype)
    change = st.delta(new, base)
    assert change.changed == {"a": 2, "b": 12, "step": 1}
    found = change.tensors["a"]
    assert (found.gaps.dtype, found.positions().tolist()) == (torch.uint16, [7, 4000])
    assert change.tensors["b"].gaps.dtype == torch.uint8
    assert change.nbytes == 2 * (2 + dtype.itemsize) + 12 * (1 + 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_two_percent_anywhere_take_few_bytes(dtype):
    base = {"w": torch.zeros(1_000_000, dtype=dtype)}
    places = torch.randperm(1_000_000, generator=torch.Generator().manual_seed(1))[:20_000]
    change = st.delta({"w": base["w"].index_fill(0, places, 1)}, base)
    assert change.changed == {"w": 20_000}
    assert change.nbytes <= 20_000 * (2 + dtype.itemsize)  # where positions of their own would take 4 bytes each


def test_others_can_read_a_flat_delta():
    base, new = states()
    flat, _ = st.to_flat(st.delta({"a": new["a"]}, {"a": base["a"]}))
    assert all(isinstance(leaf, torch.Tensor) for leaf in flat.values())
    positions = flat["tensors.a.head"][0] + flat["tensors.a.gaps"].to(torch.int64).cumsum(0)
    base["a"][positions] = flat["tensors.a.values"]
    assert base["a"].equal(new["a"])


def test_what_changed_everywhere_is_taken_whole():
    base, new = {"w": torch.arange(8.0).view(2, 4).T}, {"w": -torch.arange(8.0).view(2, 4).T - 1}
    change = st.delta(new, base)
    assert change.tensors["w"].is_whole
    assert change.nbytes == 32
    assert_trees_equal(st.apply_delta(change, base), new)


def test_nan_payloads_and_the_signs_of_zeros_are_kept():
    base = {"w": torch.tensor([0.0, float("nan"), 1.0])}
    new = {"w": torch.tensor([0x80000000 - (1 << 32), 0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)}
    change = st.delta(new, base)
    assert change.changed == {"w": 2}
    assert st.apply_delta(change, base)["w"].view(torch.int32).equal(new["w"].view(torch.int32))


def test_sparse_tensors_are_taken_by_their_parts_and_objects_whole():
    def made(number):
        sparse = torch.sparse_coo_tensor([[0, number]], [1.0, 2.0], (5,), check_invariants=True)
        return {"sparse": sparse, "generator": torch.Generator().manual_seed(number), "same": slice(1, 2)}

    base, new = made(1), made(2)
    change = st.delta(new, base)
    assert change.changed == {"generator": 1, "sparse#0": 1}
    result = st.apply_delta(change, base)
    assert st.similarity(result, new, values=True)
    assert result["sparse"] is base["sparse"]
    more = {**new, "sparse": torch.sparse_coo_tensor([[0, 1, 3]], [1.0, 2.0, 3.0], (5,), check_invariants=True)}
    with pytest.raises(st.TreeMismatch, match="number of specified elements"):
        st.copy_into(more, result)
    change = st.delta(more, new)
    assert change.changed == {"sparse": 1}
    for _ in range(2):
        result = st.apply_delta(change, result)
        assert st.similarity(result, more, values=True)
    with pytest.raises(st.TreeMismatch, match="at sparse: expected the value of the base"):
        st.apply_delta(change, made(1))
    with pytest.raises(st.TreeMismatch, match=r"at sparse#0: expected a tensor of shape \(1, 2\), got one of \(1, 3\)"):
        st.apply_delta(st.delta(made(4), new), result)


def test_tied_tensors_are_written_once():
    base = {"embed": torch.arange(6.0), "head": None}
    base["head"] = base["embed"]
    new = st.offload(base)
    new["embed"][3] = 9
    change = st.delta(new, base)
    assert change.nbytes == 5
    untied = {"embed": torch.arange(6.0), "head": torch.arange(6.0)}
    assert st.similarity(st.apply_delta(change, untied), new, values=True)
    result = st.apply_delta(change, base)
    assert result["embed"] is result["head"]
    assert st.similarity(result, new, values=True)


def test_ties_that_the_base_had_not_are_refused():
    base = {"a": torch.arange(4.0), "b": torch.arange(4.0)}
    new = {"a": torch.tensor([0.0, 1, 2, 7]), "b": torch.arange(4.0)}
    change = st.delta(new, base)
    shared = torch.arange(4.0)
    watch = Watch(tied := {"a": shared, "b": shared})
    with pytest.raises(st.TreeMismatch, match="at a: expected memory of its own"):
        st.apply_delta(change, tied)
    watch.check()
    with pytest.raises(st.TreeMismatch, match="ties at"):
        st.delta(new, tied)


@pytest.mark.parametrize(
    ("left", "message"),
    [
        ({"w": torch.zeros(3)}, "shape differs at w"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, "dtype differs at w"),
        ({"v": torch.zeros(2)}, "missing at w"),
        ({"w": 3}, "leaf type differs at w"),
        ({"w": torch.zeros(2, device="meta")}, "at w"),
    ],
)
def test_trees_that_differ_in_more_than_values_are_refused(left, message):
    with pytest.raises(st.TreeMismatch, match=message):
        st.delta(left, {"w": torch.zeros(2)})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (lambda base: {**base, "a": base["a"].double()}, "at a: expected a leaf of the base"),
        (lambda base: {**base, "more": 1}, "at more: expected a leaf of the base"),
        (lambda base: {"a": base["a"]}, "at b: expected 4 leaves, got 1"),
        (lambda base: {**base, "step": 7}, "at step: expected the value of the base"),
        (lambda base: {**base, "a": base["a"] + 1}, "at a: expected the elements of the base"),
    ],
)
def test_other_trees_are_refused(tree, message):
    base, new = states()
    change = st.delta(new, base)
    watch = Watch(wrong := tree(base))
    with pytest.raises(st.TreeMismatch, match=message):
        st.apply_delta(change, wrong)
    watch.check()


def test_what_is_not_written_is_not_looked_at():
    base, new = states()
    change = st.delta(new, base)
    base["rest"][3] = 5
    result = st.apply_delta(change, base)
    assert base["a"].equal(new["a"])
    assert result["rest"].tolist() == [1, 1, 1, 5, 1, 1, 1, 1, 1]


def damage_gaps(change):
    return replace(change, gaps=change.gaps.flip(0))


def damage_start(change):
    head = change.head.clone()
    head[0] = 4999
    return replace(change, head=head)


DAMAGES = {
    "gaps that do not ascend": damage_gaps,
    "positions behind the end": damage_start,
    "a negative start": lambda change: replace(change, head=change.head.index_fill(0, torch.tensor([0]), -5)),
    "too few values": lambda change: replace(change, values=change.values[:-1]),
    "values of another dtype": lambda change: replace(change, values=change.values.double()),
    "other values": lambda change: replace(change, values=change.values + 1),
    "other gaps": lambda change: replace(change, gaps=change.gaps + (change.gaps > 0).to(torch.uint8)),
    "a short head": lambda change: replace(change, head=change.head[:2]),
    "gaps that are no integers": lambda change: replace(change, gaps=change.gaps.float()),
    "no head": lambda change: replace(change, head=change.head[:0]),
    "gaps on meta": lambda change: replace(change, gaps=change.gaps.to("meta")),
    "another holder": lambda change: replace(change, head=change.head + torch.tensor([0, 0, 1, 0])),
    "another shape": lambda change: replace(change, head=torch.cat([change.head, torch.tensor([2])])),
    "short sums": lambda change: replace(change, sums=change.sums[:1]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_delta_is_refused(damage):
    base = {"a": torch.arange(5000.0), "b": torch.arange(5000.0)}
    new = {"a": base["a"] + (base["a"] % 100 == 50), "b": base["b"] + (base["b"] % 100 == 50)}
    change = st.delta(new, base)
    broken = replace(change, tensors={**change.tensors, "b": damage(change.tensors["b"])})
    watch = Watch(base)
    with pytest.raises(st.TreeMismatch, match="the delta is damaged at b"):
        st.apply_delta(broken, base)
    watch.check()


VALUES = {
    "an int": (1, 2, 3),
    "a text": ("a", "b", "c"),
    "a tensor for a number": (1, 2, torch.tensor(2)),
    "a sparse tensor": [torch.tensor(each).to_sparse() for each in ([1.0, 0], [1.0, 2], [0, 2.0])],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_value_that_was_damaged_is_refused(values):
    before, after, damaged = values
    base = {"a": torch.arange(9.0), "b": before}
    change = st.delta({"a": torch.arange(9.0) + 1, "b": after}, base)
    old = change.values["b"]
    numbers = [old.numbers[:1], old.numbers.flip(0), old.numbers.float(), None]
    for broken in [replace(old, value=damaged), *(replace(old, numbers=each) for each in numbers)]:
        watch = Watch(base)
        with pytest.raises(st.TreeMismatch, match="the delta is damaged at b"):
            st.apply_delta(replace(change, values={"b": broken}), base)
        watch.check()
    st.apply_delta(change, base)


PARTS = {
    "sparse": lambda *values: torch.tensor([0.0, *values]).to_sparse(),
    "CSR": lambda *values: torch.tensor([[0.0, *values]]).to_sparse_csr(),
    "quantized": lambda *values: torch.quantize_per_tensor(torch.tensor(values), 0.5, 0, torch.qint8),
    "jagged": lambda *values: torch.nested.nested_tensor([torch.tensor(values), torch.ones(3)], layout=torch.jagged),
    "two tensors": lambda *values: TwoTensor(torch.tensor(values), -torch.tensor(values)),
}


@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_leaves_that_are_made_of_parts_are_written_in_place(make):
    base, new = {"w": make(*map(float, range(1, 40)))}, {"w": make(*map(float, range(1, 39)), 5.0)}
    change, leaf = st.delta(new, base), base["w"]
    assert all(name.startswith("w#") and count == 1 for name, count in change.changed.items())
    assert change.nbytes < 20
    back = change.inverse(base)
    wrong = {"w": make(*map(float, range(2, 41)))}
    watch = Watch(wrong)
    with pytest.raises(st.TreeMismatch, match=r"at w#.: expected the elements of the base"):
        st.apply_delta(change, wrong)
    watch.check()
    for _ in range(2):
        assert st.apply_delta(change, base)["w"] is leaf
        assert st.similarity(base, new, values=True)
    st.apply_delta(back, base)
    assert not st.delta({"w": make(*map(float, range(1, 40)))}, base)


@pytest.mark.parametrize("table", [None, torch.zeros(1), torch.zeros(1, 4, dtype=torch.int64)], ids=repr)
def test_a_table_that_was_damaged_is_refused(table):
    base = {"a": torch.arange(9.0)}
    change = replace(st.delta({"a": torch.arange(9.0) + 1}, base), table=table)
    with pytest.raises(st.TreeMismatch, match="the delta is damaged at table"):
        st.apply_delta(change, base)


class Interrupt(BaseException):
    pass


def test_what_was_interrupted_is_completed_by_applying_it_again(monkeypatch):
    base, new = states()
    base["c"], new["c"] = torch.arange(6.0), -torch.arange(6.0)
    change = st.delta(new, base)
    real = [state_parts.put, state_parts.copy_all]
    for last in range(3):
        for after in (False, True):
            target, count = st.offload(base), 0

            def interrupted(function, *args, last=last, after=after):
                nonlocal count
                count += 1
                if count > last and not after:
                    raise Interrupt
                function(*args)
                if count > last:
                    raise Interrupt

            with monkeypatch.context() as patch:
                patch.setattr(state_parts, "put", lambda *args: interrupted(real[0], *args))
                patch.setattr(state_parts, "copy_all", lambda *args: interrupted(real[1], *args))
                with pytest.raises(Interrupt):
                    st.apply_delta(change, target)
            result = st.apply_delta(change, target)
            assert st.similarity(result, new, values=True)


def test_what_cannot_be_written_is_refused():
    base, new = {"w": torch.zeros(3)}, {"w": torch.arange(3.0)}
    with pytest.raises(st.TreeMismatch, match="at w: expected memory of its own, got memory in which it overlaps"):
        st.apply_delta(st.delta(new, base), {"w": torch.zeros(1).expand(3)})
    with torch.inference_mode():
        frozen = {"w": torch.zeros(3)}
    with pytest.raises(st.TreeMismatch, match="an inference tensor"):
        st.apply_delta(st.delta({"w": torch.ones(3)}, {"w": torch.zeros(3)}), frozen)


def test_deltas_in_a_row_fit_each_other():
    a, b = states()
    first = st.delta(b, a)
    with pytest.raises(st.TreeMismatch, match=r"then: .* expected deltas of one tree"):
        first.then(st.delta({"w": torch.ones(1)}, {"w": torch.zeros(1)}))
    with pytest.raises(st.TreeMismatch, match="at step: expected what the first delta makes"):
        first.then(st.delta({**b, "step": 5}, {**b, "step": 4}))
    with pytest.raises(st.TreeMismatch, match=r"inverse: .* at a: expected the elements of the base"):
        first.inverse(b)


def test_deltas_in_a_row_take_a_leaf_whole_or_by_its_parts():
    a, b, c = ({"w": torch.tensor(values).to_sparse()} for values in ([1.0, 0], [1.0, 2], [1.0, 3]))
    whole, parts = st.delta(b, a), st.delta(c, b)
    assert (list(whole.changed), list(parts.changed)) == (["w"], ["w#1"])
    with pytest.raises(st.TreeMismatch, match="at w#1: expected deltas of the same parts"):
        whole.then(parts)
    with pytest.raises(st.TreeMismatch, match="at w#1: expected deltas of the same parts"):
        parts.then(st.delta(a, c))
    assert st.similarity(st.apply_delta(whole.then(st.delta(a, b)), st.offload(a)), a, values=True)
    assert st.similarity(st.apply_delta(parts.then(st.delta(b, c)), b), b, values=True)


def test_gradients_do_not_stand_in_the_way():
    model = torch.nn.Linear(3, 3)
    base = model.state_dict(keep_vars=True)
    new = st.offload(base)
    with torch.no_grad():
        new["weight"][1, 1] += 1
    result = st.apply_delta(st.delta(new, base), base)
    assert result["weight"] is model.weight
    assert model.weight.equal(new["weight"])
    assert repr(st.delta(new, st.offload(new))) == "<Delta of 2 leaves: 0 elements and 0 values differ>"


def test_arguments_in_the_wrong_order_are_told():
    base = {"w": torch.zeros(3)}
    change = st.delta({"w": torch.ones(3)}, base)
    with pytest.raises(TypeError, match="apply_delta: the first argument is no delta: expected a Delta, got a dict"):
        st.apply_delta(base, change)
    assert not base["w"].any()


def test_bools_of_other_bytes_keep_these_wherever_a_change_is_brought():
    base, new = ({"k": torch.tensor([byte, 1, 2, 3], dtype=torch.uint8).view(torch.bool)} for byte in (0, 255))
    change = st.delta(new, base)
    for brought in (change, st.reshard(change, base)):
        result = st.apply_delta(brought, st.offload(base))
        assert result["k"].view(torch.uint8).tolist() == [255, 1, 2, 3]
