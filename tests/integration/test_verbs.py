"""What holds for any state holds for those that other packages make."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

import statetree as st
from statetree import dcp
from tests.integration.subjects import SUBJECTS, Subject
from tests.judge import assert_independent, assert_pure, assert_structure_preserved, assert_trees_equal
from tests.pace import units

UNMADE = "what restore does not make by itself"
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    ),  # peft, of transformers
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning"),  # adapters stay apart
    pytest.mark.filterwarnings(f"ignore:.*{UNMADE}:UserWarning"),  # torchao's leaves take a template
]


class Case(NamedTuple):
    """A run, and how to make another one like it, of other numbers."""

    subject: Subject
    another: Callable[[], Subject]


@pytest.fixture(params=SUBJECTS, ids=lambda make: make.__name__)
def case(request) -> Case:
    def made(seed: int) -> Subject:
        torch.manual_seed(seed)
        return request.param()

    return Case(made(0), lambda: made(1))


def is_one_storage(tree: Any, keys: tuple[str, ...]) -> bool:
    flat, _ = st.to_flat(tree)
    return len({flat[key].untyped_storage().data_ptr() for key in keys}) == 1


def test_a_state_is_taken_apart_and_put_together(case):
    state = case.subject.state()
    leaves, spec = st.flatten(state)
    assert_trees_equal(st.unflatten(spec, leaves), state)
    assert_trees_equal(st.from_flat(*st.to_flat(state)), state)
    assert all(is_one_storage(state, keys) for keys in case.subject.ties)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) > 20


def test_a_copy_is_independent_and_keeps_ties(case):
    state = case.subject.state()
    copy = assert_pure(st.offload, state)
    assert_trees_equal(copy, state)
    assert_independent(copy, state)
    assert_structure_preserved(st.offload, state)
    assert all(is_one_storage(copy, keys) for keys in case.subject.ties)


def test_a_run_is_rolled_back(case):
    subject = case.subject
    snapshot = st.offload(subject.state())
    assert st.similarity(snapshot, subject.state(), values=True)
    subject.step()
    report = st.similarity(snapshot, subject.state(), values=True)
    assert not report
    assert report.count > 2
    restored = st.copy_into(snapshot, subject.state())
    report = st.similarity(snapshot, restored, values=True)
    assert report, str(report)
    live, _ = st.to_flat(subject.state())
    for key, leaf in st.to_flat(restored)[0].items():
        if isinstance(leaf, torch.Tensor) and isinstance(live.get(key), torch.Tensor):
            assert_trees_equal(leaf.detach(), live[key].detach())
    assert all(is_one_storage(subject.state(), keys) for keys in subject.ties)
    subject.step()


@pytest.mark.parametrize("share_memory", [False, True], ids=["plain", "shared"])
def test_what_is_staged_does_not_change(case, share_memory):
    subject = case.subject
    with st.Stager(share_memory=share_memory) as stager:
        for _ in range(3):
            staged = stager.stage(subject.state())
            copy = st.offload(subject.state())
            future = stager.stage_async(subject.state())
            stager.synchronize()
            subject.step()
            assert_trees_equal(staged, copy, storages=not share_memory)
            assert_trees_equal(future.result(timeout=units(30)), copy, storages=not share_memory)
            assert not st.similarity(staged, subject.state(), values=True)
            del staged, future


def test_a_checkpoint_is_loaded_into_another_run(case, tmp_path):
    saved = st.offload(case.subject.state())
    st.save(case.subject.state(), tmp_path / "checkpoint")
    other = case.another()
    assert not st.similarity(saved, other.state(), values=True)
    loaded = st.load(tmp_path / "checkpoint", other.state(), in_place=True)
    report = st.similarity(saved, loaded, values=True)
    assert report, str(report)
    assert all(is_one_storage(other.state(), keys) for keys in other.ties)
    other.step()


def test_a_checkpoint_is_loaded_without_a_template_where_its_classes_are_known(case, tmp_path):
    saved = st.offload(case.subject.state())
    kinds = {type(leaf).__module__.partition(".")[0] for leaf in st.flatten(saved)[0]}
    with pytest.warns(UserWarning, match=UNMADE) if "torchao" in kinds else nullcontext():
        st.save(saved, tmp_path / "checkpoint")
    if "torchao" in kinds:
        with pytest.raises(st.StateTreeError, match="Pass like=, a tree like the saved one"):
            st.load(tmp_path / "checkpoint")
    else:
        report = st.similarity(saved, st.load(tmp_path / "checkpoint"), values=True)
        assert report, str(report)


def test_a_checkpointer_resumes(case, tmp_path):
    with dcp.Checkpointer(tmp_path / "run", keep=2) as checkpointer:
        for number in range(3):
            case.subject.step()
            checkpointer.async_save(number, case.subject.state())
        saved = st.offload(case.subject.state())
        case.subject.step()
        restored = checkpointer.restore(case.subject.state())
        assert checkpointer.steps() == [1, 2]
    report = st.similarity(saved, restored, values=True)
    assert report, str(report)
