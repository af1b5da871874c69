"""``where``: which leaves of a checkpoint are loaded."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

import statetree
from statetree import dcp
from tests.judge import assert_trees_equal

pytestmark = pytest.mark.filterwarnings("ignore:save. what restore does not make")


def make_state(start=0.0):
    return {
        "base": [torch.arange(4.0) + start, {"w": torch.arange(6.0) + start}],
        "lora": {"a": torch.arange(2.0) + start, "b": torch.arange(3.0) + start},
        "step": int(start),
        "rates": [0.5 + start, 1.5],
    }


@pytest.fixture
def saved(tmp_path):
    checkpointer = dcp.Checkpointer(tmp_path)
    checkpointer.save(1, make_state(7.0))
    return checkpointer


@pytest.mark.parametrize("where", ["lora.*", ["lora.a", "lora.b"], lambda path, _: path[0] == "lora"])
def test_a_part_of_a_template_is_filled(where, saved):
    template = make_state()
    loaded = saved.restore(template, where=where)
    assert_trees_equal(loaded, {**make_state(), "lora": make_state(7.0)["lora"]})
    assert loaded["lora"]["a"] is template["lora"]["a"]


@pytest.mark.parametrize("where", ["lora.*", lambda _, leaf: not isinstance(leaf, torch.Tensor) or leaf.numel() < 4])
def test_without_a_template_the_rest_is_left_out(where, saved):
    expected = make_state(7.0)
    keys = ["lora"] if isinstance(where, str) else ["lora", "step", "rates"]
    assert_trees_equal(saved.restore(where=where), {key: expected[key] for key in keys})


def test_lists_are_cut_as_select_cuts_them(saved):
    assert_trees_equal(saved.restore(where="base.1.w"), {"base": [{"w": torch.arange(6.0) + 7}]})


def test_leaves_in_attributes_are_leaves(tmp_path):
    weights = OrderedDict(a=torch.arange(2.0), b=torch.arange(3.0))
    weights._metadata = torch.arange(4.0)
    statetree.save({"w": weights}, tmp_path)
    assert_trees_equal(statetree.load(tmp_path, where="w.**"), {"w": weights})


def test_a_list_of_plain_values_is_one_leaf(saved):
    assert saved.restore(make_state(), where="rates")["rates"] == [7.5, 1.5]


def test_the_rest_of_a_template_may_be_anything(saved):
    template = {**make_state(), "base": torch.empty(3, device="meta"), "more": [1], "step": torch.ones(2)}
    loaded = saved.restore(template, where="lora.*")
    assert_trees_equal(loaded["lora"], make_state(7.0)["lora"])
    assert loaded["base"] is template["base"]
    assert loaded["more"] == [1]


def test_what_is_chosen_has_to_be_there_and_to_fit(saved):
    with pytest.raises(statetree.TreeMismatch, match=r"missing at lora\.c"):
        saved.restore({"lora": {"c": torch.ones(1)}, "other": 1}, where="lora.c")
    with pytest.raises(statetree.TreeMismatch, match=r"shape differs at lora\.a") as caught:
        saved.restore({"lora": {"a": torch.ones(5), "b": torch.ones(5)}}, where="lora.a")
    assert len(caught.value.differences) == 1
    for template in (None, make_state()):
        with pytest.raises(statetree.TreeMismatch, match=r"load: no path matches 'lora\.c'"):
            saved.restore(template, where="lora.c")


def test_a_checkpoint_of_dcp(tmp_path, recwarn):
    state = {"lora": {"a": torch.arange(3.0)}, "base": torch.arange(4.0)}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    template = {"lora": {"a": torch.zeros(3)}, "base": torch.zeros(7)}
    loaded = statetree.load(tmp_path, template, in_place=True, where="lora.a")
    assert_trees_equal(loaded, {"lora": {"a": torch.arange(3.0)}, "base": torch.zeros(7)})
    assert all("torch.distributed" in str(warning.message) for warning in recwarn)


def test_parts_that_are_not_chosen_need_no_template(tmp_path):
    statetree.save({"sparse": torch.eye(3).to_sparse(), "w": torch.arange(3.0)}, tmp_path)
    assert_trees_equal(statetree.load(tmp_path, where="w"), {"w": torch.arange(3.0)})
    assert_trees_equal(statetree.load(tmp_path, where="sparse"), {"sparse": torch.eye(3).to_sparse()})


def test_an_error_of_a_predicate_is_no_damage(tmp_path):
    checkpointer = statetree.Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.full((3,), float(step))})
    for fallback in (False, True):
        with pytest.raises(ZeroDivisionError) as caught:
            checkpointer.restore(where=lambda _, leaf: 1 // leaf.dim() > 1 // 0, fallback=fallback)
        assert caught.value.__notes__ == ["statetree: at w, StoredTensor"]
