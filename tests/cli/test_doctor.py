"""``statetree doctor``, on torch's own and on ours."""

from __future__ import annotations

import io
import re
import sys

import pytest
import torch
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import statetree as st
from statetree.testing import laws

HERE = __name__


def torch_copy(state):
    return _copy_state_dict(state, _create_cpu_state_dict(state))


def make_stager():
    return DefaultStager(StagingOptions(False, False, False, False))


def negative(state):
    return {name: -leaf if isinstance(leaf, torch.Tensor) else leaf for name, leaf in state.items()}


def through_single(state):
    """Return a copy in which float64 leaves have lost bits: a small state would not show it."""

    def cast(leaf):
        return leaf.float().double() if leaf.dtype == torch.float64 else leaf.clone()

    return {name: cast(leaf) if isinstance(leaf, torch.Tensor) else leaf for name, leaf in state.items()}


def save(state, path):
    torch.save(state, path)


def load(path):
    return torch.load(path, weights_only=False)


def save_untied(state, path):
    """Save copies, each for itself: values are kept, ties are not."""
    if any(isinstance(leaf, torch.UntypedStorage) for leaf in st.flatten(state)[0]):
        raise TypeError("torch loads them as storages of another class")
    save(st.map_leaves(lambda leaf: st.offload(leaf) if type(leaf) is torch.Tensor else leaf, state), path)


def save_lists(state, path):
    inner = state.get("inner") if type(state) is dict else None
    save({"inner": list(inner)} if type(inner) is tuple else state, path)


def save_without_none(state, path):
    save({key: value for key, value in state.items() if value is not None} if type(state) is dict else state, path)


def save_true_as_one(state, path):
    save(st.map_leaves(lambda leaf: 1 if leaf is True else leaf, state), path)


def copy_clamped(state):
    """Return a copy without infinite numbers, which no known fault has."""
    return st.map_leaves(lambda leaf: min(leaf, 1e300) if type(leaf) is float else leaf, st.offload(state))


class Clamping:
    def stage(self, state):
        return copy_clamped(state)


def impure(state):
    if type(state) is dict and "v" in state:
        raise TypeError("no v")
    if type(state) is dict and "w" in state:
        state["more"] = 1
    return st.offload(state)


class FailsToClose:
    def stage(self, state):
        return st.offload(state)

    def close(self):
        raise RuntimeError("it cannot be closed")


class RefusesOnce:
    """A stager that refuses everything after it has refused something."""

    refuses = False

    def stage(self, state):
        self.refuses |= any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in st.flatten(state)[0])
        if self.refuses:
            raise RuntimeError("refused")
        return st.offload(state)


def shared_stager():
    return st.Stager(share_memory=True)


def stager_of_one():
    return st.Stager(max_snapshots=1)


def leaves_the_process(state):
    sys.exit(0)


def takes_two(state, path):
    return state


def recurses(state):
    return recurses(state)


def raises_its_own(state):
    class Own(BaseException):
        pass

    raise Own("x")


def closes_stdout(state):
    sys.stdout.close()
    return dict(state)


a_number = 3


def load_halved(path):
    half = {torch.float32: torch.float16}
    return {name: leaf.to(half.get(leaf.dtype, leaf.dtype)) for name, leaf in load(path).items()}


