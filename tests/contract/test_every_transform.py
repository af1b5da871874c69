"""What every transform promises (DESIGN 3.2), checked for each of them on every tree of the corpus."""

import contextlib
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import statetree as st
from tests.contract.verbs import VERBS, identity
from tests.judge import assert_trees_equal, laws
from tests.judge.regions import storage_of
from tests.judge.walk import walk
from tests.memory import covered_bytes, plain_tensors, storages
from tests.products import product
from tests.trees import TREES

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),  # torch 2.11
]

# Meta tensors become real when memory is allocated for them; freed ones get memory.
ALLOCATED = {"on_meta", "freed"}
NO_OTHER_MATCHES = "copy_into has nothing to copy into: no other tree matches"


#: Every tree meets these three in `make test`, and every third of the other transforms.
ALWAYS = {"offload", "copy_into", "stage"}
PAIRS = product(VERBS, TREES, every=6, always=lambda verb, _: verb.name in ALWAYS)


def applied(verb, tree, source):
    """Apply a transform to a tree of the corpus, or see it refused as it should be."""
    if verb.name == "copy_into" and tree.keyed_by_identity:
        pytest.skip(NO_OTHER_MATCHES)
    if not verb.copies and tree.name in ALLOCATED:
        verb.ready(source)()
        pytest.skip("what comes out has memory where the tree has none")
    if verb.looks and tree.refused and (verb.fresh or tree.name != "freed"):
        with pytest.raises(st.UnsupportedLeaf, match=tree.refused) as caught:
            verb.ready(source)()
        assert caught.value.path is not None
        assert "%PATH%" not in str(caught.value)
        return None
    return verb.ready(source)()


def promised(verb, tree):
    """The laws that hold of a transform for a tree of the corpus."""
    if verb.looks and tree.refused:
        return [laws.pure]
    if tree.changes:
        return [law for law in verb.laws() if law in (laws.pure, laws.independent)]
    if tree.name == "optimizer_state_keyed_by_parameters" and verb.name.startswith("allocate_like"):
        return [laws.pure]  # its keys are compared by their elements, which are not there yet
    return verb.laws(ties=tree.name != "tied_far_apart")  # which is cut at its gap


#: Trees that take seconds for all laws of some transforms.
LONG = {"deep_mixture", "deep_lists", "wide"}
LAWFUL = [
    pytest.param(*pair.values, id=pair.id, marks=pytest.mark.slow if pair.values[1].name in LONG else pair.marks)
    for pair in PAIRS
]


@pytest.mark.parametrize(("verb", "tree"), LAWFUL)
def test_every_law_holds(verb, tree):
    source = tree.make()
    for law in promised(verb, tree):
        law(lambda state: applied(verb, tree, state), lambda: source)


@pytest.mark.parametrize(("verb", "tree"), [pair for pair in PAIRS if pair.values[0].fresh])
def test_results_are_tensors_of_their_own(verb, tree):
    source = tree.make()
    result = applied(verb, tree, source)
    if tree.refused or tree.changes:
        return
    # Frozen attributes are copied each for itself (test_stager.py has the xfail).
    if verb.deep and tree.name != "attributes_of_attributes":
        assert_trees_equal(result, source, storages=not verb.slabs and tree.name != "tied_far_apart", containers=True)
    tensors = plain_tensors(result)
    assert all(tensor.is_leaf and tensor.grad is None for tensor in tensors)
    assert not any(tensor.is_inference() for tensor in tensors)
    if not verb.slabs and verb.prepare is None and "stage" not in verb.name:
        assert sum(storage.nbytes() for storage in storages(result)) <= covered_bytes(source)
    own = [leaf for leaf in st.flatten(result)[0] if isinstance(leaf, torch.Tensor) and storage_of(leaf) is not None]
    for tensor in own[:12]:
        others = [other for other in own[:100] if other is not tensor]
        versions = [other._version for other in others]
        torch.autograd.graph.increment_version(tensor)
        assert [other._version for other in others] == versions


# What surrounds a call has no say in it


class Forbidden(TorchFunctionMode):
    """Lets nothing through that asks."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        msg = f"a user's mode was asked about {func}"
        raise AssertionError(msg)


class AddOne(TorchDispatchMode):
    """Makes every result another one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result + 1 if isinstance(result, torch.Tensor) and result.is_floating_point() else result


