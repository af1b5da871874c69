"""``combine``: what is combined, what is kept, what is refused, and stored leaves larger than a bucket."""

import numpy
import pytest
import torch
from torch import nn

import statetree as st
from statetree.files import ranges, strided_reading
from statetree.testing import run_ranks
from tests.judge import assert_trees_equal


def numbers(start, count=6):
    return torch.arange(start, start + count, dtype=torch.float32) / 3


def mean(*tensors):
    return sum(tensors) / len(tensors)


def test_leaves_of_numbers_are_combined_and_all_others_are_the_first_ones():
    first = {"w": numbers(1), "n": torch.arange(3), "c": torch.ones(2, dtype=torch.complex64), "s": 1.5, "o": [None]}
    other = {"w": numbers(4), "n": torch.arange(3) + 1, "c": torch.ones(2, dtype=torch.complex64) * 3, "s": 2, "o": [1]}
    found = st.combine(mean, first, other, first)
    assert torch.equal(found["w"], (first["w"] + other["w"] + first["w"]) / 3)
    assert torch.equal(found["c"], (first["c"] + other["c"] + first["c"]) / 3)
    assert all(found[key] is first[key] for key in "ns")
    assert found["o"] == [None]
    assert_trees_equal(first["w"], numbers(1))


def test_where_alone_says_which():
    first, other = {"a": numbers(0), "n": torch.arange(3)}, {"a": numbers(9), "n": torch.arange(3) * 5, "more": 1}
    found = st.combine(torch.maximum, first, other, where="n")
    assert found["a"] is first["a"]
    assert found["n"].tolist() == [0, 5, 10]
    with pytest.raises(st.TreeMismatch, match="combine: no path matches 'b'"):
        st.combine(mean, first, other, where="b")
    with pytest.raises(st.TreeMismatch, match="combine: leaf type differs at s: expected a tensor, got a plain value"):
        st.combine(mean, {"s": 1}, {"s": 2}, where="s")


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.view(2, 3).T,
        lambda base: base[::2],
        lambda base: base[1:2].expand(4, 1),
        lambda base: base[2:2],
        lambda base: base[3],
        lambda base: nn.Parameter(base[1:3]),
        lambda base: nn.Parameter(base.view(3, 2), requires_grad=False),
        lambda base: nn.Buffer(base[1:3]),
        lambda base: base.to("meta"),
    ],
    ids=["transposed", "strided", "expanded", "empty", "scalar", "parameter", "frozen", "buffer", "meta"],
)
@pytest.mark.parametrize(
    "fn", [lambda a, b: a.double() + b, lambda a, b: a, lambda a, b: b.flip(0).flip(0)], ids=["sum", "first", "second"]
)
def test_geometry_and_identity_are_kept(view, fn):
    leaf, other = view(numbers(5)), view(numbers(50)).detach().clone()
    leaf.note = {"kept": 1}
    if not leaf.dim():
        fn = torch.add
    found = st.combine(fn, {"x": leaf}, {"x": other})["x"]
    expected = fn(leaf.detach(), other)
    assert found.is_meta or torch.equal(found, expected)
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, leaf.shape, leaf.stride())
    assert (type(found), found.requires_grad, found.is_leaf) == (type(leaf), leaf.requires_grad, True)
    assert found.note == {"kept": 1}
    memory = {tensor.untyped_storage().data_ptr() for tensor in (leaf, other)} - {0}
    assert found.untyped_storage().data_ptr() not in memory


def tied(start):
    base, weight = numbers(start, 10), nn.Parameter(numbers(start + 20))
    return {"a": base[:6], "b": base[4:], "w": weight, "v": weight, "u": weight.view(2, 3), "own": numbers(start + 7)}


def test_ties_are_kept():
    calls = []

    def fn(a, b):
        calls.append(a.shape)
        return a + 2 * b

    found = st.combine(fn, tied(0), tied(100))
    assert_trees_equal(found, {**(expected := tied_sum()), "own": numbers(7) + 2 * numbers(107)})
    assert found["w"] is found["v"]
    assert len(calls) == 5  # once for what is one view
    assert expected["a"].shape == (6,)