@pytest.mark.parametrize(
    ("arguments", "kind", "fault"),
    [
        (["copy:deepcopy"], "copy", "It fails where parameter_tied_to_its_tensor: A parameter that is tied"),
        (["--as", "copy", f"{HERE}:torch_copy"], "copy", "It fails where"),
        # The stager of torch 2.11 stages once, and is not asked about torn snapshots.
        ([f"{HERE}:make_stager"], "stager", "It fails where conjugate_view: A conjugate view has the conjugate values"),
        (["statetree:Stager"], "stager", None),
        (["statetree:offload"], "copy", None),
        ([f"{HERE}:negative"], "transform", f"It does not hold that: {laws.values.statement}"),
        ([f"{HERE}:through_single"], "transform", f"It does not hold that: {laws.values.statement}"),
        ([f"{HERE}:save", "--load", f"{HERE}:load_halved"], "save", f"It does not hold that: {laws.values.statement}"),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_with_lines_that_show_it(arguments, kind, fault, statetree):
    ran = statetree("doctor", *arguments)
    assert f"is examined as a {kind}" in ran.out.splitlines()[0], ran.err
    assert ran.status == (fault is not None)
    if fault is not None:
        assert fault in ran.out
        lines = [
            line.removeprefix("    ")
            for line in re.split("\nIt |\nLaws that ", ran.out.split(fault)[1])[0].splitlines()
        ]
        start = next(at for at, line in enumerate(lines) if line.startswith(("import ", "from ")))
        end = max(at for at, line in enumerate(lines) if line.startswith(" "))
        compile("\n".join(lines[start : end + 1]), "shown", "exec")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.there:f"], r"doctor: nothing.there:f cannot be imported: expected package.module:function. ModuleN"),
        (["copy:deep"], r"doctor: copy:deep cannot be imported: .* AttributeError"),
        *[
            (["--as", kind, f"{HERE}:leaves_the_process"], f"doctor: {HERE}:leaves_the_process ends the process (sys.e")
            for kind in ("copy", "transform")
        ],
        ([f"{HERE}:leaves_the_process"], f"doctor: {HERE}:leaves_the_process ends the process (sys.exit(0))"),
        (
            [f"{HERE}:a_number"],
            f"doctor: {HERE}:a_number cannot be called: expected package.module:function, got a int",
        ),
        (["copy"], "doctor: copy cannot be called: expected package.module:function, got no name after a colon"),
        (["torch:save"], r"doctor: a save is examined with its load: expected --load"),
    ],
)
def test_what_cannot_be_examined_is_told_so(arguments, message, statetree):
    ran = statetree("doctor", *arguments)
    assert ran.status == 2
    assert message.split(" .* ")[0] in ran.err


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (
            "copy",
            "takes_two",
            "expected a copy that takes some of the states, got an error for each: TypeError: takes_t",
        ),
        (
            "transform",
            "takes_two",
            "expected a transform that takes some of the states, got an error for each: TypeErr",
        ),
        ("copy", "recurses", "expected a copy that takes some of the states, got an error for each: RecursionError: m"),
    ],
)
def test_what_refuses_every_check_is_not_judged(kind, name, said, statetree):
    ran = statetree("doctor", "--as", kind, f"{HERE}:{name}")
    assert ran.status == 2
    assert f"doctor: {HERE}:{name} was not judged: {said}" in ran.err


@pytest.mark.parametrize("kind", ["copy", "transform"])
def test_what_raises_no_exception_is_told_so(kind, statetree):
    ran = statetree("doctor", "--as", kind, f"{HERE}:raises_its_own")
    assert ran.status == 2
    said = "expected one that returns, or raises an Exception"
    assert f"doctor: {HERE}:raises_its_own raises a raises_its_own.<locals>.Own: {said}" in ran.err


@pytest.mark.parametrize("options", [["--as", "copy"], ["--as", "transform"], []])
def test_what_closes_the_output_is_told_so(options, statetree, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    ran = statetree("doctor", *options, f"{HERE}:closes_stdout")
    assert ran.status == 2
    assert f"doctor: {HERE}:closes_stdout closes sys.stdout: expected one that leaves it open" in ran.err


def test_what_a_save_need_not_keep_is_listed_too(statetree):
    ran = statetree("doctor", f"{HERE}:save_untied", "--load", f"{HERE}:load")
    assert ran.status == 0, ran.out
    held, others = ran.out.split("That do not: none.")
    assert "ties" not in held.split("Laws that hold:")[1]
    assert "Not needed of a save, and not kept: ties." in others
    assert re.search(r"States of \d+ that are refused with an error: .*values \d", others)
    assert "TypeError: torch loads them as" in others


@pytest.mark.parametrize(
    ("name", "law"), [("save_lists", "structure"), ("save_without_none", "values"), ("save_true_as_one", "values")]
)
def test_a_save_that_loses_structure_or_plain_values_is_found(name, law, statetree):
    ran = statetree("doctor", f"{HERE}:{name}", "--load", f"{HERE}:load")
    assert ran.status == 1, ran.out
    assert f"It does not hold that: {getattr(laws, law).statement}" in ran.out


@pytest.mark.parametrize("kind", ["copy", "stager"])
def test_of_copies_and_stagers_the_laws_are_examined_too(kind, statetree):
    ran = statetree("doctor", "--as", kind, f"{HERE}:{'copy_clamped' if kind == 'copy' else 'Clamping'}")
    assert re.search(r"^0 of \d+ checks found a result", ran.out, re.MULTILINE), ran.out
    assert f"It does not hold that: {laws.values.statement}" in ran.out
    assert ran.status == 1


@pytest.mark.parametrize("name", ["FailsToClose", "RefusesOnce", "shared_stager", "stager_of_one"])
def test_stagers_that_may_be_so_are_not_accused(name, statetree):
    ran = statetree("doctor", "--as", "stager", f"{HERE}:{name}")
    assert ran.status == 0, ran.out + ran.err
    assert "That do not: none." in ran.out
    assert (re.search(r"States of \d+ that are refused with an error: ", ran.out) is not None) == (
        name == "RefusesOnce"
    )


def test_what_breaks_a_law_is_not_taken_for_a_refusal(statetree):
    ran = statetree("doctor", "--as", "transform", f"{HERE}:impure")
    assert f"It does not hold that: {laws.pure.statement}" in ran.out
    refused = ran.out.split("that are refused with an error: pure ")[1]
    assert "The smallest of these:\n  TypeError: no v\n" in refused
