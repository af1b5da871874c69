"""Frozen storages: copied once, shared by all staged trees, and never mistaken for others."""

import copy
import gc
import random
import warnings

import numpy as np
import pytest
import torch

import statetree as st
from statetree.stager import frozen


def state():
    return {"base": {"w": torch.arange(100.0), "b": torch.arange(7)}, "lora": torch.arange(3.0), "step": 1}


def pointers(tree):
    return tree["base"]["w"].data_ptr(), tree["base"]["b"].data_ptr()


def test_what_is_frozen_is_copied_once():
    tree = state()
    with st.Stager(frozen="base.**") as stager:
        first = stager.stage(tree)
        tree["lora"].add_(1)
        second = stager.stage(tree)
        assert pointers(first) == pointers(second) != pointers(tree)
        assert first["lora"].data_ptr() != second["lora"].data_ptr()
        assert first["lora"].tolist() == [0, 1, 2]
        assert st.similarity(second, tree, values=True)
        assert 0 <= stager.nbytes - (100 * 4 + 7 * 8) < 1000


def test_a_glob_that_matches_nothing_gives_a_warning_once():
    tree = state()
    with st.Stager(frozen=["base.**", "bsae.**"]) as stager:
        with pytest.warns(UserWarning, match=r"stage: .*bsae\.\*\*"):
            first = stager.stage(tree)
        assert pointers(first) == pointers(stager.stage(tree))


def test_a_predicate_says_what_is_frozen():
    model = torch.nn.Linear(3, 3)
    model.weight.requires_grad_(False)
    tree = {"w": model.weight, "b": model.bias}
    with st.Stager(frozen=lambda path, leaf: not leaf.requires_grad) as stager:
        first, second = stager.stage(tree), stager.stage(tree)
    assert first["w"].data_ptr() == second["w"].data_ptr()
    assert first["b"].data_ptr() != second["b"].data_ptr()
    assert second["b"].requires_grad


def test_a_predicate_is_asked_about_tensors_only():
    inner = {"w": torch.arange(3.0)}
    tree = {"a": inner, "again": inner, "step": 1, "note": None, "rng": random.Random(1), "p": torch.ones(2)}
    asked = []

    def frozen(path, leaf):
        asked.append(str(path))
        return not leaf.requires_grad

    with st.Stager(frozen=frozen) as stager:
        first, second = stager.stage(tree), stager.stage(tree)
    assert set(asked) == {"a.w", "again.w", "p"}
    assert first["p"].data_ptr() == second["p"].data_ptr()
    assert first["again"] is first["a"]
    assert second["step"] == 1


def test_thaw_has_all_copied_once_more():
    tree = state()
    with st.Stager(frozen="base.**", max_snapshots=3) as stager:
        first = stager.stage(tree)
        tree["base"]["w"].neg_()
        assert st.similarity(stager.stage(tree)["base"], first["base"], values=True)
        stager.thaw()
        assert st.similarity(stager.stage(tree), tree, values=True)
        assert first["base"]["w"].tolist() == list(range(100))


def test_thaw_by_another_thread_counts_at_the_end_of_a_stage_too(monkeypatch):
    tree, views = state(), frozen._Views

    def thawed_before(*fields):
        stager.thaw()
        return views(*fields)

    with st.Stager(frozen="base.**") as stager:
        with monkeypatch.context() as patch:
            patch.setattr(frozen, "_Views", thawed_before)
            stager.stage(tree)
        tree["base"]["w"].neg_()
        assert st.similarity(stager.stage(tree), tree, values=True)


def test_another_storage_at_the_same_address_is_another():
    with st.Stager(frozen="w") as stager:
        for number in range(20):
            tree = {"w": torch.full((1000,), float(number))}
            assert stager.stage(tree)["w"][0] == number
            del tree
            gc.collect()
        assert stager.nbytes <= 2 * 4000


def test_a_storage_that_was_resized_is_copied_anew():
    w = torch.arange(1000.0)
    with st.Stager(frozen="w", max_snapshots=4) as stager:
        stager.stage({"w": w})
        before = w.data_ptr()
        w.untyped_storage().resize_(0)
        blocker = torch.empty(1000)  # takes the memory: at the same address it would be frozen, as Stager says
        w.untyped_storage().resize_(4000)
        if w.data_ptr() == before:
            pytest.skip(f"the allocator kept the address, and put {blocker.data_ptr()} elsewhere")
        w.copy_(torch.arange(1000.0) + 5)
        assert stager.stage({"w": w})["w"].equal(w)
        assert stager.stage({"w": w[10:20]})["w"].equal(w[10:20])
        w.neg_()
        stager.thaw()
        assert stager.stage({"w": w})["w"].equal(w)


