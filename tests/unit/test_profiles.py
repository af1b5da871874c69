"""That profiles of the benchmarks count every moment once, for the phase that it belongs to."""

import json
import time

import pytest

import statetree as st
from benchmarks import profiles
from benchmarks.measure import WrongResult
from benchmarks.rows import Row
from benchmarks.states import many_small
from statetree.spans import layout as spans
from statetree.tree import traversal as tree

TINY = 0.001


@pytest.fixture
def clock(monkeypatch):
    """A clock that is told the time: each reading is a second after the last one."""
    readings = iter(range(1_000_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(readings)))
    return profiles.PhaseClock()


def test_time_counts_for_the_innermost_phase(clock):
    with clock.phase("rest"):
        with clock.phase("checks"), clock.phase("bytes"):
            pass
        with clock.phase("checks"):
            pass
    assert {name: seconds for name, seconds in clock.spent.items() if seconds} == {"rest": 3, "checks": 3, "bytes": 1}


def test_a_phase_that_fails_is_left(clock):
    with pytest.raises(ZeroDivisionError), clock.phase("rest"), clock.phase("bytes"):
        raise ZeroDivisionError
    assert (clock.spent["rest"], clock.spent["bytes"]) == (2, 1)


def test_what_is_watched_is_found_wherever_it_was_imported_and_put_back():
    before = (tree.traverse, tree.rebuild, spans.copy_all, st.to_flat)
    clock = profiles.PhaseClock()
    with clock.watching(), clock.phase("rest"):
        st.offload(many_small(TINY).tree)
        st.to_flat({"a": 1})
        assert st.to_flat is not before[3]
    assert (tree.traverse, tree.rebuild, spans.copy_all, st.to_flat) == before
    seen = {name for name, seconds in clock.spent.items() if seconds}
    assert {"flatten", "checks", "plan", "allocation", "bytes", "rebuild", "rest"} == seen


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(profiles.ROWS)), ids=lambda number: profiles.ROWS[number].work)
def test_a_row_is_taken_to_pieces(number):
    row = profiles.ROWS[number]
    found = profiles.profile(row, TINY, seconds=0)
    assert found.title.startswith(row.work)
    assert found.runs >= profiles.RUNS
    assert found.unwatched_s > 0
    assert found.phases_s.keys() == set(profiles.NAMES)
    expected = {
        "stage again": {"flatten", "checks", "bytes", "rebuild"},
        "first stage": {"flatten", "checks", "plan", "allocation", "bytes", "rebuild"},
        "copy_into": {"flatten", "checks", "bytes", "rebuild"},
        "allocate_like": {"flatten", "checks", "allocation", "rebuild"},
        "similarity": {"flatten", "checks"},
        "to_flat + from_flat": {"flatten", "plan", "rebuild"},
        "gather to all": {"flatten", "checks", "plan", "allocation", "bytes", "rebuild", "waiting"},
        "distribute from one": {"flatten", "checks", "plan", "allocation", "bytes", "rebuild", "waiting"},
    }[row.work]
    assert {name for name, seconds in found.phases_s.items() if seconds} == expected | {"rest"}


def test_each_kind_of_work_with_figures_to_reach_has_a_profile():
    assert [row.work for row in profiles.ROWS] == [
        "stage again",
        "stage again",
        "first stage",
        "copy_into",
        "allocate_like",
        "similarity",
        "to_flat + from_flat",
        "gather to all",
        "distribute from one",
    ]


def test_a_wrong_result_has_no_profile():
    def never(state):
        contenders = profiles.ROWS[0].contenders(state)
        return [type(contenders[0])("statetree", "ours", contenders[0].run, lambda _: False)]

    with pytest.raises(WrongResult, match="the result is wrong"):
        profiles.profile(Row("flat", "to_flat", many_small, never), TINY, seconds=0)


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profiles, "ROWS", profiles.ROWS[:1])
    path = tmp_path / "profiles.json"
    profiles.main(["--scale", str(TINY), "--seconds", "0", "--json", str(path)])
    document = json.loads(path.read_text())
    assert {"format", "date", "versions", "machine", "load_before", "load_after", "rows"} <= document.keys()
    (row,) = document["rows"]
    assert row["title"].startswith("stage again, 10 x 1 KB")
    assert row["title"] in capsys.readouterr().out
    assert row["leaves"] == 10
    assert list(row["phases_s"]) == list(profiles.NAMES)
