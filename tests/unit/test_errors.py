"""Errors: what they derive from, what they carry, what they say."""

import copy
import pickle

import pytest

import statetree as st
from statetree.errors import SHOWN_DIFFERENCES, Difference, chain_of, shown
from statetree.key_paths import Path

ALSO = {
    st.TreeMismatch: ValueError,
    st.CheckpointError: Exception,
    st.UnsupportedLeaf: TypeError,
    st.CyclicTree: ValueError,
    st.TreeTooDeep: RecursionError,
    st.RankMismatch: Exception,
    st.StagerBusy: RuntimeError,
    st.StagerClosed: RuntimeError,
}


@pytest.mark.parametrize(("cls", "also"), ALSO.items(), ids=[cls.__name__ for cls in ALSO])
def test_every_error_has_one_base_and_a_builtin_family(cls, also):
    assert issubclass(cls, st.StateTreeError)
    assert issubclass(cls, also)
    assert cls.__name__ in st.__all__


@pytest.mark.parametrize("cls", [st.UnsupportedLeaf, st.CyclicTree, st.TreeTooDeep], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("path", [Path(("a", 0)), None], ids=["path", "none"])
@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_errors_keep_their_path_when_they_are_carried_to_another_process(cls, path, copied):
    error = copied(cls("what is wrong", path))
    assert type(error) is cls
    assert str(error) == "what is wrong"
    assert error.path == path


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_a_mismatch_keeps_its_differences_when_it_is_carried_to_another_process(copied):
    differences = [Difference(Path(("a", 0)), "shape", (1,), (2,)), Difference(Path(), "missing", "absent", "present")]
    error = copied(st.TreeMismatch.between("copy_into", differences, "Mend it."))
    assert error.differences == tuple(differences)
    assert "copy_into: the trees differ in 2 places" in str(error)


def test_one_difference_is_told_in_one_line():
    error = st.TreeMismatch.between("verb", [Difference(Path(("a", "b")), "shape", (4, 8), (8, 4))], "Transpose it.")
    assert str(error) == "verb: shape differs at a.b: expected (8, 4), got (4, 8). Transpose it."
    assert error.differences == (Difference(Path(("a", "b")), "shape", (4, 8), (8, 4)),)


def test_several_differences_are_told_together():
    differences = [Difference(Path((name,)), "dtype", "x", "y") for name in "ab"]
    lines = str(st.TreeMismatch.between("verb", differences, "Cast.")).splitlines()
    assert lines[0] == "verb: the trees differ in 2 places:"
    assert [line.strip() for line in lines[1:]] == [
        "dtype differs at a: expected y, got x.",
        "dtype differs at b: expected y, got x. Cast.",
    ]


def test_many_differences_are_capped_and_counted():
    differences = [Difference(Path((number,)), "dtype", "x", "y") for number in range(100)]
    text = str(st.TreeMismatch.between("verb", differences, "Cast."))
    assert "in 100 places" in text
    assert f"and {100 - SHOWN_DIFFERENCES} more" in text
    assert len(text.splitlines()) == SHOWN_DIFFERENCES + 2


def test_the_root_has_a_name():
    difference = Difference(Path(), "type", "int", "str")
    assert str(difference) == "type differs at <root>: int against str"
    assert "at <root>" in str(st.TreeMismatch.between("verb", [difference], "."))


def test_control_characters_of_names_do_not_reach_the_terminal():
    difference = Difference(Path(("\x1b[31m\n\x07",)), "value", "\x9b1m", "\u202e")
    assert str(difference) == r"value differs at \x1b[31m\n\x07: \x9b1m against \u202e"
    error = st.TreeMismatch.between("verb", [difference] * 2, "\x1b[0m")
    assert str(error).splitlines()[1:] == [
        r"  value differs at \x1b[31m\n\x07: expected \u202e, got \x9b1m.",
        r"  value differs at \x1b[31m\n\x07: expected \u202e, got \x9b1m. \x1b[0m",
    ]
    path = Path(("\x1b]0;x\x07",))
    assert str(st.UnsupportedLeaf(f"verb: at {path}", path)) == r"verb: at \x1b]0;x\x07"
    with pytest.raises(ZeroDivisionError) as caught:
        st.select({path[0]: 1}, lambda _path, leaf: leaf / 0)
    assert caught.value.__notes__ == [r"statetree: at \x1b]0;x\x07, int"]


def test_an_empty_key_is_not_the_root():
    assert "<root>" not in str(Difference(Path(("",)), "type", "int", "str"))


def test_a_mismatch_needs_no_differences():
    assert st.TreeMismatch("plain").differences == ()


def test_shown_joins_lines_and_takes_a_count():
    assert shown(["a", "b"]) == "a\n  b"
    assert shown(["a"], total=3) == "a\n  … and 2 more"
    assert shown([]) == ""


@pytest.mark.parametrize("cls", ALSO, ids=lambda cls: cls.__name__)
def test_every_error_is_documented(cls):
    assert cls.__doc__


def test_all_that_led_to_an_error_is_met_once_however_it_goes_round():
    first, second, third, fourth = (ValueError(number) for number in range(4))
    first.__cause__, first.__context__ = second, third
    second.__context__ = third
    third.__cause__, third.__context__ = fourth, first
    assert list(chain_of(first)) == [first, second, third, fourth]
    assert list(chain_of(fourth)) == [fourth]