def tied_sum():
    one, two = tied(0), tied(100)
    base = one["a"].untyped_storage(), two["a"].untyped_storage()
    whole = [torch.empty(0).set_(storage, 0, (10,)) for storage in base]
    total, weight = whole[0] + 2 * whole[1], nn.Parameter(one["w"].detach() + 2 * two["w"].detach())
    return {"a": total[:6], "b": total[4:], "w": weight, "v": weight, "u": weight.view(2, 3), "own": None}


@pytest.mark.parametrize("key", ["b", "w", "u"])
def test_ties_that_others_do_not_share_are_refused(key):
    other = tied(100)
    other[key] = other[key].detach().clone()
    with pytest.raises(st.TreeMismatch, match=r"(?s)combine: .*ties at .: values of its own cannot go into"):
        st.combine(mean, tied(0), other)


def test_a_tie_to_what_is_not_combined_is_refused():
    with pytest.raises(st.TreeMismatch, match="combine: ties at a: values of its own cannot go into what shares its"):
        st.combine(mean, tied(0), tied(100), where="a")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": numbers(0, 5)}, r"shape differs at x: expected \(6,\), got \(5,\)"),
        ({"y": numbers(0)}, "missing at x: expected a leaf"),
        ({"x": numbers(0).to_sparse()}, "differs at x"),
        ({"x": 1}, "leaf type differs at x: expected Tensor, got plain value"),
    ],
    ids=["shape", "name", "sparse", "plain"],
)
def test_trees_that_are_not_alike_are_refused(other, message):
    with pytest.raises(st.TreeMismatch, match=f"(?s)combine: .*{message}"):
        st.combine(mean, {"x": numbers(0)}, other)


def test_what_the_function_does_wrong_is_said_with_the_path():
    tree = {"x": numbers(0)}
    with pytest.raises(st.TreeMismatch, match=r"combine: shape differs at x: expected \(6,\), got \(\)"):
        st.combine(torch.sum, tree)
    with pytest.raises(st.TreeMismatch, match=r"combine: result differs at x: .* got float"):
        st.combine(lambda x: 1.0, tree)
    with pytest.raises(ZeroDivisionError) as caught:
        st.combine(lambda x: 1 / 0, tree)
    assert "at x, Tensor torch.float32" in caught.value.__notes__[0]
    with pytest.raises(st.UnsupportedLeaf, match=r"combine: .* at x: .* made of several"):
        st.combine(mean, {"x": numbers(0).to_sparse()})


def test_what_the_function_raises_when_stored_leaves_are_read_is_raised(tmp_path):
    st.save({"x": numbers(0)}, tmp_path / "a.safetensors")

    def fn(a, b):
        if a.numel() > 1:  # the first call is to see the dtype
            raise LookupError("mine")
        return a + b

    stored = st.files.open(tmp_path / "a.safetensors")
    made = st.combine(fn, stored, stored)
    with st.Stager() as stager:
        for read in (st.offload, st.digest, stager.stage, lambda tree: st.copy_into(tree, {"x": numbers(0)})):
            with pytest.raises(LookupError, match=r"^mine\n") as caught:
                read(made)
            assert "at x, Tensor torch.float32" in caught.value.__notes__[0]


@pytest.mark.parametrize("name", ["tree.safetensors", "tree.pt", "tree"])
def test_stored_leaves_are_combined_when_they_are_read(name, tmp_path, monkeypatch):
    trees = [{"w": numbers(i).view(2, 3), "b": numbers(i).bfloat16(), "n": torch.arange(i, i + 2)} for i in range(2)]
    for folder, tree in zip("ab", trees, strict=True):
        (tmp_path / folder).mkdir()
        st.save(tree, tmp_path / folder / name)
    calls = []

    def fn(a, b):
        calls.append(a.numel())
        return (a + b).bfloat16()

    expected = st.combine(lambda a, b: (a + b).bfloat16(), *trees)
    found = st.combine(fn, *(st.files.open(tmp_path / folder / name) for folder in "ab"))
    assert calls == [1, 1]  # to see the dtypes
    assert [str(leaf)[:6] for leaf in st.flatten(found)[0]] == ["Stored"] * 3
    for module in (ranges, strided_reading):
        monkeypatch.setattr(module, "BUCKET_BYTES", 12)
    calls.clear()
    st.save(found, tmp_path / "c.safetensors")
    assert max(calls) * 2 <= 12
    assert st.similarity(st.files.open(tmp_path / "c.safetensors"), expected)
    assert st.similarity(st.offload(found), expected)
    assert torch.equal(found["w"].read((slice(1, 2),)), expected["w"][1:])
    assert st.similarity(st.combine(torch.add, found, expected), st.combine(torch.add, expected, expected))