@contextlib.contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


@contextlib.contextmanager
def warn_always():
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(False)


SURROUNDINGS = {
    "default device": lambda: default_device("meta"),
    "device context": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.float16),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic fill": deterministic,
    "function mode": Forbidden,
    "dispatch mode": AddOne,
    "fake tensor mode": FakeTensorMode,
    "warn always": warn_always,
    "sparse invariants": torch.sparse.check_sparse_tensor_invariants,
    "saved tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t + 1, lambda t: t),
}
FEW = {
    "dataclass_special",
    "parameters_and_buffers",
    "tensor_subclasses",
    "tensors_with_attributes",
    "wrappers",
    "state_dict_like",
    "objects",
    "sparse_coo",
    "sparse_compressed",
    "nested_jagged",
    "quantized",
    "storages",
    "shapes",
    "conj_and_neg",
    "requires_grad",
    "inference_tensors",
    "tied",
    "tied_across_dtypes",
    "tied_far_apart",
}


@pytest.mark.parametrize(("surrounding", "verb"), product(SURROUNDINGS, VERBS, every=8))
def test_surroundings_have_no_say(surrounding, verb):
    chosen = [tree for tree in TREES if tree.name in FEW]
    assert len(chosen) == len(FEW)
    for tree in chosen:
        source = tree.make()

        def surrounded(state):
            call = verb.ready(state)
            with SURROUNDINGS[surrounding]():
                result = call()
            if verb.fresh:
                assert not any(value.is_inference() for value in walk(result) if isinstance(value, torch.Tensor))
            return result

        for law in promised(verb, tree):
            law(surrounded, partial(identity, source))


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_the_state_of_torch_is_left_as_it_was(verb):
    random = torch.get_rng_state()
    with torch.no_grad(), torch.inference_mode():
        verb.ready({"w": torch.arange(3.0)})()
        assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random)


# Compactness, in numbers


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb.fresh], ids=str)
def test_a_small_view_of_a_large_storage_costs_what_the_view_does(verb):
    base = torch.arange(1 << 20, dtype=torch.float32)
    result = verb.ready({"view": base[1000:1010]})()
    assert torch.equal(result["view"], base[1000:1010]) or not verb.copies
    nbytes = result["view"].untyped_storage().nbytes()
    assert nbytes <= 64 if verb.slabs else nbytes == 40


def far_apart(gap_bytes, part_bytes):
    """Two views of one storage with a gap between them."""
    base = torch.arange(gap_bytes + 2 * part_bytes, dtype=torch.int32).to(torch.uint8)
    return {"first": base[:part_bytes], "last": base[-part_bytes:]}


MIB = 1 << 20


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb.fresh and not verb.slabs], ids=str)
@pytest.mark.parametrize(
    ("gap", "part", "split"),
    [
        (MIB, 100, False),
        (MIB + 1, 100, True),
        (4 * MIB, 2 * MIB, False),
        (4 * MIB + 2, 2 * MIB, True),
        (100, 10, False),
    ],
    ids=["a gap of 1 MiB", "more than 1 MiB", "half of the hull", "more than half", "small"],
)
def test_a_storage_is_cut_only_where_its_gaps_are_large(verb, gap, part, split):
    result = verb.ready(far_apart(gap, part))()
    first, last = result["first"], result["last"]
    assert (first.untyped_storage()._cdata != last.untyped_storage()._cdata) == split
    held = sum(storage.nbytes() for storage in storages(result))
    assert held == (2 * part if split else gap + 2 * part)
    if not split:
        assert last.data_ptr() - first.data_ptr() == gap + part


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb.fresh], ids=str)
def test_views_that_overlap_are_never_cut(verb):
    base = torch.arange(8 * MIB, dtype=torch.int32).to(torch.uint8)
    tree = {"a": base[: 3 * MIB], "b": base[3 * MIB - 1 : 6 * MIB], "thin": base.as_strided((2,), (8 * MIB - 1,))}
    result = verb.ready(tree)()
    assert result["b"].data_ptr() - result["a"].data_ptr() == 3 * MIB - 1
    assert result["thin"].data_ptr() == result["a"].data_ptr()
    if verb.copies:
        assert_trees_equal(result, tree, storages=not verb.slabs)


def test_the_corpus_is_not_empty():
    assert len({tree.name for tree in TREES}) == len(TREES) > 100