def test_a_larger_view_of_a_frozen_storage_is_copied():
    w = torch.arange(1000.0)
    with st.Stager(frozen="w", max_snapshots=4) as stager:
        assert stager.stage({"w": w[:10]})["w"].equal(w[:10])
        assert stager.stage({"w": w})["w"].equal(w)
        assert stager.stage({"w": w[5:]})["w"].equal(w[5:])


def test_what_another_leaf_lies_on_too_is_not_frozen():
    w = torch.arange(4.0)
    tree = {"frozen": w[:2], "trained": w}
    with st.Stager(frozen="frozen") as stager:
        stager.stage(tree)
        w.add_(1)
        staged = stager.stage(tree)
    assert staged["frozen"].tolist() == [1, 2]
    assert staged["frozen"].data_ptr() == staged["trained"].data_ptr()


def test_what_was_staged_while_it_was_not_frozen_is_copied_anew():
    w, b = (torch.nn.Parameter(torch.arange(5.0), requires_grad=False) for _ in range(2))
    tree = {"w": w, "b": b}
    with st.Stager(frozen=lambda path, leaf: not leaf.requires_grad) as stager:
        before = stager.stage(tree)
        w.requires_grad_(True)
        stager.stage(tree)
        w.data.add_(1)
        w.requires_grad_(False)
        after = stager.stage(tree)
        assert after["w"].tolist() == [1, 2, 3, 4, 5]
        assert before["w"].tolist() == [0, 1, 2, 3, 4]
        assert after["b"].data_ptr() == before["b"].data_ptr()


def test_what_was_the_only_frozen_leaf_and_then_written_is_copied_anew():
    w = torch.nn.Parameter(torch.arange(5.0), requires_grad=False)
    with st.Stager(frozen=lambda path, leaf: not leaf.requires_grad) as stager:
        for _ in range(2):
            stager.stage({"w": w})
        w.requires_grad_(True)
        stager.stage({"w": w})
        w.data.add_(1)
        w.requires_grad_(False)
        assert stager.stage({"w": w})["w"].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w[2:6],
        lambda w: w[:6],
        lambda w: w[:4].view(2, 2),
        lambda w: w[:7:2],
        lambda w: w[:4].view(torch.int32),
        lambda w: w[:4].clone().add_(1),
        lambda w: torch._neg_view(w[:4]),
    ],
    ids=["elsewhere", "longer", "shape", "strides", "dtype", "storage", "negative"],
)
def test_frozen_leaves_that_look_otherwise_than_last_time_are_those_of_now(change):
    w = torch.arange(8.0)
    tree = {"w": w[:4], "v": torch.arange(3)}
    with st.Stager(frozen="**", max_snapshots=4) as stager:
        before = [stager.stage(tree) for _ in range(2)]
        other = {**tree, "w": change(w)}
        for _ in range(2):
            assert st.similarity(stager.stage(other), other, values=True)
            assert st.similarity(stager.stage(tree), tree, values=True)
    assert before[0]["w"] is not before[1]["w"]
    assert before[0]["w"].data_ptr() == before[1]["w"].data_ptr()
    assert st.similarity(before[1], tree, values=True)


def test_frozen_leaves_that_come_to_share_a_storage_share_one():
    w = torch.arange(4.0)
    alone, tied = {"a": w, "b": w.clone()}, {"a": w, "b": w.view(4)}
    with st.Stager(frozen="**") as stager:
        for tree, shared in ((alone, False), (alone, False), (tied, True), (alone, False)):
            staged = stager.stage(tree)
            assert st.similarity(staged, tree, values=True)
            assert (staged["a"].data_ptr() == staged["b"].data_ptr()) == shared


def test_copies_of_storages_that_are_gone_are_let_go_of_while_the_others_stay_as_they_are():
    tree = {"w": torch.arange(1000.0)}
    more = {**tree, "v": torch.arange(1000.0)}
    with st.Stager(frozen="**") as stager:
        stager.stage(more)
        for _ in range(2):
            stager.stage(tree)
        assert stager.nbytes >= 8000
        del more
        gc.collect()
        stager.stage(tree)
        assert stager.nbytes < 8000


def test_ties_between_frozen_leaves_are_kept():
    w = torch.arange(4.0).view(2, 2)
    with st.Stager(frozen="**") as stager:
        staged = stager.stage({"embed": w, "head": w.T, "again": w})
    assert staged["embed"] is staged["again"]
    assert staged["embed"].untyped_storage()._cdata == staged["head"].untyped_storage()._cdata