def test_stored_leaves_keep_their_ties(tmp_path):
    torch.save(tied(0), tmp_path / "a.pt")
    torch.save(tied(100), tmp_path / "b.pt")
    found = st.combine(lambda a, b: a + 2 * b, *(st.files.open(tmp_path / name) for name in ("a.pt", "b.pt")))
    assert_trees_equal(st.offload(found), {**tied_sum(), "own": numbers(7) + 2 * numbers(107)}, storages=False)
    torch.save({**tied(100), "v": numbers(3)}, tmp_path / "c.pt")
    with pytest.raises(st.TreeMismatch, match=r"(?s)combine: .*ties at"):
        st.combine(mean, st.files.open(tmp_path / "a.pt"), st.files.open(tmp_path / "c.pt"))


def combine_shards():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))

    def spread(start, placement):
        whole = nn.Parameter(numbers(start, 15).view(5, 3))
        sharded = nn.Parameter(distribute_tensor(whole.detach(), mesh, [placement]))
        return {"rows": sharded, "again": sharded, "whole": distribute_tensor(numbers(start), mesh, [Replicate()])}

    first, other = spread(0, Shard(0)), spread(100, Shard(0))
    found = st.combine(lambda a, b: (a + b).double(), first, other)
    assert found["rows"] is found["again"]
    for key in ("rows", "whole"):
        assert (found[key].placements, found[key].dtype) == (first[key].placements, torch.float64)
        assert torch.equal(found[key].full_tensor(), (first[key] + other[key]).full_tensor().double())
    assert isinstance(found["rows"], nn.Parameter)
    with pytest.raises(st.TreeMismatch, match=r"(?s)combine: .*placements differs"):
        st.combine(mean, first, spread(0, Shard(1)))
    with pytest.raises(st.TreeMismatch, match="placements differs at x: expected no Partial, got"):
        st.combine(mean, {"x": DTensor.from_local(numbers(0), mesh, [Partial()])})


def test_shards_are_combined_where_they_are():
    run_ranks(2, combine_shards)


X = torch.tensor([1 + 2j, 3 - 1j, 0.5j])


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("tree", "fn", "is_kept"),
    [
        pytest.param({"a": X, "b": X.conj()}, lambda v: v * 2, True, id="real factor"),
        pytest.param({"a": X, "b": X.conj()}, lambda v: v * (2 + 1j), False, id="complex factor"),
        pytest.param({"a": X, "b": X.conj()[1:]}, lambda v: v * (2 + 1j), False, id="part"),
        pytest.param({"a": X, "b": X.conj()}, torch.abs, True, id="to real"),
        pytest.param({"a": X.conj(), "b": X.conj()[:1]}, lambda v: v * (2 + 1j), True, id="both conjugate"),
        pytest.param({"a": X.imag, "b": X.conj().imag}, lambda v: v * 3, True, id="negative"),
        pytest.param({"a": X.imag, "b": X.conj().imag}, lambda v: v + 1, False, id="negative, moved"),
    ],
)
def test_a_tensor_and_its_conjugate_in_one_memory(tree, fn, is_kept, stored, tmp_path):
    if stored:
        st.save(tree, tmp_path / "a.pt")
    given = st.files.open(tmp_path / "a.pt") if stored else tree
    if not is_kept:
        with pytest.raises(st.TreeMismatch, match=r"ties at a: .*its conjugate or negative in the same memory"):
            st.offload(st.combine(fn, given))
        return
    found = st.offload(st.combine(fn, given))
    for key, leaf in tree.items():
        torch.testing.assert_close(found[key], fn(leaf).resolve_conj().resolve_neg())
    assert len({leaf.untyped_storage().data_ptr() for leaf in found.values()}) == 1


@pytest.mark.parametrize("view", [torch.view_as_real, lambda x: x.view(torch.int64), lambda x: x.view(torch.bfloat16)])
def test_ties_between_dtypes_are_refused(view):
    x = torch.ones(4, dtype=torch.complex64)
    with pytest.raises(st.TreeMismatch, match=r"what shares its memory"):
        st.combine(lambda v: v * 2, {"a": x, "b": view(x)})


