"""``conformance`` finds each fault that it knows in an implementation that has it, and none in statetree."""

import copy
import threading
from functools import partial

import pytest
import torch

import statetree as st
from benchmarks.conformance import cell, reproduction
from benchmarks.conformance_peers import IMPLEMENTATIONS
from statetree.testing import conformance
from statetree.testing.conformance_suite import FAULTS, StagerAdapter

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # said once


def mapped(leaf_function, tree):
    return st.map_leaves(lambda leaf: leaf_function(leaf) if isinstance(leaf, torch.Tensor) else leaf, st.offload(tree))


def as_plain(tree):
    """Containers become lists and dicts with strings in another order; what is no tensor is dropped."""
    if isinstance(tree, dict):
        return {str(key): as_plain(tree[key]) for key in sorted(tree, key=str) if tree[key] is not None}
    if isinstance(tree, list | tuple):
        return list(map(as_plain, tree))
    return tree


def equal_tensors_tied(tree):
    seen = []

    def one(leaf):
        same = [other for other in seen if other.shape == leaf.shape and other.dtype == leaf.dtype]
        same = [other for other in same if not leaf.is_sparse and torch.equal(other, leaf)]
        seen.append(leaf)
        return same[0] if same else leaf

    return mapped(one, tree)


def bits_lost(leaf):
    if leaf.dtype.itemsize == 1:
        return (leaf.float() + 1).to(leaf.dtype)
    plain = torch.empty(leaf.shape, dtype=leaf.dtype)
    return plain.copy_(leaf.conj() if leaf.is_conj() else torch._neg_view(leaf) if leaf.is_neg() else leaf)


def written(tree):
    tree["w"].data.zero_()
    return copy.deepcopy(tree)


COPIES = [
    lambda tree: tree,
    partial(mapped, lambda leaf: leaf.clone().detach()),
    partial(mapped, bits_lost),
    lambda tree: as_plain(st.offload(tree)),
    equal_tensors_tied,
    lambda tree: {key: value.clone() if type(value) is torch.Tensor else value for key, value in tree.items()},
    lambda tree: tree if "w" not in tree else written(tree),
    lambda tree: {key: copy.deepcopy(tree[key]) for key in list(tree)[:30]},
]


def test_each_fault_of_copies_is_found_in_a_copy_that_has_it():
    reports = [conformance(copy=copied) for copied in COPIES]
    found = {name for report in reports for name in report.failed}
    assert found == {fault.name for fault in FAULTS if fault.kind == "copy"}
    assert not any(reports)
    assert "alias_kept" in reports[0].failed
    assert "copy    alias_kept                       FAILS: {'w': tensor([-1., -1., " in str(reports[0])


class Keeps:
    """Copies into the tensors that it has, by key and shape, whatever has become of them."""

    def __init__(self, key):
        self.key, self.kept = key, {}

    def stage(self, state):
        def one(path, leaf):
            if isinstance(leaf, torch.Tensor):
                buffer = self.kept.setdefault(self.key(path, leaf), torch.empty_like(leaf))
                buffer.view(-1)[: leaf.numel()].copy_(leaf.view(-1)[: buffer.numel()])
                return buffer
            if isinstance(leaf, str | int | float | None):
                return leaf
            return copy.deepcopy(leaf)

        return st.map_with_path(one, state)


class Freezes(Keeps):
    """Copies what it was given first, and no more."""

    def stage(self, state):
        if "state" not in self.kept:
            self.kept["state"], self.kept["copy"] = state, st.offload(state)
        return st.offload(self.kept["copy"])


class Frees(Keeps):
    """Gives memory back that it has handed out."""

    def stage(self, state):
        self.kept["last"] = copy.deepcopy(state)
        return self.kept["last"]

    def close(self):
        for leaf in st.flatten(self.kept.pop("last", []))[0]:
            if isinstance(leaf, torch.Tensor):
                leaf.data.fill_(-1)


class Aliases(Keeps):
    def stage(self, state):
        return state


class CopiesOnce(Keeps):
    """Copies each tensor once, or whenever torch's counter of its versions says that it has changed."""

    def stage(self, state):
        def one(leaf):
            if not isinstance(leaf, torch.Tensor):
                return copy.deepcopy(leaf)
            version, kept = self.kept.get(self.key(leaf), (None, None))
            if version != leaf._version:
                kept = copy.deepcopy(leaf)
                self.kept[self.key(leaf)] = leaf._version, kept
            return copy.deepcopy(kept)

        return st.map_leaves(one, state)


STAGERS = [
    lambda: CopiesOnce(id),
    lambda: Keeps(lambda path, leaf: str(path)),
    lambda: Freezes(None),
    lambda: Frees(None),
    lambda: Aliases(None),
]


class Reuses(Keeps):
    """Copies into the tensors that it has, where the key says so."""

    def stage(self, state):
        def one(path, leaf):
            if not (isinstance(leaf, torch.Tensor) and self.key(path, leaf)):
                return leaf
            buffer = self.kept.setdefault((path, leaf.dtype, leaf.shape), leaf)
            buffer.data.copy_(leaf.data)
            return buffer

        return st.map_with_path(one, st.offload(state))


