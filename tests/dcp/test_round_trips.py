"""What is saved comes back: without a template from builtin containers, with one from any."""

from __future__ import annotations

import dataclasses
import random
import struct
import tempfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import statetree
from statetree import dcp
from statetree.files.key_texts import key_of
from statetree.testing.samples import Color, Thing
from statetree.testing.sources import GEOMETRIES
from statetree.testing.strategies import plain_values
from tests.judge import assert_trees_equal
from tests.judge.regions import raw_bytes
from tests.pace import units
from tests.trees.plans import Node, Value, build, tensor_plans, tree_plans

pytestmark = pytest.mark.filterwarnings("ignore:save. what restore does not make")

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where waiting for the disk costs nothing
FILLABLE = [name for name in GEOMETRIES if name not in {"meta", "expanded"}]


def round_trip(state: Any, template: Any = None, **options: Any) -> Any:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        statetree.save(state, directory)
        return statetree.load(directory, template, in_place=True, **options)


def by_value(leaf: Any) -> Any:
    """Return what a checkpoint keeps of a leaf."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    plain = leaf.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)


def builtin_plans() -> st.SearchStrategy[Any]:
    values = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 1])]),
    )
    simple = st.one_of(
        st.text("ab.", max_size=3),
        st.integers(),
        st.floats(),
        st.sampled_from([True, None, "0", "", "[0]", "\ud800", b"a", (0, ("a",)), (), "<statetree structure>"]),
    )
    readable = st.one_of(simple, st.just(frozenset({"a", 1})))
    tensors = tensor_plans(geometries=[*FILLABLE, "expanded"])
    leaves = st.one_of(tensors, st.builds(Value, values))
    attribute = st.one_of(tensors, st.builds(Value, st.dictionaries(simple, st.lists(simple, max_size=2), max_size=2)))

    def extend(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        items = st.lists(st.tuples(readable, children), max_size=4, unique_by=lambda item: item[0])
        attributes = st.dictionaries(st.sampled_from(["_metadata", "a"]), attribute, max_size=2)
        mappings = st.builds(
            lambda kind, items, attributes: Node(
                kind,
                tuple(child for _, child in items),
                tuple(key for key, _ in items),
                tuple(attributes.items()) if kind == "OrderedDict" else (),
            ),
            st.sampled_from(["dict", "OrderedDict"]),
            items,
            attributes,
        )
        sequences = st.builds(Node, st.sampled_from(["list", "tuple"]), st.lists(children, max_size=4).map(tuple))
        return st.one_of(mappings, sequences)

    return st.recursive(leaves, extend, max_leaves=10)


@given(builtin_plans())
def test_builtin_containers_come_back_without_a_template(plan):
    tree = build(plan)
    assert_trees_equal(statetree.map_leaves(by_value, tree), round_trip(tree), ties=False)


@pytest.mark.filterwarnings("ignore:save. what restore does not make")
@pytest.mark.filterwarnings("ignore:save. what restore does not make")  # functions and classes
@given(tree_plans(st.one_of(tensor_plans(geometries=FILLABLE), st.builds(Value, plain_values())), opaque=False))
def test_any_container_comes_back_into_a_template(plan):
    tree, template = build(plan), build(plan)
    for leaf in statetree.flatten(template)[0]:
        if isinstance(leaf, torch.Tensor):
            raw_bytes(leaf.untyped_storage()).zero_()
    before = statetree.flatten(template)[0]
    loaded = round_trip(tree, template, weights_only=False)
    assert_trees_equal(tree, loaded, ties=False)
    for mine, theirs in zip(before, statetree.flatten(loaded)[0], strict=True):
        assert mine is theirs or not isinstance(mine, torch.Tensor)


def test_a_known_container_below_an_unknown_one_comes_back_into_a_template():
    def state(values):
        outer, inner = OrderedDict({Color.RED: values}), OrderedDict()
        outer.extra, inner.tail = inner, values + 1
        return outer

    loaded = round_trip(state(torch.arange(3.0)), state(torch.zeros(3)), weights_only=False)
    assert_trees_equal(state(torch.arange(3.0)), loaded, ties=False)


def test_a_random_state_is_one_entry(tmp_path):
    state = {"random": random.getstate(), "torch": torch.get_rng_state()}
    statetree.save(state, tmp_path)
    metadata = torch.distributed.checkpoint.FileSystemReader(tmp_path).read_metadata()
    assert set(metadata.state_dict_metadata) == {"random", "torch", "<statetree structure>"}
    loaded = statetree.load(tmp_path)
    assert_trees_equal(loaded, state)
    random.setstate(loaded["random"])


def test_a_model_and_its_optimizer_come_back():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(12.0).reshape(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1, "done": ()}
    loaded = round_trip(state)
    assert_trees_equal(loaded, statetree.map_leaves(by_value, state), ties=False)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


SPECIAL = {
    "coo": lambda n: torch.sparse_coo_tensor([[0, 2], [1, 0]], [n, n + 1.0], (3, 2), check_invariants=True).coalesce(),
    "csr": lambda n: torch.tensor([[0, n + 1], [n + 2.0, 0]]).to_sparse_csr(),
    "bsr": lambda n: torch.full((2, 2), n + 1.0).to_sparse_bsr((1, 2)),
    "nested": lambda n: torch.nested.nested_tensor([torch.arange(2) + n, torch.arange(3) + n]),
    "jagged": lambda n: torch.nested.nested_tensor([torch.arange(2.0) + n, torch.arange(3.0) + n], layout=torch.jagged),
    "quantized": lambda n: torch.quantize_per_tensor(torch.arange(4.0) + n, 0.5, 3, torch.qint8),
    "channels": lambda n: torch.quantize_per_channel(
        torch.arange(4.0).reshape(2, 2) + n, torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.quint8
    ),
    "storage": lambda n: (torch.arange(4.0) + n).untyped_storage(),
    "int4": lambda n: torch.tensor([n, n + 1], dtype=torch.uint8).view(torch.int4),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_tensors_of_other_kinds_are_filled_in_parts(name, tmp_path):
    saved, template = {"x": SPECIAL[name](5)}, {"x": SPECIAL[name](0)}
    statetree.save(saved, tmp_path)
    loaded = statetree.load(tmp_path, template, in_place=True)
    assert loaded["x"] is template["x"]
    assert_trees_equal(loaded, saved)
    if name in ("coo", "csr", "bsr"):
        assert_trees_equal(statetree.load(tmp_path), saved)
        return
    with pytest.raises(statetree.UnsupportedLeaf, match=r"load: the leaf at x was saved in parts") as caught:
        statetree.load(tmp_path)
    assert caught.value.path == statetree.Path(("x",))


@pytest.mark.parametrize("share_memory", [False, True])
def test_objects_are_saved_without_the_storages_that_their_tensors_lie_in(share_memory, tmp_path):
    large = torch.arange(1_000_000.0)
    view = large[10:14]
    state = {f"object {number}": SimpleNamespace(a=view, b=view, rows=large[:6].view(2, 3)) for number in range(3)}
    statetree.save(state, tmp_path / "at once")
    with statetree.Stager(share_memory=share_memory) as stager:
        slab = {"w": torch.zeros(100_000), **state}
        dcp.async_save(slab, checkpoint_id=tmp_path / "staged", stager=stager).result(units(30))
    for name, allowed in (("at once", 100_000), ("staged", 500_000)):
        assert sum(path.stat().st_size for path in (tmp_path / name).iterdir()) < allowed
        loaded = statetree.load(tmp_path / name, weights_only=False)
        for key, value in state.items():
            assert loaded[key].a is loaded[key].b
            assert torch.equal(loaded[key].a, value.a)
            assert torch.equal(loaded[key].rows, value.rows)


def test_parts_of_another_layout_are_refused(tmp_path):
    statetree.save({"x": SPECIAL["quantized"](1)}, tmp_path)
    other = torch.quantize_per_tensor(torch.arange(4.0), 0.25, 3, torch.qint8)
    with pytest.raises(statetree.TreeMismatch, match=r"layout differs at x: .*0.25.*0.5"):
        statetree.load(tmp_path, {"x": other}, in_place=True)


def test_part_keys_never_collide(tmp_path):
    saved = {"x": SPECIAL["coo"](5), "x.<part 0>": torch.ones(1), "<statetree structure>": 7}
    template = {"x": SPECIAL["coo"](0), "x.<part 0>": torch.zeros(1), "<statetree structure>": 0}
    statetree.save(saved, tmp_path)
    assert_trees_equal(statetree.load(tmp_path, template, in_place=True), saved)


@dataclasses.dataclass
class Counters:
    step: int
    seen: Any


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"a": Counters(1, 2)}, "at a: expected a container that is known here, got a .*Counters"),
        ({"a": {Color.RED: 1}}, "at a: .* got a dict with the key .*Color"),
    ],
    ids=["class", "key"],
)
def test_what_is_not_known_takes_a_template(state, what, tmp_path):
    with pytest.warns(UserWarning, match="what restore does not make by itself"):
        statetree.save(state, tmp_path)
    with pytest.raises(statetree.TreeMismatch, match=rf"load: structure differs {what}.*Pass like="):
        statetree.load(tmp_path)
    assert_trees_equal(statetree.load(tmp_path, state, in_place=True), state)


def test_deep_trees(tmp_path):
    tree: Any = torch.arange(3)
    plain: Any = [1]
    for level in range(900):
        tree = {"d": tree} if level % 2 else [tree]
        plain = (plain,) if level % 2 else [plain]
    statetree.save([tree, plain], tmp_path)
    loaded = statetree.load(tmp_path)
    leaves, spec = statetree.flatten([tree, plain])
    assert statetree.flatten(loaded)[1] == spec
    assert statetree.flatten(loaded)[0][0].tolist() == leaves[0].tolist()


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        (torch.empty(2, device="meta"), "a meta tensor"),
        (torch.nn.UninitializedParameter(), "a UninitializedParameter, which has no elements"),
        (lambda: 0, "cannot be pickled"),
    ],
    ids=["meta", "uninitialized", "lambda"],
)
def test_leaves_that_cannot_be_saved_are_named(leaf, what, tmp_path):
    with pytest.raises(statetree.UnsupportedLeaf, match=rf"save: .* at a.0[ :].*{what}"):
        statetree.save({"a": [leaf, torch.ones(1)]}, tmp_path / "new")
    assert not (tmp_path / "new" / ".metadata").exists()


def test_a_freed_tensor_is_named(tmp_path):
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(statetree.UnsupportedLeaf, match=r"at a: .*freed or resized to 0 bytes"):
        statetree.save({"a": tensor}, tmp_path)


def test_a_cycle_is_named(tmp_path):
    tree: dict[str, Any] = {}
    tree["a"] = [tree]
    with pytest.raises(statetree.CyclicTree, match=r"a.0"):
        statetree.save(tree, tmp_path)


def test_an_opaque_object_comes_back_where_it_is_trusted(tmp_path):
    thing = Thing()
    thing.tensor = torch.arange(3)
    with pytest.warns(UserWarning, match=r"a \(Thing\): .*samples.Thing"):
        statetree.save({"a": thing}, tmp_path)
    with pytest.raises(statetree.CheckpointError, match=r"(?s)the plain value at a cannot be read.*weights_only=False"):
        statetree.load(tmp_path)
    loaded = statetree.load(tmp_path, weights_only=False)
    assert_trees_equal(loaded, {"a": thing})


def test_saving_changes_nothing():
    tree = OrderedDict(a=torch.nn.Parameter(torch.arange(4.0).reshape(2, 2)), b=[1, (2,)])
    version = tree["a"]._version
    round_trip(tree)
    assert tree["a"]._version == version
    assert tree["b"] == [1, (2,)]


def test_saving_over_a_checkpoint_leaves_nothing_of_it(tmp_path):
    statetree.save({"a": torch.ones(3), "b": 1}, tmp_path)
    statetree.save({"a": torch.zeros(2)}, tmp_path)
    assert_trees_equal(statetree.load(tmp_path), {"a": torch.zeros(2)})


@pytest.mark.parametrize("bits", [0x7FF8000000000000, 0xFFF8000000000000, 0x7FF8000000000001])
def test_nans_in_keys_and_attributes_keep_their_bits(bits: int, tmp_path: Path) -> None:
    nan = struct.unpack(">d", struct.pack(">Q", bits))[0]
    tree: OrderedDict[Any, int] = OrderedDict({nan: 1, complex(nan, 1.0): 2})
    vars(tree)["_metadata"] = {nan: []}
    statetree.save(tree, tmp_path)
    assert_trees_equal(statetree.load(tmp_path), tree)


@pytest.mark.parametrize("text", ["fnan", "fnan00", "fnan7ff0000000000000", "fnan00000000000000007ff8000000000000"])
def test_texts_that_are_no_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="nan"):
        key_of(text)