class TestResults:
    """What the function returns may be any tensor of its own."""

    def test_one_tensor_each_time_is_copied_at_once(self):
        buffer = torch.empty(2)

        def mean(a, b):
            return torch.add(a, b, out=buffer).div_(2)

        one, two = {"x": torch.ones(2), "y": torch.full((2,), 5.0)}, {"x": torch.full((2,), 3.0), "y": torch.zeros(2)}
        made = st.combine(mean, one, two)
        assert made["x"].tolist() == [2, 2]
        assert made["y"].tolist() == [2.5, 2.5]
        assert len({tensor.untyped_storage().data_ptr() for tensor in (buffer, *made.values())}) == 3

    @pytest.mark.parametrize(
        "keep",
        [lambda made: made, lambda made: made.view(-1), lambda made: made.untyped_storage(), lambda made: made[:1]],
    )
    def test_what_somebody_else_holds_is_copied(self, keep):
        held = []

        def double(a):
            made = a * 2
            held.append(keep(made))
            return made

        made = st.combine(double, {"x": torch.ones(2)})["x"]
        (other,) = held
        memory = other if isinstance(other, torch.UntypedStorage) else other.untyped_storage()
        assert made.untyped_storage().data_ptr() != memory.data_ptr()

    def test_memory_of_numpy_is_copied(self):
        array = numpy.empty(2, numpy.float32)
        made = st.combine(
            lambda a: torch.from_numpy(numpy.add(a.numpy(), 1, out=array)), {"x": torch.ones(2), "y": torch.zeros(2)}
        )
        assert [made["x"].tolist(), made["y"].tolist()] == [[2, 2], [1, 1]]

    def test_a_fresh_result_is_not_copied(self):
        places = []

        def double(a):
            made = a * 2
            places.append(made.data_ptr())
            return made

        assert st.combine(double, {"x": torch.ones(2)})["x"].data_ptr() == places[-1]

    def test_a_view_of_something_larger_takes_the_memory_of_its_elements(self):
        made = st.combine(
            lambda *t: torch.stack(t).sort(0).values[2], *[{"w": torch.full((9,), float(i))} for i in range(5)]
        )
        assert made["w"].tolist() == [2.0] * 9
        assert made["w"].untyped_storage().nbytes() == made["w"].nbytes
        assert made["w"].storage_offset() == 0

    @pytest.mark.parametrize("stored", [False, True])
    def test_a_function_that_works_in_place_is_refused(self, stored, tmp_path):
        ema, new = {"a": torch.zeros(3)}, {"a": torch.ones(3)}
        if stored:
            st.save(ema, tmp_path / "a.pt")
            st.save(new, tmp_path / "b.pt")
            ema, new = st.files.open(tmp_path / "a.pt"), st.files.open(tmp_path / "b.pt")
        with pytest.raises(st.TreeMismatch, match="argument differs at a: expected as it was, got written by the func"):
            st.combine(lambda old, other: old.lerp_(other, 0.5), ema, new)

    def test_a_result_that_is_not_strided_is_refused_by_its_path(self):
        with pytest.raises(
            st.TreeMismatch, match=r"result differs at m\.w: expected a strided tensor, got torch\.sparse"
        ):
            st.combine(lambda x: x.to_sparse(), {"m": {"w": torch.ones(2)}})

    @pytest.mark.filterwarnings("ignore:The PyTorch API of", "ignore:alias is not implemented")
    @pytest.mark.parametrize(
        "make",
        [
            lambda x: torch.nested.nested_tensor([x, x]),
            lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
            lambda x: torch.masked.MaskedTensor(x, x > 0),
            lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8),
            lambda x: None,
        ],
        ids=["nested", "jagged", "masked", "quantized", "nothing"],
    )
    def test_a_result_of_several_parts_is_refused_by_its_path(self, make):
        with pytest.raises(st.TreeMismatch, match=r"combine: result differs at m\.w: expected a strided tensor, got"):
            st.combine(make, {"m": {"w": torch.ones(2)}})

    def test_a_parameter_becomes_a_tensor(self):
        made = st.combine(lambda x: torch.nn.Parameter(x * 2), {"w": torch.ones(2)})["w"]
        assert type(made) is torch.Tensor
        assert not made.requires_grad

    @pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
    def test_a_leaf_that_cannot_be_taken_apart_is_named(self):
        masked = torch.masked.MaskedTensor(torch.ones(2), torch.tensor([True, False]))
        with pytest.raises(
            st.UnsupportedLeaf, match=r"combine: the leaf at m\.w \(MaskedTensor\) cannot be taken apart"
        ):
            st.combine(lambda x: x * 2, {"m": {"w": masked}})

    def test_a_tensor_that_overlaps_itself_is_named(self):
        tied = torch.arange(6.0).as_strided((2, 2, 2), (1, 1, 1))
        with pytest.raises(st.TreeMismatch, match=r"combine: overlap at m\.v"):
            st.combine(lambda x: x + torch.arange(8.0).view(2, 2, 2), {"m": {"v": tied}})