REUSED = {
    "nested": lambda path, leaf: len(path) > 1,
    "parameters": lambda path, leaf: isinstance(leaf, torch.nn.Parameter),
    "buffers": lambda path, leaf: isinstance(leaf, torch.nn.Buffer),
    "of several dims": lambda path, leaf: leaf.dim() > 1,
    "bfloat16": lambda path, leaf: leaf.dtype == torch.bfloat16,
    "large": lambda path, leaf: leaf.numel() > 1 << 20,
    "in tuples": lambda path, leaf: "pair" in path,
    "of no dims": lambda path, leaf: leaf.dim() == 0,
}


@pytest.mark.parametrize("key", REUSED.values(), ids=REUSED)
def test_a_stager_that_reuses_some_of_its_memory_is_found(key):
    assert "torn_snapshot" in conformance(stager=lambda: Reuses(key)).failed


def test_each_fault_of_stagers_is_found_in_a_stager_that_has_it():
    found = {name for make in STAGERS for name in conformance(stager=make).failed}
    assert found >= {fault.name for fault in FAULTS if fault.kind == "stager"}


def shard_alone(state):
    from torch.distributed.tensor import DTensor

    def one(leaf):
        if isinstance(leaf, DTensor):
            return leaf.to_local()
        return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return st.map_leaves(one, state)


def apart(state):
    return mapped(torch.clone, st.gather(state))


def emptied(state):
    result = st.gather(state)
    st.map_leaves(lambda leaf: leaf.to_local().zero_() if isinstance(leaf, torch.Tensor) else leaf, state)
    return result


KEPT = {}


def into_the_same_memory(state):
    """Gather into what the last gather of tensors of the same names and shapes returned."""
    made = st.gather(state)
    key = [(name, leaf.dtype, leaf.shape) for name, leaf in made.items() if isinstance(leaf, torch.Tensor)]
    kept = KEPT.setdefault(str(key), made)
    return kept if kept is made else st.copy_into(made, kept)


def over_the_first_dim_alone(state):
    """Gather what lies over meshes of one dim, and sum up what is to be reduced."""
    from torch.distributed.tensor import DTensor

    def one(leaf, whole):
        is_other = isinstance(leaf, DTensor) and (leaf.device_mesh.ndim > 1 or leaf.placements[0].is_partial("max"))
        return torch.zeros_like(whole) if is_other else whole

    return st.map_leaves(one, state, st.gather(state))


@pytest.mark.slow
def test_each_fault_of_gathers_is_found_in_a_gather_that_has_it():
    gathers = (shard_alone, apart, emptied, into_the_same_memory, over_the_first_dim_alone)
    found = [set(conformance(gather=gather).failed) for gather in gathers]
    assert found[1:3] == [{"tied_shards"}, {"shards_changed", "replicated_tensors", "gathered_again"}]
    assert found[3:] == [{"gathered_again"}, {"partials_of_other_kinds", "meshes_of_two_dims"}]
    assert set().union(*found) == {fault.name for fault in FAULTS if fault.kind == "gather"}


def flat(state):
    """Gather the values of a dict, each for itself, and look into no container."""
    from torch.distributed.tensor import DTensor

    return {name: leaf.full_tensor().clone() if isinstance(leaf, DTensor) else leaf for name, leaf in state.items()}


@pytest.mark.slow
def test_a_gather_of_flat_dicts_is_blamed_for_nothing_else():
    assert set(conformance(gather=flat).failed) <= {"tied_shards", "order_of_keys"}


def only(chosen, change):
    """A copy that is wrong for some tensors only."""
    return lambda tree: st.map_leaves(
        lambda leaf, copied: change(leaf, copied) if isinstance(leaf, torch.Tensor) and chosen(leaf) else copied,
        tree,
        st.offload(tree),
    )


NARROW = {
    "integers are aliases": (only(lambda t: t.dtype == torch.int64, lambda t, _: t), "alias_kept"),
    "0-d tensors are aliases": (only(lambda t: t.dim() == 0, lambda t, _: t), "alias_kept"),
    "3-d tensors are aliases": (only(lambda t: t.dim() == 3, lambda t, _: t), "alias_kept"),
    "float64 is rounded": (
        only(lambda t: t.dtype == torch.float64, lambda _, c: c.float().double()),
        "bits_of_every_dtype",
    ),
    "payloads of float16": (
        only(lambda t: t.dtype == torch.float16, lambda _, c: c.nan_to_num(float("nan"))),
        "bits_of_every_dtype",
    ),
    "int64 becomes int32": (only(lambda t: t.dtype == torch.int64, lambda _, c: c.int()), "bits_of_every_dtype"),
    "sparse becomes dense": (only(lambda t: t.is_sparse, lambda _, c: c.to_dense()), "sparse_tensor"),
    "the last of many elements": (
        only(lambda t: t.numel() > 100_000, lambda _, c: (c[-1:].zero_(), c)[1]),
        "bits_of_every_dtype",
    ),
    "integers of the state grow": (
        only(lambda t: t.dtype == torch.int64 and not t.is_sparse, lambda t, c: (t.add_(1), c)[1]),
        "state_changed",
    ),
}