@pytest.mark.parametrize("options", [{}, {"share_memory": True}])
def test_a_broken_promise_is_found(options):
    tree = state()
    with st.Stager(frozen="base.**", check=True, **options) as stager:
        stager.stage(tree)
        stager.stage(tree)
        tree["base"]["b"][3] += 1
        with pytest.raises(st.TreeMismatch, match=r"stage: the frozen leaf at base\.b was written to"):
            stager.stage(tree)
        stager.thaw()
        assert st.similarity(stager.stage(tree), tree, values=True)


def test_stage_async_and_prewarm_know_what_is_frozen():
    tree = state()
    with st.Stager(frozen="base.**") as stager:
        stager.prewarm(tree)
        first = stager.stage_async(tree).result()
        second = stager.stage_async(tree).result()
        assert pointers(first) == pointers(second)
    assert stager.nbytes == 0
    assert st.similarity(second, tree, values=True)


def test_meta_tensors_and_shared_containers_stay():
    inner = {"w": torch.arange(3.0)}
    tree = {"a": inner, "b": inner, "meta": torch.empty(2, device="meta")}
    with st.Stager(frozen=lambda path, leaf: isinstance(leaf, torch.Tensor)) as stager:
        staged = stager.stage(tree)
    assert staged["a"] is staged["b"]
    assert staged["meta"].is_meta
    assert staged["a"]["w"].tolist() == [0, 1, 2]


class Holder:
    def __init__(self, **held):
        self.__dict__.update(held)


def twice(w):
    return {"frozen": w, "trained": w}


def in_an_object(w):
    return {"frozen": w, "trained": Holder(w=w)}


def in_two_objects(w):
    return {"frozen": Holder(w=w), "trained": Holder(w=w)}


def in_an_object_of_two(w):
    inner = Holder(w=w)
    return {"frozen": Holder(inner=inner, other=torch.ones(2)), "trained": Holder(inner=inner)}


def by_way_of_a_third(w):
    inner = Holder(w=w)
    return {
        "frozen": Holder(inner=inner),
        "also frozen": (outer := Holder(inner=inner)),
        "trained": Holder(outer=outer),
    }


def in_a_shared_container(w):
    inner = {"w": w}
    return {"frozen": inner, "trained": inner}


def in_a_layer_and_by_itself(w):
    layer = torch.nn.Linear(2, 2)
    layer.weight.data = w.view(2, 2)
    return {"frozen": layer, "trained": layer.weight}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        twice,
        in_an_object,
        in_two_objects,
        in_an_object_of_two,
        by_way_of_a_third,
        in_a_shared_container,
        in_a_layer_and_by_itself,
    ],
)
def test_what_also_lies_where_it_may_be_written_to_is_not_frozen(make, backwards, asynchronous):
    w = torch.arange(4.0)
    tree = make(w)
    tree = dict(reversed(tree.items())) if backwards else tree
    with st.Stager(frozen=["frozen", "frozen.**", "also frozen"], max_snapshots=3) as stager:
        stage = (lambda: stager.stage_async(tree).result()) if asynchronous else (lambda: stager.stage(tree))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one of the globs matches nothing
            stage()
            w.add_(1)
            staged = stage()
    assert all(held.flatten().tolist() == [1, 2, 3, 4] for held in tensors_in(staged) if held.numel() == 4)