class TestDtypes:
    """Of a number without dims and one of another dtype torch makes another dtype than of a vector."""

    third = torch.tensor(1 / 3)

    @pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a"])
    def test_a_stored_leaf_without_dims_gets_the_dtype_that_it_gets_in_memory(self, name, tmp_path):
        tree = {"s": torch.tensor(5.0).bfloat16(), "w": torch.ones(3).bfloat16()}
        st.save(tree, tmp_path / name)
        found = st.offload(st.combine(lambda x: x * self.third, st.files.open(tmp_path / name)))
        assert {key: leaf.dtype for key, leaf in found.items()} == {"s": torch.float32, "w": torch.bfloat16}
        assert found["s"] == 5 * self.third

    @pytest.mark.parametrize("keys", ["ws", "sw"])
    def test_ties_that_would_get_two_dtypes_are_refused(self, keys):
        vector = torch.tensor([1.0, 5.0]).bfloat16()
        views = {"w": vector, "s": vector[1]}
        with pytest.raises(
            st.TreeMismatch, match=f"combine: dtype differs at {keys[1]}: expected .*as {keys[0]} becomes"
        ):
            st.combine(lambda x: x * self.third, {key: views[key] for key in keys})


class TestTiesInFiles:
    """What lies in one memory of a file is combined together, or not at all."""

    @pytest.mark.parametrize("part", [slice(None), slice(0, 2)], ids=["same", "part"])
    def test_a_leaf_is_not_combined_without_its_ties(self, part, tmp_path):
        whole = torch.arange(4.0)
        st.save({"w": whole, "v": whole[part], "u": torch.ones(4)}, tmp_path / "a.pt")
        stored = st.files.open(tmp_path / "a.pt")
        with pytest.raises(st.TreeMismatch, match="combine: ties at w: values of its own cannot go into what shares"):
            st.combine(lambda x: x * 2, stored, where="w")
        assert st.offload(st.combine(lambda x: x * 2, stored, where="u"))["u"].tolist() == [2.0] * 4

    @pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a"])
    def test_leaves_without_elements_keep_their_shapes(self, name, tmp_path):
        state = {"a": torch.zeros(3, 0), "b": torch.zeros(0, 5), "c": torch.zeros(3, 0), "w": torch.ones(2)}
        st.save(state, tmp_path / name)
        stored = st.files.open(tmp_path / name)
        for made in (
            st.combine(lambda x: x * 2, stored),
            st.update(stored, "*", lambda x: x * 2),
            st.map_leaves(lambda x: x * 2, stored),
        ):
            found = st.offload(made)
            assert {key: tuple(leaf.shape) for key, leaf in found.items()} == {
                "a": (3, 0), "b": (0, 5), "c": (3, 0), "w": (2,)
            }  # fmt: skip
            assert found["a"] is not found["c"]

    def test_strides_are_those_of_the_first_tree(self, tmp_path):
        state = {
            "spaced": torch.arange(8.0)[::2],
            "turned": torch.arange(6.0).view(2, 3).mT,
            "expanded": torch.arange(3.0).expand(2, 3),
        }
        torch.save(state, tmp_path / "a.pt")
        stored = st.files.open(tmp_path / "a.pt")
        found = st.offload(st.combine(lambda x: x.double() * 2, stored))
        assert {key: leaf.stride() for key, leaf in found.items()} == {k: leaf.stride() for k, leaf in state.items()}
        assert all(torch.equal(found[key], leaf.double() * 2) for key, leaf in state.items())

    def test_what_overlaps_itself_is_refused_with_its_path(self, tmp_path):
        torch.save({"x": torch.arange(4.0).as_strided((2, 3), (1, 1))}, tmp_path / "a.pt")
        combined = st.combine(lambda x: x * 2, st.files.open(tmp_path / "a.pt"))
        with pytest.raises(st.UnsupportedLeaf, match="offload: the leaf at x overlaps itself"):
            st.offload(combined)