@pytest.mark.parametrize("name", NARROW)
def test_what_is_wrong_for_some_tensors_is_found(name):
    copied, fault = NARROW[name]
    assert fault in conformance(copy=copied).failed


class Ring(Keeps):
    """Overwrites the fifth snapshot before."""

    def stage(self, state):
        made, number = st.offload(state), len(self.kept) % 5
        try:
            made = st.copy_into(made, self.kept[number, True])
        except (KeyError, st.StateTreeError):
            self.kept[number, True] = made
        self.kept[len(self.kept)] = None
        return made


class Late(Keeps):
    """Returns what it writes once more a moment later."""

    def stage(self, state):
        def one(leaf):
            kept = copy.deepcopy(leaf)
            if isinstance(leaf, torch.Tensor) and type(leaf) is torch.Tensor and leaf.numel() > 1000:
                self.kept[len(self.kept)] = timer = threading.Timer(0.03, lambda: kept.copy_(leaf))
                timer.start()
            return kept

        return st.map_leaves(one, state)


def test_a_stager_that_copies_late_is_found():
    assert "torn_snapshot" in conformance(stager=lambda: Late(None)).failed


class ReusesIntegers(Keeps):
    """Stages integers into the memory of the last snapshot, and all else into fresh memory."""

    def stage(self, state):
        made = st.offload(state)
        for name, leaf in made.items():
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.int64:
                made[name] = self.kept.setdefault((name, leaf.shape), leaf).copy_(leaf)
        return made


def test_a_stager_that_reuses_the_memory_of_integers_is_found():
    assert "torn_snapshot" in conformance(stager=lambda: ReusesIntegers(None)).failed


def test_a_ring_of_five_snapshots_is_found():
    assert "view_of_a_snapshot" in conformance(stager=lambda: Ring(None)).failed


def test_statetree_has_none():
    report = conformance(copy=st.offload, stager=st.Stager, gather=st.gather)
    assert report, str(report)
    assert {verdict.outcome for verdict in report.verdicts} == {"passes"}
    assert len(report.verdicts) == len(FAULTS) + sum(fault.kind == "copy" for fault in FAULTS)


def refusing(state):
    if "z" in state:
        raise TypeError("no complex numbers")
    return copy.deepcopy(state)


def test_an_error_is_not_silent():
    report = conformance(copy=refusing)
    assert report["conjugate_view"].outcome == "refuses"
    assert report["conjugate_view"].said == "TypeError: no complex numbers"
    assert report.failed == ["parameter_tied_to_its_tensor"]
    with pytest.raises(TypeError, match="conformance: expected functions as copy, stager or gather"):
        conformance()


def test_a_stager_that_cannot_be_made_is_not_silent():
    report = conformance(stager=lambda: st.Stager(no_such_option=True))
    assert {verdict.outcome for verdict in report.verdicts} == {"refuses"}


def test_a_stager_may_return_futures():
    with st.Stager() as stager:

        class Async:
            stage = staticmethod(stager.stage_async)

        state = {"w": torch.arange(3.0)}
        assert StagerAdapter(Async()).copied(state)["w"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_code_of_a_check_runs_without_statetree(fault):
    names = {}
    assert "statetree" not in fault.source
    exec(fault.source, names)
    if fault.kind == "copy" and fault.name != "parameter_tied_to_its_tensor":
        names[fault.name](copy.deepcopy)
    wrong = (lambda state: state["w"].data.zero_()) if fault.name == "state_changed" else (lambda state: {})
    with pytest.raises((AssertionError, AttributeError, TypeError, KeyError, ValueError)):
        names[fault.name](wrong)


def test_a_cell_of_the_tables_can_be_reproduced():
    peer = next(peer for peer in IMPLEMENTATIONS if peer.make.__name__ == "state_dict_stager")
    for fault in FAULTS:
        if fault.name in {"torn_snapshot", "conjugate_view"}:
            program = reproduction(peer, fault)
            assert "statetree" not in program
            with pytest.raises(AssertionError, match=r"the first snapshot has become the second one|tensor"):
                exec(program, {})


def test_what_is_documented_is_marked_in_the_tables():
    peer = next(peer for peer in IMPLEMENTATIONS if peer.unsupported)
    name = next(iter(peer.unsupported))
    assert [cell(peer, outcome, name) for outcome in ("passes", "FAILS", "refuses")] == ["yes", "n/a", "n/a"]
    assert cell(peer, "FAILS", "of another name") == "**no**"


def test_unsupported_faults_exist():
    names = {fault.name for fault in FAULTS}
    assert len(names) == len(FAULTS) >= 35
    assert all(peer.unsupported.keys() <= names for peer in IMPLEMENTATIONS)