def tensors_in(tree):
    found, pending = [], [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            found.append(value.detach())
        elif isinstance(value, torch.nn.Module):
            found.append(value.weight.detach())
        else:
            pending += vars(value).values() if isinstance(value, Holder) else value.values()
    return found


def test_objects_that_share_nothing_with_those_that_are_trained_are_frozen():
    tree = {"frozen": Holder(w=torch.ones(1000)), "trained": Holder(w=torch.ones(5))}
    with st.Stager(frozen="frozen", max_snapshots=3) as stager:
        before, after = stager.stage(tree), stager.stage(tree)
    assert before["frozen"].w.data_ptr() == after["frozen"].w.data_ptr()
    assert before["trained"].w.data_ptr() != after["trained"].w.data_ptr()


def test_globs_match_every_place_of_a_shared_container():
    inner = {"w": torch.ones(5)}
    with st.Stager(frozen=["a.*", "b.*"]) as stager:
        before, after = (stager.stage({"a": inner, "b": inner}) for _ in range(2))
    assert before["b"]["w"].data_ptr() == after["a"]["w"].data_ptr()


def test_windows_of_one_storage_are_not_kept_for_ever():
    whole = torch.arange(10_000.0)
    with st.Stager(frozen="w") as stager:
        for start in range(0, 5000, 100):
            window = {"w": whole[start : start + 5000]}
            assert stager.stage(window)["w"].equal(window["w"])
            assert stager.nbytes <= 2 * whole.nbytes


def test_a_storage_and_a_window_of_it_are_both_kept():
    whole = torch.arange(10_000.0)
    with st.Stager(frozen="w", max_snapshots=4) as stager:
        places = [
            [stager.stage({"w": tensor})["w"].data_ptr() for tensor in (whole, whole[100:5000])] for _ in range(3)
        ]
    assert places[0] == places[1] == places[2]


def test_copies_that_serve_now_are_kept_whatever_is_copied_beside_them():
    whole = torch.zeros(4_000_000)
    with st.Stager(frozen="**", max_snapshots=9) as stager:
        first = stager.stage({"a": whole[:1000]})["a"].data_ptr()
        for start in range(1_000_000, 3_600_000, 80_000):
            tree = {"a": whole[:1000], "b": whole[start : start + 300_000]}
            assert stager.stage(tree)["a"].data_ptr() == first


def test_two_storages_on_one_memory():
    array = np.zeros(5, dtype="float32")
    w = torch.arange(8.0)
    tree = {"a": torch.from_numpy(array), "b": torch.from_numpy(array), "w": w[:4], "v": torch.from_dlpack(w[2:])}
    for names in (["a", "w"], ["b", "v"]):
        with st.Stager(frozen=names) as stager:
            for _ in range(2):
                array += 1
                w += 1
                staged = stager.stage(tree)
                assert all(staged[key].equal(tree[key]) for key in tree)


def test_copies_of_a_module_are_frozen_beside_it():
    policy = torch.nn.Sequential(torch.nn.Conv2d(1, 2, (3, 3)), torch.nn.LayerNorm(4))
    tree = {"ref": copy.deepcopy(policy), "policy": policy}
    with st.Stager(frozen="ref", max_snapshots=3) as stager:
        before, after = stager.stage(tree), stager.stage(tree)
    assert before["ref"][0].weight.data_ptr() == after["ref"][0].weight.data_ptr()
    assert before["policy"][0].weight.data_ptr() != after["policy"][0].weight.data_ptr()


def test_meta_tensors_beside_what_is_frozen():
    w, trained = torch.ones(4), torch.ones(4)
    tree = {"m": torch.empty(3, device="meta"), "trained": trained, "frozen": w, "also": Holder(w=w, v=torch.ones(2))}
    with st.Stager(frozen=["frozen", "m"], max_snapshots=3) as stager:
        stager.stage(tree)
        trained.add_(1)
        w.add_(1)
        staged = stager.stage(tree)
    assert staged["frozen"].tolist() == staged["trained"].tolist() == [2] * 4


def test_containers_that_are_shared_again_and_again_are_copied():
    tree = {"w": torch.zeros(2)}
    for _ in range(18):
        tree = {"x": tree, "y": tree}
    with st.Stager(frozen="**") as stager:
        stager.stage(tree)
        follow(tree)["w"].add_(1)
        assert follow(stager.stage(tree))["w"].tolist() == [1, 1]


def test_what_was_written_in_such_a_container_is_copied_anew():
    alone = {"w": torch.zeros(2)}
    tree = {"v": alone["w"]}
    for _ in range(18):
        tree = {"x": tree, "y": tree}
    with st.Stager(frozen="w", max_snapshots=4) as stager:
        stager.stage(alone)
        stager.stage(tree)
        alone["w"].add_(1)
        assert stager.stage(alone)["w"].tolist() == [1, 1]


def follow(tree):
    while "x" in tree:
        tree = tree["y"]
    return tree


class Checked:
    def __init__(self, w):
        assert isinstance(w, torch.Tensor)
        self.w = w


def test_containers_of_users_are_not_made_of_anything_but_what_they_hold():
    st.register_container(Checked, lambda pair: ([pair.w], None), lambda _, children: Checked(*children))
    inner = {"w": torch.ones(3)}
    tree = {"a": inner, "b": inner, "c": Checked(torch.ones(2))}
    with st.Stager(frozen="c.*") as stager:
        before, after = stager.stage(tree), stager.stage(tree)
        assert before["c"].w.data_ptr() == after["c"].w.data_ptr()