@pytest.mark.parametrize("shift", [0, 1])
def test_trees_of_other_dtypes_may_be_tied_alike(shift):
    """As a moving average in float32 of a model in bfloat16."""
    average, model = torch.arange(6.0), torch.arange(8).bfloat16()
    trees = {"w": average, "v": average[2:]}, {"w": model[:6], "v": model[2 + shift : 6 + shift]}
    if shift:
        with pytest.raises(st.TreeMismatch, match="combine: ties at v"):
            st.combine(lambda x, y: x.lerp(y.float(), 0.5), *trees)
        return
    made = st.combine(lambda x, y: x.lerp(y.float(), 0.5), *trees)
    assert made["v"].data_ptr() == made["w"][2:].data_ptr()
    assert torch.equal(made["w"], average)


@pytest.mark.parametrize("keys", ["pv", "vp"])
def test_a_parameter_and_its_data_stay_what_they_are(keys, tmp_path):
    parameter = torch.nn.Parameter(torch.arange(4.0))
    views = {"p": parameter, "v": parameter.data}
    torch.save({key: views[key] for key in keys}, tmp_path / "a.pt")
    made = st.offload(st.combine(lambda x: x * 2, st.files.open(tmp_path / "a.pt")))
    assert [type(made["p"]), type(made["v"])] == [torch.nn.Parameter, torch.Tensor]
    assert made["p"].data_ptr() == made["v"].data_ptr()


def test_leaves_without_elements_have_no_ties_to_cut(tmp_path):
    empty = torch.zeros(0, 3)
    torch.save({"a": empty, "b": empty, "w": torch.ones(2)}, tmp_path / "a.pt")
    made = st.combine(lambda x: x.double(), st.files.open(tmp_path / "a.pt"), where="a")
    assert [leaf.dtype for leaf in st.offload(made).values()] == [torch.float64, torch.float32, torch.float32]
    others = {"a": torch.zeros(0, 3), "b": torch.zeros(0, 3)}
    assert st.combine(lambda x, y: x + y, {"a": empty, "b": empty}, others)["b"].shape == (0, 3)


@pytest.mark.parametrize("nbytes", [0, 8])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("stored", [True, False])
def test_a_tensor_of_any_tree_whose_storage_is_too_small_is_named(stored, place, nbytes, tmp_path):
    trees = [{"v": numbers(at), "w": numbers(at)} for at in range(3)]
    trees[place]["w"].untyped_storage().resize_(nbytes)
    if stored and place:
        st.save(trees[0], tmp_path / "a.pt")
        trees[0] = st.files.open(tmp_path / "a.pt")
    with pytest.raises(st.UnsupportedLeaf, match="the leaf at w was freed or resized"):
        st.combine(mean, *trees)


def test_strides_of_dims_of_one_element_make_no_other_tie():
    first, other = numbers(1), numbers(4)
    trees = [{"m": memory.as_strided((1, 4), (step, 1)), "v": memory[:4]} for memory, step in ((first, 4), (other, 9))]
    found = st.combine(mean, *trees)
    assert found["m"].data_ptr() == found["v"].data_ptr()
    assert torch.equal(found["v"], ((first + other) / 2)[:4])
    assert torch.equal(found["m"][0], found["v"])


def test_ties_over_two_storages_on_one_memory_are_refused():
    arrays = [numpy.arange(4.0), numpy.arange(4.0) + 2]
    trees = [{"a": torch.from_numpy(array), "b": torch.from_numpy(array)[:3]} for array in arrays]
    with pytest.raises(st.TreeMismatch, match=r"ties at [ab]"):
        st.combine(mean, *trees)
